"""`moestro config`: list presets, show a resolved configuration.

Like all commands it imports what it needs when it runs, so that `moestro --help` answers at once.
"""

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Presets and resolved configurations.")


@app.command("list")
def list_presets() -> None:
    """List the presets."""
    from rich.console import Console
    from rich.table import Table

    from moestro.config import load_config, preset_names

    table = Table(box=None, pad_edge=False)
    table.add_column("preset", style="bold")
    table.add_column("what it is")
    for name in preset_names():
        table.add_row(name, load_config(name).config.description)
    Console().print(table)


@app.command("show", no_args_is_help=True)
def show(
    preset: Annotated[str, typer.Argument(help="A preset's name or a TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
) -> None:
    """Print every setting, its value, and where the value came from."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from moestro.config import describe, load_config

    table = Table(box=None, pad_edge=False)
    for column in ("setting", "value", "from"):
        table.add_column(column, overflow="fold")
    for key, value, origin in describe(load_config(preset, overrides or ())):
        style = "dim" if origin == "default" else ""
        table.add_row(key, escape(value), escape(origin), style=style)
    Console().print(table)
