"""A stage's nodes as the operations that a host calls, with what each waits for: what predict.timeline walks."""

from collections.abc import Callable, Iterator

from moestro.graph.words import Collective, Node, Stage, StepGraph
from moestro.predict.constants import Constants
from moestro.predict.timeline import HostTimes, Op

BUCKETS = 8  # in which gradients are reduced while backward computes


def stage_ops(graph: StepGraph, stage: int, price: Callable[[Node], float], constants: Constants) -> tuple[Op, ...]:
    """One micro-batch of a stage, forward and all of backward, with what its rank does once a step around them.

    price: seconds of one node. A collective waits for the computation before it and holds up what comes next; one that
    may overlap holds up only the end of its pass. Reductions of gradients that overlap follow backward in even parts.
    """
    here = graph.stages[stage]
    rank = graph.ranks[here.rank]
    program = _Program(price, constants)
    for node in (*rank.before, *here.forward):
        program.add(node)
    program.join()
    behind = [node for node in rank.gradients if isinstance(node, Collective) and node.overlap]
    backward, sent = tuple(_backward(here)), 0
    for number, node in enumerate(backward, 1):
        program.add(node)
        due = BUCKETS * number // len(backward)
        for reduction in behind * (due - sent):
            program.add(reduction._replace(times=reduction.times / BUCKETS))
        sent = due
    for node in rank.gradients:
        if not (isinstance(node, Collective) and node.overlap):
            program.add(node)
    program.join()
    for node in rank.update:
        program.add(node)
    return tuple(program.ops)


def _backward(stage: Stage) -> Iterator[Node]:
    """Layer by layer from the last: what is computed again, gradients of inputs, gradients of weights."""
    for run in reversed(stage.pieces):
        for layer in reversed(range(run.times)):
            if layer < run.recomputed:
                yield from run.piece.recompute
            yield from run.piece.backward
            yield from run.piece.weight


class _Program:
    """Writes nodes down as operations, with what each waits for."""

    def __init__(self, price: Callable[[Node], float], constants: Constants) -> None:
        self.ops: list[Op] = []
        self._price, self._constants = price, constants
        self._computed: tuple[int, ...] = ()  # the last computation
        self._sent: tuple[int, ...] = ()  # the last collective, for which what comes next waits
        self._behind: tuple[int, ...] = ()  # collectives that only the end of the pass waits for

    def add(self, node: Node) -> None:
        seconds, place = self._price(node) * node.times, (len(self.ops),)
        if not isinstance(node, Collective):
            launches = node.times * node.launches
            count = max(1, round(launches))
            host = HostTimes(t4_s=self._constants.launch_s * launches / count)
            self.ops.append(Op(node.name, (seconds / count,) * count, host, needs=self._sent))
            self._computed, self._sent = place, ()
            return
        host = HostTimes(t4_s=self._constants.collective_host_s * node.times)
        needs = self._computed + self._sent
        self.ops.append(Op(node.name, (seconds,), host, node.dimension, needs, group=node.dimension))
        if node.overlap:
            self._behind += place
        else:
            self._sent = place

    def join(self) -> None:
        """What comes next waits for everything before it."""
        self._sent, self._behind = self._sent + self._behind, ()
