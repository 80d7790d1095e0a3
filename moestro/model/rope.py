"""Rotary position embeddings (arXiv 2104.09864), in the half-split layout of Hugging Face checkpoints."""

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
    """Rotate x: [batch, heads, seq, head_dim] by the tables of `rope_tables`; computed in fp32, returned in x's dtype."""
    first, second = x.float().chunk(2, dim=-1) if x.dtype in (torch.bfloat16, torch.float16) else x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
