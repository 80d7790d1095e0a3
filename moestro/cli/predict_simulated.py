"""What `moestro predict` prints for --simulate and --slow."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from moestro.errors import MoestroError
from moestro.report.text import MISSING, duration, percent

if TYPE_CHECKING:
    from rich.table import Table

    from moestro.predict.clock import RankTime
    from moestro.predict.simulate import Simulation

WIDTH = 110
MOST_ROWS = 16  # ranks that are shown
SHOWN = 1e-4  # share of the step, from which exposed communication has a column


def parse_slow(texts: Sequence[str]) -> dict[int, float]:
    """RANK=FACTOR of each.

    Raises:
        MoestroError: it is not that, or a rank is named twice.
    """
    found: dict[int, float] = {}
    for text in texts:
        rank, _, factor = text.partition("=")
        try:
            number, times = int(rank), float(factor)
        except ValueError:
            raise MoestroError(f"--slow {text}: write RANK=FACTOR, as 3=1.5 for pipeline rank 3") from None
        if number in found:
            raise MoestroError(f"--slow {text}: pipeline rank {number} has a factor already")
        found[number] = times
    return found


def simulated_tree(found: "Simulation", composed_s: float) -> dict[str, Any]:
    """Plain data, in seconds."""
    ranks = [{**asdict(rank), "total_s": rank.total_s} for rank in found.ranks]
    return {"step_s": found.total_s, "composed_s": composed_s, "paced_by": found.slowest, "ranks": ranks}


def print_simulated(found: "Simulation", composed_s: float, slow: Mapping[int, float]) -> None:
    """composed_s: the step as it is predicted without the simulation, on equal ranks."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    held = "".join(f", pipeline rank {rank} × {factor:g} as slow" for rank, factor in sorted(slow.items()))
    console.print(f"\nsimulated, pass by pass and stream by stream{held}", style="bold")
    difference = f"{found.total_s / composed_s - 1:+.1%} to the step above"
    console.print(f"step  {duration(found.total_s)}  ({difference})", markup=False)
    if len(found.ranks) > 1:
        console.print(f"paced by pipeline rank {found.slowest}, which waits least for the others")
    console.print()
    console.print(_table(found))
    sent = _sent(found.ranks[found.slowest])
    if sent:
        console.print(f"exposed there, of all that is sent: {', '.join(sent)}", style="dim", markup=False)


def _sent(time: "RankTime") -> list[str]:
    """Of each dimension; the longest first."""
    from moestro.predict.timeline import COMPUTE

    names = sorted(
        (name for name in time.busy_s if name not in (COMPUTE, "world")), key=lambda name: -time.busy_s[name]
    )
    return [f"{name} {_seconds(time.exposed_s.get(name, 0.0))} of {_seconds(time.busy_s[name])} s" for name in names]


def _table(found: "Simulation") -> "Table":
    from rich.table import Table

    ranks = range(len(found.ranks))
    chosen = ranks if len(ranks) <= MOST_ROWS else sorted({*ranks[:: -(-len(ranks) // MOST_ROWS)], found.slowest})
    names = dict.fromkeys(name for rank in ranks for name in found.ranks[rank].exposed_s)
    exposed = [n for n in names if any(r.exposed_s.get(n, 0.0) > SHOWN * found.total_s for r in found.ranks)]
    table = Table(box=None, pad_edge=False, header_style="dim")
    titles = ("computation", *(f"{name} exposed" for name in exposed), "host", "bubble", "optimizer")
    for title in ("rank", *titles):
        table.add_column(title, justify="right", no_wrap=True)
    for rank in chosen:
        cells = [_seconds(each) for each in _columns(found.ranks[rank], exposed)]
        table.add_row(str(rank), *cells, style="bold" if rank == found.slowest else "")
    shares = [percent(each / found.total_s) for each in _columns(found.ranks[found.slowest], exposed)]
    table.add_row("share", *shares, style="dim")
    return table


def _columns(time: "RankTime", exposed: Sequence[str]) -> list[float]:
    """Without what is not worth a column."""
    sent = [time.exposed_s.get(name, 0.0) for name in exposed]
    return [time.compute_s, *sent, time.host_s, time.bubble_s, time.optimizer_s]


def _seconds(seconds: float) -> str:
    if seconds == 0:
        return MISSING
    return f"{seconds:.3f}" if seconds >= 0.01 else f"{seconds:.5f}"
