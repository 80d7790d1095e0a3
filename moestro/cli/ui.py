"""`moestro ui`: the plan explorer, a web page of this machine."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

PORT = 8760


def ui(
    runs: Annotated[
        list[str] | None, typer.Argument(help="Runs as TOML files, or presets, to start with; all presets are there.")
    ] = None,
    profile: Annotated[
        list[Path] | None, typer.Option(help="A machine measured by `moestro measure`; may be given again.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where it listens; 0: any that is free.")] = PORT,
    host: Annotated[
        str, typer.Option(help="0.0.0.0 lets other machines in, who then see and use it too.")
    ] = "127.0.0.1",
    show: Annotated[bool, typer.Option("--show/--no-show", help="Open a browser.")] = True,
) -> None:
    """Pick a run, a machine and a plan with sliders, and see step time, memory, timeline, cost and the best plans."""
    from moestro.errors import MoestroError

    if find_spec("nicegui") is None:
        raise MoestroError("the plan explorer needs NiceGUI: pip install 'moestro[ui]'")
    from moestro.ui.offer import offer_of
    from moestro.ui.server import serve

    serve(offer_of(runs or (), profile or ()), host, port, show)
