"""The key figures of a run in the terminal."""

import math
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moestro.report.faults import fault_figures
from moestro.report.keyfigures import key_figures, run_status
from moestro.report.read import read_run
from moestro.resilience.goodput import is_watched_run, measure_goodput

_COLOURS = {"finished": "green", "interrupted": "yellow", "failed": "red", "running": "cyan"}


def print_summary(run_dir: Path, console: Console | None = None) -> None:
    """Print the run's key figures. Raises MoestroError when the folder holds no run."""
    run = read_run(run_dir)
    console = console or Console()
    status = run_status(run)
    title = f"[bold]{escape(run.name)}[/]  [{_COLOURS[status.word]}]{status.word}[/] [dim]{escape(status.detail)}[/]"
    grid = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(style="dim")
    watched = fault_figures(measure_goodput(run_dir)) if is_watched_run(run_dir) else []
    for figure in (*key_figures(run), *watched):
        style = "bold red" if figure.warn else "bold"
        grid.add_row(escape(figure.label), f"[{style}]{escape(figure.value)}[/]", escape(figure.detail))
    console.print(grid)
    for note in run.notes:
        console.print(f"[yellow]note[/] {escape(note)}")


def goodput_data(run_dir: Path) -> dict[str, float | None]:
    """Every field of `resilience.goodput.Goodput`, and what follows from them; None for what is not known."""
    measured = measure_goodput(run_dir)
    derived = {name: getattr(measured, name) for name in ("goodput", "mttf_s", "mttr_s", "training", "predicted")}
    return {key: value if math.isfinite(value) else None for key, value in (asdict(measured) | derived).items()}
