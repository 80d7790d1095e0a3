"""`moestro hardware`."""

import typer

app = typer.Typer(
    no_args_is_help=True, help="The hardware catalog: devices and clusters, every figure with its source."
)
