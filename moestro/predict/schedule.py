"""Runs a pipeline's passes against each other: when each starts, how long ranks wait, how much they hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moestro.errors import MoestroError
from moestro.predict.orders import SPLIT_BACKWARD, Order, Pass, next_stage, pipeline_orders, stage_ranks


class Event(NamedTuple):
    rank: int
    work: Pass
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PipelineResult:
    """busy_s, peak_in_flight: of each rank.

    peak_in_flight counts micro-batch passes of a stage whose activations are held, each weighted by `held` of its stage
    (1 unless given), from the start of F to the end of the last backward pass.
    """

    total_s: float
    busy_s: tuple[float, ...]
    peak_in_flight: tuple[float, ...]
    events: tuple[Event, ...]

    @property
    def bubble_s(self) -> tuple[float, ...]:
        return tuple(self.total_s - busy for busy in self.busy_s)


def simulate_pipeline(
    schedule: str,
    pp: int,
    vpp: int,
    micro_batches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weight_s: Sequence[float],
    send_s: Sequence[float] | float = 0.0,
    *,
    pair_s: Sequence[float] | None = None,
    held: Sequence[float] | None = None,
    slow: Sequence[float] | None = None,
    orders: Sequence[Order] | None = None,
) -> PipelineResult:
    """Of one step.

    forward_s, backward_s, weight_s: of each stage of the model (pp · vpp), one micro-batch; backward_s without the
    gradients of weights, which follow at once where the schedule does not split them. send_s: from each stage to its
    next, and back. pair_s: of an overlapped forward with a full backward pass of a stage (DualPipe); None: their sum.
    slow: a factor on each rank's times. orders: instead of the schedule's.

    Raises:
        MoestroError: the schedule does not fit; or ranks wait for each other in a circle, which the message names.
    """
    split = schedule in SPLIT_BACKWARD
    orders = pipeline_orders(schedule, pp, vpp, micro_batches) if orders is None else orders
    ranks = stage_ranks(schedule, pp, vpp)
    model_stages = pp * vpp

    def of(values: Sequence[float], stage: int) -> float:
        return values[stage % model_stages] if schedule == "dualpipe" else values[stage]

    sends = [send_s] * len(ranks) if isinstance(send_s, float | int) else [of(send_s, s) for s in range(len(ranks))]
    followers = [next_stage(schedule, pp, vpp, stage) for stage in range(len(ranks))]
    leaders: list[int | None] = [None] * len(ranks)
    for stage, follower in enumerate(followers):
        if follower is not None:
            leaders[follower] = stage

    def duration(work: Pass) -> float:
        factor = 1.0 if slow is None else slow[ranks[work.stage]]
        if work.kind == "F":
            return factor * of(forward_s, work.stage)
        if work.kind == "W":
            return factor * of(weight_s, work.stage)
        return factor * (of(backward_s, work.stage) + (0.0 if split else of(weight_s, work.stage)))

    ends: dict[tuple[str, int, int], float] = {}

    def ready(work: Pass) -> float | None:
        """When its inputs are here; None: not yet known."""
        if work.kind == "W":
            return ends.get(("B", work.stage, work.micro_batch))
        if work.kind == "F":
            before = leaders[work.stage]
            if before is None:
                return 0.0
            end = ends.get(("F", before, work.micro_batch))
            return None if end is None else end + _send(ranks, sends, before, work.stage)
        after = followers[work.stage]
        own = ends.get(("F", work.stage, work.micro_batch))
        if after is None or own is None:
            return own
        end = ends.get(("B", after, work.micro_batch))
        return None if end is None else max(own, end + _send(ranks, sends, work.stage, after))

    clock, place, busy = [0.0] * pp, [0] * pp, [0.0] * pp
    events: list[Event] = []
    remaining = sum(len(order) for order in orders)
    while remaining:
        moved = False
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                block = together(order, place[rank])
                times = [ready(work) for work in block if not _inside(work, block)]
                if any(time is None for time in times):
                    break
                start = max([clock[rank], *(time for time in times if time is not None)])
                if len(block) > 1 and pair_s is not None:
                    length = of(pair_s, block[0].stage) * (1.0 if slow is None else slow[rank])
                else:
                    length = sum(duration(work) for work in block)
                for work in block:
                    ends[work.kind, work.stage, work.micro_batch] = start + length
                    events.append(Event(rank, work, start, start + length))
                clock[rank] = start + length
                busy[rank] += length
                place[rank] += len(block)
                remaining -= len(block)
                moved = True
        if not moved:
            raise MoestroError(deadlock(orders, place))
    peaks = _peaks(events, pp, orders, held, schedule, model_stages)
    return PipelineResult(max(clock), tuple(busy), peaks, tuple(events))


def _send(ranks: Sequence[int], sends: Sequence[float], stage: int, other: int) -> float:
    return 0.0 if ranks[stage] == ranks[other] else sends[stage]


def together(order: Order, at: int) -> list[Pass]:
    """The pass at this place, with what runs together with it: an overlapped forward takes the B and W after it."""
    if not order[at].pair:
        return [order[at]]
    block = [order[at], order[at + 1]]
    if at + 2 < len(order) and order[at + 2] == Pass("W", order[at + 1].stage, order[at + 1].micro_batch):
        block.append(order[at + 2])
    return block


def _inside(work: Pass, block: list[Pass]) -> bool:
    return work.kind == "W" and len(block) > 1


def deadlock(orders: Sequence[Order], place: Sequence[int]) -> str:
    """What each rank waits for. place: how many passes of its order it has run."""
    waits = []
    for rank, order in enumerate(orders):
        if place[rank] < len(order):
            work = order[place[rank]]
            waits.append(
                f"rank {rank} waits to run {work.kind} of micro-batch {work.micro_batch} on stage {work.stage}"
            )
    return "the pipeline's order is a deadlock: " + "; ".join(waits[:4])


def _peaks(
    events: Sequence[Event],
    pp: int,
    orders: Sequence[Order],
    held: Sequence[float] | None,
    schedule: str,
    model_stages: int,
) -> tuple[float, ...]:
    has_weight = {(w.stage, w.micro_batch) for order in orders for w in order if w.kind == "W"}
    changes: list[list[tuple[float, int, float]]] = [[] for _ in range(pp)]
    for event in events:
        work = event.work
        weight = 1.0 if held is None else held[work.stage % model_stages]
        last = "W" if (work.stage, work.micro_batch) in has_weight else "B"
        if work.kind == "F":
            changes[event.rank].append((event.start_s, 1, weight))
        elif work.kind == last:
            changes[event.rank].append((event.end_s, 0, -weight))  # freed before what starts at the same time
    peaks = []
    for of_rank in changes:
        now = peak = 0.0
        for _, _, change in sorted(of_rank):
            now += change
            peak = max(peak, now)
        peaks.append(peak)
    return tuple(peaks)
