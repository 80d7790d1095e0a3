"""`moestro supervise`."""

from pathlib import Path
from typing import Annotated

import typer

from moestro.errors import MoestroError

# Options of the command are its own, with or without a `--` before it.
CONTEXT = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def supervise(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND ...", help="What to run; `--` goes before it.")],
    nproc: Annotated[int, typer.Option(min=1, help="Run it in so many processes, as torchrun would.")] = 1,
    folder: Annotated[Path, typer.Option(help="Where audit.jsonl and the rest are written.")] = Path("supervised"),
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the section supervise: max_restarts=5."),
    ] = None,
) -> None:
    """Run a command, and start it again when it fails: what an exit status means is in docs/resilience.md.

    It has to continue by itself where it was. Ranks that write heartbeats (moestro.train.heartbeat) are also ended when
    they hang. Training has this built in: moestro train ... run.supervise=true.
    """
    from moestro.config.load import parse_supervise
    from moestro.resilience.supervisor import Supervisor

    limits = parse_supervise(settings or ())
    if limits.elastic:
        raise MoestroError("elastic needs to know which numbers of ranks a run allows; use moestro train run.supervise")
    watched = Supervisor(command, command, nproc, folder, limits, typer.echo, layout=lambda ranks: None, speaks=False)
    raise typer.Exit(watched.run())
