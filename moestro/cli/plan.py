"""`moestro plan`: the best layout of a run on a cluster, with the reasons, as a file that `moestro train` takes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from moestro.plan.workers import Progress

# Headings of the help.
ON = "On what"
FOR = "What for"
FAILS = "When devices fail"


def plan(
    context: typer.Context,
    preset: Annotated[str, typer.Argument(help="A preset's name or a TOML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=value …; plan.pp=4 or plan.pp=[1,2,4] fixes what is searched."),
    ] = None,
    hardware: Annotated[
        str,
        typer.Option(
            "--hardware",
            help="A device or cluster of `moestro hardware list`, or a TOML file of one.",
            rich_help_panel=ON,
        ),
    ] = "",
    profile: Annotated[
        Path | None, typer.Option(help="A machine measured by `moestro measure`, instead.", rich_help_panel=ON)
    ] = None,
    devices: Annotated[
        str,
        typer.Option(
            help="How many, or several to choose from, as 64,128,256; by default the cluster's, a node's, or 1 with "
            "--profile.",
            rich_help_panel=ON,
        ),
    ] = "",
    objective: Annotated[
        str,
        typer.Option(
            help="time (of a step), goodput (failures counted), money, energy or memory.", rich_help_panel=FOR
        ),
    ] = "time",
    deadline: Annotated[str, typer.Option(help="By when the run has to end, as 30d or 12h.", rich_help_panel=FOR)] = "",
    budget: Annotated[float | None, typer.Option(help="US dollars that the run may cost.", rich_help_panel=FOR)] = None,
    headroom: Annotated[
        str, typer.Option(help="Memory of a device to leave free, as 10% or 8GB.", rich_help_panel=FOR)
    ] = "",
    tokens: Annotated[
        float | None, typer.Option(help="Of the whole run; by default train.steps tell.", rich_help_panel=FOR)
    ] = None,
    usd_per_hour: Annotated[
        float | None, typer.Option(help="For one device, instead of the catalog's price.", rich_help_panel=FOR)
    ] = None,
    mtbf_hours: Annotated[
        float | None, typer.Option(help="Mean hours between failures of one device.", rich_help_panel=FAILS)
    ] = None,
    storage_gbps: Annotated[
        float | None,
        typer.Option(
            help="GB/s of all storage together, for checkpoints; by default what the cluster or the profile says.",
            rich_help_panel=FAILS,
        ),
    ] = None,
    checkpoint_s: Annotated[
        float | None,
        typer.Option(
            help="For which a checkpoint stops training; by default what storage needs, or 30.", rich_help_panel=FAILS
        ),
    ] = None,
    restart_s: Annotated[
        float,
        typer.Option(help="To start again after a failure, before the checkpoint is read.", rich_help_panel=FAILS),
    ] = 600.0,
    top: Annotated[int, typer.Option(min=1, max=100, help="How many plans to show.")] = 8,
    balance: Annotated[
        bool, typer.Option("--balance", help="Then share out layers and recomputation over the best pipeline's stages.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the best plan as a TOML file for `moestro train`.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time over memory of the best plans: .html, or .png with kaleido.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default one a core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Search all layouts of a run for the best that fits in memory, and say why. docs/planning.md tells more."""
    from moestro.cli.asked import (
        check_folder,
        given_of,
        keep_curves,
        read_workload,
        target_asked,
        trainer_overrides,
        usual_devices,
    )
    from moestro.cli.plan_goal import Asked, check_searched, check_together, goal_of, parse_counts
    from moestro.cli.plan_print import print_counts, print_found, print_plan_json, title
    from moestro.errors import MoestroError
    from moestro.plan.counts import search_counts
    from moestro.plan.search import balance_choice, leaner
    from moestro.plan.settings import checkpoint_every, run_of
    from moestro.plan.space import Space, space_of
    from moestro.plan.workers import default_workers
    from moestro.predict.offload import host_rate
    from moestro.predict.predict import device_bytes

    sources = {name: context.get_parameter_source(name) for name in context.params}
    check_together({name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"})
    if out is not None:
        check_folder("--out", out)
    if plot is not None:
        from moestro.report.front import check_plot, write_front

        check_plot(plot)
    check_searched(overrides or ())
    config, workload, given = read_workload(preset, overrides or ())
    if out is not None and workload.precision != config.train.dtype:
        raise MoestroError(
            f"--out: the trainer computes in {config.train.dtype} (train.dtype), not in workload.precision = "
            f"{workload.precision}; leave one of them out"
        )
    wanted = parse_counts(devices) if devices else (None,)
    targets = {}
    for number in wanted:
        target = target_asked(hardware, profile, number)
        targets[number or usual_devices(target)] = target
    asked = Asked(
        objective, tokens, usd_per_hour, mtbf_hours, checkpoint_s, restart_s, storage_gbps, deadline, budget, headroom
    )
    goal = goal_of(asked, target, float(config.train.steps) * workload.tokens, workload.tokens)
    values = given_of(given)

    def space(count: int) -> Space:
        place = targets[count].place
        offloads = host_rate(place.device) is not None and not targets[count].parts
        return space_of(workload, count, place.node_size, values, offloads)

    try:
        with _bar(not as_json) as progress:
            counts = search_counts(
                workload, targets, space, goal, max(20, top), top, workers or default_workers(), progress
            )  # fmt: skip
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing was written", err=True)
        raise typer.Exit(130) from None
    found, target = counts.found[counts.best], targets[counts.best]
    lean = leaner(found, workload, target, goal)
    if balance and not balance_choice(found, workload, target, goal) and not as_json:
        typer.echo("--balance: no other placement of layers and recomputation is better\n")
    keep_curves(target)
    if as_json:
        print_plan_json(counts, lean, workload, targets, goal)
    else:
        if len(targets) > 1:
            print_counts(counts, workload, goal)
        print_found(title(preset), found, lean, workload, target, counts.best, goal)
    if plot is not None:
        write_front(found, f"{title(preset)} on {counts.best:,} × {target.place.device.name}",
                    device_bytes(target, counts.best), plot)  # fmt: skip
    if out is not None:
        from moestro.plan.file import write_plan

        best, one = found.exact[0]
        own = trainer_overrides(overrides or ())
        write_plan(out, preset, own, best, one, checkpoint_every(run_of(workload, best, one, goal), one.step_s.value))
    written = {"plot": plot, "plan": out}
    if not as_json and any(written.values()):
        typer.echo()
    for label, path in written.items():
        if path is not None and not as_json:
            ranks = f" --nproc {counts.best}" if target.host_computes and counts.best > 1 else ""
            typer.echo(f"{label}  {path}" + (f": `moestro train {path}{ranks}`" if label == "plan" else ""))


@contextmanager
def _bar(wanted: bool) -> "Iterator[Callable[[int], Progress | None]]":
    """Gives, for a number of devices, what shows how far its search is: a bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    rate = TextColumn("{task.fields[rate]}")
    columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (wanted and console.is_terminal)) as bar:

        def progress(count: int) -> "Callable[[int, int], None]":
            task = bar.add_task(f"families on {count:,} devices", total=None, rate="")

            def show(done: int, total: int) -> None:
                speed = bar.tasks[task].speed
                bar.update(task, completed=done, total=total, rate=f"{speed:,.0f}/s" if speed else "")

            return show

        yield progress
