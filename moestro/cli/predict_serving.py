"""What `moestro predict` prints for --serving and --disaggregate."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moestro.cli.shown import console_of
from moestro.report.text import MISSING, duration, grouped, percent, plural, si

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from moestro.predict.disaggregate import Split, Work
    from moestro.predict.service import Service, Width

WIDTH = 110
APART = "apart (AF-Pipe)"


def serving_tree(found: "Service", others: "Sequence[Width]") -> dict[str, Any]:
    """Plain data: seconds, bytes, dollars."""
    return {**asdict(found), "request_s": found.request_s, "widths": [asdict(width) for width in others]}


def print_serving(found: "Service", others: "Sequence[Width]") -> None:
    console = console_of(WIDTH)
    demand = found.demand
    console.print(
        f"\nserving {demand.requests_per_s:g} requests/s, prompts of {grouped(demand.prompt)} tokens, answers of "
        f"{grouped(demand.output)}: {plural(found.replicas, 'replica')} of {plural(found.tp, 'device')}",
        style="bold",
    )
    console.print(_serving_table(found))
    for note in found.notes:
        console.print(note, style="yellow", markup=False)
    if len(others) > 1:
        console.print()
        console.print(_width_table(others))


def _serving_table(found: "Service") -> "Table":
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    load, output = found.load, found.demand.output
    if load is not None and found.request_s is not None:
        prompt = f"{_time(found.prefill_s)} for the prompt, {_time(load.first_token_s - found.prefill_s)} of waiting"
        table.add_row("first token", _time(load.first_token_s), f"mean; {prompt}; no network")
        touched = f", {load.step.experts_touched:.1f} experts of a layer touched" if load.step.experts_touched else ""
        decode = f"{plural(load.batch, 'sequence')} together{touched}; prompts take {percent(load.used)} of the time"
        table.add_row("next token", _time(load.token_s), f"at the least: {decode}")
        table.add_row("request", _time(found.request_s), "at the least")
        table.add_row("tokens/s", si(found.demand.requests_per_s * output), "of answers")
    most = found.most_requests_per_s
    table.add_row("at most", f"{most:.3g} requests/s", f"{si(most * output)} tokens/s, if decoding kept to its floor")
    if found.least_usd_per_million is not None:
        now = MISSING if found.usd_per_million is None else f"${found.usd_per_million:,.2f}"
        table.add_row(
            "cost",
            now,
            f"a million tokens of answers; ${found.least_usd_per_million:,.2f} with as many requests as that",
        )
    room = f"{found.cache_bytes / 1e6:,.0f} MB of caches a sequence: room for {plural(found.most_batch, 'sequence')}"
    table.add_row("memory", f"{found.weight_bytes / 1e9:,.1f} GB", f"of weights a replica, {room}")
    return table


def _width_table(others: "Sequence[Width]") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("the same parameters in")
    for column in ("training step", "a prompt", "decoding step, at the least"):
        table.add_column(column, justify="right")
    for width in others:
        name = f"{width.top_k} of {grouped(width.experts)} experts of {grouped(width.expert_hidden_size)}"
        step = MISSING if width.training_s is None else duration(width.training_s)
        table.add_row(name, step, _time(width.prefill_s), _time(width.token_s))
    return table


def disaggregated_tree(work: "Work", split: "Split") -> dict[str, Any]:
    return {"attention": split.attention, "experts": split.experts, "seconds": _ways(work, split), "work": asdict(work)}


def print_disaggregated(work: "Work", split: "Split") -> None:
    from rich.table import Table

    console = console_of(WIDTH)
    console.print(
        f"\nattention on {plural(split.attention, 'device')}, experts on {plural(split.experts, 'device')}, NICs "
        "shared by half",
        style="bold",
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("layers and exchanges of a step")
    for column in ("seconds", "over this split"):
        table.add_column(column, justify="right")
    ways = _ways(work, split)
    apart = ways[APART]
    for name, seconds in ways.items():
        table.add_row(name, duration(seconds), f"{seconds / apart:.2f}", style="bold" if name == APART else "")
    console.print(table)
    console.print(
        f"attention {duration(work.attention_s)}, experts {duration(work.experts_s)}, exchange "
        f"{duration(work.exchange_s)} where each device does both; bubbles, optimizer, host and memory left out",
        style="dim",
        markup=False,
    )


def _ways(work: "Work", split: "Split") -> dict[str, float]:
    from moestro.predict.disaggregate import chunked_s, disaggregated_s, paired_s, serial_s

    return {
        "one after the other (1F1B)": serial_s(work),
        "exchange behind chunks of experts": chunked_s(work),
        "forward beside backward (DualPipe)": paired_s(work),
        APART: disaggregated_s(work, split),
    }


def _time(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
