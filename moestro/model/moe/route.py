"""Stage one without its parameters: logits in, (expert ids, weights, statistics) out. Pure: nothing is remembered."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moestro.config import MoEConfig
from moestro.model.moe.balance import balance_loss, lagged_balance_loss, masked_mean, z_loss
from moestro.model.moe.groups import TokenGroups
from moestro.model.moe.memory import Memory, step_sums
from moestro.model.moe.selection import Scores, Selection, hash_selection, rank, score, select
from moestro.model.moe.specialize import token_loss


@dataclass(frozen=True)
class RouterStats:
    """Sums and means over the valid tokens of one micro-batch in one layer; the losses carry gradients.

    When sequences are cut over ranks, the means are this rank's part: the ranks' values add up to the mean.
    """

    load: Tensor  # [C] fp32, (token, choice) pairs, before any are dropped; C includes null experts
    dropped: Tensor  # [] fp32, pairs that found no room
    tokens: Tensor  # [] fp32, valid tokens
    token_entropy: Tensor  # [] mean entropy of a token's scores over ln C
    aux_loss: Tensor  # [] mean over tokens, 1 at uniform routing
    z_loss: Tensor  # [] mean over tokens
    # [] the other losses of `BalanceConfig` (mutual information, alignment, modality), coefficients included
    other_loss: Tensor
    sums: Tensor  # [C, W] fp32, what `Router.update_balance` wants of all tokens besides the load


@dataclass(frozen=True)
class Routing:
    """expert_ids: [T, K] int64, E where the pair goes nowhere (dropped, null or padding). weights: [T, K], 0 there.

    input_weight: [T], how much of the layer's input goes straight into its output; None: nothing.
    """

    expert_ids: Tensor
    weights: Tensor
    stats: RouterStats
    input_weight: Tensor | None = None


def route(
    logits: Tensor,
    moe: MoEConfig,
    top_k: int,
    groups: TokenGroups,
    memory: Memory,
    training: bool,
    causal: Tensor | None = None,
) -> Routing:
    """Choose experts for each token.

    Args:
        logits: [T, C].
        memory: what the router remembers of the steps before.
        causal: [T, E] logits of expert choice's causal router.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = score(logits, moe, top_k, groups)
    ranking = rank(scores, moe, memory.bias)
    selection = select(scores, ranking, moe, top_k, groups, training, causal)
    return _settle(selection, scores, ranking, moe, groups, memory, training)


def route_by_hash(
    moe: MoEConfig, layer: int, top_k: int, groups: TokenGroups, memory: Memory, training: bool
) -> Routing:
    """As `route`, by the tokens' ids: every token's scores are its choices, equally."""
    selection = hash_selection(groups, moe, layer, top_k)
    shares = torch.zeros(len(selection.expert_ids), moe.num_choices, device=selection.weights.device)
    shares = shares.scatter(1, selection.expert_ids, 1 / top_k)
    # Logits whose logsumexp is 0, so that there is no z-loss.
    scores = Scores(shares.log(), shares, shares, None)
    return _settle(selection, scores, shares, moe, groups, memory, training)


def _settle(
    selection: Selection,
    scores: Scores,
    ranking: Tensor,
    moe: MoEConfig,
    groups: TokenGroups,
    memory: Memory,
    training: bool,
) -> Routing:
    """Weights, capacity, null experts and statistics of a selection."""
    ids, weights, experts = selection.expert_ids, selection.weights, moe.resolved_num_experts
    valid, count = groups.valid_here(), groups.count(len(ids))
    if moe.router.selection != "base":
        if moe.router.renormalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
        weights = weights * moe.router.scaling_factor
    kept = _within_capacity(ids, moe, groups, training)
    other = token_loss(scores.shares, selection.penalty, moe, groups, memory.mean_shares)
    stats = RouterStats(
        load=_count(ids, moe.num_choices, valid),
        dropped=_pairs_lost(kept, valid, ids),
        tokens=torch.tensor(float(len(ids)), device=ids.device) if valid is None else valid.sum().float(),
        token_entropy=masked_mean(_entropy(scores.shares.detach()), valid, count),
        aux_loss=_aux_loss(scores.shares, ids, moe, groups, memory.global_load),
        z_loss=z_loss(scores.logits, valid, count),
        other_loss=torch.zeros((), device=ids.device) if other is None else masked_mean(other, valid, count),
        sums=step_sums(scores, ranking, ids, moe, groups, memory),
    )
    if kept is not None:
        weights = weights * kept
    input_weight = _input_weight(ids, weights, moe, valid)
    real = ids < experts if kept is None else kept & (ids < experts)
    return Routing(torch.where(real, ids, experts), weights * real, stats, input_weight)


def _input_weight(ids: Tensor, weights: Tensor, moe: MoEConfig, valid: Tensor | None) -> Tensor | None:
    """[T] of null experts that put out the layer's input, or what BASE's expert leaves of it."""
    if moe.router.selection == "base":
        rest = 1 - weights.sum(-1)
        return rest if valid is None else rest * valid
    if moe.null_experts == 0 or moe.null_output != "input":
        return None
    return (weights * (ids >= moe.resolved_num_experts)).sum(-1)


def capacity(group_size: int, top_k: int, num_experts: int, factor: float, minimum: int) -> int:
    """Tokens an expert accepts from a group: ceil(group_size * top_k / E * factor) (arXiv 2101.03961, eq. 3)."""
    # Rounded first: 100 * 1.1 is 110.00000000000001 in floating point and must not become 111.
    return max(-int(-round(group_size * top_k * factor / num_experts, 9) // 1), minimum)


def _within_capacity(expert_ids: Tensor, moe: MoEConfig, groups: TokenGroups, training: bool) -> Tensor | None:
    """[T, K] bool, False for padding and for pairs beyond an expert's capacity; None when every pair is kept.

    All first choices of a group queue before its second choices (arXiv 2006.16668), each in token order. What is not an
    expert has room for all.
    """
    config, num_experts = moe.router, moe.resolved_num_experts
    factor = config.capacity_factor
    if not training and config.eval_capacity_factor is not None:
        factor = config.eval_capacity_factor
    if factor is None or config.selection == "expert_choice":
        here = groups.valid_here()
        return None if here is None else here.unsqueeze(1).expand(expert_ids.shape)
    expert_ids = groups.all(expert_ids)
    tokens, top_k = expert_ids.shape
    valid = None if groups.valid is None else groups.valid.unsqueeze(1).expand(tokens, top_k)
    size = min(config.group_size or groups.seq_len, tokens)
    group = torch.arange(tokens, device=expert_ids.device) // size
    slots = moe.num_choices + 1
    queue = group.unsqueeze(1) * slots + expert_ids
    if valid is not None:
        queue = torch.where(valid, queue, -1)  # padding takes no room
    order = queue.t().reshape(-1).sort(stable=True)  # choices first, then tokens
    position = torch.arange(tokens * top_k, device=expert_ids.device)
    starts = torch.searchsorted(order.values, order.values, side="left")
    room = capacity(size, top_k, num_experts, factor, config.min_expert_capacity)
    fits = (position - starts < room) | (order.values % slots >= num_experts)
    kept = torch.empty_like(order.values, dtype=torch.bool)
    kept[order.indices] = fits & (order.values >= 0)
    return groups.mine(kept.view(top_k, tokens).t())


def _aux_loss(shares: Tensor, ids: Tensor, moe: MoEConfig, groups: TokenGroups, global_load: Tensor) -> Tensor:
    scope = moe.balance.aux_scope
    if scope == "global_batch":
        return lagged_balance_loss(shares, groups.valid_here(), global_load, groups.count(len(shares)))
    all_ids = groups.all(ids)
    places = None if groups.shard is None else groups.mine(torch.arange(len(all_ids), device=shares.device))
    size = moe.router.group_size
    return balance_loss(shares, all_ids, scope, groups.seq_len, size, groups.valid, global_load, places)


def _count(ids: Tensor, choices: int, valid: Tensor | None) -> Tensor:
    ids = ids if valid is None else torch.where(valid.unsqueeze(1), ids, choices)
    return torch.bincount(ids.reshape(-1), minlength=choices + 1)[:choices].float()


def _pairs_lost(kept: Tensor | None, valid: Tensor | None, ids: Tensor) -> Tensor:
    if kept is None:
        return torch.zeros((), device=ids.device)
    lost = ~kept if valid is None else ~kept & valid.unsqueeze(1)
    return lost.sum().float()


def _entropy(shares: Tensor) -> Tensor:
    """Of each token's shares [T, C], over ln C; 0 for a single choice."""
    if shares.shape[1] == 1:
        return torch.zeros(len(shares), device=shares.device)
    return torch.special.entr(shares.float()).sum(-1) / math.log(shares.shape[1])
