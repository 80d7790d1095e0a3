"""Every selection written out token by token, and routers to hold against it."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moestro.config import MoEConfig
from moestro.model.moe.router import Router

from ..helpers import model_config, normal


def router_for(moe: dict[str, Any], layer: int = 0, **settings: Any) -> Router:
    """In double precision but for the buffers, with random weights and biases; `settings` are the model's."""
    router = Router(model_config(moe, **settings), layer).double()
    router.reset_balance(torch.device("cpu"))
    for i, parameter in enumerate(router.parameters()):
        with torch.no_grad():
            parameter.copy_(normal(*parameter.shape, seed=100 + i) * 0.7)
    return router


@dataclass
class SlowChoice:
    weights: Tensor  # [T, C] after division and scaling, 0 where not chosen
    load: list[int]


def slow_choice(
    logits: Tensor,
    moe: MoEConfig,
    top_k: int,
    seq_len: int,
    valid: list[bool],
    types: list[int] | None = None,
    bias: list[float] | None = None,
    training: bool = True,
    causal: Tensor | None = None,
) -> SlowChoice:
    tokens, choices = logits.shape
    kinds = types or [0] * tokens
    is_open = [[_open(moe, c, kind) for c in range(choices)] for kind in kinds]
    scores = [_score(row, flags, moe, top_k) for row, flags in zip(logits, is_open, strict=True)]
    if moe.router.selection in ("base", "expert_choice") and training:
        chosen = _by_sequence(logits, scores, moe, top_k, seq_len, valid, is_open, kinds)
    else:
        cause = [None] * tokens if causal is None else causal.tolist()
        chosen = [
            _of_token(row, score, flags, moe, top_k, bias or [0.0] * choices, training, c)
            for row, score, flags, c in zip(logits, scores, is_open, cause, strict=True)
        ]
    rows = []
    for row, score, ids, ok in zip(logits, scores, chosen, valid, strict=True):
        weights = _weights(row, score, ids, moe)
        rows += [weights[c] if ok and c in weights else row[c] * 0 if row[c].isfinite() else 0 for c in range(choices)]
    rows = [value if isinstance(value, Tensor) else logits.new_zeros(()) for value in rows]
    load = [sum(c in ids for ids, ok in zip(chosen, valid, strict=True) if ok) for c in range(choices)]
    return SlowChoice(torch.stack(rows).view(tokens, choices), load)


def _open(moe: MoEConfig, choice: int, kind: int) -> bool:
    if moe.expert_groups is None or choice >= moe.resolved_num_experts:
        return True
    sizes = [n * moe.granularity for n in moe.expert_groups]
    return sum(sizes[:kind]) <= choice < sum(sizes[: kind + 1])


def _score(row: Tensor, flags: list[bool], moe: MoEConfig, top_k: int) -> list[Tensor]:
    if moe.router.score == "sigmoid":
        return [1 / (1 + (-v).exp()) if ok else v * 0 for v, ok in zip(row, flags, strict=True)]
    size = len(row) // top_k if moe.router.selection == "k_top_1" else len(row)
    scores = []
    for c, ok in enumerate(flags):
        peers = [d for d in range(len(row)) if d // size == c // size and flags[d]]
        scores.append(row[c].exp() / sum(row[d].exp() for d in peers) if ok else row[c] * 0)
    return scores


def _best(values: dict[int, float], count: int) -> list[int]:
    return sorted(values, key=lambda c: (-values[c], c))[:count]


def _of_token(
    row: Tensor,
    score: list[Tensor],
    flags: list[bool],
    moe: MoEConfig,
    top_k: int,
    bias: list[float],
    training: bool,
    causal: list[float] | None,
) -> list[int]:
    config, choices, experts = moe.router, len(row), moe.resolved_num_experts
    values = {c: score[c].item() for c in range(choices) if flags[c]}
    size = experts // config.num_groups
    if config.selection == "top_k":
        ranked = {c: (row[c].item() if config.top_k_before_score else v) + bias[c] for c, v in values.items()}
        if config.num_groups > 1:
            best_two = [sorted((ranked[c] for c in range(g * size, (g + 1) * size)), reverse=True)[:2]
                        for g in range(config.num_groups)]  # fmt: skip
            of_group = {g: two[0] if config.group_score == "max" else sum(two) for g, two in enumerate(best_two)}
            kept = _best(of_group, config.top_groups)
            ranked = {c: v for c, v in ranked.items() if c // size in kept}
        ids = _best(ranked, top_k)
        if moe.null_ends_choice and any(c >= experts for c in ids):
            ids = ids[: next(i for i, c in enumerate(ids) if c >= experts) + 1]
        return ids
    if config.selection == "k_top_1":
        width = experts // top_k
        return [_best({c: row[c].item() for c in range(p * width, (p + 1) * width)}, 1)[0] for p in range(top_k)]
    if config.selection == "sam":
        sums = {g: sum(values[c] for c in range(g * size, (g + 1) * size)) for g in range(config.num_groups)}
        group = _best(sums, 1)[0]
        return _best({c: values[c] for c in range(group * size, (group + 1) * size)}, top_k)
    if config.selection == "base":
        return _best({c: row[c].item() for c in values}, 1)
    if config.selection == "expert_choice":
        assert causal is not None
        return [c for c in values if 1 / (1 + math.exp(-causal[c])) > 0.5]
    if config.selection == "dense_to_sparse":
        total = sum(values.values())
        return [c for c, v in values.items() if v / total > 1 / len(values) or c == _best(values, 1)[0]]
    if training:
        return list(values)
    ids = _best(values, config.eval_top_k or choices)
    return [c for c in ids if config.eval_threshold is None or choices * values[c] > config.eval_threshold]


def _by_sequence(
    logits: Tensor,
    scores: list[list[Tensor]],
    moe: MoEConfig,
    top_k: int,
    seq_len: int,
    valid: list[bool],
    is_open: list[list[bool]],
    kinds: list[int],
) -> list[list[int]]:
    chosen: list[list[int]] = [[] for _ in scores]
    for start in range(0, len(scores), seq_len):
        for kind in set(kinds):
            tokens = [t for t in range(start, start + seq_len) if valid[t] and kinds[t] == kind]
            experts = [e for e in range(moe.resolved_num_experts) if _open(moe, e, kind)]
            if moe.router.selection == "base":
                for t, e in zip(tokens, best_assignment(logits[tokens][:, experts].tolist()), strict=True):
                    chosen[t].append(experts[e])
                continue
            factor = moe.router.capacity_factor or 1.0
            room = math.ceil(round(factor * top_k * len(tokens) / len(experts), 9))
            for e in experts:
                for t in sorted(tokens, key=lambda t: (-scores[t][e].item(), t))[:room]:
                    chosen[t].append(e)
    return chosen


def best_assignment(scores: list[list[float]]) -> list[int]:
    """Of all assignments whose loads differ by at most one, the one with the largest sum, by trying all."""
    if not scores:
        return []
    experts, best, found = len(scores[0]), -math.inf, [0]
    for ids in itertools.product(range(experts), repeat=len(scores)):
        load = [ids.count(e) for e in range(experts)]
        total = sum(row[e] for row, e in zip(scores, ids, strict=True))
        if max(load) - min(load) <= 1 and total > best:
            best, found = total, list(ids)
    return found


def _weights(row: Tensor, score: list[Tensor], ids: list[int], moe: MoEConfig) -> dict[int, Tensor]:
    config = moe.router
    if config.selection == "base":
        return {c: 1 / (1 + (-row[c]).exp()) for c in ids}
    weights = {c: score[c] for c in ids}
    if config.selection == "top_k" and config.top_k_before_score and config.score == "softmax":
        weights = {c: row[c].exp() / sum(row[d].exp() for d in ids) for c in ids}
    if config.renormalize and ids:
        total = sum(weights.values())
        weights = {c: w / total for c, w in weights.items()}
    return {c: w * config.scaling_factor for c, w in weights.items()}
