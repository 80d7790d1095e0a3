import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.config import BalanceConfig, RouterConfig
from moestro.model.moe.balance import balance_loss, update_balance, z_loss
from moestro.model.moe.router import TokenGroups

from ..helpers import normal
from .slow_router import router_of, slow_aux

SCOPES: list[Any] = ["sequence", "group", "micro_batch", "global_batch"]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_uniform_routing_has_loss_one(scope: Any, top_k: int) -> None:
    tokens, experts = 16, 4
    shares = torch.full((tokens, experts), 1 / experts)
    ids = (torch.arange(tokens).unsqueeze(1) + torch.arange(top_k)) % experts
    loss = balance_loss(shares, ids, scope, 8, 4, None, torch.full((experts,), 1 / experts))
    assert loss.item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 1), (8, 2), (16, 4)])
def test_collapsed_routing_has_loss_e_over_k(scope: Any, experts: int, top_k: int) -> None:
    shares = torch.zeros(12, experts)
    shares[:, :top_k] = 1 / top_k
    load = torch.zeros(experts)
    load[:top_k] = 1 / top_k
    loss = balance_loss(shares, torch.arange(top_k).expand(12, top_k), scope, 6, 3, None, load)
    assert loss.item() == pytest.approx(experts / top_k)


def test_a_collapsed_router_is_not_scored_twice() -> None:
    """Through a whole router: strong logits for one expert give a loss near E, not near 1."""
    router = router_of(4, 8, 1, RouterConfig(), BalanceConfig(aux_scope="micro_batch"))
    with torch.no_grad():
        router.weight.zero_()[0] = 5.0
    stats = router(torch.ones(10, 4), TokenGroups(10))[0].stats
    assert stats.aux_loss.item() == pytest.approx(8.0, rel=1e-3)


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("padded", [False, True])
def test_loss_and_gradient_equal_naive_loops(scope: Any, padded: bool) -> None:
    shares = normal(12, 5, dtype=torch.float64).softmax(-1).requires_grad_()
    ids = normal(12, 5, seed=1).argsort(1)[:, :2]
    valid = normal(12, seed=2) > -0.5 if padded else None
    if valid is not None:
        valid[:4] = False  # a group without any token
    load = normal(5, seed=3, dtype=torch.float64).softmax(0)
    found = balance_loss(shares, ids, scope, 6, 4, valid, load)
    flags = [True] * 12 if valid is None else valid.tolist()
    expected = slow_aux(list(shares.unbind(0)), ids.tolist(), flags, scope, 6, 4, load)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    (grad,), (wanted,) = torch.autograd.grad(found, shares), torch.autograd.grad(expected, shares)
    torch.testing.assert_close(grad, wanted, rtol=1e-10, atol=1e-12)
    if valid is not None:
        assert (grad[~valid] == 0).all()


@pytest.mark.parametrize("scope", SCOPES)
def test_the_gradient_of_the_router_weight_by_hand(scope: Any) -> None:
    """d E Σ_i f_i P_i / d W with f constant: dP through the softmax of the logits x Wᵀ."""
    tokens, experts, hidden, seq_len = 12, 4, 6, 4
    router = router_of(hidden, experts, 2, RouterConfig(group_size=3), BalanceConfig(aux_scope=scope)).double()
    with torch.no_grad():
        router.weight.copy_(normal(experts, hidden))
        router.global_load.copy_(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    x = normal(tokens, hidden, seed=1, dtype=torch.float64)
    routing = router(x, TokenGroups(seq_len))[0]
    (grad,) = torch.autograd.grad(routing.stats.aux_loss, router.weight)
    assert grad.abs().max() > 1e-4

    size = {"sequence": seq_len, "group": 3, "micro_batch": tokens, "global_batch": tokens}[scope]
    expected = torch.zeros_like(grad)
    for start in range(0, tokens, size):
        part = slice(start, start + size)
        f = torch.bincount(routing.expert_ids[part].flatten(), minlength=experts).double() / (size * 2)
        if scope == "global_batch":
            f = router.global_load
        probs = (x[part] @ router.weight.detach().t()).softmax(-1)
        d_logits = experts * probs * (f - (probs * f).sum(1, keepdim=True)) / tokens
        expected += d_logits.t() @ x[part]
    torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)


def test_the_global_scope_does_not_depend_on_the_cut() -> None:
    """Micro-batches weighted by their valid tokens give the loss of the whole."""
    shares = normal(12, 4, dtype=torch.float64).softmax(-1)
    ids = normal(12, 4, seed=1).argsort(1)[:, :2]
    valid = torch.tensor([True] * 7 + [False] * 5)
    load = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    whole = balance_loss(shares, ids, "global_batch", 4, None, valid, load)
    parts = sum(
        valid[i : i + 4].sum() / 7 * balance_loss(shares[i : i + 4], ids[i : i + 4], "global_batch", 4, None,
                                                  valid[i : i + 4], load)
        for i in (0, 4, 8)
    )  # fmt: skip
    torch.testing.assert_close(whole, parts)


@pytest.mark.parametrize("scope", SCOPES)
def test_nothing_but_padding(scope: Any) -> None:
    shares = normal(4, 3).softmax(-1).requires_grad_()
    valid = torch.zeros(4, dtype=torch.bool)
    loss = balance_loss(shares, torch.zeros(4, 1, dtype=torch.int64), scope, 2, None, valid, torch.ones(3) / 3)
    loss.backward()
    assert loss == 0
    assert z_loss(normal(4, 3), valid) == 0


@pytest.mark.parametrize("padded", [False, True])
def test_z_loss(padded: bool) -> None:
    logits = normal(6, 4, dtype=torch.float64, grad=True)
    valid = torch.tensor([True, False, True, True, False, False]) if padded else None
    here = [t for t in range(6) if valid is None or valid[t]]
    found = z_loss(logits, valid)
    expected = sum(math.log(sum(math.exp(v) for v in logits[t].tolist())) ** 2 for t in here) / len(here)
    assert found.item() == pytest.approx(expected)
    (grad,) = torch.autograd.grad(found, logits)
    lse = logits.detach().logsumexp(-1, keepdim=True)
    wanted = 2 * lse * logits.detach().softmax(-1) / len(here)
    if valid is not None:
        wanted[~valid] = 0
    torch.testing.assert_close(grad, wanted)


# The selection bias


def moved(load: list[float], config: BalanceConfig, steps: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    experts = len(load)
    bias, moments, share = torch.zeros(experts), torch.zeros(3, experts), torch.full((experts,), 1 / experts)
    for _ in range(steps):
        update_balance(bias, moments, share, torch.tensor(load), config)
    return bias, moments, share


def test_sign_moves_by_the_learning_rate() -> None:
    config = BalanceConfig(bias_rule="sign", bias_lr=0.1)
    bias, moments, share = moved([30.0, 10.0, 20.0, 20.0], config)
    torch.testing.assert_close(bias, torch.tensor([-0.1, 0.1, 0.0, 0.0]))
    torch.testing.assert_close(share, torch.tensor([0.375, 0.125, 0.25, 0.25]))
    assert (moments == 0).all()
    # Three below the mean and one above: up by 1, down by 1, then moved to zero mean.
    bias, _, _ = moved([10.0, 2.0, 2.0, 2.0], config)
    torch.testing.assert_close(bias, torch.tensor([-0.15, 0.05, 0.05, 0.05]))


def test_adamw_equals_pytorch_up_to_the_mean() -> None:
    experts, lr = 6, 0.03
    config = BalanceConfig(bias_rule="adamw", bias_lr=lr)
    bias, moments, share = torch.zeros(experts), torch.zeros(3, experts), torch.full((experts,), 1 / experts)
    parameter = torch.zeros(experts, requires_grad=True)
    optimizer = torch.optim.AdamW([parameter], lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    for step in range(12):
        load = (normal(experts, seed=step).abs() * 100).round()
        update_balance(bias, moments, share, load, config)
        parameter.grad = load / load.sum() - 1 / experts
        optimizer.step()
        expected = parameter.detach() - parameter.detach().mean()
        torch.testing.assert_close(bias, expected, rtol=1e-4, atol=1e-6)
    assert (moments[2] == 12).all()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any),
    st.sampled_from(["none", "sign", "adamw"]),
    st.integers(1, 4),
)
def test_the_bias_keeps_zero_mean_and_points_to_the_idle(load: list[int], rule: Any, steps: int) -> None:
    bias, _, share = moved([float(n) for n in load], BalanceConfig(bias_rule=rule, bias_lr=0.01), steps)
    assert bias.isfinite().all()
    assert abs(bias.mean().item()) < 1e-6
    torch.testing.assert_close(share, torch.tensor(load) / sum(load))
    if rule == "none":
        assert (bias == 0).all()
    elif max(load) > min(load):
        assert bias[load.index(min(load))] > bias[load.index(max(load))]


@pytest.mark.parametrize("rule", ["none", "sign", "adamw"])
def test_no_load_changes_nothing(rule: Any) -> None:
    bias, moments, share = normal(4), normal(3, 4, seed=1), normal(4, seed=2)
    before = [t.clone() for t in (bias, moments, share)]
    update_balance(bias, moments, share, torch.zeros(4), BalanceConfig(bias_rule=rule))
    for now, then in zip((bias, moments, share), before, strict=True):
        assert torch.equal(now, then)


@pytest.mark.parametrize("rule", ["sign", "adamw"])
def test_one_expert_needs_no_bias(rule: Any) -> None:
    bias, _, share = moved([7.0], BalanceConfig(bias_rule=rule), steps=3)
    assert bias.tolist() == [0.0]
    assert share.tolist() == [1.0]


@pytest.mark.parametrize("rule", ["sign", "adamw"])
def test_the_bias_evens_a_skewed_load(rule: Any) -> None:
    balance = BalanceConfig(bias_rule=rule, bias_lr=0.01)
    router = router_of(8, 4, 1, RouterConfig(score="sigmoid"), balance)
    with torch.no_grad():
        router.weight.copy_(normal(4, 8) * 0.3)
    x = normal(256, 8, seed=1) + 0.5
    first = last = 0.0
    for _ in range(80):
        load = router(x, TokenGroups(256))[0].stats.load
        last = (load.max() / load.mean()).item()
        first = first or last
        update_balance(router.bias, router.bias_moments, router.global_load, load, balance)
    assert first > 1.8
    assert last < 1.25
