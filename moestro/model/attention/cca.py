"""Compressed convolutional attention (arXiv 2510.04476) as ZAYA1 has it (arXiv 2511.17127, appendix C).

Queries and keys live in a space narrower than the hidden state and pass two short causal convolutions there: one for
each channel, then one that mixes the channels of a head. Half of the values come from the token before.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moestro.config import ModelConfig
from moestro.model.attention.cache import LayerCache
from moestro.model.attention.mask import Positions, attend
from moestro.model.ops import Linear, product_dtype
from moestro.model.rope import apply_rope
from moestro.model.shards import SequenceShard, TensorShard


class ConvolutionalAttention(nn.Module):
    """Every packed document is as if padded on its left with `halo` latents of zeros, once for both convolutions.

    So where the grouped convolution reaches before a document, it finds the depthwise one's value of zeros: its bias.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.cca is not None
        self.halo, self.head_dim = config.cca.halo, config.resolved_head_dim
        self.window = config.sliding_window if config.layer_type(layer) == "sliding" else None
        self.heads, self.kv_heads = config.num_heads, config.resolved_num_kv_heads
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = Linear(config.hidden_size, queries)
        self.k_proj = Linear(config.hidden_size, keys)
        self.v_proj_current = Linear(config.hidden_size, keys // 2)
        self.v_proj_delayed = Linear(config.hidden_size, keys // 2)
        channels = queries + keys
        self.conv_qk_depthwise = nn.Conv1d(channels, channels, config.cca.depthwise_taps, groups=channels)
        self.conv_qk_grouped = nn.Conv1d(channels, channels, config.cca.grouped_taps, groups=self.heads + self.kv_heads)
        self.key_temperature = nn.Parameter(torch.ones(self.kv_heads))
        self.o_proj = Linear(queries, config.hidden_size)
        self.tp: TensorShard | None = None  # layouts with tp > 1 are refused: channels and values do not cut by heads

    def forward(self, x: Tensor, positions: Positions, cache: LayerCache | None = None) -> Tensor:
        """x: [batch, seq, hidden]; returns the same shape. With a cache, x continues what the cache holds."""
        batch, seq, _ = x.shape
        latents = torch.cat((self.q_proj(x), self.k_proj(x)), -1)
        delayed = self.v_proj_delayed(x)
        shard = positions.mask.context
        extended = _extend(latents, self.halo, shard, cache, "latents")
        position = positions.position_ids.unflatten(1, (extended.shape[1], -1))
        query, key = self._normed(self._convolved(extended, position).flatten(1, 2), latents)
        extended = _extend(delayed, 1, shard, cache, "delayed")
        position = positions.position_ids.unflatten(1, (extended.shape[1], -1))
        value = torch.cat((self.v_proj_current(x), _shifted(extended, 1, position, None).flatten(1, 2)), -1)
        value = value.view(batch, seq, -1, self.head_dim).transpose(1, 2)
        query = apply_rope(query.transpose(1, 2), positions.cos, positions.sin).to(x.dtype)
        key = apply_rope(key.transpose(1, 2), positions.cos, positions.sin).to(x.dtype)
        if cache is not None:
            entries = cache.append(key=key, value=value)
            key, value = entries["key"], entries["value"]
        out = attend(query, key, value, positions.mask)
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, seq, -1))
        return result

    def _convolved(self, latents: Tensor, position: Tensor) -> Tensor:
        """Both convolutions. latents: [batch, chunks, halo + n, channels], the first `halo` being those before;
        position: [batch or 1, chunks, n] inside the documents; returns [batch, chunks, n, heads + kv_heads, head_dim].
        """
        depthwise, grouped = self.conv_qk_depthwise, self.conv_qk_grouped
        reach = grouped.kernel_size[0] - 1
        # The grouped convolution reaches further back than the output. Negative: before the first one's document.
        earlier = position[:, :, :1] + torch.arange(-reach, 0, device=position.device)
        far = torch.cat((earlier, position), -1)
        bias = depthwise.bias.to(latents.dtype)  # type: ignore[union-attr]
        mixed = bias
        for shift, weight in enumerate(reversed(depthwise.weight[:, 0].unbind(-1))):
            mixed = mixed + _shifted(latents, shift, far, None) * weight.to(latents.dtype)
        wide = product_dtype(latents)
        out = grouped.bias.unflatten(0, (-1, self.head_dim)).to(wide)  # type: ignore[union-attr]
        by_head = grouped.weight.to(latents.dtype).to(wide).unflatten(0, (-1, self.head_dim))
        for shift, weight in enumerate(reversed(by_head.unbind(-1))):  # [heads + kv_heads, out, in]
            seen = _shifted(mixed, shift, position, bias).to(wide).unflatten(-1, (-1, self.head_dim))
            out = out + torch.einsum("bcnhi,hoi->bcnho", seen, weight)
        return out.to(latents.dtype)

    def _normed(self, convolved: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [batch, seq, heads, head_dim] and keys [batch, seq, kv_heads, head_dim] of length sqrt(head_dim),
        keys times their temperature, so that no score exceeds it times sqrt(head_dim). In fp32.

        convolved: [batch, seq, heads + kv_heads, head_dim]; latents: [batch, seq, channels].
        """
        dtype = torch.promote_types(latents.dtype, torch.float32)
        both = latents.to(dtype).unflatten(-1, (-1, self.head_dim))
        query, key = both.split([self.heads, self.kv_heads], 2)
        groups = query.unflatten(2, (self.kv_heads, -1))
        mean = (groups + key.unsqueeze(3)) / 2
        query, key = convolved.to(dtype).split([self.heads, self.kv_heads], 2)
        query, key = query + mean.flatten(2, 3), key + mean.mean(3)
        eps, length = torch.finfo(dtype).eps, self.head_dim**0.5
        temperature = self.key_temperature.to(dtype).unsqueeze(-1)
        return F.normalize(query, dim=-1, eps=eps) * length, F.normalize(key, dim=-1, eps=eps) * length * temperature

    def new_cache(self, batch: int, max_len: int, device: torch.device | str, dtype: torch.dtype) -> LayerCache:
        size = (batch, self.kv_heads, self.head_dim)
        return LayerCache({"key": size, "value": size}, max_len, device, dtype, self.window)


def _extend(x: Tensor, n: int, shard: SequenceShard | None, cache: LayerCache | None, name: str) -> Tensor:
    """x [batch, seq, width] with the n positions before: [batch, chunks, n + seq / chunks, width].

    Sequences that are cut over ranks lie here in several chunks, for which n > 0; else there is one, which continues
    the cache.
    """
    if shard is not None and n > 0:
        before = shard.before(x, n)
    elif cache is not None and name in cache.state:
        before = cache.state[name].to(x.dtype).unsqueeze(1)
    else:
        before = x.new_zeros(len(x), 1, n, x.shape[-1])
    extended = torch.cat((before, x.unflatten(1, (before.shape[1], -1))), 2)
    if cache is not None:
        last = extended[:, 0, extended.shape[2] - n :]
        cache.state[name] = last.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    return extended


def _shifted(x: Tensor, shift: int, position: Tensor, before: Tensor | None) -> Tensor:
    """The positions of x that stand `shift` before the last n, and `before` (None: 0) where that is another document.

    x: [batch, chunks, at least shift + n, width]; position: [batch or 1, chunks, n]; returns [batch, chunks, n, width].
    """
    start = x.shape[2] - position.shape[2] - shift
    x = x[:, :, start : start + position.shape[2]]
    if shift == 0:
        return x
    inside = (position >= shift).unsqueeze(-1)
    return x.masked_fill(~inside, 0) if before is None else torch.where(inside, x, before)
