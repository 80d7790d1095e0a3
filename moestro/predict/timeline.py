"""A rank's host and streams, kernel by kernel: the walk of arXiv 2201.07821 and, over several ranks, 2404.12674.

The host calls operations in program order and launches their kernels without waiting for them. A stream runs what was
launched on it in that order; a kernel starts when it was launched, its stream is free and what it needs has ended, and
a collective when that is so on all its ranks. What a device takes from one kernel to the next belongs to their seconds.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moestro.errors import MoestroError

HOST, COMPUTE = "host", "compute"  # rows of a timeline; all others are streams of communication


class HostTimes(NamedTuple):
    """Seconds of the host for an operation: T1 … T5."""

    t1_s: float = 0.0  # since the operation before
    t2_s: float = 0.0  # from its start to its first launch
    t3_s: float = 0.0  # from its last launch to its end
    t4_s: float = 0.0  # a launch
    t5_s: float = 0.0  # between two launches; of an operation that launches nothing, all its time

    def of(self, launches: int) -> float:
        """All of it."""
        own = self.t2_s + launches * self.t4_s + (launches - 1) * self.t5_s + self.t3_s if launches else self.t5_s
        return self.t1_s + own


NO_HOST = HostTimes()


class Op(NamedTuple):
    """An operation that the host calls.

    kernels_s: seconds of each kernel, in the order of their launches. Without any it is host work, on whose stream what
    comes later still waits for `needs`. needs: places of earlier operations, on any stream, that must have ended.
    group: of a collective (one kernel): its ranks' name. The n-th of a group is the same on all its ranks; it takes
    as long as the longest of them says. blocks: the host waits for its end, as for a copy to the host.
    """

    name: str
    kernels_s: tuple[float, ...] = ()
    host: HostTimes = NO_HOST
    stream: str = COMPUTE
    needs: tuple[int, ...] = ()
    group: str = ""
    blocks: bool = False


@dataclass(frozen=True)
class RankClass:
    """Ranks that all do the same. slow: a factor on their kernels on the compute stream."""

    name: str
    ops: Sequence[Op]
    slow: float = 1.0


class Event(NamedTuple):
    row: str  # HOST or a stream
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """Of one class of ranks. Events of a row are in order and do not overlap."""

    events: tuple[Event, ...]
    total_s: float

    def row(self, name: str) -> list[Event]:
        return [event for event in self.events if event.row == name]

    def busy_s(self, row: str) -> float:
        return sum(event.end_s - event.start_s for event in self.row(row))

    def exposed_s(self, row: str) -> float:
        """Of a stream: its busy seconds in which the compute stream ran nothing."""
        computed, hidden, first = self.row(COMPUTE), 0.0, 0
        for event in self.row(row):
            while first < len(computed) and computed[first].end_s <= event.start_s:
                first += 1
            at = first
            while at < len(computed) and computed[at].start_s < event.end_s:
                hidden += min(event.end_s, computed[at].end_s) - max(event.start_s, computed[at].start_s)
                at += 1
        return self.busy_s(row) - hidden


def walk(classes: Sequence[RankClass]) -> tuple[Timeline, ...]:
    """The timelines of classes of ranks that run together. A class by itself waits for nobody.

    Raises:
        MoestroError: an operation needs one that does not come before it, a collective has not one kernel, or classes
            wait for each other in a circle, which the message names.
    """
    ranks = [_Rank(ranks) for ranks in classes]
    members = Counter(group for rank in ranks for group in {op.group for op in rank.ops if op.group})
    waiting: dict[tuple[str, int], dict[int, tuple[int, float]]] = defaultdict(dict)  # class -> operation, arrival
    moved = True
    while moved:
        moved = False
        for number, rank in enumerate(ranks):
            moved |= rank.launch()
            for queue in tuple(rank.queues.values()):
                while queue and (arrival := rank.arrival(queue[0])) is not None:
                    index = queue[0]
                    op = rank.ops[index]
                    if op.group:
                        key = op.group, rank.nth[index]
                        waiting[key][number] = index, arrival
                        if len(waiting[key]) < members[op.group]:
                            break
                        _together(ranks, waiting.pop(key))
                    else:
                        rank.run(index, arrival, op.kernels_s)
                    moved = True
    if waiting:
        raise MoestroError(_deadlock(ranks, waiting))
    return tuple(Timeline(tuple(rank.events), max([rank.cpu, *rank.clock.values()])) for rank in ranks)


class _Rank:
    """How far a class has come: its host, its streams, and the operations that have ended."""

    def __init__(self, ranks: RankClass) -> None:
        self.name, self.ops, self.slow = ranks.name, ranks.ops, ranks.slow
        self.cpu = 0.0
        self.next = 0  # operation that the host calls
        self.blocked: int | None = None  # by which the host is held up
        self.launched: dict[int, list[float]] = {}
        self.queues: dict[str, deque[int]] = {op.stream: deque() for op in self.ops}
        self.clock = dict.fromkeys(self.queues, 0.0)
        self.ends: dict[int, float] = {}
        self.events: list[Event] = []
        self.nth: dict[int, int] = {}  # of a collective, among those of its group
        seen = Counter[str]()
        for index, op in enumerate(self.ops):
            if any(not 0 <= need < index for need in op.needs):
                raise MoestroError(f"operation {index} of {self.name}, '{op.name}', needs one that is not before it")
            if op.group:
                if len(op.kernels_s) != 1:
                    raise MoestroError(f"the collective '{op.name}' of {self.name} must have one kernel")
                self.nth[index] = seen[op.group]
                seen[op.group] += 1

    def launch(self) -> bool:
        """Let the host go as far as it can. Returns whether it went anywhere."""
        before = self.next, self.blocked
        while True:
            if self.blocked is not None:
                if self.blocked not in self.ends:
                    break
                self.cpu = max(self.cpu, self.ends[self.blocked])
                self.blocked = None
            if self.next == len(self.ops):
                break
            self._call(self.next)
            self.blocked = self.next if self.ops[self.next].blocks else None
            self.next += 1
        return (self.next, self.blocked) != before

    def _call(self, index: int) -> None:
        op = self.ops[index]
        host, launches = op.host, list[float]()
        self.cpu += host.t1_s
        start = self.cpu
        if op.kernels_s:
            self.cpu += host.t2_s
            for number in range(len(op.kernels_s)):
                self.cpu += host.t4_s + (host.t5_s if number else 0.0)
                launches.append(self.cpu)
            self.cpu += host.t3_s
        else:
            self.cpu += host.t5_s
        if self.cpu > start:
            self.events.append(Event(HOST, op.name, start, self.cpu))
        self.launched[index] = launches
        self.queues[op.stream].append(index)

    def arrival(self, index: int) -> float | None:
        """When the first operation of a stream's queue can start; None: not yet known."""
        op = self.ops[index]
        if any(need not in self.ends for need in op.needs):
            return None
        return max([self.clock[op.stream], *self.launched[index][:1], *(self.ends[need] for need in op.needs)])

    def run(self, index: int, start: float, kernels_s: tuple[float, ...]) -> None:
        op, end = self.ops[index], start
        factor = self.slow if op.stream == COMPUTE else 1.0
        for launched, seconds in zip(self.launched.pop(index), kernels_s, strict=True):
            start = max(end, launched)
            end = start + factor * seconds
            self.events.append(Event(op.stream, op.name, start, end))
        self.clock[op.stream] = self.ends[index] = end
        self.queues[op.stream].popleft()


def _together(ranks: list[_Rank], arrived: dict[int, tuple[int, float]]) -> None:
    """Run a collective on all classes, from the last arrival on."""
    start = max(arrival for _, arrival in arrived.values())
    seconds = max(ranks[number].ops[index].kernels_s[0] for number, (index, _) in arrived.items())
    for number, (index, _) in arrived.items():
        ranks[number].run(index, start, (seconds,))


def _deadlock(ranks: list[_Rank], waiting: dict[tuple[str, int], dict[int, tuple[int, float]]]) -> str:
    waits = []
    for (group, nth), arrived in waiting.items():
        here = [f"{ranks[n].name} in '{ranks[n].ops[index].name}'" for n, (index, _) in arrived.items()]
        missing = [r.name for n, r in enumerate(ranks) if n not in arrived and any(op.group == group for op in r.ops)]
        waits.append(f"{', '.join(here)} (number {nth + 1} of {group}) waits for {', '.join(missing)}")
    return "the ranks' order of collectives is a deadlock: " + "; ".join(waits[:4])
