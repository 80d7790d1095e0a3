"""A traced program in words that need no PyTorch: its calls in order with what each waits for, and its memory."""

from dataclasses import dataclass, field
from typing import NamedTuple

from moestro.graph.words import Node, StepGraph


class Call(NamedTuple):
    """What the host asks of a stream. needs: places of earlier calls that must have ended. node None: nothing runs;
    blocks: the host waits for all that it needs."""

    node: Node | None
    name: str
    stream: str  # "compute", "stream N" of the program's own, or "DIMENSION" of a collective
    needs: tuple[int, ...] = ()
    blocks: bool = False


KINDS = ("parameters", "gradients", "optimizer", "activations", "temporary")


@dataclass(frozen=True)
class TracedMemory:
    """Bytes of one rank. init, first_step, steady: peaks before the first step, in it, and in the last one (which is
    the first where there is only one). by_kind: what is there at the peak of the last step, of KINDS. allocated and
    reserved: of the whole trace, in blocks and in segments of a caching allocator."""

    init: int
    first_step: int
    steady: int
    by_kind: dict[str, int] = field(default_factory=dict)
    allocated: int = 0
    reserved: int = 0


@dataclass(frozen=True)
class Traced:
    """The last step of a program. The graph's nodes are the calls', sorted into passes."""

    graph: StepGraph
    calls: tuple[Call, ...]
    memory: TracedMemory
    steps: int = 1  # of which the last is taken
    is_routed: bool = False  # the program asked for an order of scores, which the routing model gave
    build_s: float = 0.0  # that it took to trace: before the first step …
    step_s: float = 0.0  # … and the last step
