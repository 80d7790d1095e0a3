"""The events of a trace as calls, with what each waits for on its stream."""

from collections import defaultdict

from moestro.graph.trace.program import Call
from moestro.graph.trace.recorder import Event, Exchange, Op, Sync
from moestro.graph.trace.to_graph import collective, dimension_of, kernel, part_of
from moestro.graph.words import Collective, Node

COMPUTE, WAITS = "compute", "waits"


def calls_of(events: list[Event], start: int, world_size: int) -> tuple[Call, ...]:
    """Of those from `start` on. A collective has a stream of its own for each dimension, as communicators have; it
    begins when the stream that asked for it has come so far, and one that blocks holds that stream up."""
    calls = _Calls()
    for number, event in enumerate(events[start:], start):
        if isinstance(event, Sync):
            calls.sync(event)
        elif isinstance(event, Op):
            calls.add(number, event.place.stream, _stream(event.place.stream), node_of(event, world_size))
        else:
            node = node_of(event, world_size)
            assert isinstance(node, Collective)
            at = calls.add(number, event.place.stream, node.dimension, node, holds=event.blocking)
            calls.works[number] = at
    return tuple(calls.found)


def node_of(event: Op | Exchange, world_size: int) -> Node:
    part = part_of(event.place, "optimizer" if event.place.phase == "update" else "other")
    return kernel(event, part) if isinstance(event, Op) else collective(event, part, dimension_of(event, world_size))


def _stream(number: int) -> str:
    return COMPUTE if number == 0 else f"stream {number}"


class _Calls:
    def __init__(self) -> None:
        self.found: list[Call] = []
        self.works: dict[int, int] = {}  # of collectives: place among the events -> among the calls
        self._last: dict[int, int] = {}  # of each stream of the program, its last call
        self._due: dict[int, set[int]] = defaultdict(set)  # what a stream's next call waits for
        self._marks: dict[int, set[int]] = {}  # of events: what had been asked before them

    def add(self, number: int, asked_on: int, stream: str, node: Node, holds: bool = True) -> int:
        """holds: the stream that it was asked on goes on only after it."""
        needs, at = self._due.pop(asked_on, set()), len(self.found)
        if asked_on in self._last and stream != _stream(asked_on):
            needs = needs | {self._last[asked_on]}
        self.found.append(Call(node, node.name, stream, tuple(sorted(needs))))
        if stream == _stream(asked_on):
            self._last[asked_on] = at
        elif holds:
            self._due[asked_on] = {at}
        else:
            self._due[asked_on] = needs - {self._last.get(asked_on, -1)}
        return at

    def sync(self, event: Sync) -> None:
        if event.what == "wait":
            self._due[event.stream] |= self._so_far(event.other)
        elif event.what == "record event":
            self._marks[event.other] = self._so_far(event.stream)
        elif event.what == "wait event":
            self._due[event.stream] |= self._marks.get(event.other, set())
        elif event.what == "wait work":
            self._due[event.stream] |= {self.works[event.other]} if event.other in self.works else set()
        else:
            needs = self._marks.get(event.other) if event.other else None
            if needs is None:
                streams = [event.stream] if event.what == "read" else list({*self._last, *self._due})
                needs = set[int]().union(*map(self._so_far, streams))
            self.found.append(Call(None, event.what, WAITS, tuple(sorted(needs)), blocks=True))

    def _so_far(self, stream: int) -> set[int]:
        return ({self._last[stream]} if stream in self._last else set()) | self._due.get(stream, set())
