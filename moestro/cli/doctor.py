"""`moestro doctor`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from moestro.doctor.checks import NodeReport
    from moestro.doctor.run import Request


def doctor(
    tier: Annotated[int, typer.Option(min=1, max=2, help="1: seconds. 2: also rates, under a minute.")] = 1,
    profile: Annotated[
        Path | None, typer.Option(help="Of a good node of this kind: devices, NICs, versions, floors of tier 2.")
    ] = None,
    expect_devices: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Devices the node should have.")
    ] = None,
    expect_nics: Annotated[int | None, typer.Option(min=0, metavar="N", help="NICs that should be up.")] = None,
    folder: Annotated[Path, typer.Option(help="Where runs are written: the disk to check.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report there as JSON, too.")] = None,
) -> None:
    """Is this node fit to join a run? Says what is wrong, and what mends it.

    Exit status for schedulers: 0 fit (warnings allowed), 3 unfit, 4 undecided, 2 a mistake in the command.
    Started on several nodes (torchrun or srun, one process a node) rank 0 lists the passing and the failing nodes.
    """
    import json

    from rich.console import Console

    from moestro.doctor.checks import EXIT_CODES, hung, overall
    from moestro.doctor.report import as_data, page
    from moestro.doctor.run import Request
    from moestro.errors import MoestroError
    from moestro.hardware.profile import load_profile

    if write is not None and write.is_dir():
        raise MoestroError(f"--write {write} is a folder; give the name of a file in it")
    reference = load_profile(profile) if profile is not None else None
    reports = _examine(Request(tier, folder, reference, expect_devices, expect_nics))
    if reports is None:
        return
    if reports[0].rank == 0 or reports[0].met_nobody:
        if as_json:
            typer.echo(json.dumps(as_data(reports), indent=1))
        else:
            Console().print(page(reports))
        if write is not None and reports[0].rank == 0:
            _write(reports, write)
    code = EXIT_CODES[overall(reports)]
    if hung():
        _leave(code)
    raise typer.Exit(code)


def _examine(request: "Request") -> "list[NodeReport] | None":
    """The reports that this process has to tell: of its node, on rank 0 of several of all, None for a further rank."""
    import multiprocessing

    from rich.console import Console

    from moestro.doctor.run import examine_node
    from moestro.doctor.together import report_to_rank_0
    from moestro.parallel.process import this_rank

    me = this_rank()
    with Console(stderr=True, quiet=me.rank > 0).status("") as status:

        def progress(what: str) -> None:
            status.update(f"examining: {what}")

        try:
            if me.world_size == 1:
                return [examine_node(request, progress)]
            return report_to_rank_0(me, lambda: examine_node(request, progress, me.rank), waiting=progress)
        except KeyboardInterrupt:
            for ranks in multiprocessing.active_children():  # of tier 2, for which leaving would wait
                ranks.kill()
            raise


def _write(reports: "list[NodeReport]", path: Path) -> None:
    """A disk that refuses the report is no reason to hide the verdict behind another exit status."""
    from moestro.doctor.report import write_json

    try:
        write_json(reports, path)
    except OSError as error:
        typer.echo(f"error: the report was not written: {error}", err=True)


def _leave(code: int) -> None:
    """End now: a check that hangs in the kernel holds its thread, and the interpreter would wait for its children."""
    import os
    import sys

    sys.stdout.flush()
    os._exit(code)
