"""Grouped-query attention (arXiv 2305.13245) with rotary positions and an optional norm on queries and keys."""

from torch import Tensor, nn

from moestro.config import ModelConfig
from moestro.model.attention.cache import LayerCache
from moestro.model.attention.mask import AttentionMask, attend
from moestro.model.norms import RMSNorm
from moestro.model.ops import Linear
from moestro.model.rope import apply_rope
from moestro.model.shards import TensorShard


class GroupedQueryAttention(nn.Module):
    """num_heads query heads share num_kv_heads key-value heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.resolved_head_dim
        heads, kv_heads = config.num_heads, config.resolved_num_kv_heads
        self.q_proj = Linear(config.hidden_size, heads * self.head_dim)
        self.k_proj = Linear(config.hidden_size, kv_heads * self.head_dim)
        self.v_proj = Linear(config.hidden_size, kv_heads * self.head_dim)
        self.o_proj = Linear(heads * self.head_dim, config.hidden_size)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.tp: TensorShard | None = None

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: AttentionMask, cache: LayerCache | None = None
    ) -> Tensor:
        """x: [batch, seq, hidden]; returns the same shape. With a cache, x continues what the cache holds."""
        if self.tp is not None:
            x = self.tp.gather(x, 1)
        batch, seq, _ = x.shape
        query = self.q_proj(x).view(batch, seq, -1, self.head_dim)
        key = self.k_proj(x).view(batch, seq, -1, self.head_dim)
        value = self.v_proj(x).view(batch, seq, -1, self.head_dim).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query = apply_rope(query.transpose(1, 2), *rope)
        key = apply_rope(key.transpose(1, 2), *rope)
        if cache is not None:
            key, value = cache.append(key, value)
        out = attend(query, key, value, mask)
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))
        return result if self.tp is None else self.tp.scatter(result, 1)
