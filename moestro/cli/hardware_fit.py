"""`moestro hardware fit`: curves of public or own measurements, and their error on rows that they have not seen."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from moestro.hardware.curves.judge import Verdict
    from moestro.hardware.profile import Sample


def fit(
    gemm: Annotated[Path | None, typer.Option(help="CSV of products, experts, attention, memory to fit to.")] = None,
    collectives: Annotated[Path | None, typer.Option(help="CSV of collectives to fit to.")] = None,
    against_gemm: Annotated[
        Path | None, typer.Option(help="CSV to predict; rows that were fitted are left out.")
    ] = None,
    against_collectives: Annotated[Path | None, typer.Option(help="The same for collectives.")] = None,
    device: Annotated[str, typer.Option(help="Only this device of the catalog.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Fit curves to measurements and print their error on rows left out of the fit (published records by default).

    Each curve is judged on fifths of its own samples, or on the rows of the file after --against-….

    "From another device" is the error for a device without samples of its own.

    An option for one kind of records leaves the other kind out. Fitting everything takes a minute.
    """
    import json

    from moestro.hardware.catalog import load_device

    only = load_device(device).id if device else ""
    any_compute, any_network = bool(gemm or against_gemm), bool(collectives or against_collectives)
    console = _console(as_json)
    tree: dict[str, Any] = {}
    if any_compute or not any_network:
        tree["compute"] = _judge_compute(gemm, against_gemm, only, console)
    if any_network or not any_compute:
        tree["collectives"] = _judge_collectives(collectives, against_collectives, only, console)
    if as_json:
        typer.echo(json.dumps(tree, indent=1))


def _console(quiet: bool) -> "Console":
    import sys

    from rich.console import Console

    width = None if sys.stdout.isatty() else 150
    return Console(highlight=False, quiet=quiet, width=width)


def _judge_compute(path: Path | None, other: Path | None, only: str, console: "Console") -> dict[str, Any]:
    from moestro.hardware.curves.compute import grouped
    from moestro.hardware.curves.judge import against, fit_curves, left_out
    from moestro.hardware.published.gemm import read_gemm

    samples, unusable = read_gemm(path)
    _say_read(console, "products, experts, attention, memory", path, len(samples), unusable)
    if other is None:
        groups = grouped(_of(samples, only))
        with _bar("fitting") as progress:
            curves, refused = fit_curves(groups, progress)
        verdicts = left_out(groups, curves)
        _show(console, "Error on fifths left out of the fit", verdicts, only)
    else:
        rows, odd = read_gemm(other)
        _say_read(console, "rows to predict", other, len(rows), odd)
        with _bar("fitting") as progress:
            verdicts, refused = against(samples, _of(rows, only), progress)
        _show(console, f"Error on rows of {other.name} that are not in the fit", verdicts, only)
        unusable = _added(unusable, odd)
    _say_counts(console, "without a prediction", refused)
    return {"rows": [_tree(v) for v in verdicts], "unusable": unusable, "unpredicted": refused}


def _judge_collectives(path: Path | None, other: Path | None, only: str, console: "Console") -> dict[str, Any]:
    from moestro.hardware.curves.judge import Verdict, against_collectives
    from moestro.hardware.curves.network import held_out_table
    from moestro.hardware.published.collectives import read_collectives

    samples, unusable = read_collectives(path)
    _say_read(console, "collectives", path, len(samples), unusable)
    refused: dict[str, int] = {}
    if other is None:
        reports = held_out_table(_of(samples, only))
        verdicts = [Verdict(r.what, r.samples, r.form, r.held_out_median, r.held_out_p90) for r in reports]
        _show(console, "Error on collectives left out", verdicts, only)
    else:
        rows, odd = read_collectives(other)
        _say_read(console, "rows to predict", other, len(rows), odd)
        verdicts, refused = against_collectives(samples, _of(rows, only))
        _show(console, f"Error on rows of {other.name} that are not in the fit", verdicts, only)
        unusable = _added(unusable, odd)
    _say_counts(console, "without a prediction", refused)
    return {"rows": [_tree(v) for v in verdicts], "unusable": unusable, "unpredicted": refused}


def _of(samples: "list[Sample]", device: str) -> "list[Sample]":
    return [s for s in samples if not device or s.case.get("device") == device]


def _added(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {reason: a.get(reason, 0) + b.get(reason, 0) for reason in {**a, **b}}


def _say_read(console: "Console", what: str, path: Path | None, count: int, unusable: dict[str, int]) -> None:
    console.print(f"{what}: {count:,} rows of {path or 'the published records'}", markup=False)
    _say_counts(console, "of no use", unusable)


def _say_counts(console: "Console", title: str, counts: dict[str, int]) -> None:
    for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
        console.print(f"  {count:,} rows {title}: {reason}", markup=False, style="dim")


def _show(console: "Console", title: str, verdicts: "list[Verdict]", device: str) -> None:
    from rich.table import Table

    if not verdicts:
        console.print(f"nothing to judge: no rows of {device or 'this kind'}", markup=False)
        return
    sheets, elsewhere = (any(getattr(v, name) is not None for v in verdicts) for name in ("sheet", "elsewhere"))
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("curve")
    for name in ("rows", "median", "p90"):
        table.add_column(name, justify="right")
    if sheets:
        table.add_column("data sheet", justify="right")
    if elsewhere:
        table.add_column("from another device", justify="right")
    table.add_column("rests on")
    for v in verdicts:
        cells = [v.what, f"{v.rows:,}", _percent(v.median), _percent(v.p90)]
        cells += [_percent(v.sheet)] if sheets else []
        cells += [f"{_percent(v.elsewhere)} {v.other}".strip()] if elsewhere else []
        style = "bold" if v.what.startswith("all") else None
        table.add_row(*cells, v.basis, style=style)
    console.print(table)
    console.print("Relative errors of the time; – too few samples or unknown.", style="dim", markup=False)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}%"


def _tree(verdict: "Verdict") -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(verdict)


def _bar(title: str) -> Any:
    """A context that gives `progress(done, of, what)`: a bar on a terminal, nothing elsewhere."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    @contextmanager
    def shown() -> Any:
        console = Console(stderr=True)
        columns = (
            TextColumn(title),
            BarColumn(24),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, of, what: bar.update(task, completed=done, total=of, description=what)

    return shown()
