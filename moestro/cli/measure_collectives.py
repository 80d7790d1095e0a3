"""`moestro measure collectives`: the sweep over operations, sizes and groups alone, on one machine or many."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from moestro.measure.collectives import CollectiveResult, Plan

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def collectives(
    context: typer.Context,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Start so many ranks here; leave out under torchrun.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, xpu …")] = "auto",
    ops: Annotated[str, typer.Option(help="Operations, separated by commas; all by default.")] = "",
    min_bytes: Annotated[str, typer.Option(help="Smallest message: 1024, 1K, 4M …")] = "1K",
    max_bytes: Annotated[str, typer.Option(help="Largest message.")] = "16M",
    sizes: Annotated[str, typer.Option(help="Instead of the two: bytes, separated by commas.")] = "",
    groups: Annotated[
        str, typer.Option(help="Numbers of ranks that exchange, separated by commas; all by default.")
    ] = "",
    pair_bytes: Annotated[str, typer.Option(help="Message of the probe of every two ranks; 0: no probe.")] = "0",
    dtype: Annotated[str, typer.Option(help="Of the operands.")] = "fp32",
    repeats: Annotated[int, typer.Option(min=1, help="Timings of a case in each of two rounds.")] = 10,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Verify every result.")] = True,
    limit: Annotated[float, typer.Option(min=1, help="Seconds; what does not fit is left out and named.")] = 120,
    out: Annotated[Path | None, typer.Option(help="A new folder for samples.csv and samples.jsonl.")] = None,
    into: Annotated[Path | None, typer.Option(help="A profile that takes these samples instead of its own.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Time collectives over sizes and groups of ranks, verify each result, and print bandwidths.

    A wrong result is named, and the exit status is 1. Under torchrun or srun every rank runs this command.
    """
    from moestro.parallel.process import this_rank

    me = this_rank()
    _check(nproc, me.world_size, out, into)  # before anything is measured
    ranks = nproc or me.world_size
    plan = _plan(ranks, ops, _sizes(sizes, min_bytes, max_bytes), groups, _size(pair_bytes), dtype, repeats, check)
    if ranks > 1 and me.world_size == 1:
        from moestro.parallel.launch import launch

        raise typer.Exit(launch(ranks, _without_nproc(context)))

    from moestro.measure.collectives import collective_profile

    result = collective_profile(ranks, False, device=device, plan=plan, limit_s=limit)
    if me.rank > 0:
        return
    _finish(result, plan, out, into, as_json)


def _check(nproc: int | None, world: int, out: Path | None, into: Path | None) -> None:
    from moestro.errors import MoestroError
    from moestro.hardware.profile import load_profile
    from moestro.report.profile_page import check_new

    if nproc is not None and world > 1:
        raise MoestroError(
            f"--nproc starts ranks, but this process is one of {world} that torchrun or SLURM started; "
            "leave --nproc out, or start one process"
        )
    if out is not None:
        check_new(out)
    if into is not None:
        load_profile(into)


def _plan(
    ranks: int, ops: str, sizes: list[int], groups: str, pair_bytes: int, dtype: str, repeats: int, check: bool
) -> "Plan":
    from moestro.errors import MoestroError
    from moestro.measure.collectives import Plan
    from moestro.measure.exchanges import OPS

    names = tuple(name.strip() for name in ops.split(",") if name.strip()) or OPS
    wanted = [part.strip() for part in groups.split(",") if part.strip()] or [str(ranks)]
    if not all(part.isdecimal() for part in wanted):
        raise MoestroError(f"--groups takes numbers of ranks separated by commas, such as 2,4,8, not '{groups}'")
    plan = Plan(
        ops=() if names == ("none",) else names,
        sizes_bytes=tuple(sizes),
        group_sizes=tuple(int(part) for part in wanted),
        dtype=dtype,
        repeats=repeats,
        check=check,
        pair_bytes=pair_bytes,
    )
    plan.validate(ranks)
    return plan


def _sizes(sizes: str, smallest: str, largest: str) -> list[int]:
    """The sizes asked for, or those from the smallest to the largest in steps of four."""
    from moestro.errors import MoestroError

    if sizes:
        return [_size(part) for part in sizes.split(",") if part.strip()]
    low, high = _size(smallest), _size(largest)
    if not 0 < low <= high:
        raise MoestroError(f"--min-bytes {smallest} is not between 1 and --max-bytes {largest}")
    found = [low]
    while found[-1] < high:
        found.append(min(4 * found[-1], high))
    return found


def _size(text: str) -> int:
    """64K → 65536. Raises MoestroError for what is no size."""
    from moestro.errors import MoestroError

    digits = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = UNITS.get(digits[-1:], 1)
    digits = digits[:-1] if unit > 1 else digits
    if not digits.isdecimal():
        raise MoestroError(f"'{text}' is not a size in bytes; write for example 4096, 64K, 16M or 1G")
    return int(digits) * unit


def _without_nproc(context: typer.Context) -> list[str]:
    """The arguments for a rank that is started: those of this command, each with its value, but --nproc."""
    arguments = ["measure", "collectives"]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if parameter.name == "nproc" or value is None or value == parameter.default:
            continue
        option = parameter.opts[0]
        if isinstance(value, bool):
            arguments.append(option if value else parameter.secondary_opts[0])
        else:
            arguments.append(f"{option}={value}")
    return [*arguments, *(["--debug"] if context.obj["debug"] else [])]


def _finish(result: "CollectiveResult", plan: "Plan", out: Path | None, into: Path | None, as_json: bool) -> None:
    import json

    from moestro.measure.collectives import WrongResult
    from moestro.report.profile_page import rewrite_folder, write_samples_folder

    notes = [str(note) for note in (*result.findings, *result.notes)]
    if out is not None:
        write_samples_folder(result.samples, notes, out)
    if into is not None:
        rewrite_folder(into, result.samples, notes)
    if as_json:
        samples = [sample.model_dump(mode="json", exclude_none=True) for sample in result.samples]
        typer.echo(json.dumps({"samples": samples, "notes": notes}, indent=1))
    else:
        _print(result, plan, notes)
        for path in (out, into):
            if path is not None:
                typer.echo(f"written  {path}")
    if any(isinstance(finding, WrongResult) for finding in result.findings):
        raise typer.Exit(1)


def _print(result: "CollectiveResult", plan: "Plan", notes: list[str]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from moestro.hardware.curves.busbw import busbw, per_nic_gbps
    from moestro.measure.collectives import WrongResult
    from moestro.report.profile_points import seconds, size
    from moestro.report.profile_summary import wide_console

    nodes = max((int(sample.case.get("nodes", 1)) for sample in result.samples), default=1)
    table = Table(box=None, pad_edge=False, header_style="dim")
    columns = ("operation", "ranks", "size", "time", "10–90 %", "algbw\nGB/s", "busbw\nGB/s")
    for column in (*columns, *(["per NIC\nGB/s"] if nodes > 1 else []), "#wrong", ""):
        table.add_column(column, justify="left" if column in ("operation", "") else "right", no_wrap=True)
    ordered = sorted(result.samples, key=lambda s: (s.op, s.number("ranks"), str(s.case["groups"]), s.number("bytes")))
    for sample in ordered:
        if "pair" in sample.case:
            continue
        ranks, on, what = int(sample.number("ranks")), int(sample.case.get("nodes", 1)), sample.number("bytes")
        bus = busbw(sample.op, ranks, what, sample.median_s) / 1e9
        table.add_row(
            sample.op + (" ×" if sample.case["groups"] == "all" else ""),
            f"{ranks}" + (f" on {on}" if on > 1 else ""),
            size(what),
            seconds(sample.median_s),
            f"{seconds(sample.low_s or 0)} – {seconds(sample.high_s or 0)}",
            f"{what / sample.median_s / 1e9:.3g}",
            f"{bus:.3g}",
            *([f"{per_nic_gbps(bus, on, ranks):.3g}"] if nodes > 1 else []),
            "0" if plan.check else "–",
            "noisy" if sample.noisy else "",
        )
    for finding in result.findings:
        if isinstance(finding, WrongResult):
            skipped = ["–"] * (5 if nodes > 1 else 4)
            table.add_row(
                finding.op, f"{finding.ranks}", size(finding.bytes), *skipped, f"{finding.wrong}", style="red"
            )
    console = wide_console()
    console.print(table)
    if any(sample.case["groups"] == "all" for sample in result.samples):
        console.print("×: all disjoint groups of that size at once", style="dim")
    for note in notes:
        console.print(f"[yellow]note[/] {escape(note)}", highlight=False, soft_wrap=True)
