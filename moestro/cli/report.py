"""`moestro report`."""

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the goodput in full, for machines.")] = False,
) -> None:
    """Write the run's self-contained HTML report and print its key figures."""
    from moestro.report import write_report
    from moestro.report.summary import goodput_data, print_summary

    path = write_report(run)
    if as_json:
        typer.echo(json.dumps({"report": str(path), "goodput": goodput_data(run)}, indent=1))
        return
    print_summary(run)
    typer.echo(f"report  {path}")
