"""Runs a pipeline's passes against each other: when each starts, how long ranks wait, how much they hold."""

from collections.abc import Callable, Sequence
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
    orders = pipeline_orders(schedule, pp, vpp, micro_batches) if orders is None else orders
    ranks = stage_ranks(schedule, pp, vpp)

    def paced(seconds: Sequence[float]) -> list[float]:
        """Of each stage that the orders name (DualPipe has each twice), on its rank."""
        each = (seconds[stage % (pp * vpp)] for stage in range(len(ranks)))
        return list(each) if slow is None else [slow[rank] * s for rank, s in zip(ranks, each, strict=True)]

    if schedule not in SPLIT_BACKWARD:
        backward_s = [b + w for b, w in zip(backward_s, weight_s, strict=True)]
    lengths = {"F": paced(forward_s), "B": paced(backward_s), "W": paced(weight_s)}
    pairs = None if pair_s is None else paced(pair_s)

    def length(block: list[Pass]) -> float:
        if len(block) > 1 and pairs is not None:
            return pairs[block[0].stage]
        return sum(lengths[work.kind][work.stage] for work in block)

    sends = [send_s] * (pp * vpp) if isinstance(send_s, float | int) else send_s
    hops = [sends[stage % (pp * vpp)] for stage in range(len(ranks))]
    after = [next_stage(schedule, pp, vpp, stage) for stage in range(len(ranks))]
    events, clock, busy = _run(orders, length, _Inputs(ranks, after, hops))
    peaks = _peaks(events, pp, orders, held, pp * vpp)
    return PipelineResult(max(clock), tuple(busy), peaks, tuple(events))


class _Inputs:
    """When those of a pass are there. after: of each stage its next; send_s: the way to it, and back."""

    def __init__(self, ranks: Sequence[int], after: Sequence[int | None], send_s: Sequence[float]) -> None:
        self.after = after
        self.before = {follower: stage for stage, follower in enumerate(after) if follower is not None}
        here = [follower is None or ranks[follower] == rank for rank, follower in zip(ranks, after, strict=True)]
        self.way_s = [0.0 if stays else seconds for stays, seconds in zip(here, send_s, strict=True)]
        self.ends: dict[tuple[str, int, int], float] = {}

    def ready(self, work: Pass) -> float | None:
        """None: not yet known."""
        if work.kind == "W":
            return self.ends.get(("B", work.stage, work.micro_batch))
        if work.kind == "F":
            before = self.before.get(work.stage)
            if before is None:
                return 0.0
            end = self.ends.get(("F", before, work.micro_batch))
            return None if end is None else end + self.way_s[before]
        after = self.after[work.stage]
        own = self.ends.get(("F", work.stage, work.micro_batch))
        if after is None or own is None:
            return own
        end = self.ends.get(("B", after, work.micro_batch))
        return None if end is None else max(own, end + self.way_s[work.stage])


def _run(
    orders: Sequence[Order], length: Callable[[list[Pass]], float], inputs: _Inputs
) -> tuple[list[Event], list[float], list[float]]:
    """All passes; of each rank, when it is through, and how long it was busy."""
    clock, place, busy = [0.0] * len(orders), [0] * len(orders), [0.0] * len(orders)
    events: list[Event] = []
    remaining = sum(len(order) for order in orders)
    while remaining:
        before = remaining
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                block = together(order, place[rank])
                times = [inputs.ready(work) for work in block if not _inside(work, block)]
                if any(time is None for time in times):
                    break
                start = max([clock[rank], *(time for time in times if time is not None)])
                seconds = length(block)
                for work in block:
                    inputs.ends[work.kind, work.stage, work.micro_batch] = start + seconds
                    events.append(Event(rank, work, start, start + seconds))
                clock[rank] = start + seconds
                busy[rank] += seconds
                place[rank] += len(block)
                remaining -= len(block)
        if remaining == before:
            raise MoestroError(deadlock(orders, place))
    return events, clock, busy


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
