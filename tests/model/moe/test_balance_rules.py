"""Quantile balancing, targets of types and null experts, mutual information and the modality losses."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moestro.config import MoEConfig
from moestro.model.moe.memory import Memory, num_sums, share_targets
from moestro.model.moe.quantile import EDGES, NUM_BINS, histogram, margins, quantile_step
from moestro.model.moe.route import route
from moestro.model.moe.router import Router, TokenGroups
from moestro.model.moe.selection import rank, score, select
from moestro.model.moe.specialize import modality_prior, modality_split_loss, mutual_information_loss

from ..helpers import model_config, normal
from .slow_selection import router_for


def moe_config(**settings: Any) -> MoEConfig:
    return MoEConfig.model_validate({"num_experts": 8, "top_k": 2, "expert_hidden_size": 4} | settings)


QUANTILE = {"bias_rule": "quantile"}


@pytest.mark.parametrize(
    "moe",
    [
        {},
        {"router": {"score": "sigmoid", "num_groups": 4, "top_groups": 2}},
        {"router": {"num_groups": 4, "top_groups": 2, "group_score": "max"}},
        {"router": {"top_k_before_score": True}},
        {"null_experts": 2},
    ],
)
def test_a_margin_is_how_far_the_bias_may_fall(moe: dict[str, Any]) -> None:
    """Every choice alone: it is made iff its margin is positive, and, without groups, moving its bias by a little more
    or less than minus the margin decides it."""
    config = moe_config(**moe, balance=QUANTILE)
    choices, groups = config.num_choices, TokenGroups(12)
    logits = normal(12, choices, dtype=torch.float64)
    bias = normal(choices, seed=1, dtype=torch.float64) / 10

    def chosen(bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = score(logits, config, 2, groups)
        ranking = rank(scores, config, bias)
        ids = select(scores, ranking, config, 2, groups, True, None).expert_ids
        return torch.zeros(12, choices, dtype=torch.bool).scatter(1, ids, True), ranking, ids

    made, ranking, ids = chosen(bias)
    margin = margins(ranking, ids, config)
    assert torch.equal(made, margin > 0)
    if config.router.num_groups > 1:
        return
    for token, choice in ((0, 0), (3, 5), (7, 2), (11, 7)):
        for sign in (-1, 1):
            moved = bias.clone()
            moved[choice] += -margin[token, choice] + sign * 1e-9
            assert chosen(moved)[0][token, choice] == (sign > 0)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 999), st.floats(0.05, 0.95))
def test_the_step_is_the_quantile_of_the_histogram(tokens: int, choices: int, seed: int, fraction: float) -> None:
    """As many margins lie above minus the whole step as are wanted, but for those of one bin."""
    margin = normal(tokens, choices, seed=seed) * 0.1
    counts = histogram(margin, None)
    assert counts.shape == (choices, NUM_BINS)
    assert (counts.sum(1) == tokens).all()
    step = quantile_step(counts, torch.full((choices,), fraction))
    for i in range(choices):
        if choices == 1:
            assert step[i] == 0  # nothing competes
            continue
        threshold = -step[i].item() / (1 - 1 / choices)
        wanted = fraction * tokens
        if abs((margin[:, i] > 1e-5).sum().item() - wanted) < 1:
            assert threshold == 0
            continue
        low = max((e for e in EDGES if e < threshold - 1e-7), default=-1e9)
        high = min((e for e in EDGES if e > threshold + 1e-7), default=1e9)
        assert (margin[:, i] > high).sum() <= wanted + 1e-4
        assert (margin[:, i] > low).sum() >= wanted - 1e-4


def test_padding_and_closed_choices_are_not_counted() -> None:
    moe = moe_config(expert_groups=(2, 6), balance=QUANTILE, top_k=1, router={"renormalize": False})
    types, valid = torch.tensor([0, 0, 1, 1, 1, 0]), torch.tensor([True, True, True, False, True, False])
    memory = Memory(torch.zeros(8), torch.ones(8) / 8)
    sums = route(normal(6, 8), moe, 1, TokenGroups(6, valid, token_types=types), memory, True).stats.sums
    assert sums.sum(1).tolist() == [2] * 8  # two valid tokens of each type


def evened(router: Router, steps: int, groups: TokenGroups | None = None, count: int = 2048) -> tuple[float, float]:
    """Largest over mean load of those tokens before and after."""
    x = normal(count, 16, seed=1, dtype=torch.float64) + 0.5
    found = []
    for _ in range(steps + 1):
        stats = router(x, groups or TokenGroups(count))[0].stats
        found.append((stats.load.max() / stats.load.mean()).item())
        router.update_balance(stats.load, stats.sums)
    return found[0], found[-1]


@pytest.mark.parametrize(
    ("moe", "steps", "limit"),
    [
        ({"num_experts": 2, "top_k": 1, "router": {"renormalize": False}}, 2, 1.02),
        ({"num_experts": 8, "top_k": 1, "router": {"renormalize": False}}, 4, 1.06),
        ({"num_experts": 32, "top_k": 4, "router": {"score": "sigmoid"}}, 4, 1.06),
        ({"num_experts": 32, "top_k": 4, "router": {"score": "sigmoid", "num_groups": 8, "top_groups": 4}}, 5, 1.06),
        ({"num_experts": 32, "top_k": 4, "router": {"score": "sigmoid", "num_groups": 4, "top_groups": 1}}, 16, 1.25),
        ({"num_experts": 8, "top_k": 2, "router": {"top_k_before_score": True}}, 4, 1.06),
        (
            {"num_experts": 8, "top_k": 1, "null_experts": 1, "null_bias": -1.0, "router": {"renormalize": False}},
            6,
            1.1,
        ),
    ],
)
def test_quantiles_even_a_skewed_load_in_a_few_steps(moe: dict[str, Any], steps: int, limit: float) -> None:
    router = router_for(moe | {"balance": QUANTILE}).float()
    before, after = evened(router.double(), steps)
    assert before > 1.3
    assert after < limit
    assert abs(router.bias.mean().item() - moe.get("null_bias", 0) / router.moe.num_choices) < 1e-6


@pytest.mark.parametrize("rule", ["sign", "adamw", "quantile"])
def test_types_of_unequal_share_are_evened_inside(rule: Any) -> None:
    """Nine tokens in ten are of one type: its experts keep that load, but evenly."""
    moe = {
        "num_experts": 8, "expert_groups": (4, 4), "router": {"score": "sigmoid"},
        "balance": {"bias_rule": rule, "bias_lr": 0.02},
    }  # fmt: skip
    router = router_for(moe, token_types=[20])
    types = (torch.arange(1000) % 10 == 0).long()
    x = normal(1000, 16, seed=1, dtype=torch.float64) + 0.4
    for step in range(60):
        stats = router(x, TokenGroups(1000, token_types=types))[0].stats
        if step == 0:
            assert stats.load[:4].max() / stats.load[:4].mean() > 1.25
        router.update_balance(stats.load, stats.sums)
    assert stats.load[:4].sum() == 1800
    for part in stats.load.split(4):
        assert part.max() / part.mean() < 1.1


def test_targets() -> None:
    load = torch.tensor([6.0, 2.0, 1.0, 1.0, 0.0, 2.0])
    assert (
        share_targets(load, moe_config(num_experts=6, top_k=1, router={"renormalize": False})).tolist()
        == [pytest.approx(1 / 6)] * 6
    )
    moe = moe_config(num_experts=5, top_k=1, null_experts=1, expert_groups=(2, 3), router={"renormalize": False})
    torch.testing.assert_close(
        share_targets(load, moe), torch.tensor([8 / 10 * 5 / 6 / 2] * 2 + [2 / 10 * 5 / 6 / 3] * 3 + [1 / 6])
    )
    assert share_targets(torch.tensor([0.0] * 5 + [3.0]), moe).isfinite().all()


@pytest.mark.parametrize("rule", ["sign", "adamw", "quantile"])
def test_weights_stay_free_of_the_bias(rule: Any) -> None:
    router = router_for(
        {"num_experts": 8, "top_k": 2, "router": {"renormalize": False}, "balance": {"bias_rule": rule}}
    )
    x = normal(30, 16, dtype=torch.float64)
    router.bias.copy_(normal(8, seed=4))
    routing = router(x, TokenGroups(30))[0]
    probs = (x @ router.weight.t()).softmax(-1)
    torch.testing.assert_close(routing.weights, probs.gather(1, routing.expert_ids))


# Mutual information


def shares_of(tokens: int = 12, choices: int = 5, seed: int = 0) -> Tensor:
    return (normal(tokens, choices, seed=seed, dtype=torch.float64) * 2).softmax(-1).requires_grad_()


def test_mutual_information_has_the_value_and_gradient_of_its_definition() -> None:
    """When the mean did not change since the step before."""
    shares = shares_of()
    mean = shares.mean(0)
    exact = (mean * mean.log()).sum() - (shares * shares.log()).sum(1).mean()
    found = mutual_information_loss(shares, mean.detach()).mean()
    torch.testing.assert_close(found, exact)
    # Up to the same number for all choices of a token, which no softmax passes on.
    grads = [torch.autograd.grad(loss, shares, retain_graph=True)[0] for loss in (found, exact)]
    found_grad, exact_grad = (g - g.mean(1, keepdim=True) for g in grads)
    torch.testing.assert_close(found_grad, exact_grad)
    assert -torch.tensor(5.0).log() <= found <= 0


def test_mutual_information_of_decided_and_undecided_routing() -> None:
    decided = torch.eye(4, dtype=torch.float64, requires_grad=True)
    even = torch.full((4,), 0.25)
    loss = mutual_information_loss(decided, even).mean()
    assert loss.item() == pytest.approx(-torch.tensor(4.0).log().item())
    (grad,) = torch.autograd.grad(loss, decided)
    assert grad.isfinite().all()
    assert mutual_information_loss(torch.full((4, 4), 0.25), even).mean().item() == pytest.approx(0)


def test_the_router_remembers_the_mean_shares() -> None:
    router = router_for({"balance": {"mi_coef": 0.5, "aux_coef": 0.0}})
    assert num_sums(model_config({"balance": {"mi_coef": 0.5}})) == 1
    x, valid = normal(12, 16, dtype=torch.float64), torch.arange(12) < 9
    stats = router(x, TokenGroups(6, valid))[0].stats
    shares = (x @ router.weight.t()).softmax(-1)[:9]
    # At first as if it had been even.
    expected = 0.5 * (torch.tensor(0.25).log() - (shares * shares.log()).sum(1).mean())
    assert stats.other_loss.item() == pytest.approx(expected.item())
    router.update_balance(stats.load, stats.sums)
    assert router.mean_shares is not None
    torch.testing.assert_close(router.mean_shares, shares.mean(0, keepdim=True).float())
    assert "mean_shares" not in router_for({}).state_dict()


# Modality


def test_the_prior_is_the_distance_to_the_own_part() -> None:
    assert modality_prior(2, 4, 1, torch.empty(0)).tolist() == [[0.5, 0.5, 0, 0, 0], [0, 0, 0.5, 0.5, 0]]
    uneven = modality_prior(2, 5, 0, torch.empty(0))
    assert uneven.sum(1).tolist() == pytest.approx([1, 1])
    assert (uneven > 0).sum(1).tolist() == [3, 2]
    balance = {"modality_prior_coef": 0.5}
    router = router_for({"balance": balance}, token_types=[20])
    x, types = normal(6, 16, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1, 0])
    shares = (x @ router.weight.t()).softmax(-1)
    target = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]])[types]
    stats = router(x, TokenGroups(6, token_types=types))[0].stats
    torch.testing.assert_close(stats.other_loss, 0.5 * (shares - target).abs().sum(1).mean())


def test_splitting_has_the_value_and_gradient_of_its_definition() -> None:
    shares, types = shares_of(), torch.tensor([0, 1, 2, 0, 1, 0, 0, 0, 2, 1, 1, 0])
    gates = torch.stack([shares[types == kind].mean(0) for kind in range(3)])
    divergence = torch.stack([
        (gates[a] * (gates[a] / gates[b]).log()).sum() for a in range(3) for b in range(3) if a != b
    ])  # fmt: skip
    exact = (1 - divergence).mean()
    mean = torch.stack([shares.detach()[types == kind].sum(0) / 12 for kind in range(3)])
    found = modality_split_loss(shares, types, mean).mean()
    torch.testing.assert_close(found, exact)
    grads = [torch.autograd.grad(loss, shares, retain_graph=True)[0] for loss in (found, exact)]
    found_grad, exact_grad = (g - g.mean(1, keepdim=True) for g in grads)
    torch.testing.assert_close(found_grad, exact_grad)


def test_splitting_with_a_type_that_was_not_there() -> None:
    shares, types = shares_of(), torch.arange(12) % 3
    mean = torch.zeros(3, 5, dtype=torch.float64)
    mean[0], mean[1] = 0.08, 0.12
    loss = modality_split_loss(shares, types, mean)
    assert loss.isfinite().all()
    (grad,) = torch.autograd.grad(loss.sum(), shares)
    assert (grad[types == 2] == 0).all()
    alone = modality_split_loss(shares, types, mean * torch.tensor([1.0, 0, 0]).unsqueeze(1))
    assert (alone == 1).all()


@pytest.mark.parametrize("balance", [{"modality_split_coef": 0.3}, {"mi_coef": 0.2, "modality_split_coef": 0.3}])
def test_lagged_losses_do_not_depend_on_the_cut(balance: dict[str, float]) -> None:
    router = router_for({"balance": balance | QUANTILE}, token_types=[20])
    x, types, valid = normal(12, 16, dtype=torch.float64), torch.arange(12) % 2, torch.arange(12) % 5 > 0
    stats = router(x, TokenGroups(4, valid, token_types=types))[0].stats
    router.update_balance(stats.load, stats.sums)

    def gradient(size: int) -> tuple[Tensor, Tensor]:
        total, sums = x.new_zeros(()), torch.zeros_like(stats.sums)
        for part in (slice(i, i + size) for i in range(0, 12, size)):
            piece = router(x[part], TokenGroups(4, valid[part], token_types=types[part]))[0].stats
            total, sums = total + piece.other_loss * piece.tokens / valid.sum(), sums + piece.sums
        return torch.autograd.grad(total, router.weight)[0], sums

    whole, cut = gradient(12), gradient(4)
    torch.testing.assert_close(cut[0], whole[0])
    torch.testing.assert_close(cut[1], whole[1])
    assert whole[0].abs().max() > 1e-5


@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
def test_aux_loss_when_tokens_have_unequally_many_experts(scope: Any) -> None:
    """f is a choice's share of the pairs of its set, however many a token has."""
    moe = moe_config(num_experts=5, router={"selection": "dense_to_sparse"}, balance={"aux_scope": scope})
    shares = shares_of(12)
    memory = Memory(torch.zeros(5), torch.ones(5) / 5)
    routing = route(shares.log(), moe, 2, TokenGroups(4), memory, True)
    size = 4 if scope == "sequence" else 12
    expected = []
    for part, ids in zip(shares.split(size), routing.expert_ids.split(size), strict=True):
        f = torch.bincount(ids.flatten(), minlength=6)[:5].double()
        expected.append(5 * (f / f.sum() * part.mean(0)).sum())
    torch.testing.assert_close(routing.stats.aux_loss, torch.stack(expected).mean())


def test_uni_moe_aux_loss() -> None:
    """Its E² mean_i(f_i P_i) on the first choice is E Σ f_i P_i of top-1."""
    shares = normal(20, 6).softmax(-1)
    f = torch.bincount(shares.argmax(1), minlength=6) / 20
    moe = moe_config(num_experts=6, top_k=1, router={"renormalize": False}, balance={"aux_scope": "micro_batch"})
    memory = Memory(torch.zeros(6), torch.ones(6) / 6)
    found = route(shares.log(), moe, 1, TokenGroups(20), memory, True).stats.aux_loss
    torch.testing.assert_close(found, 36 * (f * shares.mean(0)).mean())
