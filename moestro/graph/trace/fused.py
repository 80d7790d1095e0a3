"""What PyTorch has one kernel for on an accelerator, as one operation: attention and RMSNorm.

On a device that it knows no kernel for it would compute attention from products and a soft-max, with all scores in
memory. Kept for backward: queries, keys, values, the output and the log-sum-exp of a row of scores.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F


@torch.library.custom_op("moestro_trace::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """query: [..., heads, queries, dim]; key and value may have fewer heads. Returns the output and [..., queries]."""
    raise NotImplementedError("only traced, never computed")


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    # By tokens, as flash kernels lay it out: heads side by side need no copy to go on.
    *batch, heads, queries, _ = query.shape
    out = query.new_empty(*batch, queries, heads, value.shape[-1]).transpose(-3, -2)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("moestro_trace::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("only traced, never computed")


@attention_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, mask, ctx.causal = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output, mask)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, mask = ctx.saved_tensors
    return *attention_backward(grad, query, key, value, out, lse, mask, ctx.causal), None, None


attention.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("moestro_trace::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor | None, axes: int) -> tuple[Tensor, Tensor]:
    """Over the last `axes` axes. Returns the result and the inverse root mean squares, which are kept with x."""
    raise NotImplementedError("only traced, never computed")


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor | None, axes: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[: x.dim() - axes], dtype=torch.float32)


@torch.library.custom_op("moestro_trace::rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, inverse: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("only traced, never computed")


@rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor | None, inverse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0) if weight is None else torch.empty_like(weight)


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _norm_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, inverse = ctx.saved_tensors
    grad_x, grad_weight = rms_norm_backward(grad, x, weight, inverse)
    return grad_x, None if weight is None else grad_weight, None


rms_norm.register_autograd(_norm_backward, setup_context=_keep_norm)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (t.to(torch.get_autocast_dtype(query.device.type)) for t in (query, key, value))
    out: Tensor = attention(query, key, value, attn_mask, is_causal)[0]
    return out


def _rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    out: Tensor = rms_norm(input, weight, len(normalized_shape))[0]
    return out


@contextmanager
def fused_kernels() -> Iterator[None]:
    """F.scaled_dot_product_attention and F.rms_norm are those operations; names imported from there are not."""
    with (
        mock.patch.object(F, "scaled_dot_product_attention", _attend),
        mock.patch.object(F, "rms_norm", _rms_norm),
        mock.patch.object(torch, "rms_norm", _rms_norm),
    ):
        yield


def pairs_of(query: Tensor, key: Tensor, mask: Tensor | None, mask_values: Tensor | None, causal: bool) -> float:
    """(query, key) pairs that one head of one sequence computes."""
    queries, keys = query.shape[-2], key.shape[-2]
    if mask is not None:
        if mask_values is None or mask_values.dtype != torch.bool:
            return float(queries * keys)
        shown = mask_values.numel() // max(1, mask_values.shape[-1] * mask_values.shape[-2])
        seen = float(mask_values.sum()) / shown
        return seen * (queries // mask_values.shape[-2]) * (keys // mask_values.shape[-1])
    if not causal:
        return float(queries * keys)
    first = min(queries, keys)
    return first * (first + 1) / 2 + (queries - first) * keys
