"""The decoder-only transformer: embeddings, pre-norm blocks of attention and feed-forward, final norm, head."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moestro.config import ModelConfig
from moestro.model.attention.cache import KVCache, LayerCache
from moestro.model.attention.gqa import GroupedQueryAttention
from moestro.model.attention.mask import CAUSAL, AttentionMask, continuation_mask, document_mask
from moestro.model.mlp import SwiGLU
from moestro.model.moe.layer import MoELayer
from moestro.model.moe.router import RouterStats, TokenGroups
from moestro.model.norms import RMSNorm
from moestro.model.ops import linear
from moestro.model.rope import rope_tables


@dataclass(frozen=True)
class ModelOutput:
    """hidden: [batch, seq, hidden] after the final norm; router_stats: one for each MoE layer, in order."""

    hidden: Tensor
    router_stats: list[RouterStats]


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
    """A language model. Weights are stored as they are; activations run in `dtype`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32, recompute: bool = False) -> None:
        super().__init__()
        assert config.vocab_size is not None, "vocab_size must be resolved before the model is built"
        self.config, self.dtype, self.recompute = config, dtype, recompute
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """[vocab, hidden]; the loss takes it beside `hidden`, so that no one has to hold all logits."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        noise_seeds: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> ModelOutput:
        """Run the layers.

        Args:
            input_ids: [batch, seq].
            position_ids: [batch, seq] positions inside each document; None counts from 0 (or from the cache's end).
            document_ids: [batch, seq] number of the packed document, negative at padding; None: one document a row.
            noise_seeds: [batch] seeds of the routing noise, used while training.
            cache: continues the sequences it holds and is extended; excludes document_ids.
        """
        past = cache.length if cache is not None else 0
        seq = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(past, past + seq, device=input_ids.device).unsqueeze(0)
        mask = CAUSAL if cache is None else continuation_mask(seq, past + seq, input_ids.device)
        valid = None
        if document_ids is not None:
            mask = document_mask(document_ids, self.config.attention)
            valid = (document_ids >= 0).reshape(-1)
        rope = rope_tables(position_ids, self.config.resolved_head_dim, self.config.rope_theta)
        groups = TokenGroups(seq, valid, noise_seeds)
        x = self.embed_tokens(input_ids).to(self.dtype)
        stats = []
        for i, block in enumerate(self.layers):
            if self.recompute and cache is None and torch.is_grad_enabled():
                # Statistics leave the block as outputs, so the second forward of a recomputed block counts nothing.
                x, layer_stats = checkpoint(block, x, rope, mask, groups, use_reentrant=False, preserve_rng_state=False)
            else:
                x, layer_stats = block(x, rope, mask, groups, cache.layers[i] if cache is not None else None)
            if layer_stats is not None:
                stats.append(layer_stats)
        return ModelOutput(self.norm(x), stats)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [..., vocab] of hidden [..., hidden]; for decoding, where the rows are few."""
        return linear(hidden, self.head_weight).float()

    def moe_layers(self) -> list[MoELayer]:
        return [block.mlp for block in self.layers if isinstance(block.mlp, MoELayer)]

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Fill every parameter from (seed, its name) alone, so that layout and order of creation do not matter."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)  # norms
                continue
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest))
            scale = self.config.init_scale
            if name.endswith("router.weight"):
                assert self.config.moe is not None
                scale = self.config.moe.router.init_scale
            std = (scale / parameter.shape[-1]) ** 0.5
            if "o_proj" in name or "down_proj" in name:
                std /= (2 * self.config.num_layers) ** 0.5
            value = torch.empty(parameter.shape)
            nn.init.trunc_normal_(value, std=std, a=-2 * std, b=2 * std, generator=generator)
            parameter.copy_(value)
