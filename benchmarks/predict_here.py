"""Predicted against measured step times of small MoE models on 1 to 4 processes of this machine, the error taken apart.

    python benchmarks/predict_here.py [--profile PATH] [--models N] [--repeats 7] [--json]

Without --profile the machine is measured first (`moestro measure --quick --ranks 4`), as predictions age with the
machine's load; 8 minutes in all on two cores. The models are none that anything was fitted to. A step is the one that
`moestro train` runs, on random tokens; its time is the median of the slowest rank's.

The split: measured seconds put in the place of predicted ones, one group after another (`moestro.predict.oracle`).
What a group changes is its part of the error; what is left with all of them is how the parts were put together.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moestro.config import load_config
from moestro.hardware.profile import load_profile
from moestro.predict.oracle import Split, measure_and_split
from moestro.predict.target import target_of_profile

BASE = "olmoe-tiny"
MODELS: dict[str, tuple[str, ...]] = {
    "few wide experts": ("model.hidden_size=192", "model.moe.num_experts=8", "model.moe.top_k=2",
                         "model.moe.expert_hidden_size=256"),
    "many narrow experts": ("model.hidden_size=128", "model.moe.num_experts=32", "model.moe.top_k=4",
                            "model.moe.expert_hidden_size=64"),
    "wide": ("model.hidden_size=384", "model.num_heads=6", "model.moe.expert_hidden_size=192"),
    "deep": ("model.num_layers=6", "model.hidden_size=96", "model.moe.expert_hidden_size=96"),
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {  # processes, what parallel says
    "one": (1, ()),
    "dp2": (2, ()),
    "ep2": (2, ("parallel.ep=2",)),
    "pp2": (2, ("parallel.pp=2",)),
    "tp2": (2, ("parallel.tp=2",)),
    "cp2": (2, ("parallel.cp=2",)),
    "dp2·ep2": (4, ("parallel.ep=2",)),
    "pp2·ep2": (4, ("parallel.pp=2", "parallel.ep=2")),
}
SMALL = ("train.global_batch_size=4",)


@dataclass(frozen=True)
class Outcome:
    model: str
    layout: str
    processes: int
    load: float  # average of the machine, before
    split: Split


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        profile = arguments.profile or _measure(Path(folder) / "profile")
        found = list(_outcomes(profile, list(MODELS)[: arguments.models], arguments.repeats))
    if arguments.json:
        print(json.dumps([_tree(one) for one in found], indent=1))
    else:
        _print(found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--models", type=int, default=len(MODELS), help="how many of the models")
    parser.add_argument("--repeats", type=int, default=7, help="steps to time of each")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _measure(folder: Path) -> Path:
    skipped = ["--skip", "storage", "--skip", "pairs"]
    command = [sys.executable, "-m", "moestro", "measure", "--quick", "--ranks", "4", *skipped, "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


def _outcomes(profile: Path, models: list[str], repeats: int) -> Iterator[Outcome]:
    """Layouts in the outer loop, so that a machine that slows down serves all models alike."""
    machine = load_profile(profile)
    for layout, (processes, parallel) in LAYOUTS.items():
        target = target_of_profile(machine, processes)
        for model in models:
            config = load_config(BASE, [*SMALL, *MODELS[model], *parallel]).config
            load = os.getloadavg()[0]
            split = measure_and_split(config, target, processes, repeats)
            print(f"{model}, {layout}: {split.error:+.0%}", file=sys.stderr)
            yield Outcome(model, layout, processes, load, split)


def _tree(one: Outcome) -> dict[str, object]:
    split = one.split
    return {
        "model": one.model, "layout": one.layout, "processes": one.processes, "load": one.load,
        "measured_s": split.measured_s, "predicted_s": split.predicted_s, "error": split.error, "parts": split.parts,
        "left": split.left,
    }  # fmt: skip


def _print(found: list[Outcome]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("model", "layout"):
        table.add_column(column, no_wrap=True)
    for column in ("measured ms", "predicted ms", "error", "kernels", "host", "communication", "overlap", "load"):
        table.add_column(column, justify="right")
    for one in found:
        split = one.split
        seconds = (f"{split.measured_s * 1e3:.0f}", f"{split.predicted_s * 1e3:.0f}")
        errors = (f"{error:+.0%}" for error in (split.error, *split.parts.values()))
        table.add_row(one.model, one.layout, *seconds, *errors, f"{one.load:.1f}")
    console = Console(width=120)
    console.print(table)
    console.print("kernels, host, communication and overlap are parts of the error and add up to it", style="dim")
    for processes in sorted({one.processes for one in found}):
        some = [one.split for one in found if one.processes == processes]
        console.print(f"{processes} processes: {_medians(some)}")
    console.print(f"all {len(found)}: {_medians([one.split for one in found])}", style="bold")


def _medians(splits: list[Split]) -> str:
    error = statistics.median(abs(split.error) for split in splits)
    left = statistics.median(abs(split.left[-1]) for split in splits)
    return f"median of absolute errors {error:.1%}, with all parts measured {left:.1%}"


if __name__ == "__main__":
    main()
