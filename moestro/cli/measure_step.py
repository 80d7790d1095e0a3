"""`moestro measure step`: a preset's training step as primitives, each against what it could take."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from moestro.measure.primitives import Primitive
    from moestro.measure.step_projection import Progress, Projection

SHOWN, NOTES = 20, 3  # rows of the table, and notes below it
SHORT = {"forward": "fwd", "backward": "bwd", "optimizer": "opt"}


def step(
    preset: Annotated[str, typer.Argument(help="A preset's name or a TOML file; see `moestro config list`.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Take what calls could take from this profile, not from measuring each.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda …; instead of run.device.")] = "auto",
    repeats: Annotated[int, typer.Option(min=3, help="Steps to time.")] = 10,
    out: Annotated[Path | None, typer.Option(help="A new folder for step.json, primitives.csv and calls.csv.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Take a preset's training step apart: time of each primitive, what it could take, the largest gap first.

    The step is the real one, forward, backward and optimizer, in one process and on random tokens. Nothing is trained.
    """
    import json

    from moestro.config import load_config
    from moestro.errors import MoestroError

    config = load_config(preset, overrides or ()).config  # before torch loads: a mistake is answered at once
    if out is not None and out.exists():
        raise MoestroError(f"{out} exists; choose another --out")

    from moestro.hardware.device import resolve_device
    from moestro.hardware.profile import load_profile
    from moestro.measure.step import BuiltStep
    from moestro.measure.step_curves import curves_of_profile
    from moestro.measure.step_projection import as_dict, project, write_projection

    known = None
    if profile is not None:
        loaded = load_profile(profile)
        known = loaded.name, curves_of_profile(loaded)
    built = BuiltStep(config, resolve_device(device))
    with _Bar() as progress:
        found = project(built, preset, tuple(overrides or ()), repeats, known, progress)
    if out is not None:
        write_projection(found, out)
    if as_json:
        typer.echo(json.dumps(as_dict(found), indent=1))
        return
    _print(found)
    if out is not None:
        typer.echo(f"written {out}")


class _Bar:
    """A progress bar on stderr."""

    def __enter__(self) -> "Progress":
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = TextColumn("{task.description:<26}"), BarColumn(), TimeElapsedColumn()
        console = Console(stderr=True)
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.bar.start()
        task = self.bar.add_task("")
        return lambda what, done, of: self.bar.update(task, description=what, completed=done, total=of)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


def _print(found: "Projection") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    table.add_column("primitive", no_wrap=True)
    table.add_column("where", no_wrap=True)
    for column in ("calls", "in step", "share", "alone", "÷", "gap"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = found.rows
    for row in rows[:SHOWN]:
        where = row.part if row.part == row.phase else f"{row.part} {SHORT.get(row.phase, row.phase)}"
        table.add_row(row.kind, where, *_cells(found, [row]))
    if rows[SHOWN:]:
        table.add_row(f"{len(rows) - SHOWN} more", "", *_cells(found, rows[SHOWN:]), style="dim")
    console.print(table)
    console.print("Milliseconds of one step; ÷ is in step ÷ alone, gap is in step - alone.\n", style="dim")
    _print_sums(found, console)


def _cells(found: "Projection", rows: "list[Primitive]") -> tuple[str, ...]:
    """Of several rows the sums."""
    in_step_s = sum(row.in_step_s for row in rows)
    alone_s = sum(row.alone_s or 0.0 for row in rows)
    alone, ratio = (_ms(alone_s), f"{in_step_s / alone_s:.2f}") if alone_s else ("–", "–")
    share = f"{in_step_s / found.times.median_s:.1%}"
    calls, gap = f"{sum(row.calls for row in rows):,}", _ms(sum(row.gap_s for row in rows))
    return calls, _ms(in_step_s), share, alone, ratio, gap


def _print_sums(found: "Projection", console: "Console") -> None:
    from rich.table import Table

    times, step_s = found.times, found.times.median_s
    console.print(
        f"The step, measured: {_ms(step_s)} ms (median of {len(times.steps_s)}; {_ms(min(times.steps_s))} to "
        f"{_ms(max(times.steps_s))}), {found.tokens / step_s:,.0f} tokens/s; backward ÷ forward "
        f"{found.backward_over_forward:.2f}"
    )
    sums = Table(box=None, pad_edge=False, show_header=False)
    sums.add_column()
    for _ in range(2):
        sums.add_column(justify="right", no_wrap=True)
    for name, seconds in (
        (f"Σ {len(found.calls):,} calls in the step", found.in_calls_s),
        ("Σ calls and the gaps between them", found.in_calls_s + found.gaps_s),
        ("Σ calls alone", sum(found.alone_s)),
        ("Σ calls alone and the gaps: the step, composed", found.composed_s),
        ("Σ floors: FLOPs and bytes at the best speeds", sum(found.floor_s)),
    ):
        sums.add_row(name, f"{_ms(seconds)} ms", f"{seconds / step_s:.1%} of it")
    console.print(sums)
    console.print(
        f"Alone: {found.alone_from}, for {found.covered_s / found.in_calls_s:.1%} of the calls' time; the others "
        f"stand at their time in the step. In the step: the middle one of {len(times.profiled_s)} further steps, under "
        f"the profiler, whose {times.profiler_cost_s * 1e6:.2f} µs for each of {times.events:,} events are taken off.\n"
        f"Measured on {found.device}, load average {found.load_average:.1f} before; random tokens, routed by the "
        "initial routers.",
        style="dim",
    )
    for note in found.notes[:NOTES]:
        console.print(f"note: {note}", style="dim", markup=False)
    if len(found.notes) > NOTES:
        console.print(f"and {len(found.notes) - NOTES} more notes, see --json", style="dim")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
