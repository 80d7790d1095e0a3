"""The ways to choose experts from scores, one function each; all are tested against loops over tokens.

A choice is an expert or, after those, a null expert: C of them, of which E are experts. A selection returns K places
for each token; a place that stays empty holds C and weighs nothing. What a selection needs of other tokens it asks for
by `TokenGroups`, so that no way of cutting sequences over ranks changes it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moestro.config import MoEConfig, RouterConfig
from moestro.errors import MoestroError
from moestro.model.moe.assignment import balanced_assignment
from moestro.model.moe.groups import TokenGroups, open_choices


class Selection(NamedTuple):
    expert_ids: Tensor  # [T, K] int64
    weights: Tensor  # [T, K], before they are divided by their sum and scaled
    penalty: Tensor | None = None  # [T] a loss of this selection: SAM's alignment, the causal router's error


@dataclass(frozen=True)
class Scores:
    """What selections choose from. Choices that are closed to a token's type have logit -inf and score 0."""

    logits: Tensor  # [T, C] fp32 or fp64
    probs: Tensor  # [T, C] softmax or sigmoid of the logits
    shares: Tensor  # [T, C] probs over their sum
    open: Tensor | None  # [T, C] bool; None: all


def score(logits: Tensor, moe: MoEConfig, top_k: int, groups: TokenGroups) -> Scores:
    """Closed choices are masked before the softmax, so that nothing reaches their columns of the router."""
    is_open = open_choices(groups, moe)
    if is_open is not None:
        logits = logits.masked_fill(~is_open, -torch.inf)
    if moe.router.score == "sigmoid":
        probs = logits.sigmoid()
        return Scores(logits, probs, probs / probs.sum(-1, keepdim=True).clamp_min(1e-20), is_open)
    if moe.router.selection == "k_top_1":  # each prototype has a softmax of its own
        probs = logits.unflatten(1, (top_k, -1)).softmax(-1).flatten(1)
        return Scores(logits, probs, probs / top_k, is_open)
    probs = logits.softmax(-1)
    return Scores(logits, probs, probs, is_open)


def select(
    scores: Scores,
    ranking: Tensor,
    moe: MoEConfig,
    top_k: int,
    groups: TokenGroups,
    training: bool,
    causal: Tensor | None,
) -> Selection:
    """ranking: [T, C], see `rank`. causal: [T, E] logits of the router that stands in for expert choice."""
    kind = moe.router.selection
    if kind == "k_top_1":
        return _k_top_1(scores, top_k)
    if kind == "sam":
        return _sam(scores, moe.router, top_k)
    if kind == "base":
        return _base(scores, moe, groups, training)
    if kind == "expert_choice":
        assert causal is not None
        return _expert_choice(scores, moe, top_k, groups, training, causal)
    if kind in ("dense", "dense_to_sparse"):
        return _dense(scores, moe.router, training)
    return _top_k(scores, ranking, moe, top_k)


def rank(scores: Scores, moe: MoEConfig, bias: Tensor) -> Tensor:
    """[T, C] what "top_k" sorts by: scores or logits, with the selection bias; -inf where closed. No gradient."""
    ranking = scores.logits if moe.router.top_k_before_score else scores.probs
    if has_bias(moe):
        ranking = ranking + bias.to(ranking.dtype)
    if scores.open is not None:
        ranking = ranking.masked_fill(~scores.open, -torch.inf)
    return ranking.detach()


def has_bias(moe: MoEConfig) -> bool:
    return moe.balance.bias_rule != "none" or (moe.null_experts > 0 and moe.null_bias != 0)


def group_scores(ranking: Tensor, config: RouterConfig) -> Tensor:
    """[T, C] → [T, num_groups]: the sum of a group's best two (DeepSeek-V3), or its best (V2)."""
    members = ranking.unflatten(1, (config.num_groups, -1))
    if config.group_score == "max":
        return members.amax(-1)
    return members.topk(min(2, members.shape[-1]), -1).values.sum(-1)


def open_groups(ranking: Tensor, config: RouterConfig) -> Tensor:
    """[T, num_groups] bool, the best top_groups."""
    best = descending(group_scores(ranking, config))[:, : config.top_groups]
    return torch.zeros_like(ranking[:, : config.num_groups], dtype=torch.bool).scatter_(1, best, True)


def descending(values: Tensor) -> Tensor:
    """Indices along the last axis; stable, so that ties go to the lowest number on every device, unlike topk."""
    return values.detach().sort(dim=-1, descending=True, stable=True).indices


def _top_k(scores: Scores, ranking: Tensor, moe: MoEConfig, top_k: int) -> Selection:
    config, choices = moe.router, ranking.shape[1]
    if config.num_groups > 1:
        closed = ~open_groups(ranking, config)
        ranking = ranking.masked_fill(closed.repeat_interleave(choices // config.num_groups, 1), -torch.inf)
    ids = descending(ranking)[:, :top_k]
    if config.top_k_before_score and config.score == "softmax":
        weights = scores.logits.gather(1, ids).softmax(-1)
    else:
        weights = scores.probs.gather(1, ids)
    if moe.null_experts and moe.null_ends_choice:
        null = (ids >= moe.resolved_num_experts).long()
        ended = null.cumsum(1) > null
        ids, weights = ids.masked_fill(ended, choices), weights.masked_fill(ended, 0)
    return Selection(ids, weights)


def _k_top_1(scores: Scores, top_k: int) -> Selection:
    """The best expert of each of top_k prototypes of consecutive experts (M6-T, arXiv 2105.15082)."""
    size = scores.logits.shape[1] // top_k
    best = descending(scores.logits.unflatten(1, (top_k, size)))[..., 0]
    ids = best + size * torch.arange(top_k, device=best.device)
    return Selection(ids, scores.probs.gather(1, ids))


def _sam(scores: Scores, config: RouterConfig, top_k: int) -> Selection:
    """Switch and mixture: the group of experts with the largest sum of scores, and its best top_k (HetuMoE).

    The penalty is what experts of other groups score above the last chosen one.
    """
    probs = scores.probs.unflatten(1, (config.num_groups, -1))
    group = descending(probs.sum(-1))[:, :1]
    inside = probs.gather(1, group.unsqueeze(2).expand(-1, -1, probs.shape[2])).squeeze(1)
    best = descending(inside)[:, :top_k]
    weights = inside.gather(1, best)
    outside = torch.ones_like(probs[..., 0]).scatter(1, group, 0).unsqueeze(2)
    above = (probs - weights[:, -1:, None]).clamp_min(0)
    return Selection(best + group * probs.shape[2], weights, (above * outside).flatten(1).sum(1))


def _base(scores: Scores, moe: MoEConfig, groups: TokenGroups, training: bool) -> Selection:
    """While training an assignment that gives all experts (of a type) equally many of a sequence's tokens, else the
    best expert (arXiv 2103.16716). An expert's output weighs σ(its logit), the layer's input the rest."""
    ids = descending(scores.logits)[:, 0]
    if training:
        ids = groups.mine(_assign(groups.all(scores.logits), moe, groups))
    ids = ids.unsqueeze(1)
    return Selection(ids, scores.logits.gather(1, ids).sigmoid())


def _assign(logits: Tensor, moe: MoEConfig, groups: TokenGroups) -> Tensor:
    """[all tokens, E] → [all tokens] the expert of each token; 0 at padding."""
    sizes = moe.resolved_expert_groups or (moe.resolved_num_experts,)
    types = groups.all(groups.types()) if len(sizes) > 1 else torch.zeros_like(logits[:, 0], dtype=torch.int64)
    if groups.valid is not None:
        types = types.masked_fill(~groups.valid, -1)
    ids = torch.zeros_like(types)
    for start in range(0, len(logits), groups.seq_len):
        first = 0
        for kind, size in enumerate(sizes):
            here = start + (types[start : start + groups.seq_len] == kind).nonzero().squeeze(1)
            ids[here] = first + balanced_assignment(logits[here, first : first + size])
            first += size
    return ids


def _expert_choice(
    scores: Scores, moe: MoEConfig, top_k: int, groups: TokenGroups, training: bool, causal: Tensor
) -> Selection:
    """While training each expert takes the best tokens of each sequence, which looks ahead in it; else each token the
    experts that the causal router expects to take it (arXiv 2407.21770). The penalty is that router's error."""
    taken = groups.mine(_taken(groups.all(scores.probs), scores, moe, top_k, groups)) if training else causal > 0
    penalty = None
    if training:
        error = F.binary_cross_entropy_with_logits(causal, taken.to(causal.dtype), reduction="none")
        penalty = error.mean(-1) if scores.open is None else (error * scores.open).sum(-1) / scores.open.sum(-1)
    elif scores.open is not None:
        taken = taken & scores.open
    return _where(taken, scores.probs, penalty)


def _taken(probs: Tensor, scores: Scores, moe: MoEConfig, top_k: int, groups: TokenGroups) -> Tensor:
    """[all tokens, E] bool: of n tokens of its type in a sequence an expert takes ceil(factor · top_k · n / experts of
    the type), the best first."""
    sizes = moe.resolved_expert_groups or (moe.resolved_num_experts,)
    candidates = torch.ones_like(probs, dtype=torch.bool) if scores.open is None else groups.all(scores.open)
    if groups.valid is not None:
        candidates = candidates & groups.valid.unsqueeze(1)
    sequences = candidates.view(-1, groups.seq_len, probs.shape[1])
    per_type = torch.tensor([size for size in sizes for _ in range(size)], device=probs.device)
    wanted = sequences.sum(1).double() * (moe.router.capacity_factor or 1.0) * top_k / per_type
    room = wanted.mul(1e9).round().div(1e9).ceil()  # see `capacity`
    order = probs.view_as(sequences).masked_fill(~sequences, -1).sort(dim=1, descending=True, stable=True).indices
    place = torch.empty_like(order).scatter_(
        1, order, torch.arange(groups.seq_len, device=order.device).view(1, -1, 1).expand_as(order)
    )
    return ((place < room.unsqueeze(1)) & sequences).flatten(0, 1)


def _dense(scores: Scores, config: RouterConfig, training: bool) -> Selection:
    """All experts (arXiv 2404.05567, eq. 1); "dense_to_sparse": those above 1 / E and the best (arXiv 2112.14397)."""
    kept = torch.ones_like(scores.probs, dtype=torch.bool) if scores.open is None else scores.open
    best = descending(scores.shares)
    if config.selection == "dense_to_sparse":
        experts = kept.sum(-1, keepdim=True)
        kept = (scores.shares > 1 / experts).scatter(1, best[:, :1], True)
    elif not training:
        if config.eval_top_k is not None:
            kept = kept & torch.zeros_like(kept).scatter(1, best[:, : config.eval_top_k], True)
        if config.eval_threshold is not None:
            kept = kept & (scores.probs * kept.shape[1] > config.eval_threshold)
    return _where(kept, scores.probs)


def _where(kept: Tensor, probs: Tensor, penalty: Tensor | None = None) -> Selection:
    """The choices of a mask [T, C], with a place for each."""
    ids = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
    return Selection(ids.masked_fill(~kept, kept.shape[1]), probs * kept, penalty)


def hash_selection(groups: TokenGroups, moe: MoEConfig, layer: int, top_k: int) -> Selection:
    """The top_k experts with the largest hashes of (token id, layer, expert): no parameter, no training.

    Vectors of an encoder have no token id; their place in the sequence stands for it.
    """
    if groups.token_ids is None:
        raise MoestroError('router.kind = "hash" needs the token ids; pass token_ids to the model')
    parts = 1 if groups.shard is None else groups.shard.parts
    places = torch.arange(len(groups.token_ids) * parts, device=groups.token_ids.device) % groups.seq_len
    ids = torch.where(groups.token_ids < 0, -1 - groups.mine(places), groups.token_ids)
    experts = moe.resolved_num_experts
    hashed = _mix(_mix(ids.unsqueeze(1) * 4096 + layer) + torch.arange(experts, device=ids.device))
    is_open = open_choices(groups, moe)
    if is_open is not None:
        hashed = hashed.masked_fill(~is_open, -1)
    chosen = descending(hashed)[:, :top_k]
    return Selection(chosen, torch.ones(chosen.shape, device=ids.device))


def _mix(x: Tensor) -> Tensor:
    """Well-mixed 62-bit integers of int64, by a multiply-and-shift in the manner of splitmix64; products wrap."""
    for factor in (-4658895280553007687, -7723592293110705685):
        x = x ^ ((x >> 31) & 0x1FFFFFFFF)
        x = x * factor
    return (x ^ ((x >> 31) & 0x1FFFFFFFF)) & 0x3FFFFFFFFFFFFFFF
