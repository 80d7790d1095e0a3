"""What an operation of a step is and does, from its name and the shapes of its operands: its kind, FLOPs and bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Operand:
    """A tensor that an operation reads or writes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    itemsize: int
    read: bool
    written: bool

    @property
    def bytes(self) -> int:
        """That are there: an expanded axis counts once."""
        elements = 1
        for size, stride in zip(self.shape, self.stride, strict=True):
            elements *= size if stride or size == 0 else 1
        return elements * self.itemsize


class Gemm(NamedTuple):
    """batch products of [m, k] and [k, n]; of grouped products m is the mean over the groups."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


GEMM, ATTENTION, CONVOLUTION = "gemm", "attention", "convolution"
_KINDS: dict[str, tuple[str, ...]] = {
    GEMM: ("mm", "addmm", "bmm", "baddbmm", "grouped_mm", "grouped_mm_weight_grad", "mv", "dot", "addmv"),
    CONVOLUTION: ("convolution", "convolution_backward"),
    "softmax, top-k": ("softmax", "softmax_backward_data", "topk", "sort", "argsort", "kthvalue"),
    "loss": ("log_softmax", "log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward"),
    "embedding": ("embedding", "embedding_dense_backward"),
    "gather, scatter": (
        *("index", "index_select", "gather", "scatter", "scatter_add", "index_add", "index_put", "index_put_impl"),
        *("masked_fill", "masked_scatter", "masked_select", "nonzero", "searchsorted", "bucketize", "bincount"),
    ),
    "copy": (
        *("copy", "to_copy", "clone", "cat", "stack", "empty", "empty_strided", "empty_like", "new_empty", "zeros"),
        *("zeros_like", "ones", "ones_like", "full", "full_like", "new_zeros", "new_full", "new_ones", "fill", "zero"),
        *("new_empty_strided", "constant_pad_nd", "arange", "scalar_tensor", "lift_fresh", "repeat", "resize"),
    ),
    "reduction": (
        *("sum", "mean", "amax", "amin", "max", "min", "linalg_vector_norm", "linalg_vecdot", "logsumexp", "cumsum"),
        *("any", "all", "prod", "argmax", "foreach_norm", "var"),
    ),
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
_VIEWS = ("unsafe_view", "reshape_alias", "detach", "local_scalar_dense")  # beside those that torch calls so
_CHEAP = ("elementwise", "reduction", "copy")  # what a norm or an optimizer is made of


def kind_of(op: str, part: str, phase: str, is_view: bool) -> str:
    """What sort of work "aten::mul" and its like is; sums and products inside a norm or an optimizer are named so."""
    namespace, _, name = op.partition("::")
    if namespace == "c10d" or namespace.startswith("_c10d"):
        return "collective"
    bare = name.strip("_")
    if is_view or bare in _VIEWS:
        return "view"
    if "scaled_dot_product" in bare or "flex_attention" in bare:
        return ATTENTION
    if bare.startswith(("fused_adam", "foreach_")) and phase == "optimizer":
        return "optimizer"
    kind = "norm" if "rms_norm" in bare or "layer_norm" in bare else _KIND_OF.get(bare, "elementwise")
    if kind in _CHEAP and phase == "optimizer":
        return "optimizer"
    return "norm" if kind in _CHEAP and part == "norms" else kind


def gemm_of(op: str, operands: Sequence[Operand]) -> Gemm | None:
    """The product that an operation is, or None. Operands in the order of its arguments."""
    name = op.partition("::")[2].strip("_")
    shapes = [operand.shape for operand in operands]
    if name in ("addmm", "baddbmm", "addmv"):
        shapes = shapes[1:]
    if len(shapes) < 2:
        return None
    a, b = shapes[0], shapes[1]
    if name in ("mm", "addmm"):
        return Gemm(1, a[0], b[1], a[1])
    if name in ("bmm", "baddbmm"):
        return Gemm(a[0], a[1], b[2], a[2])
    if name in ("mv", "addmv"):
        return Gemm(1, a[0], 1, a[1])
    if name == "grouped_mm_weight_grad":  # [R, a], [R, b] and the groups' ends
        groups = max(shapes[2][0], 1) if len(shapes) > 2 else 1
        return Gemm(groups, a[1], b[1], round(a[0] / groups))
    if name == "grouped_mm" and len(a) == 2 and len(b) == 3:
        return Gemm(b[0], round(a[0] / max(b[0], 1)), b[2], b[1])
    return None


def flops_of(op: str, operands: Sequence[Operand], causal: bool = False, wanted: int = 2) -> float:
    """Of products, attention and convolutions; 0 for everything else.

    causal: attention counts the pairs on and below the diagonal. Its backward counts four products, without the scores
    that it computes again. wanted: gradients that a convolution's backward is asked for, biases not counted.
    """
    gemm = gemm_of(op, operands)
    name = op.partition("::")[2].strip("_")
    if gemm is not None:
        if name == "grouped_mm":  # the rows as they are, not the mean of the groups
            return 2.0 * operands[0].shape[0] * gemm.n * gemm.k
        if name == "grouped_mm_weight_grad":
            return 2.0 * operands[0].shape[0] * gemm.m * gemm.n
        return float(gemm.flops)
    if "scaled_dot_product" in name:
        backward = "backward" in name
        query, key, value = (operand.shape for operand in operands[int(backward) : int(backward) + 3])
        rows, keys = query[-2], key[-2]
        pairs = rows * (keys - (rows - 1) / 2) if causal else rows * keys
        heads = 1.0
        for size in query[:-2]:
            heads *= size
        return (4.0 if backward else 2.0) * heads * pairs * (query[-1] + value[-1])
    if name == "convolution":  # input, weight [out, in / groups, taps], bias, and the result at the end
        weight, result = operands[1].shape, operands[-1].shape
        return 2.0 * _numel(result) * _numel(weight[1:])
    if name == "convolution_backward":
        return wanted * 2.0 * _numel(operands[0].shape) * _numel(operands[2].shape[1:])
    return 0.0


def _numel(shape: Sequence[int]) -> int:
    elements = 1
    for size in shape:
        elements *= size
    return elements


def bytes_of(op: str, operands: Sequence[Operand]) -> float:
    """What the operation must read and write once. Of a table, only the rows that are taken or added to."""
    kind = _KIND_OF.get(op.partition("::")[2].strip("_"), "")
    moved = [operand.bytes * (operand.read + operand.written) for operand in operands]
    if kind in ("gather, scatter", "embedding") and len(moved) > 1:
        largest = max(range(len(moved)), key=moved.__getitem__)
        others = sum(moved) - moved[largest]
        return float(min(sum(moved), 2 * others))
    return float(sum(moved))
