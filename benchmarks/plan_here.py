"""The plan that a search chooses for four processes of this machine, executed, against all other layouts.

    python benchmarks/plan_here.py [--profile PATH] [--model NAME] [--rounds 2] [--json]

Without --profile the machine is measured first (`moestro measure --quick --ranks 4`), as predictions age with the
machine's load. Ten minutes for the 110 layouts of a model on two cores; nothing was fitted to the models. A step is the
one that `moestro train` runs, on random tokens.

All plans that the trainer can run are predicted. Of each *layout*, that is degrees, ZeRO level, schedule and stages,
the plan of the shortest predicted step is executed: its micro-batch, chunks, recomputation and way of context are the
planned ones. Layouts take turns in rounds; then those that measured fastest and the choice once more, by which they are
compared: the fastest of many measurements of one round is also the luckiest.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from moestro.config import Config, load_config
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.convert import overrides_of, workload_of
from moestro.hardware.profile import load_profile
from moestro.measure.step import BuiltStep
from moestro.parallel.layout import resolve_layout
from moestro.parallel.local import run_on_ranks
from moestro.plan.search import search
from moestro.plan.space import space_of
from moestro.plan.why import changes
from moestro.predict.predict import predict_step
from moestro.predict.target import Target, target_of_profile

BASE = ("olmoe-tiny", "model.num_layers=4")
MODELS: dict[str, tuple[str, ...]] = {
    "few-wide": ("model.hidden_size=192", "model.moe.num_experts=8", "model.moe.top_k=2",
                 "model.moe.expert_hidden_size=256"),
    "many-narrow": ("model.hidden_size=128", "model.moe.num_experts=32", "model.moe.top_k=4",
                    "model.moe.expert_hidden_size=64"),
    "deep": ("model.num_layers=8", "model.hidden_size=96", "model.moe.expert_hidden_size=96"),
}  # fmt: skip
EVERY = 10**9  # plans kept by the search
LIMIT_S = 3600.0
SHOWN = 12


@dataclass
class Layout:
    """The best plan of a layout: seconds that a step should take, and of each step that was run; final: of those in the
    last rounds, of the fastest only."""

    plan: Plan
    config: Config
    predicted_s: float
    steps_s: list[float] = field(default_factory=list)
    final_s: list[float] = field(default_factory=list)

    @property
    def measured_s(self) -> float:
        return statistics.median(self.final_s or self.steps_s)

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Outcome:
    """layouts: by their measured step. refused: plans that the trainer does not run."""

    model: str
    layouts: list[Layout]
    choice: Layout
    plans: int
    refused: int
    search_s: float
    load: float

    @property
    def best(self) -> Layout:
        return min((one for one in self.layouts if one.final_s), key=lambda one: one.measured_s)

    @property
    def regret(self) -> float:
        return self.choice.measured_s / self.best.measured_s - 1

    @property
    def rank_correlation(self) -> float:
        predicted, measured = zip(*((one.predicted_s, one.measured_s) for one in self.layouts), strict=True)
        return float(spearmanr(predicted, measured).statistic)

    @property
    def median_error(self) -> float:
        return statistics.median(abs(one.error) for one in self.layouts)


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        profile = arguments.profile or _measure(Path(folder) / "profile", arguments.ranks)
        target = target_of_profile(load_profile(profile), arguments.ranks)
        found = _outcome(arguments, target, Path(folder))
    if arguments.json:
        print(json.dumps(_tree(found), indent=1))
    else:
        _print(found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--model", choices=MODELS, default="few-wide")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the run, over the model's own")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="of all layouts")
    parser.add_argument("--steps", type=int, default=2, help="timed of a layout in each round, after one that is not")
    parser.add_argument("--finalists", type=int, default=5)
    parser.add_argument("--final-rounds", type=int, default=5, help="of the finalists and the choice")
    parser.add_argument("--first", type=int, help="only so many layouts, those predicted fastest")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _measure(folder: Path, ranks: int) -> Path:
    skipped = ["--skip", "storage", "--skip", "pairs"]
    command = [sys.executable, "-m", "moestro", "measure", "--quick", "--ranks", str(ranks), *skipped]
    subprocess.run([*command, "--out", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder


def _outcome(arguments: argparse.Namespace, target: Target, folder: Path) -> Outcome:
    preset, *settings = BASE
    run = [*settings, f"train.global_batch_size={arguments.batch}", *MODELS[arguments.model], *arguments.set]
    workload = workload_of(load_config(preset, run).config)
    start = time.perf_counter()
    layouts, plans, refused = _layouts(preset, run, workload, target, arguments.ranks)
    search_s, choice, load = time.perf_counter() - start, layouts[0], os.getloadavg()[0]
    layouts = layouts[: arguments.first]
    print(f"{plans:,} plans in {search_s:.1f} s; {len(layouts)} layouts to run", file=sys.stderr)
    for one, steps in zip(layouts, _run(layouts, arguments, arguments.rounds, folder / "all"), strict=True):
        one.steps_s = steps
    layouts = sorted((one for one in layouts if one.steps_s), key=lambda one: one.measured_s)
    fastest = layouts[: arguments.finalists]
    final = fastest if choice in fastest else [*fastest, choice]
    for one, steps in zip(final, _run(final, arguments, arguments.final_rounds, folder / "final"), strict=True):
        one.final_s = steps
    layouts.sort(key=lambda one: one.measured_s)
    return Outcome(arguments.model, layouts, choice, plans, refused, search_s, load)


def _layouts(
    preset: str, run: Sequence[str], workload: Workload, target: Target, ranks: int
) -> tuple[list[Layout], int, int]:
    """Of each layout its best plan that the trainer runs, the choice of the search first; how many plans there are, and
    how many of them the trainer refuses."""
    degrees = tuple(n for n in range(1, ranks + 1) if ranks % n == 0)
    space = space_of(workload, ranks, target.place.node_size, {"cp": degrees})
    found = search(workload, target, ranks, space, keep=EVERY)
    best: dict[tuple[object, ...], Layout] = {}
    refused = 0
    for plan in (*(plan for plan, _ in found.exact), *(one.plan for one in found.best)):
        key = (plan.pp, plan.dp, plan.cp, plan.tp, plan.ep, plan.zero, plan.schedule, plan.vpp)
        try:
            config = load_config(preset, [*run, *overrides_of(plan)]).config
            resolve_layout(config, ranks)
        except MoestroError:
            refused += 1
            continue
        if key not in best:
            predicted = predict_step(workload, plan, target, exact=True)
            best[key] = Layout(plan, config, predicted.step_s.value)
    return list(best.values()), found.tally.plans, refused


def _run(layouts: Sequence[Layout], arguments: argparse.Namespace, rounds: int, folder: Path) -> list[list[float]]:
    """Seconds of each step of each layout, its slowest rank's; none where the trainer refused it after all."""
    folder.mkdir()
    configs = [one.config for one in layouts]
    by_rank = run_on_ranks(
        _on_rank, arguments.ranks, configs, rounds, arguments.steps, folder, limit_s=LIMIT_S
    )  # fmt: skip
    return [[max(step) for step in zip(*ranks, strict=True)] for ranks in zip(*by_rank, strict=True)]


def _on_rank(rank: int, configs: Sequence[Config], rounds: int, steps: int, folder: Path) -> list[list[float]]:
    """Every second round goes backwards, so that a machine that slows down serves all alike."""
    taken: list[list[float]] = [[] for _ in configs]
    world = dist.get_world_size()
    dist.barrier()  # or one leaves while others still look for it
    dist.destroy_process_group()
    for number in range(rounds):
        begun = time.perf_counter()
        order = range(len(configs))
        for index in order if number % 2 == 0 else reversed(order):
            _join(rank, world, folder / f"{number}-{index}")
            try:
                taken[index] += _steps(configs[index], steps)
            except MoestroError as error:  # of every rank alike
                if rank == 0 and number == 0:
                    print(f"layout {index}: {error}", file=sys.stderr)
            dist.barrier()
            dist.destroy_process_group()
            _clear_sharding_prop_cache()  # it remembers meshes, whose groups are gone
        if rank == 0:
            print(f"round {number + 1} of {rounds}: {time.perf_counter() - begun:.0f} s", file=sys.stderr)
    _join(rank, world, folder / "end")
    return taken


def _join(rank: int, world: int, store: Path) -> None:
    """A group of its own for each layout: the sockets and threads of hundreds would add up."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)


def _steps(config: Config, count: int) -> list[float]:
    built, seconds = BuiltStep(config, torch.device("cpu")), []
    for number in range(count + 1):
        dist.barrier()
        start = time.perf_counter()
        built.run()
        if number:
            seconds.append(time.perf_counter() - start)
        built.put_back()
    return seconds


def _tree(found: Outcome) -> dict[str, object]:
    layouts = [
        {
            "plan": one.plan.model_dump(mode="json"), "predicted_s": one.predicted_s, "measured_s": one.measured_s,
            "steps_s": one.steps_s, "final_s": one.final_s,
        }
        for one in found.layouts
    ]  # fmt: skip
    return {
        "model": found.model, "plans": found.plans, "refused": found.refused, "search_s": found.search_s,
        "load": found.load, "choice": found.choice.plan.model_dump(mode="json"), "error": found.choice.error,
        "regret": found.regret, "rank_correlation": found.rank_correlation, "median_error": found.median_error,
        "layouts": layouts,
    }  # fmt: skip


def _print(found: Outcome) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "measured ms", "predicted ms", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("layout", overflow="fold")
    for number, one in enumerate(found.layouts, 1):
        if number <= SHOWN or one is found.choice or number == len(found.layouts):
            seconds = f"{one.measured_s * 1e3:.0f}", f"{one.predicted_s * 1e3:.0f}"
            style = "bold" if one is found.choice else ""
            table.add_row(str(number), *seconds, f"{one.error:+.0%}", _words(one.plan), style=style)
    console, choice = Console(width=120, highlight=False), found.choice
    console.print(table)
    console.print(
        f"{found.model}: {len(found.layouts)} layouts run, of {found.plans:,} plans ({found.refused:,} refused "
        f"by the trainer), searched in {found.search_s:.1f} s; load before {found.load:.1f}"
    )
    console.print(
        f"the choice: predicted {choice.predicted_s * 1e3:.0f} ms, measured {choice.measured_s * 1e3:.0f} ms: "
        f"{choice.error:+.1%}; {found.regret:.1%} slower than the fastest measured",
        style="bold",
    )
    console.print(
        f"all: rank correlation {found.rank_correlation:.2f}, median of absolute errors {found.median_error:.1%}"
    )


def _words(plan: Plan) -> str:
    return " ".join(changes(Plan(), plan)) or "one process"


if __name__ == "__main__":
    main()
