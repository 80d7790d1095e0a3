"""The StepGraph: what a rank of each pipeline stage computes and sends in one step, in program order.

Counting (`count.py`) and tracing (`trace.py`) both end here; pricing and simulation begin here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

# What a kernel's `dims` are:
#   gemm              (batch, m, n, k)
#   grouped_gemm      (groups, rows of all groups together, n, k)      rows fall on the groups as Workload.routing says
#   attention         (batch, seq_q, seq_k, heads, kv_heads, qk_dim, v_dim)    causal; forward
#   attention_backward  the same
#   memory            (elements,)     bound by memory: norms, activations, additions, casts, optimizer, scatter …
KernelOp = Literal["gemm", "grouped_gemm", "attention", "attention_backward", "memory"]
CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]
# ep_between: of a two-hop exchange, between the nodes; its "ep" is then inside a node.
Dimension = Literal["tp", "cp", "ep", "ep_between", "etp", "dp", "edp", "pp", "world"]


class Kernel(NamedTuple):
    """`times` equal operations. flops and bytes_moved are of one of them.

    A multiply-add is 2 FLOPs, causal attention is counted by half; bytes are those that must cross the memory once.
    part: embedding, attention, router, dispatch, experts, shared experts, dense, norms, head, loss, optimizer.
    """

    op: KernelOp
    part: str
    name: str  # what it is: "qkv", "scores", "gate_up" …
    dims: tuple[int, ...]
    dtype: str
    flops: float
    bytes_moved: float
    times: float = 1
    launches: int = 1  # kernels that a device launches for one of them


class Collective(NamedTuple):
    """`times` equal collectives. bytes: as moestro.hardware.curves.busbw defines them for each operation."""

    op: CollectiveOp
    part: str
    name: str
    dimension: Dimension
    ranks: int
    bytes: float
    dtype: str
    times: float = 1
    # What may run meanwhile: nothing, or the computation around it (then a simulator decides how much is hidden).
    overlap: bool = False


Node = Kernel | Collective


class Matrices(NamedTuple):
    """`times` equal matrices that Muon orthogonalises, whole (of experts: each by itself), wherever they are cut."""

    rows: int
    columns: int
    times: int
    expert: bool


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters that one rank holds (before ZeRO splits anything)."""

    dense: int = 0  # replicated over dp · cp
    expert: int = 0  # replicated over the expert data ranks
    matrices: int = 0  # of both: in matrices that Muon takes
    trained: int = 0  # of both: with gradients and optimizer state
    replicated: int = 0  # of dense: whole on every tp rank, not a part
    shapes: tuple[Matrices, ...] = ()  # of `matrices`

    @property
    def total(self) -> int:
        return self.dense + self.expert


@dataclass(frozen=True)
class Saved:
    """Bytes of activations that a micro-batch leaves behind for its backward pass, on one rank of this stage."""

    kept: float  # with the plan's recomputation
    without_recompute: float
    transient: float  # the largest further need while one layer computes (recomputed activations, gathered weights …)


@dataclass(frozen=True, eq=False)
class Piece:
    """What one layer, the embedding or the head does in one micro-batch.

    Counting makes one object for all equal layers, and gives the same object again to later graphs in which nothing
    changes for them. Pieces are equal by identity, so whoever prices many graphs keeps a `dict[Piece, …]` and walks the
    nodes of a piece once; stages whose `pieces` are equal cost the same.
    """

    forward: tuple[Node, ...]
    backward: tuple[Node, ...] = ()
    weight: tuple[Node, ...] = ()
    recompute: tuple[Node, ...] = ()  # before backward, where the stage recomputes it
    saved: float = 0.0
    kept: float = 0.0  # of saved, where it is recomputed
    transient: float = 0.0  # further bytes at its worst moment: chunks of experts that are computed again
    parameters: Parameters = Parameters()
    # The same with nothing recomputed; or with its weights whole: it does without the nodes of part "sharding".
    base: "Piece | None" = None


class Run(NamedTuple):
    """`times` equal pieces of a stage one after the other, of which the first `recomputed` are computed again."""

    piece: Piece
    times: int = 1
    recomputed: int = 0


@dataclass(frozen=True)
class Stage:
    """One chunk of layers on a pipeline rank, for one micro-batch. Stage i of pp · vpp; the rank is i % pp unless the
    schedule is V-shaped.

    `pieces` is the short form, in the order of forward; the four tuples of nodes are made of it when asked for.
    backward holds the gradients of inputs, weight those of weights: schedules that do not split them run both.
    recompute: what recomputation adds before the backward pass.
    """

    index: int
    rank: int
    layers: tuple[int, ...]
    parameters: Parameters
    saved: Saved
    pieces: tuple[Run, ...]
    send_bytes: float = 0.0  # to the next stage, each micro-batch, each direction

    @cached_property
    def forward(self) -> tuple[Node, ...]:
        return tuple(node for run in self.pieces for node in run.piece.forward * run.times)

    @cached_property
    def backward(self) -> tuple[Node, ...]:
        return tuple(node for run in reversed(self.pieces) for node in run.piece.backward * run.times)

    @cached_property
    def weight(self) -> tuple[Node, ...]:
        return tuple(node for run in reversed(self.pieces) for node in run.piece.weight * run.times)

    @cached_property
    def recompute(self) -> tuple[Node, ...]:
        return tuple(node for run in self.pieces for node in run.piece.recompute * run.recomputed)


@dataclass(frozen=True)
class RankStep:
    """What a pipeline rank does once a step."""

    rank: int
    before: tuple[Node, ...]  # gather of weights that the optimizer of the last step left split
    gradients: tuple[Node, ...]  # reductions after (or, overlapped, during) the last backward pass
    update: tuple[Node, ...]  # norm, clipping, optimizer


@dataclass(frozen=True)
class StepGraph:
    world_size: int
    micro_batches: int
    tokens: int  # of the global batch
    model_flops: float  # of the step on all ranks together, recomputation not counted (as MFU does)
    stages: tuple[Stage, ...]
    ranks: tuple[RankStep, ...]
    notes: tuple[str, ...] = field(default=())  # what is approximated or left out

    def nodes(self) -> Iterator[tuple[Node, float]]:
        """Every node with how often it runs in the step, over one rank of each stage."""
        for stage in self.stages:
            for node in (*stage.forward, *stage.recompute, *stage.backward, *stage.weight):
                yield node, node.times * self.micro_batches
        for rank in self.ranks:
            for node in (*rank.before, *rank.gradients, *rank.update):
                yield node, node.times
