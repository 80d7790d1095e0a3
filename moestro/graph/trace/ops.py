"""What an operation costs: FLOPs from its shapes, and the bytes that must cross the memory once."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moestro.graph.words import KernelOp

aten = torch.ops.aten


class Cost(NamedTuple):
    op: KernelOp
    dims: tuple[int, ...]  # as in graph/words.py
    flops: float


# Nothing runs on a device for these; views and bookkeeping.
FREE = (
    "detach", "alias", "lift_fresh", "_local_scalar_dense", "empty", "empty_like", "new_empty", "empty_strided",
    "new_empty_strided", "set_", "resize_", "is_pinned", "item", "_to_copy_same", "wait_tensor", "record_stream",
)  # fmt: skip


def cost_of(func: Any, args: Sequence[Any], out: Any) -> Cost | None:
    """None for an operation that is bound by memory, or that does nothing (see `moves`)."""
    if func in (aten.mm.default, aten.mm.out, aten.mm.dtype):
        return _gemm(1, args[0], args[1])
    if func in (
        aten.addmm.default,
        aten.addmm.out,
        aten.addmm_.default,
        aten.addmm.dtype,
        aten._addmm_activation.default,
    ):
        return _gemm(1, args[1], args[2])
    if func in (aten.bmm.default, aten.bmm.out, aten.bmm.dtype):
        return _gemm(args[0].shape[0], args[0], args[1])
    if func in (aten.baddbmm.default, aten.baddbmm_.default, aten.baddbmm.out):
        return _gemm(args[1].shape[0], args[1], args[2])
    if func in (aten._scaled_mm.default, aten._scaled_mm.out):
        return _gemm(1, args[0], args[1])
    if func is aten.convolution.default:
        return _convolution(args[0], args[1], out)
    if func is aten.convolution_backward.default:
        once = _convolution(args[1], args[2], args[0])
        return Cost("gemm", once.dims, once.flops * sum(args[-1][:2]))
    namespace, name = func._schema.name.split("::")
    if (namespace, name) == ("moestro", "grouped_mm"):
        rows, weight = args[0], args[1]
        return _grouped(weight.shape[0], rows.shape[0], weight.shape[2], weight.shape[1])
    if (namespace, name) == ("moestro", "grouped_mm_weight_grad"):
        left, right, ends = args
        return _grouped(ends.shape[0], left.shape[0], left.shape[1], right.shape[1])
    if name in ("_grouped_mm", "_scaled_grouped_mm"):
        return _grouped_mm(args[0], args[1], args[2 if name == "_grouped_mm" else 4])
    return None


def makes_weight(func: Any, args: Sequence[Any]) -> bool:
    """Whether a product of the backward pass is gradᵀ · input: its left side is a transposed view."""
    name = func._schema.name.split("::")[1]
    if name == "grouped_mm_weight_grad":
        return True
    left = args[1] if name.startswith(("addmm", "baddbmm")) else args[0]
    if name not in ("mm", "bmm", "addmm", "addmm_", "baddbmm", "_grouped_mm"):
        return False
    return bool(left.stride(-2) == 1 and left.shape[-1] > 1 and left.stride(-1) != 1)


def moves(func: Any) -> bool:
    """Whether a device does something for it."""
    schema = func._schema
    name = schema.name.split("::")[1]
    is_view = not schema.is_mutable and any(a.alias_info is not None for a in schema.arguments)
    return not is_view and name not in FREE


def bytes_of(args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int:
    """Of all tensors that go in and come out, each once. An expanded axis is read once."""
    seen: dict[int, int] = {}
    for tensor in (*tensors(args), *tensors(list(kwargs.values())), *tensors([out])):
        seen[id(tensor)] = _stored(tensor)
    return sum(seen.values())


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors(item)]
    return []


def _stored(tensor: Tensor) -> int:
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


def _gemm(batch: int, left: Tensor, right: Tensor) -> Cost:
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    return Cost("gemm", (batch, m, n, k), 2.0 * batch * m * n * k)


def _grouped(groups: int, rows: int, n: int, k: int) -> Cost:
    return Cost("grouped_gemm", (groups, rows, n, k), 2.0 * rows * n * k)


def _grouped_mm(a: Tensor, b: Tensor, ends: Tensor | None) -> Cost:
    """PyTorch's own: rows by expert times [E, k, n], or the weight's gradient, whose inner axis is cut."""
    if a.dim() == 3 and b.dim() == 3:
        return _gemm(a.shape[0], a, b)
    groups = len(ends) if ends is not None else 1
    if a.dim() == 2 and b.dim() == 2:
        return _grouped(groups, a.shape[1], b.shape[1], a.shape[0])
    if a.dim() == 2:
        return _grouped(groups, a.shape[0], b.shape[-1], a.shape[1])
    return _grouped(groups, b.shape[-1], a.shape[1], a.shape[2])


def _convolution(x: Tensor, weight: Tensor, out: Tensor) -> Cost:
    """As the product that it is: outputs of all positions times the weights of one output channel."""
    inner = weight[0].numel()
    rows, channels = out.numel() // out.shape[1], weight.shape[0]
    groups = max(1, x.shape[1] // weight.shape[1])
    return Cost("gemm", (groups, rows, channels // groups, inner), 2.0 * rows * channels * inner)
