"""The timeline of a step as bars in rows: the passes of each pipeline rank, or the kernels of one micro-batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moestro.config.plan import Plan, Workload
from moestro.graph.count import count_step
from moestro.predict.orders import pipeline_orders
from moestro.predict.predict import price_step, slowest_stage
from moestro.predict.schedule import simulate_pipeline
from moestro.predict.simulate import NAMES, PASSES, simulate_on
from moestro.predict.step import pass_seconds
from moestro.predict.target import Target
from moestro.predict.timeline import COMPUTE, HOST, Event
from moestro.predict.warmup import orders_of
from moestro.report.text import duration, grouped, percent

MOST_ROWS = 16
MOST_BARS = 3000
MOST_PASSES = 8_000  # that are simulated; a step of more is drawn with fewer micro-batches
KINDS = ("forward", "backward", "weight gradients", "several", "gradients and weights sent", "optimizer")
STREAMS = ("host", "computation", "communication")
FORWARD, BACKWARD, WEIGHT, SEVERAL, SENT, UPDATE = range(6)


class Bar(NamedTuple):
    """row, kind: places in the rows and kinds of its Gantt."""

    row: int
    kind: int
    start_s: float
    end_s: float
    name: str


@dataclass(frozen=True)
class Gantt:
    """note: what is drawn, and what is left out."""

    rows: tuple[str, ...]
    kinds: tuple[str, ...]
    bars: tuple[Bar, ...]
    total_s: float
    note: str


def pipeline_gantt(workload: Workload, plan: Plan, target: Target) -> Gantt:
    """A step, pass by pass: simulated with its streams where devices have some, or else with the passes' times alone.

    Raises:
        MoestroError: the plan does not fit, or its ranks wait for each other.
    """
    whole, workload = workload, _short(workload, plan)
    ranks = _shown(plan.pp)
    if target.host_computes or target.parts:
        of_rank, total_s, idle = _priced(workload, plan, target)
    else:
        found = simulate_on(workload, plan, target)
        of_rank = {rank: _of_events(found.timeline(rank)) for rank in ranks}
        total_s, idle = found.total_s, sum(rank.bubble_s for rank in found.ranks) / plan.pp / found.total_s
    most = MOST_BARS // len(ranks)
    bars = [
        Bar(row, kind, start, end, name)
        for row, rank in enumerate(ranks)
        for kind, start, end, name in _merged(of_rank[rank], total_s, most)
    ]
    note = f"{duration(total_s)}, simulated pass by pass"
    note += f"; ranks wait for each other {percent(idle)} of it" if plan.pp > 1 else ""
    drawn, there = plan.micro_batches(workload), plan.micro_batches(whole)
    if drawn < there:
        note = (
            f"the first {drawn:,} of {there:,} micro-batches: the step is longer, and its waiting a smaller part of it"
        )
    if len(ranks) < plan.pp:
        note += f"; ranks {ranks[len(ranks) // 2 - 1] + 1} to {ranks[len(ranks) // 2] - 1} of {plan.pp} are left out"
    return Gantt(tuple(f"rank {rank}" for rank in ranks), KINDS, tuple(bars), total_s, note)


def kernel_gantt(workload: Workload, plan: Plan, target: Target) -> Gantt:
    """One micro-batch of the slowest stage, and what its rank does once a step: host and streams, kernel by kernel.

    Raises:
        MoestroError: a CPU, whose host computes, or unlike devices.
    """
    line = slowest_stage(count_step(workload, plan), workload, plan, target)
    rows = [HOST, COMPUTE, *sorted({event.row for event in line.events} - {HOST, COMPUTE})]
    rows = [row for row in rows if line.row(row)]
    kinds = [min(2, (HOST, COMPUTE, row).index(row)) for row in rows]
    bars = [
        Bar(number, kinds[number], start, end, name)
        for number, row in enumerate(rows)
        for _, start, end, name in _merged(_plain(line.row(row)), line.total_s, MOST_BARS // len(rows))
    ]
    note = f"{duration(line.total_s)}: one micro-batch of the slowest stage, and what its rank does once a step"
    return Gantt(tuple(rows), STREAMS, tuple(bars), line.total_s, note)


Piece = tuple[int, float, float, str]  # kind, start, end, name


def _plain(events: Iterable[Event]) -> list[Piece]:
    return [(0, event.start_s, event.end_s, event.name) for event in events]


def _of_events(events: Iterable[Event]) -> list[Piece]:
    """Of a simulated rank: its passes, and what it does when no pass runs."""
    every = list(events)
    passes = [event for event in every if event.row == PASSES]
    first, last = min(event.start_s for event in passes), max(event.end_s for event in passes)
    found = [(_kind(event.name), event.start_s, event.end_s, event.name) for event in passes]
    for event in every:
        if event.row != PASSES and (event.start_s >= last or event.end_s <= first):
            kind = UPDATE if event.row in (COMPUTE, "world") else SENT
            found.append((kind, event.start_s, event.end_s, event.name))
    return _apart(sorted(found, key=lambda piece: piece[1]))


def _apart(pieces: Iterable[Piece]) -> list[Piece]:
    """Of what several streams do at a time, what is not yet drawn."""
    found: list[Piece] = []
    for kind, start, end, name in pieces:
        start = max(start, found[-1][2]) if found else start
        if end > start:
            found.append((kind, start, end, name))
    return found


def _kind(name: str) -> int:
    kinds = [kind for kind in (FORWARD, BACKWARD, WEIGHT) if KINDS[kind] in name]
    return kinds[0] if len(kinds) == 1 else SEVERAL


def _priced(workload: Workload, plan: Plan, target: Target) -> tuple[dict[int, list[Piece]], float, float]:
    """Of each rank its passes, with the whole step's seconds and the share that ranks wait."""
    costs = price_step(count_step(workload, plan), workload, plan, target)
    constants = target.constants_for(workload, plan.world_size)
    forward, backward, weight, both = pass_seconds(costs, plan, constants)
    sends = [stage.send_s * constants.between + stage.latency_s + stage.line_s for stage in costs.stages]
    result = simulate_pipeline(
        plan.schedule, plan.pp, plan.vpp, costs.micro_batches, forward, backward, weight, sends, pair_s=both,
        orders=orders_of(plan, costs.micro_batches),
    )  # fmt: skip
    found: dict[int, list[Piece]] = {rank: [] for rank in range(plan.pp)}
    for event in result.events:
        work = event.work
        kind = "FBW".index(work.kind)
        name = f"{NAMES[work.kind]} {work.micro_batch}, stage {work.stage}"
        found[event.rank].append((kind, event.start_s, event.end_s, name))
    total_s = result.total_s
    for rank, (_, reduce, update) in enumerate(costs.once):
        start = result.total_s
        for kind, cost, name in ((SENT, reduce, "gradients"), (UPDATE, update, "optimizer")):
            end = start + cost.seconds(constants)
            found[rank] += [(kind, start, end, name)] if end > start else []
            start = end
        total_s = max(total_s, start)
    return found, total_s, sum(result.bubble_s) / plan.pp / total_s


def _short(workload: Workload, plan: Plan) -> Workload:
    """With fewer micro-batches, where all would be too many passes to simulate while somebody waits."""
    m = plan.micro_batches(workload)
    passes = sum(map(len, pipeline_orders(plan.schedule, plan.pp, plan.vpp, 4 * plan.pp))) * m / (4 * plan.pp)
    if passes <= MOST_PASSES or m <= 4 * plan.pp:
        return workload
    rounds = max(4, int(m / plan.pp * MOST_PASSES / passes))
    return workload.model_copy(update={"global_batch_size": rounds * plan.pp * plan.dp * plan.micro_batch_size})


def _shown(pp: int) -> list[int]:
    """The first and the last ranks."""
    return list(range(pp)) if pp <= MOST_ROWS else [*range(MOST_ROWS // 2), *range(pp - MOST_ROWS // 2, pp)]


def _merged(pieces: Sequence[Piece], total_s: float, most: int) -> list[Piece]:
    """Bars, of which those too narrow to be seen are put together where they touch."""
    if len(pieces) <= most:
        return list(pieces)
    narrow = total_s / most
    found: list[Piece] = []
    counts: list[int] = []
    for kind, start, end, name in pieces:
        if found and end - found[-1][1] <= narrow and start - found[-1][2] <= narrow / 10:
            last = found[-1]
            counts[-1] += 1
            found[-1] = (kind if kind == last[0] else SEVERAL, last[1], max(end, last[2]), last[3])
        else:
            found.append((kind, start, end, name))
            counts.append(1)
    many = zip(found, counts, strict=True)
    return [(k, s, e, name if n == 1 else f"{name} and {grouped(n - 1)} more") for (k, s, e, name), n in many]
