"""`moestro plan`: the best layout of a run on a cluster, with the reasons, as a file that `moestro train` takes."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from moestro.config.plan import Plan, Workload
    from moestro.plan.search import Found, Tally
    from moestro.predict.target import Target

WIDTH = 130
REASONS = 3  # told for a plan that comes second or later


def plan(
    preset: Annotated[str, typer.Argument(help="A preset's name or a TOML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="section.key=value …; plan.pp=4 or plan.pp=[1,2,4] fixes what is searched."),
    ] = None,
    hardware: Annotated[
        str, typer.Option("--hardware", help="A device or cluster of `moestro hardware list`, or a TOML file of one.")
    ] = "",
    profile: Annotated[Path | None, typer.Option(help="A machine measured by `moestro measure`, instead.")] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="How many; by default the cluster's, a node's, or 1 with --profile.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=100, help="How many plans to show.")] = 8,
    balance: Annotated[
        bool, typer.Option("--balance", help="Then share out layers and recomputation over the best pipeline's stages.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the best plan as a TOML file for `moestro train`.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default one a core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Search all layouts of a run for the fastest that fits in memory, and say why. docs/planning.md tells more."""
    from moestro.cli.asked import keep_curves, read_workload, target_asked
    from moestro.errors import MoestroError
    from moestro.plan.file import write_plan
    from moestro.plan.search import default_workers, search
    from moestro.plan.space import space_of

    if out is not None and not out.parent.is_dir():
        raise MoestroError(f"--out {out}: there is no folder {out.parent}")
    _, workload, given = read_workload(preset, overrides or ())
    target = target_asked(hardware, profile, devices)
    count = devices or target.devices or (1 if target.host_computes else target.place.device.devices_per_node or 1)
    values = {name: tuple(value) if isinstance(value, list) else (value,) for name, value in given.items()}
    space = space_of(workload, count, target.place.node_size, values)
    workers = workers or default_workers()
    found = search(workload, target, count, space, keep=max(20, top), exact=top, workers=workers)
    if balance and not _balance(found, workload, target) and not as_json:
        typer.echo("--balance: no other placement of layers and recomputation is faster\n")
    keep_curves(target)
    if out is not None:
        others = [text for text in overrides or () if not text.startswith(("plan.", "workload."))]
        write_plan(out, preset, others, *found.exact[0])
    if as_json:
        _print_json(found, workload)
        return
    _print(preset, found, workload, target, count)
    if out is not None:
        typer.echo(f"\nplan  {out}: `moestro train {out}`")


def _balance(found: "Found", workload: "Workload", target: "Target") -> bool:
    """Put the first plan's balanced form before it, and say whether it is faster."""
    from moestro.plan.ilp.balance import balance
    from moestro.predict.predict import predict_step

    plan, before = found.exact[0]
    if plan.pp == 1:
        return False
    balanced = balance(workload, plan, target)
    after = predict_step(workload, balanced, target, exact=True)
    faster = after.step_s.value < before.step_s.value
    if faster:
        found.exact.insert(0, (balanced, after))
    return faster


def _print(preset: str, found: "Found", workload: "Workload", target: "Target", devices: int) -> None:
    from rich.console import Console

    from moestro.plan.why import binding

    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=WIDTH)
    console.print(f"{Path(preset).name} on {devices:,} × {target.place.device.name}", style="bold", markup=False)
    console.print(f"priced by: {target.profile}; {_went_through(found.tally)}\n", style="dim", markup=False)
    _print_ranking(console, found)
    console.print()
    for number, line in enumerate(binding(found, workload, target)):
        console.print(f"{'what binds:' if not number else '':<14}{line}", style="dim", markup=False)
    step = found.exact[0][1].step_s
    console.print(f"{'how sure:':<14}{step.low:.4g} to {step.high:.4g} s: {step.basis}", style="dim", markup=False)
    for number, line in enumerate(found.exact[0][1].notes):
        console.print(f"{'rests on:' if not number else '':<14}{line}", style="dim", markup=False)
    console.print()
    _print_front(console, found)


def _went_through(tally: "Tally") -> str:
    skipped = f"{tally.skipped:,} of {tally.families:,} families skipped by rule" if tally.skipped else ""
    parts = (f"{tally.plans:,} plans, {tally.too_big:,} too big for memory", skipped)
    return "; ".join(part for part in parts if part)


def _print_ranking(console: "Console", found: "Found") -> None:
    from rich.table import Table

    from moestro.plan.why import changes, differences
    from moestro.report.text import duration, percent, si

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("", "step", "tokens/s", "MFU", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("plan", overflow="fold")
    table.add_column("loses", overflow="fold")
    first_plan, first = found.exact[0]
    for number, (plan, one) in enumerate(found.exact, 1):
        loses = ""
        if number > 1:
            longer = one.step_s.value / first.step_s.value - 1
            parts = [d for d in differences(first.time, one.time) if abs(d.seconds) > 0.002 * first.time.total]
            reasons = ", ".join(f"{d.what} {d.seconds / first.time.total:+.1%}" for d in parts[:REASONS])
            loses = f"{longer:.1%}" + (f": {reasons}" if reasons else "")
        table.add_row(
            str(number), duration(one.step_s.value), si(one.tokens_per_s), percent(one.mfu) if one.mfu else "",
            f"{one.memory.total / 1e9:.1f} GB", _words(plan) if number == 1 else " ".join(changes(first_plan, plan)),
            loses, style="bold" if number == 1 else "",
        )  # fmt: skip
    console.print(table)


def _words(plan: "Plan") -> str:
    """Of the choice all that is not the usual value; of others what is different."""
    from moestro.config.plan import Plan
    from moestro.plan.why import changes

    return " ".join(changes(Plan(), plan)) or "one device"


def _print_front(console: "Console", found: "Found") -> None:
    from rich.table import Table

    from moestro.plan.why import changes
    from moestro.report.text import duration

    if len(found.front) < 2:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("with less memory", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("what changes", overflow="fold")
    for one in found.front[:8]:
        text = " ".join(changes(found.best[0].plan, one.plan))
        table.add_row(f"{one.total_bytes / 1e9:.1f} GB", duration(one.step_s), text)
    console.print(table)


def _print_json(found: "Found", workload: "Workload") -> None:
    import json
    from dataclasses import asdict

    def tree(plan: "Plan", **rest: Any) -> dict[str, Any]:
        return {"plan": plan.model_dump(mode="json"), **rest}

    ranked = [tree(plan, prediction=asdict(one)) for plan, one in found.exact]
    front = [tree(one.plan, step_s=one.step_s, total_bytes=one.total_bytes) for one in found.front]
    whole = {"ranked": ranked, "front": front, "searched": asdict(found.tally)}
    whole["workload"] = workload.model_dump(mode="json", exclude_defaults=True)
    typer.echo(json.dumps(whole, indent=1, ensure_ascii=False))
