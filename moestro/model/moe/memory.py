"""What a router remembers of earlier steps, and what a step has to count for it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from moestro.config import ModelConfig, MoEConfig
from moestro.model.moe.groups import TokenGroups
from moestro.model.moe.quantile import NUM_BINS, histogram, margins
from moestro.model.moe.selection import Scores


@dataclass(frozen=True)
class Memory:
    """The same on all ranks: figures of whole global batches."""

    bias: Tensor  # [C] fp32, added to the selection scores
    global_load: Tensor  # [C] fp32, share of the previous step's pairs
    # [types, C] fp32, sums of the previous step's shares over the tokens of a type, divided by all its tokens; one row
    # for all types if only mutual information asks. None: nobody asks.
    mean_shares: Tensor | None = None


def num_mean_shares(model: ModelConfig) -> int:
    """Rows of `Memory.mean_shares`."""
    assert model.moe is not None
    balance = model.moe.balance
    if balance.modality_prior_coef or balance.modality_split_coef:
        return model.num_token_types
    return 1 if balance.mi_coef else 0


def num_sums(model: ModelConfig) -> int:
    """W of `RouterStats.sums`: bins of a histogram of margins, then rows of mean shares."""
    assert model.moe is not None
    return (NUM_BINS if model.moe.balance.bias_rule == "quantile" else 0) + num_mean_shares(model)


@torch.no_grad()
def step_sums(
    scores: Scores, ranking: Tensor, ids: Tensor, moe: MoEConfig, groups: TokenGroups, memory: Memory
) -> Tensor:
    """[C, W] of the valid tokens here. ids: [T, K] choices, ranking: what they were made by."""
    parts, valid = [], groups.valid_here()
    if moe.balance.bias_rule == "quantile":
        counted = scores.open
        if valid is not None:
            column = valid.unsqueeze(1).expand(ranking.shape)
            counted = column if counted is None else column & counted
        parts.append(histogram(margins(ranking, ids, moe), counted))
    if memory.mean_shares is not None:
        shares = scores.shares.float()
        shares = shares if valid is None else shares * valid.unsqueeze(1)
        rows = len(memory.mean_shares)
        types = groups.types() if rows > 1 else torch.zeros_like(ids[:, 0])
        parts.append(shares.new_zeros(rows, shares.shape[1]).index_add_(0, types, shares).t())
    return torch.cat(parts, 1) if parts else torch.zeros(ranking.shape[1], 0, device=ranking.device)


def share_targets(load: Tensor, moe: MoEConfig) -> Tensor:
    """[C] of all pairs, those that each choice should have: all the same, but experts of a token type share what that
    type's tokens have, however many those are. load: [C]."""
    sizes, experts = moe.resolved_expert_groups, moe.resolved_num_experts
    target = torch.full_like(load, 1 / len(load))
    if sizes is None:
        return target
    parts = torch.stack([part.sum() for part in load[:experts].split(list(sizes))])
    parts = parts / parts.sum().clamp_min(1e-20) * (experts / len(load))
    each = torch.cat([(part / size).expand(size) for part, size in zip(parts, sizes, strict=True)])
    return torch.cat((each, target[experts:]))


def chosen_fractions(top_k: int, moe: MoEConfig) -> list[float]:
    """[C] of the tokens that a choice is open to, those that should make it."""
    sizes, experts = moe.resolved_expert_groups or (moe.resolved_num_experts,), moe.resolved_num_experts
    real = [top_k * experts / moe.num_choices / size for size in sizes for _ in range(size)]
    return real + [top_k / moe.num_choices] * moe.null_experts
