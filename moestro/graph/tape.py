"""Writes down what a chunk of layers does: forward in order, backward in the opposite order, weights, saved bytes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from moestro.config.plan import Plan, Workload
from moestro.graph.words import Collective, CollectiveOp, Dimension, Kernel, Matrices, Node, Parameters

ACTIVATION_BYTES = {"fp32": 4, "tf32": 4}  # of other precisions: 2
# Of a flash attention kernel: forward has two products, backward five (scores again, dV, dP, dQ, dK).
BACKWARD_PRODUCTS = 2.5
# Backward of a gather is the reduction of its gradient and the other way round.
_BACK: dict[CollectiveOp, CollectiveOp] = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
    "all_reduce": "all_reduce",
}


def activation_bytes(workload: Workload) -> int:
    """Of one number of an activation."""
    return ACTIVATION_BYTES.get(workload.precision, 2)


def activation_dtype(workload: Workload) -> str:
    if activation_bytes(workload) == 4:
        return "fp32"
    return "fp16" if workload.precision == "fp16" else "bf16"


def stream_bytes(workload: Workload) -> int:
    """What goes from stage to stage of a token: the hidden state, and a router's state where layers pass one on."""
    model = workload.model
    router = model.moe.router if model.moe else None
    state = router.hidden_size if router is not None and router.kind == "zaya" and router.carry_state else 0
    return (model.hidden_size + state) * (4 if model.residual_fp32 else activation_bytes(workload))


def weight_bytes(workload: Workload) -> int:
    """Of one weight as it is gathered and multiplied with."""
    return 4 if workload.trainer == "moestro" else activation_bytes(workload)


def expert_shards(workload: Workload, plan: Plan) -> int:
    """Ranks among which optimizer state of an expert (and, by `zero`, gradients and weights) is split."""
    if workload.trainer == "moestro" and plan.zero >= 2:
        return max(1, plan.shard_ranks // plan.ep)
    return min(plan.shard_ranks, plan.expert_data_ranks)


@dataclass
class Tape:
    """Of one rank and one micro-batch. `width` is the bytes of an activation's element."""

    workload: Workload
    plan: Plan
    forward: list[Node] = field(default_factory=list)
    backward_groups: list[list[Node]] = field(default_factory=list)  # in the order of forward
    weight: list[Node] = field(default_factory=list)
    saved: float = 0.0
    transient: float = 0.0  # of bytes that are only there for a while
    cheap_saved: float = 0.0  # of saved, what selective recomputation gives up …
    cheap_nodes: list[Node] = field(default_factory=list)  # … and computes again
    adapters: int = 0  # parameters
    dense: int = 0
    replicated: int = 0
    expert: int = 0
    matrices: int = 0  # of dense and expert, those of Muon
    shapes: Counter[tuple[int, int, bool]] = field(default_factory=Counter)  # of matrices: rows, columns, of an expert
    ours: bool = field(init=False)  # our trainer's habits, not Megatron's
    repeat: int = 1  # of what is written now: as many equal ones
    width: int = field(init=False)
    activation_dtype: str = field(init=False)

    def __post_init__(self) -> None:
        self.width = activation_bytes(self.workload)
        self.ours = self.workload.trainer == "moestro"
        self.activation_dtype = activation_dtype(self.workload)

    def save(self, elements: float, width: int | None = None, cheap: bool = False) -> None:
        size = elements * (self.width if width is None else width)
        self.saved += size
        if cheap:
            self.cheap_saved += size

    def own(
        self,
        rows: int,
        columns: int,
        times: int = 1,
        *,
        cut: Literal["rows", "columns"] | None = None,
        expert: bool = False,
        muon: bool = True,
    ) -> None:
        """`times` matrices of rows × columns that this rank holds. cut: the axis of which each of the tensor ranks (for
        experts: etp) holds a part; None: they hold the same."""
        self._hold(times * rows * columns, cut is not None, expert)
        if muon:
            self.matrices += times * rows * columns
            parts = self.plan.etp if expert else self.plan.tp
            whole = (rows * parts if cut == "rows" else rows, columns * parts if cut == "columns" else columns)
            self.shapes[(*whole, expert)] += times

    def own_vectors(self, numbers: int, *, cut: bool = False, expert: bool = False) -> None:
        """Norms, biases and other parameters that AdamW updates under Muon too."""
        self._hold(numbers, cut, expert)

    def _hold(self, numbers: int, cut: bool, expert: bool) -> None:
        if expert:
            self.expert += numbers
        else:
            self.dense += numbers
            self.replicated += 0 if cut else numbers

    def parameters(self) -> Parameters:
        if self.workload.adapter_rank is not None:
            return Parameters(self.dense, self.expert, 0, self.adapters, self.replicated)
        shapes = tuple(Matrices(rows, columns, n, expert) for (rows, columns, expert), n in self.shapes.items())
        return Parameters(self.dense, self.expert, self.matrices, self.dense + self.expert, self.replicated, shapes)

    def gemm(
        self,
        part: str,
        name: str,
        m: int,
        n: int,
        k: int,
        *,
        batch: int = 1,
        dtype: str | None = None,
        detached: bool = False,
    ) -> None:
        """out [batch, m, n] = in [batch, m, k] · weight [batch, k, n], with the gradients of both.

        detached: nothing before the input learns from it. With adapters the weight is frozen: instead of its gradient
        there are two thin products.
        """
        if self.ours and self.width == 2 and dtype is None and part != "head":
            self.saved += float(2 * batch * n * k * self.repeat)  # the weight in 16 bits, made for each micro-batch
        dtype = dtype or self.workload.precision
        self.forward.append(self._product("gemm", part, name, (batch, m, n, k), dtype))
        if not detached:
            self.backward_groups.append([self._product("gemm", part, f"{name} dgrad", (batch, m, k, n), dtype)])
        if self.workload.adapter_rank is None:
            self.weight.append(self._product("gemm", part, f"{name} wgrad", (batch, k, n, m), dtype))
        else:
            self._adapter("gemm", part, name, m, n, k, batch)

    def weight_only(self, part: str, name: str, m: int, n: int, k: int) -> None:
        """A product [m, k] · [k, n] that only gradients of weights need."""
        self.weight.append(self._product("gemm", part, name, (1, m, n, k), self.activation_dtype))

    def grouped(self, part: str, name: str, groups: int, rows: int, n: int, k: int) -> None:
        """The experts' products: `rows` rows in all, those of each of `groups` experts by its own weight [k, n]."""
        dtype = self.workload.precision
        self.forward.append(self._product("grouped_gemm", part, name, (groups, rows, n, k), dtype))
        self.backward_groups.append([self._product("grouped_gemm", part, f"{name} dgrad", (groups, rows, k, n), dtype)])
        if self.workload.adapter_rank is None:
            self.weight.append(self._product("grouped_gemm", part, f"{name} wgrad", (groups, rows, n, k), dtype))
        else:
            self._adapter("grouped_gemm", part, name, rows, n, k, groups)

    def attention(
        self, dims: tuple[int, ...], name: str = "attention", seen: float | None = None, part: str = "attention"
    ) -> None:
        """dims as in words.py. seen: keys that a query looks at on average; None: half of all, as causality leaves
        it, also to the queries of a context-parallel rank."""
        batch, seq_q, seq_k, heads, kv_heads, qk_dim, v_dim = dims
        flops = 2.0 * batch * heads * seq_q * ((seq_k + 1) / 2 if seen is None else seen) * (qk_dim + v_dim)
        io = self.width * batch * (seq_q * heads * (qk_dim + v_dim) + seq_k * kv_heads * (qk_dim + v_dim))
        scores = 2.0 * batch * heads * seq_q * seq_k * self.width if self.workload.attention_kernel == "math" else 0.0
        dtype = self.activation_dtype
        self.forward.append(Kernel("attention", part, name, dims, dtype, flops, io + 3 * scores, self.repeat))
        backward = Kernel(
            "attention_backward",
            part,
            f"{name} backward",
            dims,
            dtype,
            flops * (BACKWARD_PRODUCTS if self.workload.attention_kernel == "flash" else 2.0),
            2 * io + 4 * scores,
            self.repeat,
        )
        self.backward_groups.append([backward])
        if self.workload.attention_kernel == "math":
            self.cheap_nodes.append(self.forward[-1])

    def memory(
        self,
        part: str,
        name: str,
        elements: float,
        passes: float,
        back: float,
        launches: int = 1,
        width: int | None = None,
        flops: float = 0.0,
    ) -> None:
        """An operation bound by memory: `passes` and `back` are how often its elements are read or written."""
        width = self.width if width is None else width
        if not self.workload.fused_kernels and launches == 1:
            launches = max(1, round(passes))
        size = (round(elements),)
        dtype = self.activation_dtype
        moved = elements * width
        self.forward.append(Kernel("memory", part, name, size, dtype, flops, moved * passes, self.repeat, launches))
        if back:
            name = f"{name} backward"
            node = Kernel("memory", part, name, size, dtype, 2 * flops, moved * back, self.repeat, launches)
            self.backward_groups.append([node])

    def norm(self, part: str, name: str, rows: int, size: int, *, stream: bool = False) -> None:
        """Of `rows` vectors of `size`, of the residual stream or not. It keeps its input and a scale for each row; what
        it gives is kept by the product that takes it."""
        self.memory(part, name, rows * size, 2, 3)
        self.cheap_nodes.append(self.forward[-1])
        self.save_normed(rows, size, stream)
        self.save(rows, width=4)

    def save_normed(self, rows: float, size: int, stream: bool = False) -> None:
        """The input of a norm."""
        wide = self.ours or (stream and self.workload.model.residual_fp32)
        self.save(rows * size, width=4 if wide else None)

    def dropped(self, elements: float) -> None:
        """Dropout's mask, where there is dropout: a byte for each element."""
        if self.workload.dropout:
            self.save(elements / (self.plan.tp if self.plan.sequence_parallel else 1), width=1)

    def activation(self, part: str, rows: float, width: int, matrices: int) -> None:
        """The activation between two products: of gate and up (or of one), both kept, to the input of the second."""
        self.memory(part, "activation", rows * width, matrices, 2 * matrices - 1)
        self.cheap_nodes.append(self.forward[-1])
        self.save(rows * (matrices - 1) * width)
        self.save(rows * width, cheap=True)

    def exchange(
        self,
        op: CollectiveOp,
        part: str,
        name: str,
        dimension: Dimension,
        ranks: int,
        elements: float,
        *,
        overlap: bool = False,
        back: bool = True,
        extra: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """A collective over activations and its mirror image in the backward pass; nothing on one rank.

        extra: further bytes, in forward and in backward."""
        if ranks == 1:
            return
        bytes_, dtype = elements * self.width, self.activation_dtype
        there = bytes_ + extra[0]
        self.forward.append(Collective(op, part, name, dimension, ranks, there, dtype, self.repeat, overlap))
        if back:
            mirror = Collective(
                _BACK[op], part, f"{name} backward", dimension, ranks, bytes_ + extra[1], dtype, self.repeat, overlap
            )
            self.backward_groups.append([mirror])

    def enter_tensor(self, part: str, tokens: int, hidden: int) -> None:
        """Tensor parallelism needs all of a context rank's tokens before its first product."""
        plan = self.plan
        if plan.sequence_parallel:
            self.exchange("all_gather", part, "tokens in", "tp", plan.tp, tokens * hidden, overlap=plan.overlap_tensor)
            if (
                plan.tp > 1 and not self.ours
            ):  # only the rank's own tokens are kept: the weight's gradient gathers the others again
                again = Collective(
                    "all_gather", part, "tokens in again", "tp", plan.tp, tokens * hidden * self.width,
                    self.activation_dtype, self.repeat, True,
                )  # fmt: skip
                self.backward_groups[-1].append(again)
        elif plan.tp > 1:  # the input is whole on every rank; its gradient is summed
            summed = Collective(
                "all_reduce", part, "tokens in backward", "tp", plan.tp, tokens * hidden * self.width,
                self.activation_dtype, self.repeat, plan.overlap_tensor,
            )  # fmt: skip
            self.backward_groups.append([summed])

    def save_entered(self, tokens: int, hidden: int) -> None:
        """The input of a tensor-parallel region; selective recomputation makes it again from the norm's."""
        whole = self.ours or not self.plan.sequence_parallel
        self.save(tokens * hidden / (1 if whole else self.plan.tp), cheap=True)

    def leave_tensor(self, part: str, tokens: int, hidden: int) -> None:
        """The sum over the tensor ranks of a region's last product."""
        plan, size = self.plan, tokens * hidden
        if plan.sequence_parallel:
            self.exchange("reduce_scatter", part, "tokens out", "tp", plan.tp, size, overlap=plan.overlap_tensor)
        else:
            self.exchange(
                "all_reduce", part, "tokens out", "tp", plan.tp, size, overlap=plan.overlap_tensor, back=False
            )

    def backward(self) -> tuple[Node, ...]:
        return tuple(node for group in reversed(self.backward_groups) for node in group)

    def _product(self, op: str, part: str, name: str, dims: Sequence[int], dtype: str) -> Kernel:
        if op == "gemm":
            batch, m, n, k = dims
            moved = self.width * batch * (m * k + k * n + m * n)
            return Kernel("gemm", part, name, (batch, m, n, k), dtype, 2.0 * batch * m * n * k, moved, self.repeat)
        groups, rows, n, k = dims
        moved = self.width * (rows * k + groups * k * n + rows * n)
        return Kernel("grouped_gemm", part, name, (groups, rows, n, k), dtype, 2.0 * rows * n * k, moved, self.repeat)

    def _adapter(self, op: str, part: str, name: str, m: int, n: int, k: int, batch: int) -> None:
        """Products in [m, k] · [k, rank] · [rank, n] beside a frozen one. batch: of products, or of groups."""
        rank = self.workload.adapter_rank
        assert rank is not None
        dtype = self.activation_dtype
        for label, columns, inner in (("adapter in", rank, k), ("adapter out", n, rank)):
            for suffix, dims in (
                ("", (batch, m, columns, inner)),
                (" dgrad", (batch, m, inner, columns)),
                (" wgrad", (batch, m, columns, inner) if op == "grouped_gemm" else (batch, inner, columns, m)),
            ):
                node = self._product(op, part, f"{name} {label}{suffix}", dims, dtype)
                if suffix == "":
                    self.forward.append(node)
                elif suffix == " dgrad":
                    self.backward_groups.append([node])
                else:
                    self.weight.append(node)
        self.save(m * rank * (batch if op == "gemm" else 1))
        numbers = batch * rank * (n + k)
        self.adapters += numbers
        self._hold(numbers, True, op == "grouped_gemm")
