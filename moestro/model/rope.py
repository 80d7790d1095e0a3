"""Rotary position embeddings (arXiv 2104.09864), in the half-split layout of Hugging Face checkpoints."""

from typing import Any

import torch
from torch import Tensor


def rope_tables(position_ids: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `apply_rope`.

    Args:
        position_ids: [batch, seq] integer positions, restarting in every packed document.
    Returns:
        Two fp32 tensors [batch, 1, seq, head_dim / 2].
    """
    exponent = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32) / head_dim
    angle = position_ids.float().unsqueeze(-1) * theta**-exponent
    return angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [batch, heads, seq, head_dim] by the tables of `rope_tables`, in fp32; returned in x's dtype."""
    result: Tensor = _Rotate.apply(x, cos, sin)
    return result


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back, so nothing but the tables is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    first, second = wide.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=wide.dtype, device=x.device)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out.to(x.dtype)
