"""Granularity after training: every expert in G pieces, and the model still computes the same.

That G narrower experts train better than one of as many weights is the finding of arXiv 2401.06066 and 2506.02890.

The hidden columns of an expert are dealt out, in order, to G experts that stand in its place, each with the expert's
row of the router. A token whose best k experts were these then has all their pieces as its best G k, and the pieces'
outputs add up to the expert's, but for the gates: where they are shares of a sum, of all scores or of the chosen ones,
each piece has a G-th of its expert's gate, for which the down projection makes up.

While training, noise on the logits and what balances the load see G times as many choices, so that steps differ from
those of the model before. Its outputs without noise do not.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from moestro.config import ModelConfig
from moestro.errors import MoestroError


def split_model(
    state: Mapping[str, Tensor], model: ModelConfig, granularity: int
) -> tuple[dict[str, Tensor], ModelConfig]:
    """A model's `state_dict` and config with every routed expert in `granularity` pieces.

    What stays as it is is not copied. Null experts are repeated; shared experts, being no choice, stay whole.

    Raises:
        MoestroError: no experts, a width that cannot be divided, or a router for which the result would not be equal.
    """
    _check(model, granularity)
    assert model.moe is not None
    pieces = _pieces(model, granularity)
    result = dict(state)
    for name, value in state.items():
        _, found, ending = name.partition(".mlp.")
        if found and ending in pieces:
            result[name] = pieces[ending](value)
    moe = model.moe.model_dump() | {
        "granularity": model.moe.granularity * granularity,
        "null_experts": model.moe.null_experts * granularity,
    }
    return result, ModelConfig.model_validate(model.model_dump() | {"moe": moe})


def _pieces(model: ModelConfig, granularity: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """What becomes of the tensors of a MoE layer, by their names in it."""
    assert model.moe is not None
    router = model.moe.router
    gate = granularity if _gates_are_shares(model) else 1  # of an expert over that of its piece
    # A bias is added to scores, which are as much smaller when they are shares of all.
    score = granularity if router.score == "softmax" and not router.top_k_before_score else 1

    def columns(packed: Tensor, axis: int) -> Tensor:
        """[E, ..., H, ...] → [E G, ..., H / G, ...]"""
        width = packed.shape[axis] // granularity
        return packed.unflatten(axis, (granularity, width)).movedim(axis, 1).flatten(0, 1).contiguous()

    def rows(choices: Tensor) -> Tensor:
        return choices.repeat_interleave(granularity, 0)

    return {
        "experts.gate_up_proj": lambda t: columns(t, 2),
        "experts.gate_up_bias": lambda t: columns(t, 2),
        "experts.down_proj": lambda t: columns(t, 2) * gate,
        "experts.down_bias": lambda t: rows(t) * (gate / granularity),  # once in every piece
        "router.weight": rows,
        "router.logit_bias": rows,
        "router.bias": lambda t: rows(t) / score,
        "router.bias_moments": lambda t: t.repeat_interleave(granularity, 1),
        "router.global_load": lambda t: rows(t) / granularity,
        "router.mean_shares": lambda t: t.repeat_interleave(granularity, 1) / granularity,
    }


def _gates_are_shares(model: ModelConfig) -> bool:
    assert model.moe is not None
    return model.moe.router.score == "softmax" or model.moe.router.renormalize


def _check(model: ModelConfig, granularity: int) -> None:
    moe = model.moe
    if moe is None:
        raise MoestroError("the model has no experts to split; only one with [model.moe] has granularity")
    router = moe.router
    if granularity < 1 or moe.resolved_expert_hidden_size % granularity:
        raise MoestroError(
            f"experts of width {moe.resolved_expert_hidden_size} cannot be split in {granularity}; choose a divisor"
        )
    if router.kind != "linear" or router.selection != "top_k":
        raise MoestroError(
            f'router.kind = "{router.kind}" with selection = "{router.selection}" would choose others after a split; '
            'only "linear" with "top_k" can be split'
        )
    if router.num_groups > 1 and router.group_score == "sum_of_two":
        raise MoestroError(
            'router.group_score = "sum_of_two" would add up two pieces of one expert after a split; '
            'only groups scored by "max" can be split'
        )
    if moe.null_experts and moe.null_ends_choice:
        raise MoestroError(
            "moe.null_ends_choice would end after the first of a null expert's pieces; it cannot be split"
        )
    if moe.null_experts and moe.null_output == "input" and not _gates_are_shares(model):
        raise MoestroError(
            'null_output = "input" with sigmoid scores that are not renormalised would give the input once for every '
            "piece after a split; such a model cannot be split"
        )
