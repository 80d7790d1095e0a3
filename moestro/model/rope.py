"""Rotary position embeddings (arXiv 2104.09864), in the half-split layout of Hugging Face checkpoints."""

import math
from typing import Any

import torch
from torch import Tensor

from moestro.config import ModelConfig, RopeConfig
from moestro.config.model import LayerType


def rope_tables(position_ids: Tensor, dims: int, rope: RopeConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines for `apply_rope`.

    Args:
        position_ids: [batch, seq] integer positions, restarting in every packed document.
        dims: how many dimensions are rotated.
    Returns:
        Two fp32 tensors [batch, 1, seq, dims / 2].
    """
    exponent = torch.arange(0, dims, 2, device=position_ids.device, dtype=torch.float32) / dims
    frequency = _stretch(rope.theta**-exponent, rope)
    angle = position_ids.float().unsqueeze(-1) * frequency
    factor = _attention_factor(rope)
    return (angle.cos() * factor).unsqueeze(1), (angle.sin() * factor).unsqueeze(1)


def softmax_scale(config: ModelConfig, kind: LayerType = "full") -> float:
    """Of latent attention's scores: 1 / sqrt(head_dim), which yarn multiplies by m(mscale_all_dim)² (DeepSeek-V3)."""
    assert config.mla is not None
    rope, scale = config.rope_of(kind), config.mla.qk_head_dim**-0.5
    return scale * _mscale(rope, rope.mscale_all_dim) ** 2 if rope.scaling == "yarn" else scale


def _stretch(frequency: Tensor, rope: RopeConfig) -> Tensor:
    """The frequencies [dims / 2], in radians a position, for a context `factor` times as long."""
    if rope.scaling == "none":
        return frequency
    slow = frequency / rope.factor
    if rope.scaling == "linear":  # position interpolation, arXiv 2306.15595
        return slow
    assert rope.original_max_seq_len is not None
    if rope.scaling == "yarn":
        keep = 1 - _yarn_ramp(frequency, rope, rope.original_max_seq_len)
    else:  # Llama 3.1: by how many rotations the original length holds
        turns = rope.original_max_seq_len * frequency / (2 * math.pi)
        keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return keep * frequency + (1 - keep) * slow


def _yarn_ramp(frequency: Tensor, rope: RopeConfig, length: int) -> Tensor:
    """How far each frequency is stretched, from 0 to 1 (arXiv 2309.00071, section 3.2).

    The borders are the numbers of the dimensions that turn beta_fast and beta_slow times in the original length.
    """
    pairs = len(frequency)
    low, high = (
        pairs * math.log(length / (turns * 2 * math.pi)) / math.log(rope.theta)
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    number = torch.arange(pairs, device=frequency.device, dtype=torch.float32)
    return ((number - low) / max(high - low, 1e-3)).clamp(0, 1)


def _attention_factor(rope: RopeConfig) -> float:
    if rope.scaling != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return _mscale(rope, rope.mscale) / _mscale(rope, rope.mscale_all_dim)


def _mscale(rope: RopeConfig, mscale: float) -> float:
    return 0.1 * mscale * math.log(rope.factor) + 1


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of x [batch, heads, seq, head_dim], as many as the tables of `rope_tables` are for.

    In fp32; returned in x's dtype.
    """
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
    pairs = cos.shape[-1]
    first, second, rest = wide.tensor_split((pairs, 2 * pairs), dim=-1)
    out = torch.empty(x.shape, dtype=wide.dtype, device=x.device)
    out_first, out_second, out_rest = out.tensor_split((pairs, 2 * pairs), dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    out_rest.copy_(rest)
    return out.to(x.dtype)
