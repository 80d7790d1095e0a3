"""Writes down what a chunk of layers does: forward in order, backward in the opposite order, weights, saved bytes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from moestro.config.plan import Plan, Workload
from moestro.graph.words import Collective, CollectiveOp, Dimension, Kernel, Node

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


@dataclass
class Tape:
    """Of one rank and one micro-batch. `width` is the bytes of an activation's element."""

    workload: Workload
    plan: Plan
    forward: list[Node] = field(default_factory=list)
    backward_groups: list[list[Node]] = field(default_factory=list)  # in the order of forward
    weight: list[Node] = field(default_factory=list)
    saved: float = 0.0
    cheap_saved: float = 0.0  # of saved, what selective recomputation gives up …
    cheap_nodes: list[Node] = field(default_factory=list)  # … and computes again
    adapters: int = 0  # parameters
    dense: int = 0
    expert: int = 0
    matrices: int = 0

    @property
    def width(self) -> int:
        return ACTIVATION_BYTES.get(self.workload.precision, 2)

    @property
    def activation_dtype(self) -> str:
        precision = self.workload.precision
        return precision if precision in ("fp32", "fp16") else "fp32" if precision == "tf32" else "bf16"

    def save(self, elements: float, width: int | None = None, cheap: bool = False) -> None:
        size = elements * (self.width if width is None else width)
        self.saved += size
        if cheap:
            self.cheap_saved += size

    def own(self, matrices: int, vectors: int = 0, expert: bool = False) -> None:
        """Parameters that this rank holds."""
        self.matrices += matrices
        if expert:
            self.expert += matrices + vectors
        else:
            self.dense += matrices + vectors

    def gemm(self, part: str, name: str, m: int, n: int, k: int, *, batch: int = 1, dtype: str | None = None) -> None:
        """out [batch, m, n] = in [batch, m, k] · weight [batch, k, n], with the gradients of both.

        With adapters the weight is frozen: its gradient is left out, and the two thin products are added by the caller.
        """
        dtype = dtype or self.workload.precision
        self.forward.append(self._product("gemm", part, name, (batch, m, n, k), dtype))
        self.backward_groups.append([self._product("gemm", part, f"{name} dgrad", (batch, m, k, n), dtype)])
        if self.workload.adapter_rank is None:
            self.weight.append(self._product("gemm", part, f"{name} wgrad", (batch, k, n, m), dtype))
        else:
            self._adapter(part, name, m, n, k, batch)

    def grouped(self, part: str, name: str, groups: int, rows: int, n: int, k: int) -> None:
        """The experts' products: `rows` rows in all, those of each of `groups` experts by its own weight [k, n]."""
        dtype = self.workload.precision
        self.forward.append(self._product("grouped_gemm", part, name, (groups, rows, n, k), dtype))
        self.backward_groups.append([self._product("grouped_gemm", part, f"{name} dgrad", (groups, rows, k, n), dtype)])
        if self.workload.adapter_rank is None:
            self.weight.append(self._product("grouped_gemm", part, f"{name} wgrad", (groups, rows, n, k), dtype))

    def attention(self, dims: tuple[int, ...], name: str = "attention") -> None:
        """dims as in words.py. Causal; a context-parallel rank's queries see half of all keys on average."""
        batch, seq_q, seq_k, heads, kv_heads, qk_dim, v_dim = dims
        flops = batch * heads * seq_q * (seq_k + 1) * (qk_dim + v_dim)  # 2 FLOPs · half of the keys
        io = self.width * batch * (seq_q * heads * (qk_dim + v_dim) + seq_k * kv_heads * (qk_dim + v_dim))
        scores = 2.0 * batch * heads * seq_q * seq_k * self.width if self.workload.attention_kernel == "math" else 0.0
        dtype = self.activation_dtype
        self.forward.append(Kernel("attention", "attention", name, dims, dtype, flops, io + 3 * scores))
        backward = Kernel(
            "attention_backward",
            "attention",
            f"{name} backward",
            dims,
            dtype,
            flops * (BACKWARD_PRODUCTS if self.workload.attention_kernel == "flash" else 2.0),
            2 * io + 4 * scores,
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
    ) -> None:
        """An operation bound by memory: `passes` and `back` are how often its elements are read or written."""
        width = self.width if width is None else width
        if not self.workload.fused_kernels and launches == 1:
            launches = max(1, round(passes))
        size = (round(elements),)
        dtype = self.activation_dtype
        self.forward.append(
            Kernel("memory", part, name, size, dtype, 0.0, elements * passes * width, launches=launches)
        )
        if back:
            self.backward_groups.append(
                [
                    Kernel(
                        "memory", part, f"{name} backward", size, dtype, 0.0, elements * back * width, launches=launches
                    )
                ]
            )

    def norm(self, part: str, name: str, elements: float) -> None:
        """A norm that keeps its input; what it gives is kept by the product that takes it."""
        self.memory(part, name, elements, 2, 3)
        self.cheap_nodes.append(self.forward[-1])
        self.save(elements)

    def activation(self, part: str, rows: int, width: int, matrices: int) -> None:
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
    ) -> None:
        """A collective over activations and its mirror image in the backward pass; nothing on one rank."""
        if ranks == 1:
            return
        bytes_, dtype = elements * self.width, self.activation_dtype
        self.forward.append(Collective(op, part, name, dimension, ranks, bytes_, dtype, overlap=overlap))
        if back:
            mirror = Collective(_BACK[op], part, f"{name} backward", dimension, ranks, bytes_, dtype, overlap=overlap)
            self.backward_groups.append([mirror])

    def enter_tensor(self, part: str, tokens: int, hidden: int) -> None:
        """Tensor parallelism needs all of a context rank's tokens before its first product."""
        plan = self.plan
        if plan.sequence_parallel:
            self.exchange("all_gather", part, "tokens in", "tp", plan.tp, tokens * hidden, overlap=plan.overlap_tensor)
            if plan.tp > 1:  # only the rank's own tokens are kept: the weight's gradient gathers the others again
                again = Collective(
                    "all_gather", part, "tokens in again", "tp", plan.tp, tokens * hidden * self.width,
                    self.activation_dtype, overlap=True,
                )  # fmt: skip
                self.backward_groups[-1].append(again)
        elif plan.tp > 1:  # the input is whole on every rank; its gradient is summed
            summed = Collective(
                "all_reduce", part, "tokens in backward", "tp", plan.tp, tokens * hidden * self.width,
                self.activation_dtype, overlap=plan.overlap_tensor,
            )  # fmt: skip
            self.backward_groups.append([summed])

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
            return Kernel("gemm", part, name, (batch, m, n, k), dtype, 2.0 * batch * m * n * k, moved)
        groups, rows, n, k = dims
        moved = self.width * (rows * k + groups * k * n + rows * n)
        return Kernel("grouped_gemm", part, name, (groups, rows, n, k), dtype, 2.0 * rows * n * k, moved)

    def _adapter(self, part: str, name: str, m: int, n: int, k: int, batch: int) -> None:
        rank = self.workload.adapter_rank
        assert rank is not None
        for label, dims in (("adapter in", (batch, m, rank, k)), ("adapter out", (batch, m, n, rank))):
            b, rows, columns, inner = dims
            dtype = self.activation_dtype
            self.forward.append(self._product("gemm", part, f"{name} {label}", dims, dtype))
            self.backward_groups.append(
                [self._product("gemm", part, f"{name} {label} dgrad", (b, rows, inner, columns), dtype)]
            )
            self.weight.append(self._product("gemm", part, f"{name} {label} wgrad", (b, inner, columns, rows), dtype))
        self.adapters += batch * rank * (n + k)
