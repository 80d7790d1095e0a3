"""`moestro validate`: the predictor held against measured runs that people published, or against your own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from moestro.predict.validate import Group, Progress, Row, Validation

REASONS = 6  # that are shown


def validate(
    path: Annotated[
        Path | None, typer.Argument(help="A CSV of measured runs, .xz too; by default the shipped public ones.")
    ] = None,
    hold_out: Annotated[
        bool, typer.Option("--hold-out", help="Predict each source with constants fitted to all others; minutes.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="A new folder for runs.csv, summary.json and validation.html.")
    ] = None,
    fit: Annotated[
        Path | None, typer.Option(help="Fit the constants to the complete runs instead, and write them here (TOML).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Predict every run of a table and print the errors: of all, by kind, scale, hardware and source.

    Beside them stand those of the null model: the median efficiency of other runs on that hardware in that precision.
    Rows that say too little are counted with the reason. docs/predicting.md describes the format.
    """
    import json

    from moestro.errors import MoestroError

    if out is not None and out.exists():
        raise MoestroError(f"{out} exists; choose another --out")
    if fit is not None and (hold_out or out is not None):
        raise MoestroError("--fit writes constants and validates nothing; leave --hold-out and --out out")

    from moestro.predict.validate import calibrate
    from moestro.predict.validate import validate as predict_runs

    with _progress() as progress:
        if fit is not None:
            _write_calibration(fit, calibrate(path, progress))
            typer.echo(f"constants  {fit}")
            return
        found = predict_runs(path, hold_out=hold_out, progress=progress)
    if out is not None:
        _write(out, found)
    if as_json:
        typer.echo(json.dumps(summary(found), indent=1))
        return
    _print(found)
    if out is not None:
        typer.echo(f"written {out}")


@contextmanager
def _progress() -> "Iterator[Progress]":
    """A bar on stderr. What is unknown in length (fitting) only pulses."""
    from rich.console import Console
    from rich.progress import Progress

    err = Console(stderr=True)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("pricing", total=None)

        def show(done: int, total: int, what: str) -> None:
            if done == total:
                bar.update(task, description="fitting", total=None)
            else:
                bar.update(task, description=what, completed=done, total=total)

        yield show


def _tables() -> "dict[str, Callable[[Row], str]]":
    from moestro.predict.validate import by_device, by_kind, by_scale, by_source

    return {"kind": by_kind, "scale": by_scale, "hardware": by_device, "source": by_source}


def summary(found: "Validation") -> dict[str, Any]:
    """Errors as plain data: shares of the measured time."""
    from dataclasses import asdict

    from moestro.predict.validate import coverage, group, groups

    complete = found.complete()
    return {
        "held_out": found.held_out,
        "all": asdict(group("all", found.rows)),
        "complete": asdict(group("complete", complete)) if complete else None,
        **{f"by_{name}": [asdict(one) for one in groups(found.rows, key)] for name, key in _tables().items()},
        "inside_interval": coverage(found.rows),
        "choice_of_layout": _regrets(found),
        "unusable": dict(found.unusable.most_common()),
        "failed": dict(found.failed.most_common()),
    }


def _regrets(found: "Validation") -> dict[str, Any]:
    """How well the predictions choose among runs that differ in their layout only; empty where there are none."""
    from dataclasses import asdict

    from moestro.plan.regret import choices, regrets, regrets_by

    some = choices(found.rows)
    if not some:
        return {}
    by = {"by_hardware": lambda one: one.device, "by_source": lambda one: one.source}
    groups = {name: [asdict(part) for part in regrets_by(some, key)] for name, key in by.items()}
    return {"all": asdict(regrets("all", some)), **groups}


def _print(found: "Validation") -> None:
    from rich.console import Console

    from moestro.predict.validate import coverage, group, groups

    console = Console(highlight=False, width=max(100, Console().width))
    how = "with constants fitted to all other sources" if found.held_out else "with the shipped constants"
    console.print(f"[bold]{len(found.rows):,} step times[/] {how}. Errors are shares of the measured time.")
    for name, key in _tables().items():
        console.print()
        _print_groups(console, name, groups(found.rows, key))
    console.print()
    whole = [group("all runs", found.rows)]
    complete = found.complete()
    if complete and len(complete) < len(found.rows):
        whole.append(group("of them complete", complete))
    _print_groups(console, "", whole, style="bold")
    inside = coverage(found.rows)
    if inside is not None:
        console.print(f"{inside:.0%} of the runs lie in 80 % intervals made of the errors of all other sources")
    _print_regrets(console, found)
    for what, reasons in (("not used", found.unusable), ("not priced", found.failed)):
        if reasons:
            shown = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(REASONS))
            more = "; …" if len(reasons) > REASONS else ""
            console.print(f"{what}: {sum(reasons.values())} rows: {shown}{more}", style="dim", markup=False)


def _print_regrets(console: "Console", found: "Validation") -> None:
    from rich.table import Table

    from moestro.report.text import MISSING, grouped

    regrets = _regrets(found)
    if not regrets:
        return
    console.print("\nThe layout we would choose among published ones of a run, beside the best of them:")
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("hardware", min_width=28, no_wrap=True)
    for column in ("choices", "layouts", "right", "median", "p90", "at random", "rank correlation"):
        table.add_column(column, justify="right", no_wrap=True)
    for part in (*regrets["by_hardware"], regrets["all"]):
        rank = MISSING if part["spearman"] is None else f"{part['spearman']:.2f}"
        shares = (f"{part[name]:.1%}" for name in ("median", "p90", "blind"))
        counts = (grouped(part[name]) for name in ("choices", "layouts", "right"))
        table.add_row(part["name"], *counts, *shares, rank, style="bold" if part is regrets["all"] else "")
    console.print(table)


def _print_groups(console: "Console", title: str, parts: "Sequence[Group]", style: str = "") -> None:
    from rich.markup import escape
    from rich.table import Table

    from moestro.report.text import MISSING, grouped

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(title, max_width=60, min_width=28, no_wrap=True)
    for column in ("runs", "median", "p90", "bias", "null median"):
        table.add_column(column, justify="right", no_wrap=True)
    for part in parts:
        null = MISSING if part.null_median is None else f"{part.null_median:.1%}"
        figures = (f"{part.median:.1%}", f"{part.p90:.1%}", f"{part.bias:+.1%}", null)
        table.add_row(escape(part.name), grouped(part.runs), *figures, style=style)
    console.print(table)


def _write_calibration(path: Path, calibration: Any) -> None:
    import tomli_w

    from moestro.config.files import write_whole

    write_whole(path, tomli_w.dumps(calibration.model_dump(mode="json", exclude_none=True)))


def _write(out: Path, found: "Validation") -> None:
    """The folder appears when it is whole."""
    import json
    import os
    import shutil

    from moestro.report.validation import write_page

    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        _write_runs(temporary / "runs.csv", found.rows)
        (temporary / "summary.json").write_text(json.dumps(summary(found), indent=1) + "\n", encoding="utf-8")
        write_page(found, temporary / "validation.html")
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


COLUMNS = (
    "row", "model", "device", "num_devices", "precision", "metric", "measured_s", "predicted_s", "null_s", "error",
    "assumed",
)  # fmt: skip


def _write_runs(path: Path, rows: "Sequence[Row]") -> None:
    import csv

    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for row in rows:
            run = row.run
            what = (run.row, run.model, run.device, run.num_devices, run.workload.precision, run.metric)
            null = "" if row.null is None else f"{row.null:.6g}"
            figures = (f"{run.measured:.6g}", f"{row.predicted:.6g}", null, f"{row.error:.4f}")
            writer.writerow((*what, *figures, "; ".join(run.assumed)))
