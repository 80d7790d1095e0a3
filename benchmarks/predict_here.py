"""Predicted against measured step times of small MoE models on this machine, the error split by what caused it.

    python benchmarks/predict_here.py [--profile PATH] [--ranks 1 2] [--steps 12] [--json]

Without --profile the machine is measured first (`moestro measure --quick`), as predictions age with the machine's load.
The models are none that anything was fitted to. With one rank the measured step is that of `moestro measure step`, with
several the median of a short `moestro train`, without its first two steps.

The split, for one rank: the real step is taken apart (`moestro measure step`) into the time of its operations and the
host's time between them. The prediction with the measured operations put in for the predicted ones errs by the host
alone, with the measured host put in by the operations alone.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moestro.config import Config, load_config
from moestro.graph.convert import plan_of, workload_of
from moestro.hardware.profile import load_profile
from moestro.predict.predict import predict_step
from moestro.predict.target import target_of_profile
from moestro.predict.words import TimeBreakdown
from moestro.report.read import read_run

BASE = "olmoe-tiny"
MODELS: dict[str, tuple[str, ...]] = {
    "few wide experts": ("model.hidden_size=192", "model.moe.num_experts=8", "model.moe.top_k=2",
                         "model.moe.expert_hidden_size=256"),
    "many narrow experts": ("model.hidden_size=128", "model.moe.num_experts=32", "model.moe.top_k=4",
                            "model.moe.expert_hidden_size=64"),
    "deep": ("model.num_layers=6", "model.hidden_size=96", "model.moe.expert_hidden_size=96"),
    "wide": ("model.hidden_size=384", "model.num_heads=6", "model.moe.expert_hidden_size=192"),
    "long sequences": ("data.seq_len=1024", "model.max_seq_len=1024", "train.global_batch_size=2"),
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    model: str
    ranks: int
    measured_s: float
    calls_s: float | None  # of the real step's operations, one rank
    gaps_s: float | None
    predicted: TimeBreakdown

    @property
    def error(self) -> float:
        return self.predicted.total / self.measured_s - 1

    def split(self) -> dict[str, float]:
        """Relative errors that are left when all else is as measured."""
        if self.calls_s is None or self.gaps_s is None:
            return {}
        whole = self.calls_s + self.gaps_s
        time = self.predicted
        kernels = time.compute + time.optimizer
        return {"operations": (kernels - self.calls_s) / whole, "host": (time.host - self.gaps_s) / whole}


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        profile = arguments.profile or _measure(place / "profile", max(arguments.ranks))
        found: list[Outcome] = []
        for name, changes in MODELS.items():
            for ranks in arguments.ranks:
                found.append(_one(name, changes, ranks, arguments.steps, profile, place / f"{len(found)}"))
                print(f"{name}, {ranks}: {found[-1].error:+.1%}", file=sys.stderr)
    if arguments.json:
        print(json.dumps([_tree(one) for one in found], indent=1))
    else:
        _print(found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _measure(folder: Path, ranks: int) -> Path:
    options = ["--quick", "--skip", "storage", "--skip", "pairs", "--out", str(folder)]
    if ranks > 1:
        options += ["--ranks", str(ranks)]
    subprocess.run([sys.executable, "-m", "moestro", "measure", *options], check=True, stdout=subprocess.DEVNULL)
    return folder


def _one(name: str, changes: tuple[str, ...], ranks: int, steps: int, profile: Path, folder: Path) -> Outcome:
    overrides = [
        *changes,
        f"train.steps={steps}",
        "train.log_every=1",
        "train.eval_every=1000000",
        "train.eval_batches=1",
        f"run.dir={folder}",
        "run.sample_prompts=[]",
        *([f"parallel.ep={ranks}", "train.micro_batch_size=1"] if ranks > 1 else []),
    ]
    config = load_config(BASE, overrides).config
    workload, plan = workload_of(config), plan_of(config, ranks)
    target = target_of_profile(load_profile(profile), ranks)
    time = predict_step(workload, plan, target).time
    if ranks == 1:
        return Outcome(name, ranks, *_apart(config, steps), time)
    command = [sys.executable, "-m", "moestro", "train", BASE, *overrides, "--nproc", str(ranks)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return Outcome(name, ranks, _measured(next(folder.iterdir())), None, None, time)


def _measured(run: Path) -> float:
    return statistics.median(float(seconds) for seconds in read_run(run).train.step_s[2:])


def _apart(config: Config, steps: int) -> tuple[float, float, float]:
    """Seconds of a step, of its operations, and between them."""
    import torch

    from moestro.measure.step import BuiltStep, take_apart, time_step

    built = BuiltStep(config, torch.device("cpu"))
    times = time_step(built, take_apart(built, built.record()), steps)
    return times.median_s, times.accounted.calls_s, times.accounted.gaps_s


def _tree(one: Outcome) -> dict[str, Any]:
    time = one.predicted
    parts = {
        "compute": time.compute,
        "host": time.host,
        "communication": time.communication,
        "optimizer": time.optimizer,
    }
    return {
        "model": one.model, "ranks": one.ranks, "measured_s": one.measured_s, "predicted_s": time.total,
        "error": one.error, "parts_s": parts, "calls_s": one.calls_s, "gaps_s": one.gaps_s, "left": one.split(),
    }  # fmt: skip


def _print(found: list[Outcome]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("model")
    for column in ("ranks", "measured ms", "predicted ms", "error", "by operations", "by host"):
        table.add_column(column, justify="right")
    for one in found:
        left = one.split()
        cells = [f"{left[key]:+.1%}" if key in left else "–" for key in ("operations", "host")]
        seconds = (f"{one.measured_s * 1e3:.1f}", f"{one.predicted.total * 1e3:.1f}")
        table.add_row(one.model, str(one.ranks), *seconds, f"{one.error:+.1%}", *cells)
    console = Console(width=110)
    console.print(table)
    errors = [abs(one.error) for one in found]
    console.print(f"median of absolute errors: {statistics.median(errors):.1%}", style="bold")


if __name__ == "__main__":
    main()
