"""How two steps side by side are shown: what differs, the headline, where the time goes, and a verdict in words."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moestro.cli.shown import console_of
from moestro.plan.explain_words import cause, seconds, verdict
from moestro.report.text import MISSING, percent, si

if TYPE_CHECKING:
    from rich.console import Console

    from moestro.plan.explain import Explanation, Row
    from moestro.plan.explain_side import Side

WIDTH = 110
SETTINGS = 14  # shown of those that bear on speed
LEAST = 0.0005  # of A: smaller differences share a line
LONG = 28  # letters of a value


def print_explanation(found: "Explanation") -> None:
    console = console_of(WIDTH)
    for label, side in (("A", found.first), ("B", found.second)):
        console.print(f"{label}  {side.name}", style="bold", markup=False)
        console.print(f"   {side.basis}", style="dim", markup=False)
    console.print()
    if not found.same:
        _print_settings(console, found)
        _print_headline(console, found)
        console.print()
        _print_rows(console, _title(found), found.rows, found.first_s, found)
        if found.around:
            console.print()
            _print_rows(console, "outside of steps, for each", found.around, found.first_s, None)
        if found.predicted is not None:
            console.print()
            _print_rows(console, "as predicted", found.predicted.rows, found.predicted.first_s, found.predicted)
        console.print()
    console.print(verdict(found), markup=False)
    for number, note in enumerate(found.notes):
        console.print(f"{'rests on:' if not number else '':<11}{note}", style="dim", markup=False)


def _title(found: "Explanation") -> str:
    return "where the time goes" if found.per is None else f"time of {found.per:,} tokens"


def _print_settings(console: "Console", found: "Explanation") -> None:
    from rich.table import Table

    if found.bearing:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("differs", "A", "B"):
            table.add_column(column, overflow="fold")
        for one in found.bearing[:SETTINGS]:
            table.add_row(one.key, _short(one.first), _short(one.second))
        console.print(table)
        if found.bearing[SETTINGS:]:
            console.print(f"and {len(found.bearing) - SETTINGS} more; --json has all", style="dim")
    if found.other:
        names = ", ".join(one.key.removeprefix("run.") for one in found.other)
        console.print(f"differs, without bearing on speed: {names}", style="dim", markup=False)
    if found.bearing or found.other:
        console.print()


def _print_headline(console: "Console", found: "Explanation") -> None:
    from rich.table import Table

    first, second = found.first, found.second
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for column in ("A", "B", "B - A", "of A"):
        table.add_column(column, justify="right", no_wrap=True)
    change = (f"{second.step_s / first.step_s - 1:+.1%}",)
    table.add_row("step", seconds(first.step_s), seconds(second.step_s), _delta(second.step_s - first.step_s), *change)
    rates = [side.tokens / side.step_s for side in (first, second)]
    table.add_row("tokens/s", si(rates[0]), si(rates[1]), "", f"{rates[1] / rates[0] - 1:+.1%}")
    if first.devices != second.devices:
        each = [rate / side.devices for rate, side in zip(rates, (first, second), strict=True)]
        table.add_row("a device", si(each[0]), si(each[1]), "", f"{each[1] / each[0] - 1:+.1%}")
    if first.mfu is not None or second.mfu is not None:
        table.add_row("MFU", *(MISSING if side.mfu is None else percent(side.mfu) for side in (first, second)), "", "")
    if first.memory_bytes is not None or second.memory_bytes is not None:
        table.add_row("memory", _memory(first), _memory(second), "", _change(first.memory_bytes, second.memory_bytes))
    console.print(table)


def _print_rows(
    console: "Console", title: str, rows: "Sequence[Row]", whole_s: float, found: "Explanation | None"
) -> None:
    """found: for the sum at the end."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(title)
    for column in ("A", "B", "B - A", "of A"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    rows = [row for row in rows if row.first.seconds or row.second.seconds]
    shown = [row for row in rows if abs(row.seconds) >= LEAST * whole_s or found is None]
    for row in shown:
        why = ", ".join(filter(None, (cause(row), "within the spread" if row.is_noise else "")))
        table.add_row(row.name, *_cells(row.first.seconds, row.second.seconds, whole_s), why)
    others = [row for row in rows if row not in shown]
    if others:
        sums = [sum(part) for part in zip(*((r.first.seconds, r.second.seconds) for r in others), strict=True)]
        table.add_row(f"{len(others)} more", *_cells(sums[0], sums[1], whole_s), _names(others), style="dim")
    if found is not None:
        table.add_row("all", *_cells(found.first_s, found.second_s, whole_s), "", style="bold")
    console.print(table)


def _cells(first: float, second: float, whole_s: float) -> tuple[str, str, str, str]:
    delta = second - first
    return (
        seconds(first) if first else MISSING, seconds(second) if second else MISSING, _delta(delta),
        f"{delta / whole_s:+.1%}",
    )  # fmt: skip


def _names(rows: "Sequence[Row]") -> str:
    return ", ".join(row.name for row in rows)


def _delta(value: float) -> str:
    return seconds(value, signed=True) if abs(value) > 1e-10 else MISSING


def _memory(side: "Side") -> str:
    if side.memory_bytes is None:
        return MISSING
    return f"{side.memory_bytes / 1e9:.1f} GB" if side.memory_bytes >= 2e9 else f"{side.memory_bytes / 1e6:.0f} MB"


def _change(first: float | None, second: float | None) -> str:
    return f"{second / first - 1:+.1%}" if first and second else ""


def _short(text: str) -> str:
    return text if len(text) <= LONG else f"{text[: LONG - 1]}…"
