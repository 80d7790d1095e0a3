"""Mixture of depths (arXiv 2404.02258): a layer that only some tokens of a sequence pass; the others stay as they are.

While training, a router of one column admits the ceil(capacity · tokens) best valid tokens of each sequence: a choice
among all of them, which looks ahead and cannot be made token by token. So a second router, which sees each token alone,
learns to foretell it and stands in when not training (arXiv 2404.02258, section 3.5; MoMa, arXiv 2407.21770). It learns
from a constant of the stream: nothing but itself is trained by its loss.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moestro.config import ModelConfig
from moestro.config.model import LayerType
from moestro.errors import MoestroError
from moestro.model.attention.cache import LayerCache
from moestro.model.attention.mask import Positions, mask_of
from moestro.model.block import Attention, Block, BlockOutput
from moestro.model.mlp import FeedForward
from moestro.model.moe.balance import masked_mean
from moestro.model.moe.layer import MoELayer
from moestro.model.moe.router import RouterStats, TokenGroups
from moestro.model.ops import Linear


class DepthBlock(nn.Module):
    """x + sigmoid(router(x)) · (block(x) - x) for the tokens that are admitted, x for the others.

    Admitted tokens attend to each other only, at the positions they have in their document.
    """

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.depth is not None
        self.config, self.capacity = config, config.depth.capacity
        self.block = Block(config, layer, dtype)
        hidden = max(1, config.hidden_size // 2)
        self.depth_router = Linear(config.hidden_size, 1)
        self.aux_in = Linear(config.hidden_size, hidden)
        self.aux_out = Linear(hidden, 1)

    # What others ask of a layer, wherever it is.

    @property
    def layer(self) -> int:
        return self.block.layer

    @property
    def layer_type(self) -> LayerType:
        return self.block.layer_type

    @property
    def self_attn(self) -> Attention:
        return self.block.self_attn

    @property
    def mlp(self) -> MoELayer | FeedForward:
        return self.block.mlp

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        groups: TokenGroups,
        router_state: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> BlockOutput:
        """x: [batch, seq, hidden], the residual stream. A cache gets entries of the admitted tokens only.

        Raises:
            MoestroError: a cache of several sequences, whose layers would differ in length.
        """
        batch, seq, _ = x.shape
        valid = x.new_ones(batch, seq, dtype=torch.bool) if groups.valid is None else groups.valid.view(batch, seq)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        score: Tensor = self.depth_router(wide).squeeze(-1)
        foretold: Tensor = self.aux_out(F.silu(self.aux_in(wide.detach()))).squeeze(-1)
        admitted, loss = valid & (foretold > 0), None
        size = seq  # the shape must not depend on the tokens: ranks exchange them
        if self.training:
            admitted, size = best(score, valid, self.capacity), room(seq, self.capacity)
            nll = F.binary_cross_entropy_with_logits(foretold, admitted.to(foretold.dtype), reduction="none")
            loss = masked_mean(nll.flatten(), groups.valid, groups.count(batch * seq))
        elif cache is not None:
            if batch > 1:
                raise MoestroError("a model with a mixture of depths decodes one sequence at a time")
            size = int(admitted.sum())
            if size == 0:
                return BlockOutput(x, None, None, None)
        slots = admitted.logical_not().sort(dim=1, stable=True).indices[:, :size]
        inside = admitted.gather(1, slots)
        chosen = _take(x, slots)
        out = self.block(
            chosen,
            self._positions(positions, slots, cache),
            _groups(groups, slots, inside),
            cache=cache,
        )
        change = (out.x - chosen) * _take(score, slots).sigmoid().unsqueeze(-1)
        change = torch.where(inside.unsqueeze(-1), change, 0).to(x.dtype)
        x = x.scatter_add(1, slots.unsqueeze(-1).expand_as(change), change)
        stats = out.stats
        if stats is not None and self.training:
            stats = _per_token(stats, inside.sum() / (self.capacity * groups.count(batch * seq)))
        return BlockOutput(x, stats, None, None, loss)

    def _positions(self, positions: Positions, slots: Tensor, cache: LayerCache | None) -> Positions:
        """Of the chosen tokens. Slots beyond the admitted ones come last, so that no admitted token sees them."""
        ids = _take(positions.position_ids, slots)
        documents = None if positions.document_ids is None else _take(positions.document_ids, slots)
        cos, sin = (_take(table.squeeze(1), slots).unsqueeze(1) for table in (positions.cos, positions.sin))
        window = self.config.sliding_window if self.layer_type == "sliding" else None
        past = None if cache is None else cache.length
        return Positions(ids, cos, sin, mask_of(self.config, ids, documents, window, past, None), documents)


def room(seq: int, capacity: float) -> int:
    """The most tokens of a sequence that are admitted."""
    return math.ceil(seq * capacity - 1e-9)  # 100 · 0.07 is 7.000000000000001 in floating point


def best(score: Tensor, valid: Tensor, capacity: float) -> Tensor:
    """[batch, seq] bool: the ceil(capacity · valid) best valid tokens of each row; of equal ones the first."""
    order = score.detach().masked_fill(~valid, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    rank = order.sort(dim=1).indices  # the inverse of a permutation
    limit = (valid.sum(1, keepdim=True).double() * capacity - 1e-9).ceil()
    return valid & (rank < limit)


def _take(x: Tensor, slots: Tensor) -> Tensor:
    """x: [batch or 1, seq, ...] at slots [batch, size] → [batch, size, ...]."""
    tail = x.shape[2:]
    index = slots.view(*slots.shape, *[1] * len(tail)).expand(*slots.shape, *tail)
    return x.expand(len(slots), *x.shape[1:]).gather(1, index)


def _groups(groups: TokenGroups, slots: Tensor, inside: Tensor) -> TokenGroups:
    def taken(x: Tensor | None) -> Tensor | None:
        return None if x is None else _take(x.view(len(slots), -1), slots).flatten()

    return replace(
        groups,
        seq_len=slots.shape[1],
        valid=inside.flatten(),
        token_ids=taken(groups.token_ids),
        token_types=taken(groups.token_types),
    )


def _per_token(stats: RouterStats, factor: Tensor) -> RouterStats:
    """Means over the admitted tokens of a micro-batch as sums over them per token that could have been admitted.

    A step weighs a micro-batch by its valid tokens; the admitted ones are not quite in proportion to those, for their
    number is rounded up in each sequence.
    """
    means = ("token_entropy", "aux_loss", "z_loss", "other_loss")
    return replace(stats, **{name: getattr(stats, name) * factor for name in means})
