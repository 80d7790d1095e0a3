import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moestro.config import BalanceConfig, RouterConfig
from moestro.model.moe.noise import jitter_noise
from moestro.model.moe.route import Routing, capacity
from moestro.model.moe.router import TokenGroups

from ..helpers import normal
from .slow_router import fast_route, router_of, slow_capacity, slow_route

NO_BALANCE = BalanceConfig()


def compare(
    logits: Tensor,
    top_k: int,
    config: RouterConfig,
    balance: BalanceConfig = NO_BALANCE,
    groups: TokenGroups | None = None,
    bias: Tensor | None = None,
    training: bool = True,
) -> Routing:
    """Hold `route` against the slow one, forward and backward."""
    experts = logits.shape[1]
    groups = groups or TokenGroups(len(logits))
    bias = torch.zeros(experts, dtype=torch.float64) if bias is None else bias
    load = torch.arange(1, experts + 1, dtype=torch.float64)
    arguments = (top_k, config, balance, groups, bias, load / load.sum(), training)
    mine, other = (logits.clone().requires_grad_() for _ in range(2))
    found, slow = fast_route(mine, *arguments), slow_route(other, *arguments)
    assert found.expert_ids.tolist() == slow.expert_ids
    stats = found.stats
    assert stats.load.tolist() == slow.load
    assert (stats.dropped.item(), stats.tokens.item()) == (slow.dropped, slow.tokens)
    assert stats.token_entropy.item() == pytest.approx(slow.token_entropy, abs=1e-5)
    upstream = normal(len(logits), top_k, seed=99, dtype=torch.float64)
    for one, two in (
        (found.weights, slow.weights),
        (stats.aux_loss, slow.aux_loss),
        (stats.z_loss, slow.z_loss),
    ):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)
        scale = upstream if one.dim() else torch.ones((), dtype=one.dtype)
        (grad,) = torch.autograd.grad(one, mine, scale, retain_graph=True)
        (expected,) = torch.autograd.grad(two, other, scale, retain_graph=True)
        torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-12)
    return found


VALID = torch.tensor([True] * 5 + [False] * 3 + [True] * 2 + [False] * 1 + [True] * 1)


@pytest.mark.parametrize(
    ("score", "before", "renormalize", "rule", "factor", "padded"),
    list(
        itertools.product(
            ["softmax", "sigmoid"], [False, True], [False, True], ["none", "sign"], [None, 0.75], [False, True]
        )
    ),
)
def test_every_option_equals_the_slow_router(
    score: Any, before: bool, renormalize: bool, rule: Any, factor: float | None, padded: bool
) -> None:
    config = RouterConfig(
        score=score, top_k_before_score=before, renormalize=renormalize, scaling_factor=2.5, capacity_factor=factor
    )
    groups = TokenGroups(6, VALID if padded else None)
    logits = normal(12, 5, dtype=torch.float64)
    bias = normal(5, seed=1, dtype=torch.float64) / 2
    found = compare(logits, 3, config, BalanceConfig(bias_rule=rule, aux_scope="sequence"), groups, bias)
    if factor is not None:
        assert found.stats.dropped > 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_settings_equal_the_slow_router(data: st.DataObject) -> None:
    draw = data.draw
    experts = draw(st.integers(1, 7))
    top_k = draw(st.integers(1, experts))
    seq_len, sequences = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    tokens = seq_len * sequences
    config = RouterConfig(
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        top_k_before_score=draw(st.booleans()),
        renormalize=draw(st.booleans()),
        scaling_factor=draw(st.sampled_from([1.0, 0.5, 2.5])),
        capacity_factor=draw(st.sampled_from([None, 0.1, 0.5, 1.0, 1.25, 8.0])),
        eval_capacity_factor=draw(st.sampled_from([None, 0.5, 2.0])),
        min_expert_capacity=draw(st.integers(1, 3)),
        group_size=draw(st.sampled_from([None, 1, 2, 5, 100])),
    )
    scope = draw(st.sampled_from(["sequence", "group", "micro_batch", "global_batch"]))
    balance = BalanceConfig(bias_rule=draw(st.sampled_from(["none", "sign", "adamw"])), aux_scope=scope)
    valid = draw(st.none() | st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    groups = TokenGroups(seq_len, None if valid is None else torch.tensor(valid))
    seed = draw(st.integers(0, 999))
    logits = normal(tokens, experts, seed=seed, dtype=torch.float64) * draw(st.sampled_from([0.1, 1.0, 4.0]))
    bias = normal(experts, seed=seed + 1, dtype=torch.float64)
    compare(logits, top_k, config, balance, groups, bias, training=draw(st.booleans()))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_every_routing_keeps(data: st.DataObject) -> None:
    draw = data.draw
    experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, experts))
    seq_len, sequences = draw(st.integers(1, 16)), draw(st.integers(1, 3))
    tokens = seq_len * sequences
    factor = draw(st.sampled_from([None, 0.25, 1.0, 1.5]))
    group_size = draw(st.sampled_from([None, 3, 7]))
    config = RouterConfig(
        score=draw(st.sampled_from(["softmax", "sigmoid"])), capacity_factor=factor, scaling_factor=1.75,
        group_size=group_size,
    )  # fmt: skip
    valid = torch.tensor(draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    # Few distinct values, so that ties are common.
    logits = normal(tokens, experts, seed=draw(st.integers(0, 999))).round()
    load = torch.full((experts,), 1 / experts)
    arguments = (top_k, config, NO_BALANCE, TokenGroups(seq_len, valid), torch.zeros(experts), load, True)
    routing = fast_route(logits, *arguments)
    ids, weights, stats = routing.expert_ids, routing.weights, routing.stats
    kept = ids < experts
    pairs = int(valid.sum()) * top_k
    assert kept.sum() + stats.dropped == pairs
    assert stats.load.sum() == pairs
    assert not kept[~valid].any()
    assert (weights[~kept] == 0).all()
    assert (weights[kept] > 0).all()
    assert ids.min() >= 0
    assert ids.max() <= experts
    for row in ids.tolist():
        real = [e for e in row if e < experts]
        assert len(set(real)) == len(real)
    if factor is None:
        assert stats.dropped == 0
        torch.testing.assert_close(weights.sum(1)[valid], torch.full((int(valid.sum()),), 1.75))
        # Ties go to the lowest number: of two equal logits, the later is never chosen before the earlier.
        for row, chosen in zip(logits[valid].tolist(), ids[valid].tolist(), strict=True):
            assert chosen == sorted(range(experts), key=lambda e: (-row[e], e))[:top_k]
    else:
        size = min(group_size or seq_len, tokens)
        room = slow_capacity(size, top_k, experts, factor, 1)
        for part in ids.split(size):
            assert torch.bincount(part.flatten(), minlength=experts + 1)[:experts].max() <= room


def test_second_choices_queue_behind_all_first_choices() -> None:
    # Token 0 has expert 0 second, tokens 1 and 2 have it first; two places.
    logits = torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 2.0], [3.0, 0.0, 2.0]])
    config = RouterConfig(capacity_factor=1.0)  # ceil(3 · 2 / 3) = 2
    routing = compare(logits.double(), 2, config)
    assert routing.expert_ids.tolist() == [[1, 3], [0, 2], [0, 2]]


def test_padding_takes_no_place() -> None:
    logits = torch.zeros(6, 2, dtype=torch.float64)
    logits[:, 0] = 1
    config = RouterConfig(capacity_factor=1.0)  # 3 places
    valid = torch.tensor([False, False, False, True, True, True])
    assert compare(logits, 1, config, groups=TokenGroups(6)).expert_ids.flatten().tolist() == [0, 0, 0, 2, 2, 2]
    padded = compare(logits, 1, config, groups=TokenGroups(6, valid))
    assert padded.expert_ids.flatten().tolist() == [2, 2, 2, 0, 0, 0]
    assert padded.stats.dropped == 0


def test_evaluation_has_its_own_capacity() -> None:
    logits = torch.zeros(8, 2, dtype=torch.float64)
    config = RouterConfig(capacity_factor=0.5, eval_capacity_factor=2.0)
    assert compare(logits, 1, config, training=True).stats.dropped == 6
    assert compare(logits, 1, config, training=False).stats.dropped == 0
    only_eval = RouterConfig(eval_capacity_factor=0.5)
    assert compare(logits, 1, only_eval, training=True).stats.dropped == 0
    assert compare(logits, 1, only_eval, training=False).stats.dropped == 6


def test_the_bias_changes_the_selection_and_not_the_weights() -> None:
    logits = torch.tensor([[1.0, 0.5, 0.0]], dtype=torch.float64)
    bias = torch.tensor([-9.0, 0.0, 0.0], dtype=torch.float64)
    raw = RouterConfig(renormalize=False)
    routing = compare(logits, 2, raw, BalanceConfig(bias_rule="sign"), bias=bias)
    assert routing.expert_ids.tolist() == [[1, 2]]
    torch.testing.assert_close(routing.weights[0], logits.softmax(-1)[0, 1:])
    # Without a rule the bias is not read.
    assert compare(logits, 2, raw, bias=bias).expert_ids.tolist() == [[0, 1]]


def test_the_bias_of_a_real_layer_moves_its_selection() -> None:
    router = router_of(4, 3, 1, RouterConfig(), BalanceConfig(bias_rule="sign"))
    with torch.no_grad():
        router.weight.copy_(normal(3, 4))
    x = normal(20, 4, seed=1)
    router.bias[2] = 5.0
    assert (router(x, TokenGroups(20))[0].expert_ids == 2).all()


def test_ties_go_to_the_lowest_number() -> None:
    assert (
        compare(torch.zeros(3, 64, dtype=torch.float64), 5, RouterConfig()).expert_ids.tolist() == [[0, 1, 2, 3, 4]] * 3
    )


@pytest.mark.parametrize(
    ("group", "top_k", "experts", "factor", "minimum", "expected"),
    [
        (1024, 1, 128, 1.0, 1, 8),
        (1024, 1, 128, 1.25, 4, 10),
        (100, 2, 8, 1.0, 1, 25),
        (10, 1, 3, 1.0, 1, 4),
        (100, 1, 1, 1.1, 1, 110),  # 110.00000000000001 in floating point
        (10, 1, 64, 1.0, 4, 4),
        (1, 1, 8, 0.01, 1, 1),
    ],
)
def test_capacity(group: int, top_k: int, experts: int, factor: float, minimum: int, expected: int) -> None:
    assert capacity(group, top_k, experts, factor, minimum) == expected


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 8), st.integers(1, 256), st.integers(1, 400), st.integers(1, 9))
def test_capacity_is_the_exact_ceiling(group: int, top_k: int, experts: int, percent: int, minimum: int) -> None:
    factor = percent / 100
    found = capacity(group, top_k, experts, factor, minimum)
    assert found == slow_capacity(group, top_k, experts, factor, minimum)


def test_sigmoid_weights_survive_vanishing_scores() -> None:
    logits = torch.full((2, 4), -200.0, requires_grad=True)
    arguments = (2, RouterConfig(score="sigmoid"), NO_BALANCE, TokenGroups(2), torch.zeros(4), torch.ones(4) / 4, True)
    routing = fast_route(logits, *arguments)
    (routing.weights.sum() + routing.stats.aux_loss).backward()
    assert routing.weights.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_routing_is_pure() -> None:
    router = router_of(4, 3, 2, RouterConfig(capacity_factor=1.0), BalanceConfig(bias_rule="adamw"))
    torch.nn.init.normal_(router.weight)
    before = {name: value.clone() for name, value in router.state_dict().items()}
    router(normal(6, 4), TokenGroups(6))
    for name, value in router.state_dict().items():
        assert torch.equal(value, before[name]), name


# Noise


def test_jitter_depends_on_the_seed_and_the_layer_alone() -> None:
    like = torch.empty(0)
    both = jitter_noise(torch.tensor([5, 1 << 40]), 3, 4, 6, 0.1, like)
    assert both.shape == (8, 6)
    assert (both >= 0.9).all()
    assert (both <= 1.1).all()
    assert both.min() < 0.92
    assert both.max() > 1.08
    swapped = jitter_noise(torch.tensor([1 << 40, 5]), 3, 4, 6, 0.1, like)
    assert torch.equal(both, torch.cat([swapped[4:], swapped[:4]]))
    torch.manual_seed(17)
    assert torch.equal(both[:4], jitter_noise(torch.tensor([5]), 3, 4, 6, 0.1, like))
    assert not torch.equal(both[:4], jitter_noise(torch.tensor([5]), 4, 4, 6, 0.1, like))
    assert not torch.equal(both[:4], both[4:])
    # Seed and layer must not be confused: 51/2 is not 5/12.
    one = jitter_noise(torch.tensor([51]), 2, 4, 6, 0.1, like)
    assert not torch.equal(one, jitter_noise(torch.tensor([5]), 12, 4, 6, 0.1, like))


def test_jitter_is_uniform() -> None:
    noise = jitter_noise(torch.arange(8), 0, 64, 64, 0.5, torch.empty(0))
    assert noise.mean().item() == pytest.approx(1.0, abs=5e-3)
    assert noise.var().item() == pytest.approx(1 / 12, rel=0.02)


def test_a_sequence_is_routed_alike_in_any_batch() -> None:
    router = router_of(6, 5, 2, RouterConfig(jitter=0.3), NO_BALANCE, layer=2)
    with torch.no_grad():
        router.weight.copy_(normal(5, 6))
    x = normal(3, 8, 6, seed=1)
    seeds = torch.tensor([11, 12, 13])
    whole = router(x.flatten(0, 1), TokenGroups(8, noise_seeds=seeds))[0]
    alone = router(x[1], TokenGroups(8, noise_seeds=seeds[1:2]))[0]
    assert torch.equal(whole.expert_ids[8:16], alone.expert_ids)
    torch.testing.assert_close(whole.weights[8:16], alone.weights, rtol=1e-5, atol=1e-6)


def test_jitter_only_while_training_and_with_seeds() -> None:
    router = router_of(6, 5, 2, RouterConfig(jitter=0.3), NO_BALANCE)
    with torch.no_grad():
        router.weight.copy_(normal(5, 6))
    x = normal(8, 6, seed=1)
    seeds = torch.tensor([3])
    plain = router(x, TokenGroups(8))[0].weights
    assert not torch.equal(router(x, TokenGroups(8, noise_seeds=seeds))[0].weights, plain)
    router.eval()
    assert torch.equal(router(x, TokenGroups(8, noise_seeds=seeds))[0].weights, plain)


# Precision


@pytest.fixture(scope="module")
def near_ties() -> tuple[Tensor, Tensor]:
    """bf16 inputs and eight experts whose logits differ by less than bf16 can tell."""
    x = normal(256, 32, dtype=torch.bfloat16)
    return x, normal(1, 32, seed=1) + 1e-3 * normal(8, 32, seed=2)


def first_choices(x: Tensor, weight: Tensor, fp32: bool) -> tuple[list[int], Routing]:
    router = router_of(32, 8, 1, RouterConfig(fp32=fp32), NO_BALANCE)
    with torch.no_grad():
        router.weight.copy_(weight)
    routing = router(x, TokenGroups(len(x)))[0]
    return routing.expert_ids.flatten().tolist(), routing


def test_the_fp32_router_sees_near_ties(near_ties: tuple[Tensor, Tensor]) -> None:
    x, weight = near_ties
    exact = x.double() @ weight.double().t()
    top = exact.topk(2, dim=1).values
    clear = (top[:, 0] - top[:, 1] > 1e-5).tolist()  # beyond fp32's own rounding
    assert sum(clear) > 200
    found, routing = first_choices(x, weight, fp32=True)
    assert routing.weights.dtype == torch.float32
    wrong = [a != b for a, b, c in zip(found, exact.argmax(1).tolist(), clear, strict=True) if c]
    assert not any(wrong)


def test_a_bf16_router_does_not(near_ties: tuple[Tensor, Tensor]) -> None:
    x, weight = near_ties
    exact = (x.double() @ weight.double().t()).argmax(1).tolist()
    found, _ = first_choices(x, weight, fp32=False)
    assert sum(a != b for a, b in zip(found, exact, strict=True)) > 10


def test_statistics_of_a_bf16_router_do_not_saturate() -> None:
    """Counting in bf16 stops at 256: the loss of balanced routing must still be 1."""
    tokens, experts = 2048, 2
    logits = torch.zeros(tokens, experts, dtype=torch.bfloat16)
    logits[::2, 0] = logits[1::2, 1] = 1.0
    balance = BalanceConfig(aux_scope="micro_batch")
    arguments = (1, RouterConfig(fp32=False), balance, TokenGroups(tokens), torch.zeros(2), torch.ones(2) / 2, True)
    stats = fast_route(logits, *arguments).stats
    assert stats.load.tolist() == [1024, 1024]
    assert stats.aux_loss.item() == pytest.approx(1.0, abs=0.02)
    assert stats.tokens == tokens


def test_a_bf16_router_scores_in_fp32() -> None:
    """`fp32 = false` is about the product; the softmax, its weights and losses stay in fp32 (see RouterConfig)."""
    _, routing = first_choices(normal(6, 32, dtype=torch.bfloat16), normal(8, 32, seed=1), fp32=False)
    assert routing.weights.dtype == torch.float32
    assert routing.stats.z_loss.dtype == torch.float32
