"""The decoder-only transformer: embeddings, blocks of attention and feed-forward, final norm, head."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moestro.config import ModelConfig, RopeConfig
from moestro.config.model import LayerType
from moestro.model.attention.cache import KVCache, LayerCache
from moestro.model.attention.head_experts import HeadExpertAttention, HeadStats
from moestro.model.attention.mask import Positions, positions_of
from moestro.model.attention.mla import LatentAttention
from moestro.model.block import Block, BlockOutput, MTPBlock
from moestro.model.depth import DepthBlock
from moestro.model.initial import initial_value
from moestro.model.loss import linear_cross_entropy
from moestro.model.media import Encoder, Media, insert, placeholder
from moestro.model.moe.layer import MoELayer
from moestro.model.moe.router import RouterStats, TokenGroups
from moestro.model.norms import RMSNorm
from moestro.model.ops import linear
from moestro.model.residual import InputScale
from moestro.model.rope import softmax_scale
from moestro.model.shards import SequenceShard

T = TypeVar("T")


@dataclass(frozen=True)
class ModelOutput:
    """hidden: [batch, seq, hidden] after the last layer here and the final norm; router_stats: one a MoE block.

    head_stats: one a block in training, if the model has attention experts.
    Before the last layer, `hidden` has the router's state behind it if the model carries one (see `stream_size`).
    loss: scale · Σ nll of the labels, when those were given. mtp_loss: the same of multi-token prediction, the mean
    over its depths. depth_loss: in training, of the causal routers of a mixture of depths, the mean over
    tokens and over the layers that have one (those that are not here count as 0).
    """

    hidden: Tensor
    router_stats: list[RouterStats]
    head_stats: list[HeadStats]
    loss: Tensor | None = None
    mtp_loss: Tensor | None = None
    depth_loss: Tensor | None = None


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
        has_embedding = self.is_first or (self.is_last and shares_embedding(config))
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if has_embedding else None
        scaled = config.residual_scaling == "released" and self.is_first
        self.input_residual = InputScale(config.hidden_size) if scaled else None
        encoders = config.encoders if self.is_first else ()
        self.encoders = nn.ModuleDict({encoder.name: Encoder(encoder, config, dtype) for encoder in encoders})
        # Keyed by their numbers, so that a layer's weights have the same names wherever it is.
        self.layers = nn.ModuleDict({str(layer): _block(config, layer, dtype) for layer in numbers})
        self.norm = RMSNorm(config.hidden_size, config.norm_eps) if self.is_last else None
        has_head = self.is_last and not config.tie_embeddings
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if has_head else None
        ahead = range(config.num_layers, config.num_blocks) if self.is_last else ()
        self.mtp = nn.ModuleDict({str(layer): MTPBlock(config, layer, dtype) for layer in ahead})

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
        token_ids: Tensor | None = None,
        ahead: Tensor | None = None,
        media: Sequence[Media] = (),
    ) -> ModelOutput:
        """Run the layers.

        Args:
            inputs: token ids [batch, seq], or what the layer before the first here put out [batch, seq, stream_size].
            position_ids: [batch, seq] positions inside each document; None counts from 0 (or from the cache's end).
            document_ids: [batch, seq] number of the packed document, negative at padding; None: one document a row.
            noise_seeds: [batch] seeds of the routing noise, used while training.
            cache: continues the sequences it holds and is extended; excludes document_ids.
            shard: this rank holds some positions of each sequence: `inputs`, `labels`, `token_ids` and `ahead` are
                those; position_ids are the ones that attention has here; document_ids stay whole.
            labels: [batch, seq], for the loss.
            token_ids: [batch, seq] of the inputs; needed where `inputs` are not token ids.
            ahead: [depth, batch, seq] labels of multi-token prediction (see `train.stage`); None: it is left out.
            media: what stands at the placeholders among the inputs (see `Media`), at most one for each encoder. Only
                the first layers want it.
        """
        past = cache.length if cache is not None else 0
        seq = inputs.shape[1]
        if position_ids is None:
            position_ids = torch.arange(past, past + seq, device=inputs.device).unsqueeze(0)
        positions = {
            kind: positions_of(
                kind, self.config, position_ids, document_ids, past if cache is not None else None, shard
            )
            for kind in {block.layer_type for block in self.all_blocks()}
        }
        token_ids = inputs if token_ids is None and self.is_first else token_ids
        groups = self._groups(seq, token_ids, document_ids, noise_seeds, shard)
        x, state = self._enter(inputs, media)
        stats: list[RouterStats | None] = []
        heads: list[HeadStats | None] = []
        depth_losses: list[Tensor | None] = []
        for i, block in enumerate(self.blocks()):
            layer_cache = cache.layers[i] if cache is not None else None
            out = self._run(block, layer_cache, x, positions[block.layer_type], groups, state)
            x, state = out.x, out.router_state
            stats.append(out.stats)
            heads.append(out.head_stats)
            depth_losses.append(out.depth_loss)
        if cache is not None:
            cache.length += seq
        if self.norm is None:
            return ModelOutput(
                self._leave(x, state), _present(stats), _present(heads), depth_loss=self._depth_loss(depth_losses)
            )
        hidden = self.norm(x).to(self.dtype)
        loss = None if labels is None else self._nll(hidden, labels, loss_scale)
        mtp_loss = None
        if ahead is not None and self.mtp:
            assert labels is not None
            mtp_loss = self._predict_ahead(hidden, labels, ahead, positions, groups, state, stats, heads) * loss_scale
        return ModelOutput(hidden, _present(stats), _present(heads), loss, mtp_loss, self._depth_loss(depth_losses))

    def _groups(
        self,
        seq: int,
        token_ids: Tensor | None,
        document_ids: Tensor | None,
        noise_seeds: Tensor | None,
        shard: SequenceShard | None,
    ) -> TokenGroups:
        valid = None if document_ids is None else (document_ids >= 0).reshape(-1)
        ids = None if token_ids is None else token_ids.reshape(-1)
        types = None
        if ids is not None and self.config.num_token_types > 1:
            borders = torch.tensor(self.config.token_types, device=ids.device, dtype=ids.dtype)
            types = torch.bucketize(ids, borders, right=True)
            types = torch.where(ids < 0, len(borders) - ids, types)  # placeholder(0) is -1, and so on
            ids = ids.clamp_min(-1)
        return TokenGroups(seq if shard is None else seq * shard.parts, valid, noise_seeds, shard, ids, types)

    def _enter(self, inputs: Tensor, media: Sequence[Media]) -> tuple[Tensor, Tensor | None]:
        """The residual stream and the router's state that come into the first layer here."""
        if not self.is_first:
            if self.stream_size == self.config.hidden_size:
                return inputs, None
            x, state = inputs.split([self.config.hidden_size, self.stream_size - self.config.hidden_size], -1)
            return x, state
        x = self._embed(inputs, media)
        return x if self.input_residual is None else self.input_residual(x), None

    def _embed(self, ids: Tensor, media: Sequence[Media]) -> Tensor:
        """[batch, seq, hidden]: rows of the table, and encoders' vectors at their placeholders."""
        assert self.embed_tokens is not None
        if not self.encoders:
            return self.embed_tokens(ids).to(self.stream_dtype)
        x = self.embed_tokens(ids.clamp_min(0)).to(self.stream_dtype)
        found = {item.encoder: (item.patches, item.numbers) for item in media}
        for number, encoder in enumerate(self.encoders.values()):
            assert isinstance(encoder, Encoder)
            if number not in found and not torch.is_grad_enabled():
                continue
            # With gradients every encoder takes part in every batch: ranks must agree on whose gradients there are.
            vectors = encoder(*found.get(number, encoder.blank(x.device)))
            x = insert(x, ids == placeholder(number), vectors)
        return x

    def _depth_loss(self, losses: list[Tensor | None]) -> Tensor | None:
        found = _present(losses)
        return torch.stack(found).sum() / sum(self.config.depth_layers) if found else None

    def _leave(self, x: Tensor, state: Tensor | None) -> Tensor:
        carried = self.stream_size - self.config.hidden_size
        if carried == 0:
            return x
        return torch.cat((x, x.new_zeros(*x.shape[:-1], carried) if state is None else state.to(x.dtype)), -1)

    def _run(self, block: nn.Module, cache: LayerCache | None, *args: Any) -> BlockOutput:
        if self.recompute and cache is None and torch.is_grad_enabled():
            # Statistics leave the block as outputs, so the second forward of a recomputed block counts nothing.
            again: BlockOutput = checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)
            return again
        output: BlockOutput = block(*args) if cache is None else block(*args, cache)
        return output

    def _nll(self, hidden: Tensor, labels: Tensor, scale: float) -> Tensor:
        return linear_cross_entropy(self._to_head(hidden), self.head_weight, labels, scale)

    def _to_head(self, hidden: Tensor) -> Tensor:
        return hidden.float() if self.config.head_fp32 and hidden.dtype != torch.float64 else hidden

    def _predict_ahead(
        self,
        hidden: Tensor,
        labels: Tensor,
        ahead: Tensor,
        positions: dict[LayerType, Positions],
        groups: TokenGroups,
        state: Tensor | None,
        stats: list[RouterStats | None],
        heads: list[HeadStats | None],
    ) -> Tensor:
        """Mean over the depths of Σ nll; the statistics of their blocks are added to `stats` and `heads`."""
        assert self.embed_tokens is not None
        losses = []
        x = hidden.to(self.stream_dtype)
        for known, target, mtp in zip([labels, *ahead[:-1]], ahead, self.mtp.values(), strict=True):
            assert isinstance(mtp, MTPBlock)
            embedding = self.embed_tokens(known.clamp_min(0)).to(self.stream_dtype)
            x, block_stats, state, block_heads, _ = self._run(
                mtp, None, x, embedding, positions[mtp.block.layer_type], groups, state
            )
            stats.append(block_stats)
            heads.append(block_heads)
            losses.append(self._nll(mtp.norm(x).to(self.dtype), target, 1.0))
        return torch.stack(losses).mean()

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [..., vocab] of hidden [..., hidden]; for decoding, where the rows are few."""
        return linear(self._to_head(hidden), self.head_weight).float()

    @property
    def stream_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32) if self.config.residual_fp32 else self.dtype

    @property
    def stream_size(self) -> int:
        return stream_size(self.config)

    def blocks(self) -> list[Block | DepthBlock]:
        return list(self.layers.values())  # type: ignore[arg-type]  # a ModuleDict does not say what it holds

    def all_blocks(self) -> list[Block | DepthBlock]:
        """Those of multi-token prediction too."""
        return self.blocks() + [mtp.block for mtp in self.mtp.values()]  # type: ignore[misc]

    def moe_layers(self) -> list[MoELayer]:
        """Of all blocks, in the order of their router statistics."""
        return [block.mlp for block in self.all_blocks() if isinstance(block.mlp, MoELayer)]

    def head_experts(self) -> dict[int, HeadExpertAttention]:
        """Of all blocks, by their numbers and in the order of their head statistics."""
        found = {block.layer: block.self_attn for block in self.all_blocks()}
        return {layer: module for layer, module in found.items() if isinstance(module, HeadExpertAttention)}

    def new_cache(self, batch: int, max_len: int, device: torch.device | str, dtype: torch.dtype) -> KVCache:
        """An empty cache for `batch` sequences of at most max_len tokens."""
        return KVCache([block.self_attn.new_cache(batch, max_len, device, dtype) for block in self.blocks()], max_len)

    def set_rope(self, rope: RopeConfig) -> None:
        """Go on with other rotary embeddings, as when the context is extended."""
        self.config = self.config.model_copy(update={"rope": rope})
        for block in self.all_blocks():
            if isinstance(block.self_attn, LatentAttention):
                block.self_attn.scale = softmax_scale(self.config, block.layer_type)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, self.config, seed))


def _present(found: Iterable[T | None]) -> list[T]:
    return [item for item in found if item is not None]


def _block(config: ModelConfig, layer: int, dtype: torch.dtype) -> Block | DepthBlock:
    return DepthBlock(config, layer, dtype) if config.depth_layers[layer] else Block(config, layer, dtype)


def shares_embedding(config: ModelConfig) -> bool:
    """Whether the first and the last stage of a pipeline both need the embedding."""
    return config.tie_embeddings or config.mtp is not None


def stream_size(config: ModelConfig) -> int:
    """Width of what goes from stage to stage: the hidden state, and the router's state where layers pass one on."""
    router = config.moe.router if config.moe else None
    carries = router is not None and router.kind == "zaya" and router.carry_state
    return config.hidden_size + (router.hidden_size if carries and router is not None else 0)
