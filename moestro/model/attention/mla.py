"""Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values are made from a short latent."""

import torch
from torch import Tensor, nn

from moestro.config import ModelConfig
from moestro.model.attention.cache import LayerCache
from moestro.model.attention.mask import AttentionMask, Positions, attend
from moestro.model.norms import RMSNorm
from moestro.model.ops import Linear, product_dtype
from moestro.model.rope import apply_rope, softmax_scale
from moestro.model.shards import TensorShard

LATENT_NORM_EPS = 1e-6  # of DeepSeek's models, whatever their other norms have


class LatentAttention(nn.Module):
    """Parameters have the names of Hugging Face's DeepSeek models, but rotary dimensions are halves, not pairs."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        mla, hidden, heads = config.mla, config.hidden_size, config.num_heads
        assert mla is not None
        self.mla, self.scale = mla, softmax_scale(config, config.layer_type(layer))
        self.window = config.sliding_window if config.layer_type(layer) == "sliding" else None
        if mla.q_rank is None:
            self.q_proj = Linear(hidden, heads * mla.qk_head_dim)
        else:
            self.q_a_proj = Linear(hidden, mla.q_rank)
            self.q_a_layernorm = RMSNorm(mla.q_rank, LATENT_NORM_EPS)
            self.q_b_proj = Linear(mla.q_rank, heads * mla.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(hidden, mla.kv_rank + mla.rope_head_dim)
        self.kv_a_layernorm = RMSNorm(mla.kv_rank, LATENT_NORM_EPS)
        self.kv_b_proj = Linear(mla.kv_rank, heads * (mla.nope_head_dim + mla.v_head_dim))
        self.o_proj = Linear(heads * mla.v_head_dim, hidden)
        self.tp: TensorShard | None = None

    def forward(self, x: Tensor, positions: Positions, cache: LayerCache | None = None) -> Tensor:
        """x: [batch, seq, hidden]; returns the same shape. With a cache, x continues what the cache holds."""
        mla = self.mla
        query, latent, rope_key = self._latents(x)
        batch, seq, _ = query.shape
        up = self.q_proj if mla.q_rank is None else self.q_b_proj
        query = up(query).view(batch, seq, -1, mla.qk_head_dim).transpose(1, 2)
        query, rope_query = query.split([mla.nope_head_dim, mla.rope_head_dim], -1)
        rope_query = apply_rope(rope_query, positions.cos, positions.sin)
        rope_key = apply_rope(rope_key.unsqueeze(1), positions.cos, positions.sin)
        entries = torch.cat((latent.unsqueeze(1), rope_key), -1)
        if cache is not None:
            entries = cache.append(latent=entries)["latent"]
        absorbed = cache is not None and self._absorbs(seq, entries.shape[2])
        attend_to = self._attend_to_latents if absorbed else self._attend_to_heads
        out = attend_to(query, rope_query, entries, positions.mask)
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))
        return result if self.tp is None else self.tp.scatter(result, 1)

    def _latents(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What queries [batch, seq, q_rank or hidden], keys and values [.., kv_rank], and the keys' rotary part
        [.., rope_head_dim] are made from. A tp rank computes its own positions and gathers the others'."""
        query = x if self.mla.q_rank is None else self.q_a_layernorm(self.q_a_proj(x))
        latent, rope_key = self.kv_a_proj_with_mqa(x).split([self.mla.kv_rank, self.mla.rope_head_dim], -1)
        parts = query, self.kv_a_layernorm(latent), rope_key
        if self.tp is None:
            return parts
        query, latent, rope_key = self.tp.gather(torch.cat(parts, -1), 1).split([part.shape[-1] for part in parts], -1)
        return query, latent, rope_key

    def _attend_to_heads(self, query: Tensor, rope_query: Tensor, entries: Tensor, mask: AttentionMask) -> Tensor:
        """With keys and values of every head. query: [batch, heads, queries, nope_head_dim], rope_query: [..,
        rope_head_dim], entries: [batch, 1, keys, kv_rank + rope_head_dim]; returns [batch, heads, queries, v_head_dim].
        """
        mla = self.mla
        latent, rope_key = entries.split([mla.kv_rank, mla.rope_head_dim], -1)
        both = self.kv_b_proj(latent.squeeze(1)).unflatten(-1, (-1, mla.nope_head_dim + mla.v_head_dim)).transpose(1, 2)
        key, value = both.split([mla.nope_head_dim, mla.v_head_dim], -1)
        key = torch.cat((key, rope_key.expand(-1, key.shape[1], -1, -1)), -1)
        return attend(torch.cat((query, rope_query), -1), key, value, mask, self.scale)

    def _attend_to_latents(self, query: Tensor, rope_query: Tensor, entries: Tensor, mask: AttentionMask) -> Tensor:
        """The same without them: qᵀ(W c) = (Wᵀq)ᵀc, and Σ a (W c) = W Σ a c (section 2.1.2)."""
        mla, heads = self.mla, query.shape[1]
        up = self.kv_b_proj.weight.unflatten(0, (-1, mla.nope_head_dim + mla.v_head_dim))
        key_up, value_up = up.split([mla.nope_head_dim, mla.v_head_dim], 1)  # [heads, .., kv_rank]
        query = torch.cat((_product(query, key_up), rope_query), -1)
        # All heads have the same keys, so they go as so many queries: as heads, the keys would be copied for each.
        dense = None if mask.dense is None else mask.dense.repeat_interleave(heads, 2)
        rows = query.transpose(1, 2).flatten(1, 2).unsqueeze(1)
        found = attend(rows, entries, entries[..., : mla.kv_rank], AttentionMask(False, dense), self.scale)
        return _product(found.view(len(query), -1, heads, mla.kv_rank).transpose(1, 2), value_up.mT)

    def _absorbs(self, queries: int, keys: int) -> bool:
        """Whether the second way has fewer multiply-adds, for queries that continue others."""
        rank, wide = self.mla.kv_rank, self.mla.nope_head_dim + self.mla.v_head_dim
        return queries < keys and queries * rank * (wide + 2 * keys) < keys * wide * (rank + queries)

    def new_cache(self, batch: int, max_len: int, device: torch.device | str, dtype: torch.dtype) -> LayerCache:
        size = (batch, 1, self.mla.kv_rank + self.mla.rope_head_dim)
        return LayerCache({"latent": size}, max_len, device, dtype, self.window)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [batch, heads, rows, in] @ weight [heads, in, out] in x's dtype."""
    wide = product_dtype(x)
    return (x.to(wide) @ weight.to(x.dtype).to(wide)).to(x.dtype)
