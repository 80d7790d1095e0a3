"""`moestro measure`."""

import typer

app = typer.Typer(no_args_is_help=True, help="Measure this machine, and compare what was measured.")
