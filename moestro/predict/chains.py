"""A pass of a stage as a chain of links: computation between collectives, and what each waits for."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moestro.graph.words import Collective, Kernel, Node, Stage
from moestro.predict.constants import Constants
from moestro.predict.timeline import COMPUTE

# Collectives whose result the next operation works on: they hide behind another micro-batch or chunk only.
CARRIED = ("ep", "ep_between", "etp")
SHARDED = "sharding"  # part of the collectives that bring weights and take their gradients away, pass by pass
TO = " … "  # between the names of the first and the last kernel of a link


class Link(NamedTuple):
    """Kernels one after the other, or a collective. needs: places of earlier links of the chain.

    alone: nothing may be computed meanwhile. launches, host_s: kernels, and the host's seconds for launching all.
    """

    name: str
    stream: str
    seconds: float
    launches: float
    host_s: float
    needs: tuple[int, ...]
    alone: bool = False


Chain = tuple[Link, ...]


@dataclass(frozen=True)
class Writer:
    """price: seconds of all `times` of a node. chunks: in which experts take a layer's tokens."""

    price: Callable[[Node], float]
    constants: Constants
    chunks: int = 1

    def forward(self, stage: Stage) -> Chain:
        return self._write(run.piece.forward for run in stage.pieces for _ in range(run.times))

    def backward(self, stage: Stage, split: bool) -> Chain:
        """Layer by layer from the last: what is computed again, gradients of inputs and, unless they are split off, of
        weights."""
        pieces = []
        for run in reversed(stage.pieces):
            for layer in reversed(range(run.times)):
                again = run.piece.recompute if layer < run.recomputed else ()
                pieces.append((*again, *run.piece.backward, *(() if split else run.piece.weight)))
        return self._write(pieces)

    def weight(self, stage: Stage) -> Chain:
        return self._write(run.piece.weight for run in reversed(stage.pieces) for _ in range(run.times))

    def _write(self, pieces: Iterable[Sequence[Node]]) -> Chain:
        hand = _Hand(self)
        for nodes in pieces:
            hand.piece(nodes)
        return tuple(hand.links)


class _Hand:
    """Writes links down. tail: what the next one waits for; late: collectives beside which one kernel may run first."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.links: list[Link] = []
        self.tail: tuple[int, ...] = ()
        self.late: tuple[int, ...] = ()
        self.before: tuple[int, ...] = ()  # what the piece before this one waited for: weights are fetched so early
        self.open = False  # the last link is computation that the next kernel continues

    def piece(self, nodes: Sequence[Node]) -> None:
        before, self.before = self.before, self.tail
        at = 0
        while at < len(nodes):
            size = self._chunked(nodes, at)
            if size:
                self._chunks(nodes[at : at + size])
            else:
                self._add(nodes[at], 1, before)
            at += max(1, size)

    def _chunked(self, nodes: Sequence[Node], at: int) -> int:
        """How many nodes from here on experts run chunk by chunk, with exchanges that may hide; 0: none."""
        chunks, end = self.writer.chunks, at
        while chunks > 1 and end < len(nodes) and nodes[end].times == chunks:
            end += 1
        some = nodes[at:end]
        return len(some) if any(isinstance(node, Collective) and node.overlap for node in some) else 0

    def _chunks(self, nodes: Sequence[Node]) -> None:
        """Each chunk by itself, after what came before all of them; what comes next waits for all."""
        start, ends = self.tail + self.late, tuple[int, ...]()
        for _ in range(self.writer.chunks):
            self.tail, self.late, self.open = start, (), False
            for node in nodes:
                self._add(node, self.writer.chunks, ())
            ends += self.tail + self.late
        self.tail, self.late, self.open = ends, (), False

    def _add(self, node: Node, chunks: int, before: tuple[int, ...]) -> None:
        if isinstance(node, Kernel):
            self._kernel(node, chunks)
        else:
            self._collective(node, chunks, before)

    def _kernel(self, node: Kernel, chunks: int) -> None:
        seconds, launches = self.writer.price(node) / chunks, node.times * node.launches / chunks
        host_s = launches * self.writer.constants.launch_s
        if self.open and not self.late:
            last = self.links[-1]
            self.links[-1] = last._replace(
                name=f"{last.name.partition(TO)[0]}{TO}{node.name}",
                seconds=last.seconds + seconds,
                launches=last.launches + launches,
                host_s=last.host_s + host_s,
            )
            return
        self._append(Link(node.name, COMPUTE, seconds, launches, host_s, self.tail))
        self.tail, self.late, self.open = (len(self.links) - 1, *self.late), (), not self.late

    def _collective(self, node: Collective, chunks: int, before: tuple[int, ...]) -> None:
        seconds, times = self.writer.price(node) / chunks, node.times / chunks
        host_s, fetched = times * self.writer.constants.collective_host_s, node.op == "all_gather"
        sharded = node.overlap and node.part == SHARDED
        needs = before if sharded and fetched else self.tail + self.late
        place = len(self.links)
        self._append(Link(node.name, node.dimension, seconds, times, host_s, needs, alone=not node.overlap))
        if sharded:  # weights are waited for; nothing waits for their gradients
            self.tail += (place,) if fetched else ()
        elif node.overlap and node.dimension not in CARRIED:
            self.late += (place,)
        else:
            self.tail, self.late = (place,), ()

    def _append(self, link: Link) -> None:
        self.links.append(link)
        self.open = False
