"""Stage one: logits in, (expert ids, weights, statistics) out. Pure: nothing is remembered here."""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moestro.config import BalanceConfig, RouterConfig
from moestro.model.moe.balance import balance_loss, lagged_balance_loss, masked_mean, z_loss
from moestro.model.ops import linear
from moestro.model.shards import SequenceShard


@dataclass(frozen=True)
class TokenGroups:
    """What the router must know about where its tokens come from.

    valid: [T] bool, False at padding, or None when there is none. seq_len: tokens of one sequence; T is a multiple.
    noise_seeds: one integer a sequence, or None outside training. All three describe whole sequences, also when
    `shard` says that this rank routes only some of their positions.
    """

    seq_len: int
    valid: Tensor | None = None
    noise_seeds: Tensor | None = None
    shard: SequenceShard | None = None

    def mine(self, x: Tensor) -> Tensor:
        """[all tokens, ...] → [tokens here, ...]."""
        return x if self.shard is None else self.shard.mine(x)

    def all(self, x: Tensor) -> Tensor:
        """[tokens here, ...] → [all tokens, ...], without gradient."""
        return x if self.shard is None else self.shard.gather(x)

    def valid_here(self) -> Tensor | None:
        return None if self.valid is None else self.mine(self.valid)

    def count(self, here: int) -> Tensor | int:
        """Valid tokens of the micro-batch, of which `here` (padding included) are on this rank."""
        if self.valid is not None:
            return self.valid.sum()
        return here if self.shard is None else here * self.shard.parts


@dataclass(frozen=True)
class RouterStats:
    """Sums and means over the valid tokens of one micro-batch in one layer; the losses carry gradients.

    When sequences are cut over ranks, the means are this rank's part: the ranks' values add up to the mean.
    """

    load: Tensor  # [E] fp32, (token, expert) pairs chosen, before any are dropped
    dropped: Tensor  # [] fp32, pairs that found no room
    tokens: Tensor  # [] fp32, valid tokens
    token_entropy: Tensor  # [] mean entropy of a token's scores over ln E
    aux_loss: Tensor  # [] mean over tokens, 1 at uniform routing
    z_loss: Tensor  # [] mean over tokens


@dataclass(frozen=True)
class Routing:
    """expert_ids: [T, K] int64, E where the pair goes nowhere (dropped or padding). weights: [T, K], 0 there."""

    expert_ids: Tensor
    weights: Tensor
    stats: RouterStats


class Router(nn.Module):
    """A linear router. `bias` and `global_load` are moved only by `balance.update_balance`, once per step."""

    bias: Tensor  # [E] fp32, added to the selection scores
    bias_moments: Tensor  # [3, E] fp32: AdamW's first and second moment and its step count
    global_load: Tensor  # [E] fp32, share of the previous step's pairs, over the whole global batch

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, config: RouterConfig, balance: BalanceConfig):
        super().__init__()
        self.config, self.balance, self.top_k = config, balance, top_k
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.reset_balance(self.weight.device)

    def reset_balance(self, device: torch.device) -> None:
        """No bias, and a load as if it had been even so far."""
        num_experts = len(self.weight)
        self.register_buffer("bias", torch.zeros(num_experts, device=device))
        self.register_buffer("bias_moments", torch.zeros(3, num_experts, device=device))
        self.register_buffer("global_load", torch.full((num_experts,), 1 / num_experts, device=device))

    def forward(self, x: Tensor, groups: TokenGroups, layer: int) -> Routing:
        """x: [T, D]; `layer` distinguishes the layers' noise."""
        dtype = torch.float32 if self.config.fp32 and x.dtype != torch.float64 else x.dtype
        x = x.to(dtype)
        if self.training and self.config.jitter > 0 and groups.noise_seeds is not None:
            noise = jitter_noise(groups.noise_seeds, layer, groups.seq_len, x.shape[1], self.config.jitter, x)
            x = x * groups.mine(noise)
        logits = F.linear(x, self.weight.to(dtype)) if self.config.fp32 else linear(x, self.weight)
        return route(logits, self.top_k, self.config, self.balance, groups, self.bias, self.global_load, self.training)


def route(
    logits: Tensor,
    top_k: int,
    config: RouterConfig,
    balance: BalanceConfig,
    groups: TokenGroups,
    bias: Tensor,
    global_load: Tensor,
    training: bool,
) -> Routing:
    """Choose top_k experts for each token. logits: [T, E]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    valid, count = groups.valid_here(), groups.count(len(logits))
    num_experts = logits.shape[1]
    probs = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
    selection = logits if config.top_k_before_score else probs
    if balance.bias_rule != "none":
        selection = selection + bias.to(selection.dtype)
    # A stable sort breaks ties by the lowest expert number on every device, which topk does not promise.
    expert_ids = selection.detach().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    if config.top_k_before_score and config.score == "softmax":
        weights = logits.gather(1, expert_ids).softmax(-1)
    else:
        weights = probs.gather(1, expert_ids)
    if config.renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    weights = weights * config.scaling_factor

    shares = probs if config.score == "softmax" else probs / probs.sum(-1, keepdim=True).clamp_min(1e-20)
    kept = _within_capacity(expert_ids, num_experts, config, groups, training)
    stats = RouterStats(
        load=_count(expert_ids, num_experts, valid),
        dropped=_pairs_lost(kept, valid, expert_ids),
        tokens=torch.tensor(float(len(logits)), device=logits.device) if valid is None else valid.sum().float(),
        token_entropy=masked_mean(_entropy(shares.detach()), valid, count),
        aux_loss=_aux_loss(shares, expert_ids, balance, groups, config.group_size, global_load),
        z_loss=z_loss(logits, valid, count),
    )
    if kept is not None:
        expert_ids = torch.where(kept, expert_ids, num_experts)
        weights = weights * kept
    return Routing(expert_ids, weights, stats)


def capacity(group_size: int, top_k: int, num_experts: int, factor: float, minimum: int) -> int:
    """Tokens an expert accepts from a group: ceil(group_size * top_k / E * factor) (arXiv 2101.03961, eq. 3)."""
    # Rounded first: 100 * 1.1 is 110.00000000000001 in floating point and must not become 111.
    return max(-int(-round(group_size * top_k * factor / num_experts, 9) // 1), minimum)


def _within_capacity(
    expert_ids: Tensor, num_experts: int, config: RouterConfig, groups: TokenGroups, training: bool
) -> Tensor | None:
    """[T, K] bool, False for padding and for pairs beyond an expert's capacity; None when every pair is kept.

    All first choices of a group queue before its second choices (arXiv 2006.16668), each in token order.
    """
    factor = config.capacity_factor
    if not training and config.eval_capacity_factor is not None:
        factor = config.eval_capacity_factor
    if factor is None:
        here = groups.valid_here()
        return None if here is None else here.unsqueeze(1).expand(expert_ids.shape)
    expert_ids = groups.all(expert_ids)
    tokens, top_k = expert_ids.shape
    valid = None if groups.valid is None else groups.valid.unsqueeze(1).expand(tokens, top_k)
    size = min(config.group_size or groups.seq_len, tokens)
    group = torch.arange(tokens, device=expert_ids.device) // size
    queue = group.unsqueeze(1) * num_experts + expert_ids
    if valid is not None:
        queue = torch.where(valid, queue, -1)  # padding takes no room
    order = queue.t().reshape(-1).sort(stable=True)  # choices first, then tokens
    position = torch.arange(tokens * top_k, device=expert_ids.device)
    starts = torch.searchsorted(order.values, order.values, side="left")
    room = capacity(size, top_k, num_experts, factor, config.min_expert_capacity)
    kept = torch.empty_like(order.values, dtype=torch.bool)
    kept[order.indices] = (position - starts < room) & (order.values >= 0)
    return groups.mine(kept.view(top_k, tokens).t())


def _aux_loss(
    shares: Tensor,
    expert_ids: Tensor,
    balance: BalanceConfig,
    groups: TokenGroups,
    group_size: int | None,
    global_load: Tensor,
) -> Tensor:
    if balance.aux_scope == "global_batch":
        return lagged_balance_loss(shares, groups.valid_here(), global_load, groups.count(len(shares)))
    all_ids = groups.all(expert_ids)
    places = None if groups.shard is None else groups.mine(torch.arange(len(all_ids), device=shares.device))
    return balance_loss(
        shares, all_ids, balance.aux_scope, groups.seq_len, group_size, groups.valid, global_load, places
    )


def jitter_noise(seeds: Tensor, layer: int, seq_len: int, width: int, amount: float, like: Tensor) -> Tensor:
    """Uniform in [1 - amount, 1 + amount], [sequences * seq_len, width]: a function of (sequence seed, layer) alone."""
    rows = []
    for seed in seeds.tolist():
        digest = hashlib.blake2b(f"{seed}/{layer}".encode(), digest_size=7).digest()
        generator = torch.Generator(device=like.device).manual_seed(int.from_bytes(digest))
        rows.append(torch.rand(seq_len, width, generator=generator, device=like.device, dtype=like.dtype))
    return torch.cat(rows).mul_(2 * amount).add_(1 - amount)


def _count(expert_ids: Tensor, num_experts: int, valid: Tensor | None) -> Tensor:
    ids = expert_ids if valid is None else torch.where(valid.unsqueeze(1), expert_ids, num_experts)
    return torch.bincount(ids.reshape(-1), minlength=num_experts + 1)[:num_experts].float()


def _pairs_lost(kept: Tensor | None, valid: Tensor | None, expert_ids: Tensor) -> Tensor:
    if kept is None:
        return torch.zeros((), device=expert_ids.device)
    lost = ~kept if valid is None else ~kept & valid.unsqueeze(1)
    return lost.sum().float()


def _entropy(shares: Tensor) -> Tensor:
    """Of each token's shares [T, E], over ln E; 0 for a single expert."""
    if shares.shape[1] == 1:
        return torch.zeros(len(shares), device=shares.device)
    return torch.special.entr(shares.float()).sum(-1) / math.log(shares.shape[1])
