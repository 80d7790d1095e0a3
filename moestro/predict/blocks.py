"""Passes that run together on a rank: chains of links that share its computation and its streams."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from moestro.predict.chains import Chain, Link
from moestro.predict.timeline import COMPUTE

_ENDS, _READY = 0, 1  # at one time, what ends comes first


class Ran(NamedTuple):
    """A link, and when it ran."""

    chain: int
    link: Link
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Block:
    """A block that starts at 0. ends_s: of each chain's last link that something waits for.

    busy_s: of each stream. exposed_s: of each stream of communication, seconds in which it ran and nothing was
    computed. first_s, last_s: of each, when it is used first and free again. host_s: of the launches.
    late_s: from the start of the host's work to the end, were the device always ready.
    """

    length_s: float
    ends_s: tuple[float, ...]
    busy_s: dict[str, float]
    exposed_s: dict[str, float]
    first_s: dict[str, float]
    last_s: dict[str, float]
    host_s: float
    late_s: float
    ran: tuple[Ran, ...]


def run_block(chains: Sequence[Chain], contention: float = 0.0, slow: float = 1.0) -> Block:
    """A stream takes the link that was ready first, and of several at once that of the first chain.

    contention: share by which computation is slower while something is sent. slow: a factor on computation.
    """
    walk = _Walk(chains, contention, slow)
    walk.run()
    return _block(sorted(walk.ran, key=lambda ran: ran.start_s), len(chains))


@dataclass
class _Walk:
    """Events in order of time. A link that finds its stream taken comes again when the stream is free."""

    chains: Sequence[Chain]
    contention: float
    slow: float
    ran: list[Ran] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.events: list[tuple[float, int, int, int]] = []  # when, what, chain, link
        self.free: dict[str, float] = {}
        self.sent_until = 0.0  # something is being sent until then
        self.computing: tuple[int, int, float] | None = None  # chain, link, start
        self.computed_at = 0.0  # when the running computation ends
        self.open = [[len(link.needs) for link in chain] for chain in self.chains]
        self.after: list[list[list[int]]] = [[[] for _ in chain] for chain in self.chains]
        for number, chain in enumerate(self.chains):
            for place, link in enumerate(chain):
                for need in link.needs:
                    self.after[number][need].append(place)
                if not link.needs:
                    heappush(self.events, (0.0, _READY, number, place))

    def run(self) -> None:
        while self.events:
            now, what, chain, place = heappop(self.events)
            link = self.chains[chain][place]
            if what == _READY:
                self._start(now, chain, place, link)
            elif link.stream == COMPUTE and now < self.computed_at:  # slower than it seemed at its start
                heappush(self.events, (self.computed_at, _ENDS, chain, place))
            else:
                self._end(now, chain, place, link)

    def _start(self, now: float, chain: int, place: int, link: Link) -> None:
        streams = (link.stream, COMPUTE) if link.alone else (link.stream,)
        free = max(self.free.get(stream, 0.0) for stream in streams)
        if free > now:
            heappush(self.events, (free, _READY, chain, place))
            return
        end = now + link.seconds * (self.slow if link.stream == COMPUTE else 1.0)
        if link.stream == COMPUTE:
            end += self.contention * max(0.0, min(end, self.sent_until) - now)
            self.computing, self.computed_at = (chain, place, now), end
        else:
            if self.computing is not None and now < self.computed_at:
                both = min(end, self.computed_at) - max(now, self.sent_until)
                self.computed_at += self.contention * max(0.0, both)
                self.free[COMPUTE] = self.computed_at
            self.sent_until = max(self.sent_until, 0.0 if link.alone else end)
            self.ran.append(Ran(chain, link, now, end))
        for stream in streams:
            self.free[stream] = end
        heappush(self.events, (end, _ENDS, chain, place))

    def _end(self, now: float, chain: int, place: int, link: Link) -> None:
        if link.stream == COMPUTE and self.computing is not None:
            self.ran.append(Ran(chain, link, self.computing[2], now))
            self.computing = None
        for other in self.after[chain][place]:
            self.open[chain][other] -= 1
            if not self.open[chain][other]:
                heappush(self.events, (now, _READY, chain, other))


def _block(ran: Sequence[Ran], chains: int) -> Block:
    ends, busy, first, last = [0.0] * chains, dict[str, float](), dict[str, float](), dict[str, float]()
    for one in ran:
        stream = one.link.stream
        busy[stream] = busy.get(stream, 0.0) + one.end_s - one.start_s
        first.setdefault(stream, one.start_s)
        last[stream] = max(last.get(stream, 0.0), one.end_s)
        if stream == COMPUTE or one.link.alone or stream not in ("dp", "edp"):
            ends[one.chain] = max(ends[one.chain], one.end_s)
    length, host, late = max(ends, default=0.0), 0.0, 0.0
    for one in ran:  # in the order of their launches
        each = one.link.host_s / one.link.launches if one.link.launches else 0.0
        few = 1 / max(1.0, one.link.launches)
        late = max(late, host + each + length - one.start_s)
        host += one.link.host_s
        late = max(late, host + few * (one.end_s - one.start_s) + length - one.end_s)
    return Block(length, tuple(ends), busy, _exposed(ran, length), first, last, host, late, tuple(ran))


def _exposed(ran: Sequence[Ran], length: float) -> dict[str, float]:
    """Of each stream. Where several send at once and nothing is computed, it is the one that started first."""
    found = dict[str, float]()
    computed = [(one.start_s, one.end_s) for one in ran if one.link.stream == COMPUTE]
    gaps, at = [], 0.0
    for start, end in computed:
        if start > at:
            gaps.append((at, start))
        at = max(at, end)
    if length > at:
        gaps.append((at, length))
    sends = [one for one in ran if one.link.stream != COMPUTE]
    first = 0
    for start, end in gaps:
        at = start
        while first < len(sends) and sends[first].end_s <= start:
            first += 1
        for one in sends[first:]:
            if one.start_s >= end:
                break
            shown = min(end, one.end_s) - max(at, one.start_s)
            if shown > 0:
                found[one.link.stream] = found.get(one.link.stream, 0.0) + shown
                at = min(end, one.end_s)
    return found
