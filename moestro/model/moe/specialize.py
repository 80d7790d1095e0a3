"""Losses that give experts something of their own: mutual information, and the modality losses of Uni-MoE.

Each is a mean over valid tokens of a function of that token's shares, so it adds up over micro-batches and ranks. Where
the definition has a mean over the batch inside a logarithm, the *previous* step's global mean stands there, with the
derivative that the whole would have at that point: the lag that `balance.py` explains.
"""

import torch
from torch import Tensor

from moestro.config import MoEConfig
from moestro.model.moe.groups import TokenGroups

TINY = 1e-20  # least share whose logarithm is taken


def token_loss(
    shares: Tensor, penalty: Tensor | None, moe: MoEConfig, groups: TokenGroups, mean_shares: Tensor | None
) -> Tensor | None:
    """[T] all losses of `BalanceConfig` but the auxiliary and z-loss, times their coefficients; None: there is none.

    shares: [T, C]; penalty: [T] of the selection; mean_shares: [types, C], see `memory.Memory`.
    """
    balance, terms = moe.balance, []
    if penalty is not None:
        terms.append(penalty if moe.router.selection == "expert_choice" else balance.alignment_coef * penalty)
    if balance.mi_coef:
        assert mean_shares is not None
        terms.append(balance.mi_coef * mutual_information_loss(shares, mean_shares.sum(0)))
    if balance.modality_prior_coef:
        assert mean_shares is not None
        prior = modality_prior(len(mean_shares), moe.resolved_num_experts, moe.null_experts, shares)
        terms.append(balance.modality_prior_coef * (shares - prior[groups.types()]).abs().sum(-1))
    if balance.modality_split_coef:
        assert mean_shares is not None
        terms.append(balance.modality_split_coef * modality_split_loss(shares, groups.types(), mean_shares))
    return torch.stack(terms).sum(0) if terms else None


def mutual_information_loss(shares: Tensor, mean_share: Tensor) -> Tensor:
    """[T] with mean -H(expert) + mean H(expert | token) (arXiv 2404.05567, eq. 4), in nats.

    Σ p ln q, with q the previous mean, has the derivative of -H(mean p) where the mean is q.
    """
    reference = mean_share.to(shares.dtype).clamp_min(TINY).log()
    return (shares * (reference - shares.clamp_min(TINY).log())).sum(-1)


def modality_prior(types: int, experts: int, null_experts: int, like: Tensor) -> Tensor:
    """[types, C] the share of each choice that a type's tokens should have: equal over its part of the experts, which
    are cut into consecutive parts as equal as can be."""
    owner = torch.arange(experts, device=like.device) * types // experts
    mask = (owner == torch.arange(types, device=like.device).unsqueeze(1)).to(like.dtype)
    prior = mask / mask.sum(1, keepdim=True).clamp_min(1)
    return torch.cat((prior, prior.new_zeros(types, null_experts)), 1)


def modality_split_loss(shares: Tensor, types: Tensor, mean_shares: Tensor) -> Tensor:
    """[T] with mean 1 - the mean KL divergence of two different types' mean gates (in both orders), of all pairs of
    types that the previous step had tokens of.

    It is that step's value, and to first order what this step's gates add to it. mean_shares: [types, C] sums of the
    previous step's shares by type over its tokens.
    """
    part = mean_shares.to(shares.dtype).sum(1, keepdim=True)  # of all tokens, those of a type
    gates = (mean_shares / part.clamp_min(TINY)).to(shares.dtype).clamp_min(TINY)
    here = (part > 0).to(shares.dtype)
    pair = here * here.t() * (1 - torch.eye(len(part), dtype=shares.dtype, device=shares.device))
    pair = pair / pair.sum().clamp_min(1)
    logs = gates.log()
    ratio = gates / gates.unsqueeze(1)  # [a, b, C]: gate b over gate a
    difference = logs.unsqueeze(1) - logs
    value = 1 - (pair.unsqueeze(2) * gates.unsqueeze(1) * difference).sum()
    # ∂ KL(a, b) / ∂ gate a = ln a - ln b + 1, and ∂ KL(b, a) / ∂ gate a = -b / a.
    slope = -(pair.unsqueeze(2) * (difference + 1 - ratio)).sum(1)
    slope = (slope - (slope * gates).sum(1, keepdim=True)) / part.clamp_min(TINY) * here
    return value + (shares * slope[types]).sum(-1)
