"""`moestro validate`: the predictor held against measured runs that people published, or against your own."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Sequence

    from rich.console import Console

    from moestro.predict.costs import StepCost
    from moestro.predict.public import PublicRun

Pair = tuple["PublicRun", float]  # a run, predicted seconds
GROUPS = ("hardware", "precision", "kind", "devices", "source")


def validate(
    path: Annotated[
        Path | None, typer.Argument(help="A CSV of measured runs, .xz too; by default the shipped public ones.")
    ] = None,
    hold_out: Annotated[
        bool, typer.Option("--hold-out", help="Predict each source with constants fitted to all others; minutes.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="A new folder for runs.csv and summary.json.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Predict every run of a table and print the errors: of all, by hardware, precision, kind, scale and source.

    Rows that say too little are counted with the reason. The format is described in docs/predicting.md.
    """
    import json

    from moestro.errors import MoestroError
    from moestro.predict.public import parse_runs

    if out is not None and out.exists():
        raise MoestroError(f"{out} exists; choose another --out")
    runs, unusable = parse_runs(path)
    priced, refused = _price([run for run in runs if run.quantity == "step_s"])
    unusable.update(refused)
    if not priced:
        raise MoestroError("no run of the table tells enough to predict a step; " + _reasons(unusable))
    pairs = _predict(priced, hold_out)
    tree = {
        "runs": len(pairs),
        "held_out": hold_out,
        "all": _errors(pairs),
        "by": {group: {name: _errors(some) for name, some in _split(pairs, group).items()} for group in GROUPS},
        "unusable": dict(unusable.most_common()),
    }
    if out is not None:
        _write(out, pairs, tree)
    if as_json:
        typer.echo(json.dumps(tree, indent=1))
        return
    _print(pairs, unusable, hold_out)
    if out is not None:
        typer.echo(f"written {out}")


def _price(runs: "Sequence[PublicRun]") -> "tuple[list[tuple[PublicRun, StepCost]], Counter[str]]":
    """Every run counted and priced, and why some cannot be."""
    from collections import Counter

    from moestro.errors import MoestroError
    from moestro.hardware.catalog import load_device
    from moestro.predict.step import Place, cost_step

    priced, refused = [], Counter[str]()
    with _progress() as bar:
        for run in bar.track(runs, description="pricing"):
            try:
                place = Place.of(load_device(run.device), run.devices_per_node)
                priced.append((run, cost_step(run.workload, run.plan, place)))
            except MoestroError as error:
                refused[str(error)] += 1
    return priced, refused


def _predict(priced: "Sequence[tuple[PublicRun, StepCost]]", hold_out: bool) -> list[Pair]:
    from moestro.predict.constants import load_calibration
    from moestro.predict.fit import left_out, predicted, source_of

    if not hold_out:
        return predicted(priced, load_calibration())
    with _progress() as bar:
        task = bar.add_task("fitting without", total=len({source_of(run) for run, _ in priced}))
        return left_out(priced, lambda source: bar.update(task, advance=1))


def _progress() -> Any:
    from rich.console import Console
    from rich.progress import Progress

    err = Console(stderr=True)
    return Progress(console=err, transient=True, disable=not err.is_terminal)


def _split(pairs: list[Pair], group: str) -> dict[str, list[Pair]]:
    """By what a run's group is called, the largest first."""
    from moestro.predict.fit import source_of

    def name(run: "PublicRun") -> str:
        if group == "hardware":
            return run.device
        if group == "precision":
            return run.workload.precision
        if group == "kind":
            return "mixture of experts" if run.is_moe else "dense"
        if group == "devices":
            return next(text for limit, text in SCALES if run.num_devices <= limit)
        return source_of(run)

    found: dict[str, list[Pair]] = {}
    for pair in pairs:
        found.setdefault(name(pair[0]), []).append(pair)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


SCALES = ((1, "1"), (8, "2 to 8"), (64, "9 to 64"), (512, "65 to 512"), (10**9, "over 512"))


def _errors(pairs: list[Pair]) -> dict[str, float]:
    """Relative errors of the step time; bias is that of the median run."""
    import numpy as np

    signed = np.array([predicted / run.measured - 1 for run, predicted in pairs])
    return {
        "runs": len(pairs),
        "median": float(np.median(np.abs(signed))),
        "p90": float(np.quantile(np.abs(signed), 0.9)),
        "bias": float(np.median(signed)),
    }


def _print(pairs: list[Pair], unusable: "Counter[str]", hold_out: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=max(100, Console().width))
    how = "constants fitted to all other sources" if hold_out else "constants as shipped"
    console.print(f"[bold]{len(pairs):,} step times[/], {how}; errors of the predicted against the measured time")
    for group in GROUPS:
        console.print()
        _print_group(console, group, _split(pairs, group))
    if group_errors := _errors(pairs):
        console.print(
            f"\nall: median {group_errors['median']:.1%}, nine of ten within {group_errors['p90']:.1%}, "
            f"bias {group_errors['bias']:+.1%}",
            style="bold",
        )
    if unusable:
        console.print(f"not used: {_reasons(unusable)}", style="dim", markup=False)


def _print_group(console: "Console", group: str, parts: dict[str, list[Pair]]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table: Table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(group, max_width=60, no_wrap=True)
    for column in ("runs", "median", "p90", "bias"):
        table.add_column(column, justify="right")
    for name, some in parts.items():
        found = _errors(some)
        figures = (f"{found['median']:.1%}", f"{found['p90']:.1%}", f"{found['bias']:+.1%}")
        table.add_row(escape(name), f"{len(some):,}", *figures)
    console.print(table)


def _reasons(unusable: "Counter[str]") -> str:
    total = sum(unusable.values())
    shown = "; ".join(f"{count} {reason}" for reason, count in unusable.most_common(5))
    return f"{total} rows: {shown}" + ("; …" if len(unusable) > 5 else "")


def _write(out: Path, pairs: list[Pair], tree: dict[str, Any]) -> None:
    """The folder appears when it is whole."""
    import csv
    import json
    import os

    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    columns = ("row", "model", "device", "num_devices", "metric", "measured_s", "predicted_s", "error", "assumed")
    with (temporary / "runs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for run, seconds in pairs:
            error = f"{seconds / run.measured - 1:.4f}"
            figures = (f"{run.measured:.6g}", f"{seconds:.6g}", error)
            cells = (run.row, run.model, run.device, run.num_devices, run.metric, *figures, "; ".join(run.assumed))
            writer.writerow(cells)
    (temporary / "summary.json").write_text(json.dumps(tree, indent=1) + "\n")
    temporary.rename(out)
