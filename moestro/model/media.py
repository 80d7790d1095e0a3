"""Encoders of images and sounds: a transformer over patches, and a connector to the language model's vectors.

The connectors are those that MM1 compares (arXiv 2403.09611, section 3.1), and LLaVA's network on each patch (arXiv
2310.03744). All weights are ordinary ones: encoder, connector and language model train together.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moestro.config import EncoderConfig, ModelConfig
from moestro.model.attention.mask import AttentionMask, attend
from moestro.model.mlp import FeedForward
from moestro.model.norms import RMSNorm
from moestro.model.ops import Linear, product_dtype


@dataclass(frozen=True)
class Media:
    """The items of one encoder in a batch, in the order of their placeholders, row by row.

    Where the vectors of encoder number e go, the token ids are `placeholder(e)`.
    """

    encoder: int  # its number in ModelConfig.encoders
    patches: Tensor  # [items, max_patches, input_size] fp32, 0 beyond an item's own
    numbers: Tensor  # [items] int64, patches of each item

    def to(self, device: torch.device | str) -> "Media":
        return Media(
            self.encoder, self.patches.to(device, non_blocking=True), self.numbers.to(device, non_blocking=True)
        )


def placeholder(encoder: int) -> int:
    """The token id that keeps a place for a vector of this encoder; never a label."""
    return -1 - encoder


class Encoder(nn.Module):
    """Patches of items to num_tokens vectors each, of the language model's size."""

    def __init__(self, config: EncoderConfig, model: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        size, eps = config.hidden_size, model.norm_eps
        self.patch_proj = Linear(config.input_size, size)
        self.position_embed = nn.Parameter(torch.empty(config.resolved_position_patches, size))
        self.blocks = nn.ModuleList(EncoderBlock(config, eps) for _ in range(config.num_layers))
        self.norm = RMSNorm(size, eps)
        self.connector = _connector(config, model.hidden_size, eps)

    def forward(self, patches: Tensor, numbers: Tensor) -> Tensor:
        """patches: [items, max_patches, input_size]; numbers: [items] from 1, how many of them an item has.

        Returns [items, num_tokens, hidden of the language model].
        """
        config = self.config
        positions = resize_positions(self.position_embed, config.max_patches, config.shape)
        x = self.patch_proj(patches.to(self.dtype)) + positions.to(self.dtype)
        present = None
        if config.shape == "line":
            present = torch.arange(config.max_patches, device=x.device) < numbers.unsqueeze(1)
        for block in self.blocks:
            x = block(x, present)
        result: Tensor = self.connector(self.norm(x), present)
        return result

    def blank(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Patches and number of an empty item, for a batch without any."""
        shape = (1, self.config.max_patches, self.config.input_size)
        return torch.zeros(shape, device=device), torch.full((1,), self.config.max_patches, device=device)


def insert(x: Tensor, places: Tensor, vectors: Tensor) -> Tensor:
    """x [batch, seq, hidden] with `vectors` [items, tokens, hidden], in their order, where `places` [batch, seq] is
    True. Without such a place x is as it was, and still depends on the vectors, with gradient 0."""
    rows = vectors.flatten(0, 1)
    index = (places.flatten().cumsum(0) - 1).clamp(0, len(rows) - 1)
    return torch.where(places.unsqueeze(-1), rows.index_select(0, index).view_as(x).to(x.dtype), x)


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); every patch sees every other of its item."""

    def __init__(self, config: EncoderConfig, eps: float) -> None:
        super().__init__()
        size = config.hidden_size
        self.attention_norm = RMSNorm(size, eps)
        self.attention = Attention(size, config.num_heads)
        self.mlp_norm = RMSNorm(size, eps)
        self.mlp = FeedForward(size, config.resolved_intermediate_size, "gelu")

    def forward(self, x: Tensor, present: Tensor | None) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, present)
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class Attention(nn.Module):
    """Of every x to all that is `seen` of the same item."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Linear(size, size) for _ in range(4))

    def forward(self, x: Tensor, seen: Tensor, present: Tensor | None) -> Tensor:
        """x: [items, n, size]; seen: [items, patches, size]; present: [items, patches] bool, or None for all."""
        query, key, value = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in (self.q_proj(x), self.k_proj(seen), self.v_proj(seen))
        )
        mask = AttentionMask(causal=False, dense=None if present is None else present[:, None, None])
        result: Tensor = self.o_proj(attend(query, key, value, mask).transpose(1, 2).flatten(2))
        return result


def _connector(config: EncoderConfig, hidden_size: int, eps: float) -> nn.Module:
    """forward(x [items, patches, size], present) → [items, num_tokens, hidden_size]."""
    if config.connector == "mlp":
        return PatchNetwork(config.hidden_size, hidden_size)
    if config.connector == "attention_pool":
        return AttentionPool(config, hidden_size)
    return Pool(config, hidden_size, eps)


class PatchNetwork(nn.Module):
    """Two layers with GELU on each patch."""

    def __init__(self, size: int, hidden_size: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = Linear(size, hidden_size), Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, _present: Tensor | None) -> Tensor:
        result: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return result


class AttentionPool(nn.Module):
    """Learned queries that look at all patches."""

    def __init__(self, config: EncoderConfig, hidden_size: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.empty(config.num_tokens, config.hidden_size))
        self.attention = Attention(config.hidden_size, config.num_heads)
        self.proj = Linear(config.hidden_size, hidden_size)

    def forward(self, x: Tensor, present: Tensor | None) -> Tensor:
        queries = self.queries.to(x.dtype).expand(len(x), -1, -1)
        result: Tensor = self.proj(self.attention(queries, x, present))
        return result


class Pool(nn.Module):
    """Means of neighbouring patches and a product; as C-Abstractor (arXiv 2312.06742) with a residual convolution on
    either side of the means. (Honeybee takes three with squeeze-and-excitation; MM1 does not say.)"""

    def __init__(self, config: EncoderConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.config = config
        convolutional = config.connector == "c_abstractor"
        self.before, self.after = (
            ConvBlock(config.hidden_size, config.shape, eps) if convolutional else None for _ in range(2)
        )
        self.proj = Linear(config.hidden_size, hidden_size)

    def forward(self, x: Tensor, present: Tensor | None) -> Tensor:
        if self.before is not None:
            x = self.before(x, present)
        numbers = torch.full((1,), x.shape[1], device=x.device) if present is None else present.sum(1)
        wide = torch.promote_types(x.dtype, torch.float32)
        weights = pooling(numbers, x.shape[1], self.config.num_tokens, self.config.shape, wide)
        x = (weights @ x.to(wide)).to(x.dtype)
        if self.after is not None:
            x = self.after(x, None)
        result: Tensor = self.proj(x)
        return result


class ConvBlock(nn.Module):
    """x + conv(silu(conv(norm(x)))) with three taps along each axis and zeros around."""

    def __init__(self, size: int, shape: Literal["grid", "line"], eps: float) -> None:
        super().__init__()
        taps = (3, 3) if shape == "grid" else (3,)
        self.norm = RMSNorm(size, eps)
        self.conv_in = nn.Parameter(torch.empty(size, size, *taps))
        self.conv_out = nn.Parameter(torch.empty(size, size, *taps))

    def forward(self, x: Tensor, present: Tensor | None) -> Tensor:
        return x + self._conv(F.silu(self._conv(self.norm(x), self.conv_in, present)), self.conv_out, present)

    def _conv(self, x: Tensor, weight: Tensor, present: Tensor | None) -> Tensor:
        """x: [items, patches, size]."""
        if present is not None:
            x = x * present.unsqueeze(-1)
        wide = product_dtype(x)
        channels, filters = x.transpose(1, 2).to(wide), weight.to(x.dtype).to(wide)
        if weight.dim() == 3:
            out = F.conv1d(channels, filters, padding=1)
        else:
            side = math.isqrt(x.shape[1])
            out = F.conv2d(channels.unflatten(-1, (side, side)), filters, padding=1).flatten(2)
        return out.transpose(1, 2).to(x.dtype)


def pooling(numbers: Tensor, patches: int, tokens: int, shape: Literal["grid", "line"], dtype: torch.dtype) -> Tensor:
    """Weights [items, tokens, patches] of the means that make tokens of an item's patches.

    Token i of a line is the mean of patches floor(i n / tokens) to ceil((i + 1) n / tokens) of its n; of a grid it is
    so along both axes. numbers: [items], n of each; in a grid n = patches.
    """
    if shape == "grid":
        side, token_side = math.isqrt(patches), math.isqrt(tokens)
        line = pooling(torch.full_like(numbers[:1], side), side, token_side, "line", dtype)[0]
        return torch.kron(line, line).unsqueeze(0)
    token, patch = (torch.arange(count, device=numbers.device) for count in (tokens, patches))
    first = token * numbers.unsqueeze(1) // tokens
    last = ((token + 1) * numbers.unsqueeze(1) + tokens - 1) // tokens
    inside = (patch >= first.unsqueeze(-1)) & (patch < last.unsqueeze(-1))
    return inside.to(dtype) / (last - first).unsqueeze(-1)


def resize_positions(table: Tensor, patches: int, shape: Literal["grid", "line"]) -> Tensor:
    """Position embeddings [n, size] for another number of patches, [patches, size]: interpolated linearly along each
    axis between patches' centres."""
    if len(table) == patches:
        return table
    channels = table.t().unsqueeze(0)
    if shape == "line":
        return F.interpolate(channels, size=patches, mode="linear")[0].t()
    side = math.isqrt(len(table))
    grid = F.interpolate(channels.unflatten(-1, (side, side)), size=(math.isqrt(patches),) * 2, mode="bilinear")
    return grid[0].flatten(1).t()
