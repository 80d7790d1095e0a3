"""What misaligned widths cost: factors on the time of products, by rule or as measured, and a step priced with them.

The shipped records hold aligned products only, so the curves of a device say nothing of n = 10,922. The rule does: with
rows that begin off multiples of 16 bytes a product takes as much longer as the one published pair says; and widths are
asked to be multiples of 128 bytes, as arXiv 2401.14489 has it for devices since the A100. A measured profile with a
sweep over neighbouring widths stands in the place of both.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from moestro.config.plan import Plan, Workload
from moestro.graph.count import count_step
from moestro.graph.words import Kernel, Node, Piece, StepGraph
from moestro.hardware.curves.alignment import alignment_table
from moestro.hardware.devices import DTYPE_BYTES
from moestro.hardware.profile import Sample
from moestro.measure.sweeps import find_sweeps
from moestro.predict.memory import memory_of
from moestro.predict.predict import compose, device_bytes, peak_flops, price_step
from moestro.predict.target import Target
from moestro.predict.words import TimeBreakdown

LINE_BYTES = 128  # rows of a matrix should begin on multiples of it
VECTOR_BYTES = 16  # and must on multiples of this, for the fast kernels
# Feed-forward of hidden size 4,096 on an H100, bf16: 398.4 TFLOP/s at width 10,944 and 272.7 at 10,922 (measured by the
# authors of arXiv 2401.14489 for the ML engineering handbook).
BELOW_VECTOR = 398.4 / 272.7
# Flash attention's kernels are made for heads of multiples of this (FlashAttention-2's list, recalled) and pad others.
HEAD_STEP = 32
LARGEST = 256
REACHED = 0.98  # of the best alignment's rate, from which on a width counts as aligned


@dataclass(frozen=True)
class Alignment:
    """slower: largest power of two that divides a width -> time over that of an aligned one; powers not listed take the
    next smaller one's. line_bytes: multiples of it are asked for; with `step`, a measured number of elements instead.
    """

    basis: str
    slower: Mapping[int, float] = field(default_factory=dict)  # of elements; empty: by the rule, in bytes
    step: int | None = None
    head_step: int = HEAD_STEP  # heads are padded to multiples of it; 1: the device's attention curve has it

    def step_of(self, dtype: str) -> int:
        """Elements of which a width should be a multiple."""
        return self.step or max(1, int(LINE_BYTES / DTYPE_BYTES[dtype]))

    def factor(self, width: int, dtype: str) -> float:
        """Time of a product with this width over one with an aligned width, 1 or more."""
        power = min(width & -width, LARGEST)
        if self.slower:
            known = [each for each in self.slower if each <= power]
            return self.slower[max(known)] if known else max(self.slower.values())
        return BELOW_VECTOR if power * DTYPE_BYTES[dtype] < VECTOR_BYTES else 1.0

    def padded_head(self, head_dim: int) -> int:
        return -(-head_dim // self.head_step) * self.head_step


RULE = Alignment("by rule (2401.14489; one published pair of widths)")


def measured_alignment(samples: Iterable[Sample], dtype: str) -> Alignment:
    """By the profile's sweep over n in this dtype, where it has one; else the rule."""
    samples = list(samples)
    sweeps = {sweep.name: sweep for sweep in find_sweeps(samples) if sweep.dtype == dtype}
    head_step = 1 if "head_dim" in sweeps else HEAD_STEP
    table = alignment_table(sweeps["gemm_n"].samples, "n") if "gemm_n" in sweeps else {}
    if len(table) < 2:
        return replace(RULE, head_step=head_step)
    step = next(power for power, share in table.items() if share >= REACHED)
    slower = {power: 1.0 if power >= step else max(1.0, 1 / share) for power, share in table.items()}
    return Alignment(f"measured: a sweep of {len(sweeps['gemm_n'].samples)} widths in {dtype}", slower, step, head_step)


def aligned_graph(graph: StepGraph, alignment: Alignment) -> StepGraph:
    """The same step, whose kernels take as much longer as their widths make them (told as more of them)."""
    made: dict[Piece, Piece] = {}
    stages = tuple(
        replace(stage, pieces=tuple(run._replace(piece=_piece(run.piece, alignment, made)) for run in stage.pieces))
        for stage in graph.stages
    )
    return replace(graph, stages=stages)


def _piece(piece: Piece, alignment: Alignment, made: dict[Piece, Piece]) -> Piece:
    if piece not in made:
        made[piece] = replace(
            piece,
            forward=_nodes(piece.forward, alignment),
            backward=_nodes(piece.backward, alignment),
            recompute=_nodes(piece.recompute, alignment),
            weight=_nodes(piece.weight, alignment, of_weights=True),
            base=None if piece.base is None else _piece(piece.base, alignment, made),
        )
    return made[piece]


def _nodes(nodes: Iterable[Node], alignment: Alignment, of_weights: bool = False) -> tuple[Node, ...]:
    return tuple(_slowed(node, alignment, of_weights) if isinstance(node, Kernel) else node for node in nodes)


def _slowed(kernel: Kernel, alignment: Alignment, of_weights: bool) -> Kernel:
    """Routers are left as they are: small, and as wide as there are experts."""
    if kernel.op in ("attention", "attention_backward"):
        *sizes, qk_dim, v_dim = kernel.dims
        padded = alignment.padded_head(qk_dim), alignment.padded_head(v_dim)
        return kernel._replace(dims=(*sizes, *padded))
    if kernel.op not in ("gemm", "grouped_gemm") or kernel.part == "router":
        return kernel
    # Rows begin at multiples of a width of the model; how many rows there are does not matter.
    widths = kernel.dims[1:3] if of_weights and kernel.op == "gemm" else kernel.dims[2:]
    slower = max(alignment.factor(width, kernel.dtype) for width in widths)
    return kernel if slower == 1 else kernel._replace(times=kernel.times * slower)


@dataclass(frozen=True)
class Priced:
    """A step of a shape. needed_bytes: of the fullest device; fits: None where its size is not known."""

    time: TimeBreakdown
    model_flops: float
    tokens_per_s_per_device: float
    mfu: float | None
    needed_bytes: float
    fits: bool | None

    @property
    def step_s(self) -> float:
        return self.time.total


def price_shape(workload: Workload, plan: Plan, target: Target, alignment: Alignment = RULE) -> Priced:
    """As predict_step, with what misaligned widths cost.

    Raises:
        MoestroError: as predict_step.
    """
    graph = count_step(workload, plan)
    constants = target.constants_for(workload, plan.world_size)
    costs = price_step(aligned_graph(graph, alignment), workload, plan, target)
    time = compose(costs, plan, target, constants)
    needed = memory_of(graph, workload, plan, target.place.device)[0].needed
    there, peak = device_bytes(target, plan.world_size), peak_flops(workload, target)
    devices = plan.world_size
    return Priced(
        time,
        graph.model_flops,
        graph.tokens / time.total / devices,
        None if peak is None else graph.model_flops / (time.total * devices * peak),
        needed,
        None if there is None else needed <= there,
    )
