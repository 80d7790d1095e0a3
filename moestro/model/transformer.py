"""The decoder-only transformer: embeddings, pre-norm blocks of attention and feed-forward, final norm, head."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moestro.config import ModelConfig
from moestro.model.attention.cache import KVCache, LayerCache
from moestro.model.attention.gqa import GroupedQueryAttention
from moestro.model.attention.mask import CAUSAL, AttentionMask, continuation_mask, document_mask
from moestro.model.loss import linear_cross_entropy
from moestro.model.mlp import SwiGLU
from moestro.model.moe.layer import MoELayer
from moestro.model.moe.router import RouterStats, TokenGroups
from moestro.model.norms import RMSNorm
from moestro.model.ops import linear
from moestro.model.rope import rope_tables
from moestro.model.shards import SequenceShard


@dataclass(frozen=True)
class ModelOutput:
    """hidden: [batch, seq, hidden] after the last layer here and the final norm; router_stats: one a MoE layer.

    loss: scale · Σ nll of the labels, when those were given.
    """

    hidden: Tensor
    router_stats: list[RouterStats]
    loss: Tensor | None = None


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = GroupedQueryAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp: MoELayer | SwiGLU
        if config.moe_layers[layer]:
            self.mlp = MoELayer(config, layer)
        else:
            assert config.intermediate_size is not None
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: AttentionMask,
        groups: TokenGroups,
        cache: LayerCache | None = None,
    ) -> tuple[Tensor, RouterStats | None]:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask, cache)
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MoELayer):
            out, stats = self.mlp(normed, groups)
            return x + out, stats
        return x + self.mlp(normed), None


class Transformer(nn.Module):
    """A language model, or consecutive layers of one. Weights are stored as they are; activations run in `dtype`."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        recompute: bool = False,
        layers: Sequence[int] | None = None,
    ) -> None:
        """layers: numbers of the layers to hold, None for all; the first brings the embedding, the last the head."""
        super().__init__()
        assert config.vocab_size is not None, "vocab_size must be resolved before the model is built"
        self.config, self.dtype, self.recompute = config, dtype, recompute
        numbers = range(config.num_layers) if layers is None else layers
        self.is_first, self.is_last = 0 in numbers, config.num_layers - 1 in numbers
        tied = config.tie_embeddings and self.is_last
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if self.is_first or tied else None
        # Keyed by their numbers, so that a layer's weights have the same names wherever it is.
        self.layers = nn.ModuleDict({str(layer): Block(config, layer) for layer in numbers})
        self.norm = RMSNorm(config.hidden_size, config.norm_eps) if self.is_last else None
        has_head = self.is_last and not config.tie_embeddings
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if has_head else None

    @property
    def head_weight(self) -> Tensor:
        """[vocab, hidden] of the last stage; the loss takes it beside `hidden`: no one has to hold all logits."""
        head = self.lm_head or self.embed_tokens
        assert head is not None
        return head.weight

    def forward(
        self,
        inputs: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        noise_seeds: Tensor | None = None,
        cache: KVCache | None = None,
        shard: SequenceShard | None = None,
        labels: Tensor | None = None,
        loss_scale: float = 1.0,
    ) -> ModelOutput:
        """Run the layers.

        Args:
            inputs: token ids [batch, seq], or what the layer before the first here put out [batch, seq, hidden].
            position_ids: [batch, seq] positions inside each document; None counts from 0 (or from the cache's end).
            document_ids: [batch, seq] number of the packed document, negative at padding; None: one document a row.
            noise_seeds: [batch] seeds of the routing noise, used while training.
            cache: continues the sequences it holds and is extended; excludes document_ids.
            shard: this rank holds some positions of each sequence: `inputs` and `labels` are those; position_ids are
                the ones that attention has here; document_ids stay whole.
            labels: [batch, seq], for the loss.
        """
        past = cache.length if cache is not None else 0
        seq = inputs.shape[1]
        if position_ids is None:
            position_ids = torch.arange(past, past + seq, device=inputs.device).unsqueeze(0)
        mask = CAUSAL if cache is None else continuation_mask(seq, past + seq, inputs.device)
        if shard is not None and shard.splits_attention:
            mask = AttentionMask(context=shard, documents=document_ids)
        elif document_ids is not None:
            mask = document_mask(document_ids, self.config.attention)
        valid = None if document_ids is None else (document_ids >= 0).reshape(-1)
        rope = rope_tables(position_ids, self.config.resolved_head_dim, self.config.rope_theta)
        groups = TokenGroups(seq if shard is None else seq * shard.parts, valid, noise_seeds, shard)
        x = inputs
        if self.is_first:
            assert self.embed_tokens is not None
            x = self.embed_tokens(inputs).to(self.dtype)
        stats = []
        for i, block in enumerate(self.blocks()):
            if self.recompute and cache is None and torch.is_grad_enabled():
                # Statistics leave the block as outputs, so the second forward of a recomputed block counts nothing.
                x, layer_stats = checkpoint(block, x, rope, mask, groups, use_reentrant=False, preserve_rng_state=False)
            else:
                x, layer_stats = block(x, rope, mask, groups, cache.layers[i] if cache is not None else None)
            if layer_stats is not None:
                stats.append(layer_stats)
        if self.norm is not None:
            x = self.norm(x)
        loss = None if labels is None else linear_cross_entropy(x, self.head_weight, labels, loss_scale)
        return ModelOutput(x, stats, loss)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [..., vocab] of hidden [..., hidden]; for decoding, where the rows are few."""
        return linear(hidden, self.head_weight).float()

    def blocks(self) -> list[Block]:
        return list(self.layers.values())  # type: ignore[arg-type]  # a ModuleDict does not say what it holds

    def moe_layers(self) -> list[MoELayer]:
        return [block.mlp for block in self.blocks() if isinstance(block.mlp, MoELayer)]

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, self.config, seed))


def initial_value(name: str, shape: Sequence[int], config: ModelConfig, seed: int) -> Tensor:
    """The whole parameter `name` at the start: a function of (seed, name) alone, so that no layout matters."""
    if len(shape) == 1:
        return torch.ones(shape)  # norms
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    scale = config.init_scale
    if name.endswith("router.weight"):
        assert config.moe is not None
        scale = config.moe.router.init_scale
    std = (scale / shape[-1]) ** 0.5
    if "o_proj" in name or "down_proj" in name:
        std /= (2 * config.num_layers) ** 0.5
    value = torch.empty(*shape)
    return nn.init.trunc_normal_(value, std=std, a=-2 * std, b=2 * std, generator=generator)
