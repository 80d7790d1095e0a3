"""One pipeline rank of a simulated step: how far its host, its computation and its streams have come."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from moestro.graph.words import Collective, Kernel, Node, RankStep
from moestro.predict.blocks import Block
from moestro.predict.constants import Constants
from moestro.predict.program import BUCKETS
from moestro.predict.timeline import COMPUTE, Event

MOST_BUCKETS = 64  # of a stage, that are simulated one by one
BESIDE = ("dp", "edp")  # streams that go on when a pass has ended


@dataclass
class RankTime:
    """A pipeline rank's seconds. All but busy_s, which is by stream, add up to the step.

    exposed_s: by dimension, communication that holds up computation. bubble_s: waiting for other pipeline ranks.
    """

    compute_s: float = 0.0
    host_s: float = 0.0
    bubble_s: float = 0.0
    optimizer_s: float = 0.0
    exposed_s: dict[str, float] = field(default_factory=dict)
    busy_s: dict[str, float] = field(default_factory=dict)

    @property
    def total_s(self) -> float:
        return self.compute_s + self.host_s + self.bubble_s + self.optimizer_s + sum(self.exposed_s.values())


@dataclass
class RankClock:
    """step: what the rank does once. shares: of its parameters, those of each stage, in the order of first passes.

    now_s, host_s: how far passes and launches have come. free_s: when each stream is free. beside_s: until when
    gradients or weights are sent beside the passes. fetched_s: when each part of a stage's weights is there.
    """

    step: RankStep
    shares: Mapping[int, float]
    price: Callable[[Node], float]
    constants: Constants
    slow: float = 1.0
    now_s: float = 0.0
    host_s: float = 0.0
    beside_s: float = 0.0
    free_s: dict[str, float] = field(default_factory=dict)
    fetched_s: dict[int, list[float]] = field(default_factory=dict)
    time: RankTime = field(default_factory=RankTime)
    placed: list[tuple[str, Block, float, float]] = field(default_factory=list)
    others: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Gather weights. What may not overlap comes before all passes."""
        nodes = [node for node in self.step.before if isinstance(node, Collective)]
        for node in nodes:
            if not node.overlap:
                self._alone(node)
        for stage, share in self.shares.items():
            for node in nodes:
                if node.overlap:
                    each = self.price(node) * share / BUCKETS
                    ends = [self._send(node, each, 0.0) for _ in range(BUCKETS)]
                    before = self.fetched_s.get(stage, ends)
                    self.fetched_s[stage] = [max(both) for both in zip(ends, before, strict=True)]
                    self.beside_s = max(self.beside_s, ends[-1])

    def run(self, name: str, block: Block, ready_s: float, first: list[int], last: list[int]) -> tuple[float, float]:
        """Place a block whose inputs are ready. Returns its start and end.

        first, last: stages whose first forward or last backward pass (gradients of weights included) is in it.
        """
        time = self.time
        time.bubble_s += ready_s - self.now_s
        start = self._after_streams(ready_s, block, first)
        length = block.length_s
        length += self.constants.contention * max(0.0, min(self.beside_s, start + length) - start)
        for stage in last:
            length += self._reduce(stage, start, start + length)
        end = max(start + length, self.host_s + block.late_s)
        self.host_s += block.host_s
        time.host_s += end - (start + length)
        time.compute_s += length - sum(block.exposed_s.values())
        for stream, seconds in block.exposed_s.items():
            self._expose(stream, seconds)
        for stream, seconds in block.busy_s.items():
            time.busy_s[stream] = time.busy_s.get(stream, 0.0) + seconds
        for stream in BESIDE:
            if stream in block.last_s:
                self.free_s[stream] = max(self.free_s.get(stream, 0.0), start + block.last_s[stream])
        self.now_s = end
        self.placed.append((name, block, start, end))
        return start, end

    def _after_streams(self, start: float, block: Block, first: list[int]) -> float:
        """When it can start: its first link on a stream finds that free, and a first pass its weights."""
        waits = [(s, self.free_s.get(s, 0.0) - block.first_s[s]) for s in BESIDE if s in block.first_s]
        for stage in first:
            parts = enumerate(self.fetched_s.get(stage, ()))
            waits += [("dp", there - block.length_s * part / BUCKETS) for part, there in parts]
        for stream, until in waits:
            if until > start:
                self._expose(stream, until - start)
                start = until
        return start

    def _reduce(self, stage: int, start: float, end: float) -> float:
        """Gradients of a stage in buckets, while its last backward pass runs. Returns how long that is held up."""
        both = 0.0
        for node in self.step.gradients:
            if isinstance(node, Collective) and node.overlap:
                share = self.shares[stage]
                count = BUCKETS if node.times <= 1 else min(MOST_BUCKETS, max(1, round(node.times * share)))
                each = self.price(node) * share / count
                for number in range(1, count + 1):
                    until = self._send(node, each, start + (end - start) * number / count)
                    both += max(0.0, min(until, end) - max(until - each, start))
                self.beside_s = max(self.beside_s, self.free_s[node.dimension])
        return self.constants.contention * both

    def sends(self, name: str, start: float, seconds: float) -> None:
        """To another pipeline rank."""
        if seconds:
            self._busy("pp", name, start, start + seconds)

    def drain(self) -> None:
        """What gradients still need after the passes, but for what is summed over pipeline ranks."""
        for stream, free in self.free_s.items():
            if free > self.now_s:
                self._expose(stream, free - self.now_s)
                self.now_s = free
        for node in self.step.gradients:
            if isinstance(node, Collective) and not node.overlap and node.dimension != "pp":
                self._alone(node)

    def join(self, node: Collective, start: float) -> None:
        """A sum over pipeline ranks, once all are there."""
        self.time.bubble_s += start - self.now_s
        self.now_s = start
        self._alone(node)

    def update(self, node: Node, joined: float) -> None:
        """A node of the optimizer; one over all ranks starts when all have `joined`."""
        seconds, stream, start = self.price(node), COMPUTE, self.now_s
        if isinstance(node, Kernel):
            seconds = max(self.slow * seconds, node.times * node.launches * self.constants.launch_s)
        else:
            stream, start = node.dimension, joined if of_all(node) else start
            seconds = max(seconds, node.times * self.constants.collective_host_s)
        self.time.bubble_s += start - self.now_s
        self.time.optimizer_s += seconds
        self.now_s = start + seconds
        self._busy(stream, node.name, start, self.now_s)

    def _alone(self, node: Collective) -> None:
        end = self._send(node, self.price(node), self.now_s)
        self._expose(node.dimension, end - self.now_s)
        self.now_s = end

    def _send(self, node: Collective, seconds: float, ready: float) -> float:
        """On its stream, from when it is ready. Returns its end."""
        start = max(ready, self.free_s.get(node.dimension, 0.0))
        self.free_s[node.dimension] = end = start + seconds
        self._busy(node.dimension, node.name, start, end)
        return end

    def _expose(self, stream: str, seconds: float) -> None:
        self.time.exposed_s[stream] = self.time.exposed_s.get(stream, 0.0) + seconds

    def _busy(self, stream: str, name: str, start: float, end: float) -> None:
        self.time.busy_s[stream] = self.time.busy_s.get(stream, 0.0) + end - start
        self.others.append(Event(stream, name, start, end))


def of_all(node: Node) -> bool:
    """Whether ranks of all pipeline stages take part."""
    return isinstance(node, Collective) and node.dimension == "world"
