"""Attention and experts on devices of their own: would it pay? After DisagMoE (arXiv 2605.11005).

A-workers hold attention, F-workers experts; tokens cross from the ones to the others and back, a pipeline stage of its
own, instead of an all-to-all among devices that do both. The closed forms are of a pipeline under way; `simulate` runs
one with its beginning and end. What a group must hold in memory is not looked at.
"""

import heapq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moestro.errors import MoestroError
from moestro.predict.words import TimeBreakdown

EXPERT_PARTS = ("experts", "shared experts", "dense", "dispatch")  # of TimeBreakdown.by_part: with the F-workers
CHUNKS = 4  # in which experts and their exchanges are overlapped, where nothing else is said
BACKWARD = 2.0  # a backward pass over a forward pass, of computation


@dataclass(frozen=True)
class Work:
    """Seconds that each device spends where all do both, on the same tokens: a layer's, a step's.

    dispatch_s, combine_s: of the exchanges, alone, every device's NIC busy in both directions.
    """

    attention_s: float
    experts_s: float
    dispatch_s: float
    combine_s: float

    @property
    def compute_s(self) -> float:
        return self.attention_s + self.experts_s

    @property
    def exchange_s(self) -> float:
        return self.dispatch_s + self.combine_s


@dataclass(frozen=True)
class Split:
    """nics: share of all NICs that serves the A-workers. Sharing those of a node out by half is possible where both
    kinds of workers sit in every node; otherwise it is attention's share of the devices."""

    attention: int
    experts: int
    nics: float = 0.5

    def __post_init__(self) -> None:
        if self.attention < 1 or self.experts < 1 or not 0 < self.nics < 1:
            raise MoestroError("a split needs a device or more of each kind, and NICs for both")

    @property
    def share(self) -> float:
        """Of the devices: attention's."""
        return self.attention / (self.attention + self.experts)

    def __str__(self) -> str:
        return f"{self.attention}:{self.experts}"


def serial_s(work: Work) -> float:
    """Nothing hidden, as in plain 1F1B."""
    return work.compute_s + work.exchange_s


def chunked_s(work: Work, chunks: int = CHUNKS) -> float:
    """Experts' exchanges behind experts, in chunks: the shorter of both sticks out by a chunk (Tutel, Comet)."""
    longer, shorter = sorted((work.experts_s, work.exchange_s), reverse=True)
    return work.attention_s + longer + shorter / chunks


def paired_s(work: Work) -> float:
    """A forward beside another micro-batch's backward pass, as DualPipe: each exchange behind one computation."""
    return max(work.attention_s, work.dispatch_s) + max(work.experts_s, work.combine_s)


def disaggregated_s(work: Work, split: Split) -> float:
    """The slowest of attention, experts and the exchange.

    Over a forward and a backward pass dispatch and combine go each way once, so that either direction carries half of
    the exchange; by the smaller side's NICs.
    """
    narrow = min(split.nics, 1 - split.nics)
    return max(work.attention_s / split.share, work.experts_s / (1 - split.share), work.exchange_s / 2 / narrow)


def best_split(work: Work, devices: int, shared_nics: bool = True) -> Split:
    """Of `devices`: the one of the least time; of several such, that whose computations are the most even.

    Raises:
        MoestroError: fewer than two devices.
    """
    if devices < 2:
        raise MoestroError("attention and experts apart take two devices or more")
    splits = [split_of(m, devices - m, shared_nics) for m in range(1, devices)]
    return min(splits, key=lambda s: (disaggregated_s(work, s), _slower_computation(work, s)))


def split_of(attention: int, experts: int, shared_nics: bool = True) -> Split:
    return Split(attention, experts, 0.5 if shared_nics else attention / (attention + experts))


def parse_split(text: str, devices: int) -> Split | None:
    """ "16:10" as so many, or as that ratio, of `devices`; "auto": None.

    Raises:
        MoestroError: neither.
    """
    if text == "auto":
        return None
    sides = text.split(":")
    if len(sides) != 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise MoestroError(f"--disaggregate {text}: give devices for attention and for experts as M:N, or auto")
    m, n = map(int, sides)
    if devices % (m + n):
        raise MoestroError(f"--disaggregate {text}: {m + n} does not divide the plan's {devices} devices")
    times = devices // (m + n)
    return split_of(m * times, n * times)


def work_of(time: TimeBreakdown) -> Work:
    """Of a predicted step. What is not experts' is attention's: norms, routers, embedding, head.

    Raises:
        MoestroError: the step has no experts, or sends no tokens to them.
    """
    experts = sum(seconds for part, seconds in time.by_part.items() if part in EXPERT_PARTS)
    exchange = sum(seconds for name, seconds in time.by_dimension.items() if name in ("ep", "ep_between"))
    if "experts" not in time.by_part or not exchange:
        raise MoestroError("--disaggregate is for experts spread over devices; give plan.ep (or parallel.ep) above 1")
    return Work(sum(time.by_part.values()) - experts, experts, exchange / 2, exchange / 2)


def copies(choices: ArrayLike, attention: int, experts: int, num_experts: int) -> NDArray[np.int64]:
    """Copies of tokens that each A-worker sends to each F-worker, [attention, experts]; its transpose comes back.

    choices: experts that each token takes, [tokens, top_k]. Tokens and experts lie in blocks; a token goes to a worker
    once, however many of its experts are there.

    Raises:
        MoestroError: an expert that does not exist.
    """
    taken = np.asarray(choices)
    if taken.size and not 0 <= taken.min() <= taken.max() < num_experts:
        raise MoestroError(f"choices must be numbers of {num_experts} experts, from 0")
    tokens = np.arange(len(taken)) * attention // max(1, len(taken))
    found = np.zeros((attention, experts), dtype=np.int64)
    workers = taken * experts // num_experts
    for worker in range(experts):
        np.add.at(found[:, worker], tokens[(workers == worker).any(axis=1)], 1)
    return found


def _slower_computation(work: Work, split: Split) -> float:
    return max(work.attention_s / split.share, work.experts_s / (1 - split.share))


# Pass by pass.


@dataclass(frozen=True)
class AFPipe:
    """total_s: of all micro-batches. most: of them under way at once. Of each resource (A0, out0, F0, back0 …) busy_s:
    at work; first_s: since when."""

    total_s: float
    most: int
    busy_s: dict[str, float]
    first_s: dict[str, float]


@dataclass
class _Resource:
    """seconds: of a forward and of a backward pass. waiting: (0 for backward, micro-batch, place on the path)."""

    seconds: tuple[float, float]
    waiting: list[tuple[int, int, int]] = field(default_factory=list)
    free: bool = True
    busy_s: float = 0.0
    first_s: float | None = None


def simulate(work: Work, split: Split, groups: int, layers: int, micro_batches: int, most: int | None = None) -> AFPipe:
    """AF-Pipe: group g of either kind holds layers g, g + groups, …; micro-batches go A, F, A, F … and back.

    work: of one layer's forward and backward pass of a micro-batch, if it were shared out over all devices. most:
    micro-batches that may be under way; None: two for each worker and each way between them. Where several wait for the
    same worker, backward passes go first, then the oldest.

    Raises:
        MoestroError: layers that do not share out over the groups, or nothing to do.
    """
    if groups < 1 or layers < 1 or layers % groups or micro_batches < 1:
        raise MoestroError(f"{layers} layers do not share out over {groups} groups, or there is no micro-batch")
    resources = _resources(work, split, groups)
    path = [(f"{kind}{layer % groups}", 0) for layer in range(layers) for kind in ("A", "out", "F", "back")]
    # A gradient of what came back goes out first.
    path += [(f"{kind}{layer % groups}", 1) for layer in reversed(range(layers)) for kind in ("out", "F", "back", "A")]
    limit = most or 8 * groups
    events: list[tuple[float, int, int]] = []  # end, micro-batch, place
    clock, started, ended, peak = 0.0, 0, 0, 0

    def start(name: str) -> None:
        resource = resources[name]
        if resource.free and resource.waiting:
            _, micro_batch, place = heapq.heappop(resource.waiting)
            length = resource.seconds[path[place][1]]
            resource.free, resource.busy_s = False, resource.busy_s + length
            resource.first_s = clock if resource.first_s is None else resource.first_s
            heapq.heappush(events, (clock + length, micro_batch, place))

    def enter(micro_batch: int, place: int) -> None:
        name, backward = path[place]
        heapq.heappush(resources[name].waiting, (1 - backward, micro_batch, place))
        start(name)

    while ended < micro_batches:
        while started < micro_batches and started - ended < limit:
            started += 1
            enter(started - 1, 0)
        peak = max(peak, started - ended)
        clock, micro_batch, place = heapq.heappop(events)
        resources[path[place][0]].free = True
        if place + 1 < len(path):
            enter(micro_batch, place + 1)
        else:
            ended += 1
        start(path[place][0])
    busy = {name: resource.busy_s for name, resource in resources.items()}
    first = {name: resource.first_s or 0.0 for name, resource in resources.items()}
    return AFPipe(clock, peak, busy, first)


def _resources(work: Work, split: Split, groups: int) -> dict[str, _Resource]:
    """A group does one of `groups` layers by its share of the devices: as many times slower as there are groups."""
    attention, experts = work.attention_s / split.share * groups, work.experts_s / (1 - split.share) * groups
    exchange = work.exchange_s / 2 / min(split.nics, 1 - split.nics) * groups
    found = {}
    for group in range(groups):
        for kind, seconds, backward in (("A", attention, BACKWARD), ("F", experts, BACKWARD), ("out", exchange, 1.0),
                                        ("back", exchange, 1.0)):  # fmt: skip
            forward = seconds / (1 + backward)
            found[f"{kind}{group}"] = _Resource((forward, forward * backward))
    return found
