"""A layer: attention and feed-forward, each joined to the residual stream; and the blocks of multi-token prediction."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from moestro.config import ModelConfig
from moestro.model.attention.cache import LayerCache
from moestro.model.attention.cca import ConvolutionalAttention
from moestro.model.attention.gqa import GroupedQueryAttention
from moestro.model.attention.head_experts import HeadExpertAttention, HeadStats
from moestro.model.attention.mask import Positions
from moestro.model.attention.mla import LatentAttention
from moestro.model.mlp import FeedForward
from moestro.model.moe.layer import MoELayer
from moestro.model.moe.router import RouterStats, TokenGroups
from moestro.model.norms import RMSNorm
from moestro.model.ops import Linear
from moestro.model.residual import Residual

Attention = GroupedQueryAttention | LatentAttention | ConvolutionalAttention | HeadExpertAttention


class BlockOutput(NamedTuple):
    x: Tensor  # [batch, seq, hidden]
    stats: RouterStats | None  # of a MoE layer
    router_state: Tensor | None  # [batch, seq, router hidden], for the next MoE layer
    head_stats: HeadStats | None  # of attention experts, in training
    depth_loss: Tensor | None = None  # [] of a mixture of depths' causal router, mean over the valid tokens


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); with norm_position = "post", x + norm(attention(x)) …"""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer, self.layer_type, self.dtype = layer, config.layer_type(layer), dtype
        self.norm_first = config.norm_position == "pre"
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = _attention(config, layer)
        self.attention_residual = Residual(config.hidden_size, config.residual_scaling)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = _feed_forward(config, layer)
        self.feed_forward_residual = Residual(config.hidden_size, config.residual_scaling)

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        groups: TokenGroups,
        router_state: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> BlockOutput:
        """x: [batch, seq, hidden], the residual stream."""
        seen = self._enter(x, self.attention_residual, self.input_layernorm)
        head_stats = None
        if isinstance(self.self_attn, HeadExpertAttention):
            attended, head_stats = self.self_attn(seen, positions, groups, cache)
        else:
            attended = self.self_attn(seen, positions, cache)
        x = self._join(x, attended, self.attention_residual, self.input_layernorm)
        seen = self._enter(x, self.feed_forward_residual, self.post_attention_layernorm)
        stats = None
        if isinstance(self.mlp, MoELayer):
            out, stats, router_state = self.mlp(seen, groups, router_state)
        else:
            out = self.mlp(seen)
        x = self._join(x, out, self.feed_forward_residual, self.post_attention_layernorm)
        return BlockOutput(x, stats, router_state, head_stats)

    def _enter(self, x: Tensor, residual: Residual, norm: nn.Module) -> Tensor:
        x = residual.enter(x)
        return (norm(x) if self.norm_first else x).to(self.dtype)

    def _join(self, x: Tensor, out: Tensor, residual: Residual, norm: nn.Module) -> Tensor:
        return residual.join(x, out if self.norm_first else norm(out))


def _attention(config: ModelConfig, layer: int) -> Attention:
    if config.mla is not None:
        return LatentAttention(config, layer)
    if config.cca is not None:
        return ConvolutionalAttention(config, layer)
    if config.attention_experts is not None:
        return HeadExpertAttention(config, layer)
    return GroupedQueryAttention(config, layer)


def _feed_forward(config: ModelConfig, layer: int) -> MoELayer | FeedForward:
    if config.moe_blocks[layer]:
        return MoELayer(config, layer)
    assert config.intermediate_size is not None
    return FeedForward(config.hidden_size, config.intermediate_size, config.activation)


class MTPBlock(nn.Module):
    """Depth k of multi-token prediction (arXiv 2412.19437, eq. 21–23): from the hidden state at position i and the
    embedding of token i + k, what predicts token i + k + 1."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.embedding_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.projection = Linear(2 * config.hidden_size, config.hidden_size)
        self.block = Block(config, layer, dtype)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        hidden: Tensor,
        embedding: Tensor,
        positions: Positions,
        groups: TokenGroups,
        router_state: Tensor | None,
    ) -> BlockOutput:
        """hidden, embedding: [batch, seq, hidden]; the x that is returned goes to the next depth, and through `norm`
        to the head."""
        both = torch.cat((self.hidden_norm(hidden), self.embedding_norm(embedding)), -1).to(self.dtype)
        output: BlockOutput = self.block(self.projection(both).to(hidden.dtype), positions, groups, router_state)
        return output
