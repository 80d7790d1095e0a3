"""The router written out token by token, as the documentation of its settings reads."""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from moestro.config import BalanceConfig, MoEConfig, RouterConfig
from moestro.model.moe.memory import Memory
from moestro.model.moe.route import Routing, route
from moestro.model.moe.router import Router, TokenGroups

from ..helpers import model_config


def moe_config(num_experts: int, router: RouterConfig, balance: BalanceConfig) -> MoEConfig:
    """Without its checks, so that tests may draw any mixture of settings."""
    return MoEConfig.model_construct(
        num_experts=num_experts, top_k=1, expert_hidden_size=4, router=router, balance=balance
    )


def router_of(
    hidden_size: int, num_experts: int, top_k: int, router: RouterConfig, balance: BalanceConfig, layer: int = 0
) -> Router:
    """A router for layer number `layer`, its weights not yet set."""
    moe = moe_config(num_experts, router, balance).model_copy(update={"top_k": top_k})
    sizes = {"hidden_size": hidden_size, "head_dim": 4, "num_layers": layer + 1}
    return Router(model_config(None, **sizes).model_copy(update={"moe": moe}), layer)


def fast_route(
    logits: Tensor,
    top_k: int,
    config: RouterConfig,
    balance: BalanceConfig,
    groups: TokenGroups,
    bias: Tensor,
    global_load: Tensor,
    training: bool,
) -> Routing:
    """`route` with the arguments of `slow_route`."""
    moe = moe_config(logits.shape[1], config, balance)
    return route(logits, moe, top_k, groups, Memory(bias, global_load), training)


@dataclass
class SlowRouting:
    expert_ids: list[list[int]]
    weights: Tensor  # [T, K]
    load: list[int]
    dropped: int
    tokens: int
    token_entropy: float
    aux_loss: Tensor
    z_loss: Tensor


def slow_route(
    logits: Tensor,
    top_k: int,
    config: RouterConfig,
    balance: BalanceConfig,
    groups: TokenGroups,
    bias: Tensor,
    global_load: Tensor,
    training: bool,
) -> SlowRouting:
    tokens, experts = logits.shape
    valid = [True] * tokens if groups.valid is None else groups.valid.tolist()
    scores = [_scores(row, config) for row in logits]
    chosen = [
        _choose(row if config.top_k_before_score else score, bias, top_k, balance)
        for row, score in zip(logits, scores, strict=True)
    ]
    weights = [_weights(row, score, ids, config) for row, score, ids in zip(logits, scores, chosen, strict=True)]

    load = [sum(ids.count(e) for ids, ok in zip(chosen, valid, strict=True) if ok) for e in range(experts)]
    shares = [score / score.sum() for score in scores]
    kept = _kept(chosen, valid, experts, config, groups.seq_len, training)
    here = [t for t in range(tokens) if valid[t]]
    zero = logits.sum() * 0
    flat = [w if ok else w * 0 for t in range(tokens) for w, ok in zip(weights[t], kept[t], strict=True)]
    return SlowRouting(
        expert_ids=[[e if ok else experts for e, ok in zip(chosen[t], kept[t], strict=True)] for t in range(tokens)],
        weights=torch.stack(flat).view(tokens, top_k),
        load=load,
        dropped=sum(not ok for t in here for ok in kept[t]),
        tokens=len(here),
        token_entropy=_entropy(shares, here, experts),
        aux_loss=slow_aux(shares, chosen, valid, balance.aux_scope, groups.seq_len, config.group_size, global_load),
        z_loss=sum((logits[t].exp().sum().log() ** 2 for t in here), zero) / max(len(here), 1),
    )


def _scores(row: Tensor, config: RouterConfig) -> Tensor:
    return row.exp() / row.exp().sum() if config.score == "softmax" else 1 / (1 + (-row).exp())


def _choose(values: Tensor, bias: Tensor, top_k: int, balance: BalanceConfig) -> list[int]:
    numbers = values.tolist()
    if balance.bias_rule != "none":
        numbers = [value + b for value, b in zip(numbers, bias.tolist(), strict=True)]
    return sorted(range(len(numbers)), key=lambda e: (-numbers[e], e))[:top_k]


def _weights(row: Tensor, score: Tensor, ids: list[int], config: RouterConfig) -> list[Tensor]:
    if config.top_k_before_score and config.score == "softmax":
        total = sum(row[e].exp() for e in ids)
        weights = [row[e].exp() / total for e in ids]
    else:
        weights = [score[e] for e in ids]
    if config.renormalize:
        total = sum(weights)
        weights = [w / total for w in weights]
    return [w * config.scaling_factor for w in weights]


def slow_capacity(group: int, top_k: int, experts: int, factor: float, minimum: int) -> int:
    return max(math.ceil(Fraction(str(factor)) * group * top_k / experts), minimum)


def _kept(
    chosen: list[list[int]], valid: list[bool], experts: int, config: RouterConfig, seq_len: int, training: bool
) -> list[list[bool]]:
    factor = config.capacity_factor
    if not training and config.eval_capacity_factor is not None:
        factor = config.eval_capacity_factor
    top_k = len(chosen[0])
    kept = [[ok] * top_k for ok in valid]
    if factor is None:
        return kept
    size = min(config.group_size or seq_len, len(chosen))
    room = slow_capacity(size, top_k, experts, factor, config.min_expert_capacity)
    for start in range(0, len(chosen), size):
        taken = [0] * experts
        for k in range(top_k):
            for t in range(start, min(start + size, len(chosen))):
                if valid[t]:
                    kept[t][k] = taken[chosen[t][k]] < room
                    taken[chosen[t][k]] += 1
    return kept


def slow_aux(
    shares: list[Tensor],
    chosen: list[list[int]],
    valid: list[bool],
    scope: str,
    seq_len: int,
    group_size: int | None,
    global_load: Tensor,
) -> Tensor:
    """E Σ_i f_i P_i of each set of tokens, averaged with the sets' valid tokens as weights."""
    tokens, experts, top_k = len(chosen), len(shares[0]), len(chosen[0])
    size = {"sequence": seq_len, "group": group_size or seq_len, "micro_batch": tokens, "global_batch": tokens}[scope]
    total, count = shares[0].sum() * 0, 0
    for start in range(0, tokens, size):
        members = [t for t in range(start, min(start + size, tokens)) if valid[t]]
        for e in range(experts):
            if not members:
                continue
            f = sum(chosen[t].count(e) for t in members) / (len(members) * top_k)
            if scope == "global_batch":
                f = float(global_load[e])
            total = total + len(members) * experts * f * (sum(shares[t][e] for t in members) / len(members))
        count += len(members)
    return total / max(count, 1)


def _entropy(shares: list[Tensor], here: list[int], experts: int) -> float:
    if experts == 1 or not here:
        return 0.0
    total = sum(-sum(p * math.log(p) for p in shares[t].tolist() if p > 0) for t in here)
    return total / math.log(experts) / len(here)
