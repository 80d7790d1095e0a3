"""The key figures of a run in the terminal."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moestro.report.keyfigures import key_figures, run_status
from moestro.report.read import read_run

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
    for figure in key_figures(run):
        style = "bold red" if figure.warn else "bold"
        grid.add_row(escape(figure.label), f"[{style}]{escape(figure.value)}[/]", escape(figure.detail))
    console.print(grid)
    for note in run.notes:
        console.print(f"[yellow]note[/] {escape(note)}")
