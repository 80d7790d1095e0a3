"""`moestro report`."""

from pathlib import Path
from typing import Annotated

import typer


def report(run: Annotated[Path, typer.Argument(help="The run's folder.")]) -> None:
    """Write the run's self-contained HTML report and print its key figures."""
    from moestro.report import write_report
    from moestro.report.summary import print_summary

    path = write_report(run)
    print_summary(run)
    typer.echo(f"report  {path}")
