"""Grouped-query attention (arXiv 2305.13245) with rotary positions, and the options that model families add to it."""

import torch
from torch import Tensor, nn

from moestro.config import ModelConfig
from moestro.model.attention.cache import LayerCache
from moestro.model.attention.mask import Positions, attend
from moestro.model.norms import RMSNorm
from moestro.model.ops import Linear, linear
from moestro.model.rope import apply_rope
from moestro.model.shards import TensorShard


class GroupedQueryAttention(nn.Module):
    """num_heads query heads share num_kv_heads key-value heads."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.head_dim, self.clip = config.resolved_head_dim, config.clip_qkv
        self.window = config.sliding_window if config.layer_type(layer) == "sliding" else None
        heads, kv_heads = config.num_heads, config.resolved_num_kv_heads
        self.kv_heads = kv_heads
        bias = config.attention_bias != "none"
        self.q_proj = Linear(config.hidden_size, heads * self.head_dim, bias)
        self.k_proj = Linear(config.hidden_size, kv_heads * self.head_dim, bias)
        self.v_proj = Linear(config.hidden_size, kv_heads * self.head_dim, bias)
        self.o_proj = Linear(heads * self.head_dim, config.hidden_size, config.attention_bias == "all")
        self.norm_heads = config.qk_norm == "head"
        self.q_norm = self.k_norm = None
        if config.qk_norm != "none":
            sizes = (self.head_dim,) * 2 if self.norm_heads else (heads * self.head_dim, kv_heads * self.head_dim)
            self.q_norm, self.k_norm = (RMSNorm(size, config.norm_eps) for size in sizes)
        self.sinks = nn.Parameter(torch.zeros(heads)) if config.attention_sinks else None
        self.tp: TensorShard | None = None

    def forward(self, x: Tensor, positions: Positions, cache: LayerCache | None = None) -> Tensor:
        """x: [batch, seq, hidden]; returns the same shape. With a cache, x continues what the cache holds."""
        if self.tp is not None:
            x = self.tp.gather(x, 1)
        result = linear(self.attended(x, positions, cache), self.o_proj.weight)
        if self.tp is not None:
            result = self.tp.scatter(result, 1)
        return result if self.o_proj.bias is None else result + self.o_proj.bias.to(result.dtype)

    def attended(self, x: Tensor, positions: Positions, cache: LayerCache | None) -> Tensor:
        """What the output projection gets: [batch, seq, heads · head_dim] of x [batch, seq, hidden]."""
        query = apply_rope(self._heads(self.q_proj(x), self.q_norm), positions.cos, positions.sin)
        key = apply_rope(self._heads(self.k_proj(x), self.k_norm), positions.cos, positions.sin)
        value = self._heads(self.v_proj(x), None)
        if cache is not None:
            entries = cache.append(key=key, value=value)
            key, value = entries["key"], entries["value"]
        return attend(query, key, value, positions.mask, sinks=self.sinks).transpose(1, 2).flatten(2)

    def new_cache(self, batch: int, max_len: int, device: torch.device | str, dtype: torch.dtype) -> LayerCache:
        size = (batch, self.kv_heads, self.head_dim)
        return LayerCache({"key": size, "value": size}, max_len, device, dtype, self.window)

    def _heads(self, projected: Tensor, norm: RMSNorm | None) -> Tensor:
        """[batch, seq, heads · head_dim], normed and clipped, as [batch, heads, seq, head_dim]."""
        if norm is not None and not self.norm_heads:
            projected = _norm_projection(projected, norm, self.tp)
        heads = projected.unflatten(-1, (-1, self.head_dim))
        if norm is not None and self.norm_heads:
            heads = norm(heads)
        if self.clip is not None:
            heads = heads.clamp(-self.clip, self.clip)
        return heads.transpose(1, 2)


def _norm_projection(x: Tensor, norm: RMSNorm, tp: TensorShard | None) -> Tensor:
    """Over all heads together (OLMoE, arXiv 2409.02060); x: [..., size of the heads here]."""
    if tp is None:
        result: Tensor = norm(x)
        return result
    wide = x if x.dtype == torch.float64 else x.float()
    mean_square = tp.total(wide.square().sum(-1, keepdim=True)) / len(norm.weight)
    return (wide * (mean_square + norm.eps).rsqrt() * tp.part(norm.weight)).to(x.dtype)
