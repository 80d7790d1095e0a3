"""The selection bias by quantiles: where it should stand so that every choice gets its share of the pairs.

A choice's *margin* at a token is how far its biased score lies above what it takes to be chosen: the top_k-th largest
biased score for a choice that was not chosen, the largest one not chosen for a choice that was. The choice would be
taken by exactly those tokens whose margin exceeds -d if its bias rose by d and all others stayed; so d is minus a
quantile of its margins. All choices move at once, and a margin is a difference to others' scores that move too, so
each goes (C - 1) / C of the way (exact for C = 2), and a few steps are needed.

What the step needs of a whole global batch is one histogram of margins for each choice: counts add up over
micro-batches and ranks. Bins are geometric on both sides of 0, and so ever finer where the bias comes to rest.
"""

import torch
from torch import Tensor

from moestro.config import MoEConfig
from moestro.model.moe.selection import group_scores, open_groups

# Margins are differences of scores in [0, 1], or of logits.
_POSITIVE = [10 ** (e / 6) for e in range(-30, 13)]  # 1e-5 … 100
EDGES = [-e for e in reversed(_POSITIVE)] + _POSITIVE
NUM_BINS = len(EDGES) + 1


@torch.no_grad()
def margins(ranking: Tensor, chosen: Tensor, moe: MoEConfig) -> Tensor:
    """[T, C] of biased scores (see `selection.rank`) and the choices [T, K] made by them; +inf where nothing competes.

    With groups of experts a choice also needs its group among the open ones; its margin is the lesser of the two.
    """
    config = moe.router
    inside = torch.zeros(len(ranking), ranking.shape[1] + 1, dtype=torch.bool, device=ranking.device)
    inside = inside.scatter_(1, chosen, True)[:, :-1]
    others = ranking.masked_fill(inside, -torch.inf)
    if config.num_groups > 1:
        is_open = open_groups(ranking, config)
        size = ranking.shape[1] // config.num_groups
        others = others.masked_fill(~is_open.repeat_interleave(size, 1), -torch.inf)
    last = ranking.masked_fill(~inside, torch.inf).amin(1, keepdim=True)
    margin = ranking - torch.where(inside, others.amax(1, keepdim=True), last)
    if config.num_groups > 1:
        of_group = group_scores(ranking, config)
        last = of_group.masked_fill(~is_open, torch.inf).amin(1, keepdim=True)
        best_closed = of_group.masked_fill(is_open, -torch.inf).amax(1, keepdim=True)
        group_margin = of_group - torch.where(is_open, best_closed, last)
        # Its members move alike, and so the sum of two twice as far.
        group_margin = group_margin / (1 if config.group_score == "max" else min(2, size))
        margin = torch.minimum(margin, group_margin.repeat_interleave(size, 1))
    return margin


def histogram(margin: Tensor, counted: Tensor | None) -> Tensor:
    """[T, C] margins of the tokens and choices that are `counted` [T, C] → [C, NUM_BINS] fp32 counts."""
    choices = margin.shape[1]
    bins = torch.bucketize(margin.float(), torch.tensor(EDGES, device=margin.device))
    flat = bins + NUM_BINS * torch.arange(choices, device=margin.device)
    weight = torch.ones_like(flat, dtype=torch.float32) if counted is None else counted.float()
    counts = torch.zeros(choices * NUM_BINS, device=margin.device)
    return counts.index_add_(0, flat.flatten(), weight.flatten()).view(choices, NUM_BINS)


def quantile_step(counts: Tensor, fraction: Tensor) -> Tensor:
    """How far each choice's bias should rise, [C], so that `fraction` [C] of its tokens would choose it.

    counts: [C, NUM_BINS]. Choices that are within one token of their share, or cannot miss it, stay.
    """
    edges = torch.tensor(EDGES, device=counts.device)
    lower = torch.cat((edges[:1], edges))
    upper = torch.cat((edges, edges[-1:]))
    tokens = counts.sum(1, keepdim=True)
    want = fraction.unsqueeze(1).to(counts.dtype) * tokens
    above = counts.flip(1).cumsum(1).flip(1)  # tokens in a bin or a higher one
    here = (above >= want).long().sum(1, keepdim=True).sub(1).clamp_min(0)  # the last bin with enough above
    over = above.gather(1, here) - counts.gather(1, here)
    part = ((want - over) / counts.gather(1, here).clamp_min(1)).clamp(0, 1)
    threshold = upper[here] - part * (upper[here] - lower[here])
    chosen = counts[:, len(_POSITIVE) + 1 :].sum(1, keepdim=True)
    settled = ((chosen - want).abs() < 1) | (want >= tokens)
    scale = 1 - 1 / len(counts)
    return (-scale * threshold.masked_fill(settled, 0)).squeeze(1)
