"""What keeps the experts' load even: the auxiliary loss, the z-loss, and the selection bias.

The auxiliary loss is E · Σ_i f_i P_i (arXiv 2101.03961, eq. 4), with f_i the share of (token, expert) pairs that chose
expert i, a constant for the gradient, and P_i the mean score share of i. It is 1 at uniform routing for every top_k.
The scope says over which tokens:

* sequence, group, micro_batch: f and P over each such set of tokens; the loss is the mean over sets, weighted by their
  valid tokens.
* global_batch: f over the *previous* step's whole global batch, P over the current one. The current batch's f is not
  known before its last micro-batch has been routed, and every estimate from a part of it would make the gradient
  depend on how the batch is cut. With the lag the gradient is the same for every micro-batch size and layout; f is
  uniform at the first step, where the term therefore has no gradient.

Every token counts once: micro-batches are weighted by their valid tokens, and layers are averaged, so that a
coefficient means the same whatever the accumulation and depth.
"""

from typing import Literal

import torch
from torch import Tensor

from moestro.config import BalanceConfig

ADAMW_BETAS = (0.9, 0.999)
ADAMW_EPS = 1e-8


def balance_loss(
    shares: Tensor,
    expert_ids: Tensor,
    scope: Literal["sequence", "group", "micro_batch", "global_batch"],
    seq_len: int,
    group_size: int | None,
    valid: Tensor | None,
    global_load: Tensor,
    places: Tensor | None = None,
) -> Tensor:
    """The auxiliary loss without its coefficient.

    When sequences are cut over ranks, each rank returns its own tokens' part of the sum (`places` says which they are).

    Args:
        shares: [T, E] scores that sum to one over the experts; carries the gradient.
        expert_ids: [T, K] chosen experts, E for none; with `places`, those of all tokens [T', K].
        seq_len, group_size: tokens of a set for the scopes `sequence` and `group`.
        valid: [T] bool or None; tokens that are False count nowhere. With `places`, of all tokens [T'].
        global_load: [E] shares of the previous step's pairs, for the scope `global_batch`.
        places: [T] where the tokens of `shares` stand among all T' tokens of the micro-batch; None: they are all.
    """
    if scope == "global_batch":
        return lagged_balance_loss(shares, valid, global_load)
    tokens, num_experts = len(expert_ids), shares.shape[1]
    weight = shares.new_ones(tokens) if valid is None else valid.to(shares.dtype)
    here = weight if places is None else weight[places]
    size = {"sequence": seq_len, "group": group_size or seq_len, "micro_batch": tokens}[scope]
    group = torch.arange(tokens, device=shares.device) // size
    group_here = group if places is None else group[places]
    num_groups = -(-tokens // size)
    members = shares.new_zeros(num_groups).index_add(0, group, weight)
    mean = shares.new_zeros(num_groups, num_experts).index_add(0, group_here, shares * here.unsqueeze(1))
    pairs = (group.unsqueeze(1) * (num_experts + 1) + expert_ids).reshape(-1)
    chosen = shares.new_zeros(num_groups * (num_experts + 1)).index_add(
        0, pairs, weight.repeat_interleave(expert_ids.shape[1])
    )
    chosen = chosen.view(num_groups, num_experts + 1)[:, :num_experts]
    # Σ over groups of members · E · Σ_i (chosen_i / all chosen) · (mean_i / members), over all members.
    product = (chosen * mean).sum(1) / chosen.sum(1).clamp_min(1)
    return num_experts * product.sum() / members.sum().clamp_min(1)


def lagged_balance_loss(
    shares: Tensor, valid: Tensor | None, global_load: Tensor, count: Tensor | int | None = None
) -> Tensor:
    """The scope `global_batch`: E Σ f_i P_i with P the sum of the valid shares [T, E] over `count` tokens."""
    return shares.shape[1] * masked_mean(shares @ global_load.to(shares.dtype), valid, count)


def z_loss(logits: Tensor, valid: Tensor | None, count: Tensor | int | None = None) -> Tensor:
    """Mean of logsumexp² of the router's logits (arXiv 2202.08906, eq. 5). logits: [T, E]."""
    return masked_mean(logits.logsumexp(-1).square(), valid, count)


def masked_mean(values: Tensor, valid: Tensor | None, count: Tensor | int | None = None) -> Tensor:
    """Σ of the valid values [T] over `count`, by default their number; 0 when there is none."""
    if valid is None:
        return values.mean() if count is None else values.sum() / count
    total = valid.sum() if count is None else torch.as_tensor(count, device=values.device)
    return (values * valid).sum() / total.clamp_min(1)


@torch.no_grad()
def update_balance(
    bias: Tensor,
    moments: Tensor,
    global_load: Tensor,
    load: Tensor,
    config: BalanceConfig,
    target: Tensor | None = None,
) -> None:
    """Move the selection bias by one step and remember the load, in place.

    `sign` (DeepSeek-V3, arXiv 2412.19437): up for experts below the mean load, down for those above. `adamw` (ZAYA1):
    AdamW on the gradient f_i - 1/E. Both are kept at zero mean, so that the bias cannot drift as a whole. `quantile`
    moves elsewhere (quantile.py).

    Args:
        bias, global_load: [E]; moments: [3, E], see `Router`.
        load: [E] pairs chosen in this step's whole global batch.
        target: [E] the shares f_i that are wanted instead of 1/E each.
    """
    total = load.sum()
    if total == 0:
        return
    share = load / total
    global_load.copy_(share)
    error = share - (1 / len(load) if target is None else target)
    if config.bias_rule == "sign":
        step = -error.sign()
    elif config.bias_rule == "adamw":
        first, second, count = moments
        count.add_(1)
        first.lerp_(error, 1 - ADAMW_BETAS[0])
        second.lerp_(error.square(), 1 - ADAMW_BETAS[1])
        unbiased = (second / (1 - ADAMW_BETAS[1] ** count)).sqrt()
        step = -first / (1 - ADAMW_BETAS[0] ** count) / (unbiased + ADAMW_EPS)
    else:
        return
    bias.add_(config.bias_lr * (step - step.mean()))
