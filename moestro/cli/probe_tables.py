"""What `moestro probe` prints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moestro.cli.shown import console_of

if TYPE_CHECKING:
    from rich.table import Table

    from moestro.config.plan import Plan
    from moestro.plan.measured import MeasuredPlan
    from moestro.predict.dry_run import Probe, StageMemory
    from moestro.predict.probe_rounds import Rounds
    from moestro.predict.probe_table import ProbeTable
    from moestro.predict.target import Target

WIDTH = 120


def print_rounds(name: str, rounds: "Rounds", plan: "Plan", commands: Sequence[str]) -> None:
    """The stages of each dry run, and what starts it."""
    from moestro.predict.dry_run import MOST_CONDITION

    console = console_of(WIDTH)
    several = f"{len(rounds.rounds)} dry run{'s' * (len(rounds.rounds) != 1)} of {plan.pp} stages"
    console.print(f"{name}: {several}, {plan.world_size:,} devices each", style="bold", markup=False)
    console.print(
        f"condition number of the stages between the first and the last: {rounds.condition:.1f} "
        f"(at most {MOST_CONDITION:.0f}); layers as kept / recomputed\n", style="dim", markup=False,
    )  # fmt: skip
    table = _table("dry run", "recomputes", *(f"stage {stage}" for stage in range(plan.pp)))
    for number, one in enumerate(rounds.rounds):
        cells = [
            f"{count - again} / {again}" if again else f"{count}"
            for count, again in zip(one.layers, one.recomputed, strict=True)
        ]
        table.add_row(str(number), one.kind, *cells)
    flights = [str(probe.in_flight) for probe in rounds.probes[0]]
    table.add_row("", "in flight", *flights, style="dim")
    console.print(table)
    console.print()
    for number, command in enumerate(commands):
        console.print(f"{number}  {command}", markup=False, soft_wrap=True)


def rounds_tree(rounds: "Rounds") -> dict[str, Any]:
    from dataclasses import asdict

    return {"rounds": [asdict(one) for one in rounds.rounds], "condition": rounds.condition}


def print_fit(
    path: Path,
    read: "ProbeTable",
    fitted: "StageMemory",
    left_out: Sequence[float | None],
    counted: Mapping[str, float],
) -> None:
    """The numbers, then every stage with what the fit makes of it."""
    console = console_of(WIDTH)
    misses, outs = [abs(r) for r in fitted.residuals], [abs(r) for r in left_out if r is not None]
    console.print(f"{path}: {len(read.probes)} stages", style="bold", markup=False)
    console.print(
        f"rank {fitted.rank} of {2 + len(fitted.activation_bytes)}, condition number {fitted.condition:.1f}; residuals "
        f"{max(misses):.1%} at worst, left out {max(outs):.1%} at worst\n" if outs else "", style="dim", markup=False,
    )  # fmt: skip
    table = _table("", "fitted", *(("counted", "fitted ÷ counted") if counted else ()))
    for name, size in _numbers(fitted):
        key = {"a layer": "layer"}.get(name, name.removeprefix("activations of a layer, "))
        beside = counted.get(key)
        cells = [_gb(beside), f"{size / beside:.3f}"] if beside else ["", ""] if counted else []
        table.add_row(name, _gb(size), *cells)
    console.print(table)
    console.print()
    table = _table("stage", "", "in flight", "layers", "peak", "fitted", "off", "left out")
    for name, probe, peak, off, out in zip(
        read.names, read.probes, read.peaks_bytes, fitted.residuals, left_out, strict=True
    ):
        sizes = _gb(peak), _gb(peak * (1 + off)), f"{off:+.1%}", "–" if out is None else f"{out:+.1%}"
        table.add_row(name, "" if probe.end == "middle" else probe.end, str(probe.in_flight), _layers(probe), *sizes)
    console.print(table)
    console.print(
        "off: fitted over peak; left out: by a fit without this stage (–: the others do not determine it). A stage "
        "alone\nin its kind of end is fitted exactly.", style="dim", markup=False,
    )  # fmt: skip


def print_placed(
    name: str,
    found: "MeasuredPlan",
    counted: "MeasuredPlan | None",
    limit_bytes: float,
    target: "Target",
    path: Path,
) -> None:
    """Both plans, rank by rank."""
    console = console_of(WIDTH)
    plan = found.plan
    console.print(f"{name} on {plan.world_size:,} × {target.place.device.name}", style="bold", markup=False)
    console.print(
        f"memory by {path}, of which tensors may take {_gb(limit_bytes)}; times predicted by {target.profile}\n",
        style="dim", markup=False,
    )  # fmt: skip
    table = _table("placed by", "step", "fullest", "layers of each stage", "recomputed")
    for label, one in (("these dry runs", found), ("counted memory", counted)):
        if one is None:
            table.add_row(label, "", "", "nothing fits by it", "")
            continue
        most = max(one.rank_bytes)
        over = "!" if most > limit_bytes * (1 + 1e-9) else ""
        table.add_row(label, f"{one.step_s:.3f} s", f"{_gb(most)}{over}", *_cut(one.plan))
    console.print(table)
    notes = ["fullest: a rank's tensors by the dry runs, whoever placed them"]
    if counted is not None and max(counted.rank_bytes) > limit_bytes * (1 + 1e-9):
        notes.append("! more than there is: that plan would run out of memory")
    console.print(". ".join(notes) + ".", style="dim", markup=False)


def placed_tree(found: "MeasuredPlan", counted: "MeasuredPlan | None", limit_bytes: float) -> dict[str, Any]:
    def tree(one: "MeasuredPlan") -> dict[str, Any]:
        return {"plan": one.plan.model_dump(mode="json"), "step_s": one.step_s, "rank_bytes": one.rank_bytes}

    beside = None if counted is None else tree(counted)
    return {"measured": tree(found), "counted": beside, "limit_bytes": limit_bytes}


@contextmanager
def progress(what: str) -> "Iterator[Callable[[int, int], None]]":
    """On the error stream: a bar, or now and then a line where that is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("eta"), TimeRemainingColumn(elapsed_when_finished=False))  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)

        def told(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if not console.is_terminal and done and (done == total or done % max(total // 4, 1) == 0):
                console.print(f"{what}: {done}/{total}", highlight=False)

        yield told


def _cut(plan: "Plan") -> tuple[str, str]:
    layers = " ".join(map(str, plan.layers_per_stage or ())) or "even"
    if plan.recompute == "none":
        return layers, "none"
    per_stage = plan.recompute_per_stage
    return layers, f"{plan.recompute}: " + ("all" if per_stage is None else " ".join(map(str, per_stage)))


def _numbers(fitted: "StageMemory") -> list[tuple[str, float]]:
    rows = [("constant", fitted.constant_bytes), ("a layer", fitted.layer_bytes)]
    rows += [(f"activations of a layer, {kind}", size) for kind, size in fitted.activation_bytes.items()]
    return rows + [(f"{end} stage, besides", size) for end, size in fitted.end_bytes.items()]


def _layers(probe: "Probe") -> str:
    return " + ".join(f"{count} {kind}" for kind, count in probe.layers.items() if count) or "0"


def _gb(size: float | None) -> str:
    if size is None:
        return ""
    return f"{size / 1e9:.2f} GB" if abs(size) >= 1e9 else f"{size / 1e6:.1f} MB"


def _table(*columns: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table
