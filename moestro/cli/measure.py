"""`moestro measure`: this machine into a profile, and what can be done with profiles.

The measuring itself is the group's own work: `moestro measure --quick` needs no subcommand.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moestro.cli import measure_collectives, measure_step

if TYPE_CHECKING:
    from collections.abc import Collection

    from rich.progress import Progress, TaskID

    from moestro.hardware.profile import MachineProfile
    from moestro.measure.compare import Comparison

app = typer.Typer()

ProfileArgument = Annotated[Path, typer.Argument(help="A profile.json, or the folder that holds it.")]
JsonOption = Annotated[bool, typer.Option("--json", help="For machines.")]


@app.callback(invoke_without_command=True)
def measure(
    context: typer.Context,
    quick: Annotated[bool, typer.Option("--quick", help="Within a minute, with fewer sizes and repeats.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, xpu …")] = "auto",
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Of the collectives; by default one for each device.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder to write; by default profiles/HOST-DATE.", show_default=False)
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            help="A section to leave out: gemm, memory, attention, elementwise, host, storage, collectives, pairs."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine: products, memory, attention, host overheads, storage, collectives.

    Writes a folder with profile.json (what predictions are priced by), samples.csv, samples.jsonl and profile.html.
    Without --quick it takes about eight minutes. Ctrl-C stops it and leaves nothing behind.
    """
    if context.invoked_subcommand is not None:
        return
    import json
    import time

    started = time.perf_counter()
    from moestro.measure.sections import check_skipped
    from moestro.report.profile_page import check_new, write_folder
    from moestro.report.profile_summary import print_profile

    folder = out or _default_folder()
    check_new(folder)
    names = check_skipped(name.strip() for entry in skip or [] for name in entry.split(",") if name.strip())
    _refuse_ranks("moestro measure collectives")
    with _progress() as bar:
        profile = _measure(bar, quick, device, ranks, folder, names, started)
        bar.add_task("curves and page", total=None)
        from moestro.measure.constants import with_curves

        profile, curves = with_curves(profile)
        paths = write_folder(profile, curves, folder)
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), **_digest(profile)}, indent=1))
        return
    print_profile(profile)
    for path in paths:
        typer.echo(f"{path.stem if path.suffix == '.html' else path.name:<14} {path}")


def _default_folder() -> Path:
    import platform
    from datetime import datetime

    return Path("profiles") / f"{platform.node() or 'machine'}-{datetime.now():%Y%m%d-%H%M}"


def _refuse_ranks(instead: str) -> None:
    from moestro.errors import MoestroError
    from moestro.parallel.process import this_rank

    if (world := this_rank().world_size) > 1:
        raise MoestroError(
            f"this process is one of {world} that torchrun or SLURM started, but one process measures a machine; "
            f"`{instead}` runs on many"
        )


def _progress() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    err = Console(stderr=True)
    return Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(24),
        TextColumn("{task.completed:>4.0f} of {task.total}"),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[what]}"),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )


def _measure(
    bar: "Progress",
    quick: bool,
    device: str,
    ranks: int | None,
    folder: Path,
    skip: "Collection[str]",
    started: float,
) -> "MachineProfile":
    from moestro.measure.machine import measure_machine

    tasks: dict[str, TaskID] = {}

    def progress(section: str, done: int, total: int, what: str) -> None:
        if section not in tasks:
            tasks[section] = bar.add_task(section, total=total, what="")
        bar.update(tasks[section], completed=done, total=total, what=what)

    # Storage is measured where the folder will be: there must be a place already.
    place = next(parent for parent in folder.absolute().parents if parent.is_dir())
    return measure_machine(
        quick=quick,
        device=device,
        ranks=ranks,
        folder=place,
        skip=skip,
        name=folder.name,
        progress=progress,
        started=started,
    )


def _digest(profile: "MachineProfile") -> dict[str, object]:
    """A profile without its samples."""
    tree = profile.model_dump(mode="json", exclude_none=True, exclude={"samples"})
    return {**tree, "num_samples": len(profile.samples), "num_noisy": sum(s.noisy for s in profile.samples)}


@app.command("show", no_args_is_help=True)
def show(
    profile: ProfileArgument,
    params: Annotated[
        float | None,
        typer.Option(help="Parameters that one step reduces, such as 1.5e9: how to fuse them, and what stays exposed."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print what a profile says of its machine."""
    import json
    from dataclasses import asdict

    from moestro.hardware.profile import load_profile
    from moestro.report.profile_summary import print_buckets, print_profile

    loaded, found = load_profile(profile), None
    if params is not None:
        from moestro.measure.constants import buckets, with_curves

        found = buckets(with_curves(loaded)[1], params)
    if as_json:
        more = {} if found is None else {"buckets": {ranks: asdict(bucket) for ranks, bucket in found.items()}}
        typer.echo(json.dumps({**_digest(loaded), **more}, indent=1))
        return
    print_profile(loaded)
    if found is not None and params is not None:
        print_buckets(found, params)


@app.command("plot", no_args_is_help=True)
def plot(
    profile: ProfileArgument,
    out: Annotated[
        Path | None, typer.Option(help="The page to write; by default beside the profile.", show_default=False)
    ] = None,
) -> None:
    """Draw a profile again: curves are fitted anew to its samples, and profile.html is replaced."""
    from moestro.hardware.profile import load_profile
    from moestro.measure.constants import with_curves
    from moestro.report.profile_page import write_page

    loaded, curves = with_curves(load_profile(profile))
    target = out or (profile if profile.is_dir() else profile.parent) / "profile.html"
    write_page(loaded, curves, target)
    typer.echo(f"page  {target}")


@app.command("compare", no_args_is_help=True)
def compare(a: ProfileArgument, b: ProfileArgument, as_json: JsonOption = False) -> None:
    """Compare two profiles: what differs about the machines, then which figures differ by more than their spread."""
    import json
    from dataclasses import asdict

    from moestro.hardware.profile import load_profile
    from moestro.measure.compare import compare_profiles

    first, second = load_profile(a), load_profile(b)
    found = compare_profiles(first, second)
    if as_json:
        entries = [{**asdict(e), "ratio": e.ratio, "within": e.within} for e in found.entries]
        tree = {**asdict(found), "same_machine": found.same_machine, "totals": [asdict(t) for t in found.totals()]}
        typer.echo(json.dumps({**tree, "entries": entries}, indent=1))
        return
    _print_comparison(found, first.name, second.name)


def _print_comparison(found: "Comparison", a: str, b: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    from moestro.report.profile_summary import wide_console

    console = wide_console()
    if found.differences:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("differs", a, b):
            table.add_column(escape(column), overflow="fold")
        for difference in found.differences:
            style = "yellow" if difference.identity else ""
            table.add_row(*(escape(cell) for cell in (difference.what, difference.a, difference.b)), style=style)
        console.print(table)
        if not found.same_machine:
            console.print("Not the same machine: the ratios below compare machines.", style="yellow")
    else:
        console.print("Same machine, versions and settings.")
    table = Table(box=None, pad_edge=False, header_style="dim", title="\ntime in the second over time in the first")
    table.title_justify = "left"
    for column in ("section", "entries", "within spread", "median ratio", "largest difference"):
        table.add_column(column, justify="left" if column in ("section", "largest difference") else "right")
    for total in found.totals():
        case = " ".join(f"{key}={value}" for key, value in total.worst.case.items())
        table.add_row(
            total.section,
            str(total.entries),
            f"{total.within / total.judged:.0%}" if total.judged else "–",
            f"{total.median_ratio:.3f}",
            escape(f"{total.worst.ratio:.2f} × {total.worst.op} {case}"),
            style="bold" if total.section == "all" else "",
        )
    console.print(table)
    everything = found.totals()[-1]
    unjudged = everything.entries - everything.judged
    if everything.judged:
        console.print(
            f"{everything.within / everything.judged:.0%} of {everything.judged} entries differ by less than their "
            "spread (10th to 90th percentile, the larger of the two)."
            + (f" Of {unjudged} more there are too few timings to tell." if unjudged else "")
        )
    if found.only_a or found.only_b:
        console.print(f"In one profile only: {found.only_a} in {a}, {found.only_b} in {b}.", style="dim")


app.command("collectives")(measure_collectives.collectives)
app.command("step", no_args_is_help=True)(measure_step.step)
