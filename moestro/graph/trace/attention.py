"""Scaled dot-product attention as one operation, as the kernels of accelerators have it.

Without this a device that PyTorch knows no kernel for would compute it from products and a soft-max, with all scores in
memory. Kept for backward: queries, keys, values, the output and the log-sum-exp of a row of scores.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


@torch.library.custom_op("moestro_trace::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """query: [..., heads, queries, dim]; key and value may have fewer heads. Returns the output and [..., queries]."""
    raise NotImplementedError("only traced, never computed")


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
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


class FusedAttention(TorchFunctionMode):
    """Calls of F.scaled_dot_product_attention become the operation above."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _attend(*args, **(kwargs or {}))


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
    out: Tensor = attention(query, key, value, attn_mask, is_causal)[0]
    return out


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
