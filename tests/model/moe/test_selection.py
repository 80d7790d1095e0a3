"""Every selection against loops over tokens, forward and backward, and what each promises."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moestro.config import MoEConfig
from moestro.errors import MoestroError
from moestro.model.moe.memory import Memory
from moestro.model.moe.route import Routing, route
from moestro.model.moe.router import TokenGroups

from ..helpers import normal
from .slow_selection import router_for, slow_choice

RAW = {"renormalize": False}


def moe_config(
    num_experts: int = 6, top_k: int = 2, router: dict[str, Any] | None = None, **settings: Any
) -> MoEConfig:
    data = {"num_experts": num_experts, "top_k": top_k, "expert_hidden_size": 4, "router": router or {}} | settings
    return MoEConfig.model_validate(data)


def run(
    logits: Tensor,
    moe: MoEConfig,
    groups: TokenGroups | None = None,
    bias: Tensor | None = None,
    training: bool = True,
    causal: Tensor | None = None,
) -> Routing:
    assert isinstance(moe.top_k, int)
    bias = torch.zeros(logits.shape[1], dtype=logits.dtype) if bias is None else bias
    memory = Memory(bias, torch.full_like(bias, 1 / len(bias)))
    groups = groups or TokenGroups(len(logits))
    return route(logits, moe, moe.top_k * moe.granularity, groups, memory, training, causal)


def dense(routing: Routing, experts: int) -> Tensor:
    """[T, E] weights."""
    table = routing.weights.new_zeros(len(routing.weights), experts + 1)
    return table.scatter_add(1, routing.expert_ids, routing.weights)[:, :experts]


def compare(moe: MoEConfig, logits: Tensor, seq_len: int, valid: list[bool] | None = None, **arguments: Any) -> Routing:
    """Weights and load of `route` and their gradient against the loops."""
    types, training = arguments.get("types"), arguments.get("training", True)
    bias = arguments.get("bias", torch.zeros(logits.shape[1], dtype=torch.float64))
    causal = arguments.get("causal")
    groups = TokenGroups(
        seq_len,
        None if valid is None else torch.tensor(valid),
        token_types=None if types is None else torch.tensor(types),
    )
    mine, other = (logits.clone().requires_grad_() for _ in range(2))
    found = run(mine, moe, groups, bias, training, causal)
    flags = valid or [True] * len(logits)
    assert isinstance(moe.top_k, int)
    read = moe.balance.bias_rule != "none" or moe.null_bias != 0
    added = (bias * read).tolist()
    slow = slow_choice(other, moe, moe.top_k, seq_len, flags, types, added, training, causal)
    experts = moe.resolved_num_experts
    table = dense(found, experts)
    torch.testing.assert_close(table, slow.weights[:, :experts], rtol=1e-9, atol=1e-12)
    assert found.stats.load.tolist() == slow.load
    if moe.null_experts and moe.null_output == "input":
        assert found.input_weight is not None
        torch.testing.assert_close(found.input_weight, slow.weights[:, experts:].sum(1), rtol=1e-9, atol=1e-12)
    if moe.router.selection == "base":
        assert found.input_weight is not None
        torch.testing.assert_close(found.input_weight, (1 - slow.weights.sum(1)) * torch.tensor(flags))
    upstream = normal(len(logits), experts, seed=99, dtype=torch.float64)
    (grad,) = torch.autograd.grad((table * upstream).sum(), mine)
    (expected,) = torch.autograd.grad((slow.weights[:, :experts] * upstream).sum(), other)
    torch.testing.assert_close(grad, expected, rtol=1e-8, atol=1e-11)
    assert 0 <= found.stats.token_entropy.item() <= 1 + 1e-6
    assert (found.weights >= 0).all()
    return found


ROUTERS: list[dict[str, Any]] = [
    {"router": {"num_groups": 3, "top_groups": 2}},
    {"router": {"num_groups": 3, "top_groups": 1, "group_score": "max", "score": "sigmoid", "scaling_factor": 2.5}},
    {"router": {"num_groups": 6, "top_groups": 3}, "balance": {"bias_rule": "sign"}},
    {"router": {"num_groups": 2, "top_groups": 1, "score": "sigmoid"}},
    {"null_experts": 2, "null_output": "input"},
    {"null_experts": 1, "null_bias": -0.1, "null_ends_choice": True, "null_output": "input", "router": RAW},
    {"null_experts": 1, "router": {"top_k_before_score": True}, "balance": {"bias_rule": "quantile"}},
    {"expert_groups": (2, 4)},
    {"expert_groups": (2, 4), "router": {"score": "sigmoid"}, "balance": {"bias_rule": "sign"}},
    {"expert_groups": (2, 4), "router": {"top_k_before_score": True}},
    {"router": {"selection": "k_top_1"}},
    {"router": {"selection": "k_top_1", "score": "sigmoid"} | RAW},
    {"router": {"selection": "sam", "num_groups": 2}},
    {"router": {"selection": "sam", "num_groups": 3, "score": "sigmoid"} | RAW},
    {"router": {"selection": "base"}, "top_k": 1},
    {"router": {"selection": "base"}, "top_k": 1, "expert_groups": (3, 3)},
    {"router": {"selection": "expert_choice", "score": "sigmoid"} | RAW},
    {"router": {"selection": "expert_choice", "capacity_factor": 0.6}},
    {"router": {"selection": "expert_choice", "capacity_factor": 3.5} | RAW, "expert_groups": (2, 4)},
    {"router": {"selection": "dense"}},
    {"router": {"selection": "dense", "eval_top_k": 2}},
    {"router": {"selection": "dense", "eval_top_k": 3, "eval_threshold": 1.1} | RAW, "expert_groups": (2, 4)},
    {"router": {"selection": "dense_to_sparse"}},
    {"router": {"selection": "dense_to_sparse", "score": "sigmoid"} | RAW, "expert_groups": (2, 4)},
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("settings", ROUTERS, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_every_selection_equals_loops(settings: dict[str, Any], padded: bool, training: bool) -> None:
    base = settings.get("router", {}).get("selection") == "base"
    moe = moe_config(3 if base and "expert_groups" not in settings else 6, **settings)
    logits = normal(10, moe.num_choices, seed=1, dtype=torch.float64) * 1.5
    valid = [True] * 4 + [False] + [False, True, True, True, False] if padded else None
    compare(
        moe, logits, 5, valid,
        types=[0, 1, 1, 0, 1, 1, 1, 0, 1, 0] if moe.expert_groups else None,
        bias=normal(moe.num_choices, seed=2, dtype=torch.float64) / 3,
        causal=normal(10, 6, seed=3, dtype=torch.float64),
        training=training,
    )  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_random_sizes_equal_loops(data: st.DataObject) -> None:
    draw = data.draw
    kind = draw(st.sampled_from(["top_k", "k_top_1", "sam", "base", "expert_choice", "dense", "dense_to_sparse"]))
    groups, size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    experts = groups * size
    top_k = 1 if kind in ("base", "k_top_1") else draw(st.integers(1, size))
    router = {"selection": kind, "score": draw(st.sampled_from(["softmax", "sigmoid"])), "renormalize": False}
    if kind in ("top_k", "sam"):
        router["num_groups"] = groups
    moe = moe_config(experts, top_k, router)
    seq_len = draw(st.integers(1, 6))
    tokens = seq_len * draw(st.integers(1, 2))
    valid = draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    seed = draw(st.integers(0, 999))
    logits = normal(tokens, experts, seed=seed, dtype=torch.float64)
    compare(moe, logits, seq_len, valid, causal=normal(tokens, experts, seed=seed + 1, dtype=torch.float64))


# What each promises


def test_the_group_limit() -> None:
    moe = moe_config(32, 8, {"score": "sigmoid", "num_groups": 8, "top_groups": 3}, balance={"bias_rule": "sign"})
    ids = run(normal(64, 32), moe, bias=normal(32, seed=1)).expert_ids
    assert max(len({e // 4 for e in row}) for row in ids.tolist()) == 3


def test_sam_visits_one_group_and_pays_for_what_lies_outside() -> None:
    settings = {"selection": "sam", "num_groups": 4} | RAW
    moe = moe_config(16, 3, settings, balance={"alignment_coef": 0.5})
    logits = normal(32, 16, dtype=torch.float64, grad=True)
    routing = run(logits, moe)
    assert all(len({e // 4 for e in row}) == 1 for row in routing.expert_ids.tolist())
    expected = torch.zeros((), dtype=torch.float64)
    for probs, ids in zip(logits.softmax(-1), routing.expert_ids.tolist(), strict=True):
        group, last = ids[0] // 4, probs[ids[-1]]
        expected = expected + sum((p - last).clamp_min(0) for e, p in enumerate(probs) if e // 4 != group) / 32
    torch.testing.assert_close(routing.stats.other_loss, 0.5 * expected)
    (grad,) = torch.autograd.grad(routing.stats.other_loss, logits)
    (wanted,) = torch.autograd.grad(0.5 * expected, logits)
    torch.testing.assert_close(grad, wanted)
    assert grad.abs().max() > 0


def test_k_top_1_takes_one_of_each_prototype() -> None:
    ids = run(normal(32, 12), moe_config(12, 4, {"selection": "k_top_1"})).expert_ids
    assert (ids // 3 == torch.arange(4)).all()


@pytest.mark.parametrize("tokens", [1, 3, 8, 11])
def test_base_loads_are_equal_while_training_only(tokens: int) -> None:
    moe = moe_config(4, 1, {"selection": "base"})
    logits = normal(3 * tokens, 4) + torch.tensor([4.0, 0.0, 0.0, 0.0])  # all want the first
    for ids in run(logits, moe, TokenGroups(tokens)).expert_ids.split(tokens):
        load = torch.bincount(ids.flatten(), minlength=4)
        assert load.max() - load.min() <= 1
    greedy = run(logits, moe, TokenGroups(tokens), training=False)
    assert (greedy.expert_ids[:, 0] == logits.argmax(1)).all()
    assert greedy.input_weight is not None
    torch.testing.assert_close(greedy.weights[:, 0] + greedy.input_weight, torch.ones(len(logits)))


def test_expert_choice_fills_every_expert() -> None:
    moe = moe_config(4, 2, {"selection": "expert_choice", "capacity_factor": 0.75} | RAW)
    valid = torch.tensor([True] * 9 + [False] * 3 + [True] * 12)
    logits = normal(24, 4) + torch.tensor([3.0, 0.0, 0.0, -3.0])
    routing = run(logits, moe, TokenGroups(12, valid), causal=torch.zeros(24, 4))
    for ids, tokens in zip(routing.expert_ids.split(12), (9, 12), strict=True):
        assert torch.bincount(ids.flatten(), minlength=5)[:4].tolist() == [-(-tokens * 3 // 8)] * 4
    assert routing.stats.dropped == 0


def test_expert_choice_sees_the_future_and_its_causal_router_does_not() -> None:
    router = router_for({"router": {"selection": "expert_choice", "score": "sigmoid"} | RAW})
    x = normal(12, 16, dtype=torch.float64)
    changed = x.clone()
    changed[8:] = normal(4, 16, seed=1, dtype=torch.float64) * 3
    past = [router(v, TokenGroups(12))[0].weights[:8] for v in (x, changed)]
    assert not torch.equal(*past)
    router.eval()
    past = [router(v, TokenGroups(12))[0].weights[:8] for v in (x, changed)]
    assert torch.equal(*past)
    assert (past[0] > 0).any()


def test_the_causal_router_learns_the_choice_and_teaches_nothing_else() -> None:
    router = router_for({"router": {"selection": "expert_choice"} | RAW})
    x = normal(12, 16, dtype=torch.float64, grad=True)
    own = [router.aux_in.weight, router.aux_out.weight]
    losses = []
    for _ in range(150):
        routing = router(x, TokenGroups(12))[0]
        routing.stats.other_loss.backward()
        losses.append(routing.stats.other_loss.item())
        for parameter in own:
            assert parameter.grad is not None
            with torch.no_grad():
                parameter -= parameter.grad
            parameter.grad = None
    assert losses[0] > 0.5
    assert losses[-1] < 0.1
    assert x.grad is None or (x.grad == 0).all()
    assert router.weight.grad is None or (router.weight.grad == 0).all()
    trained = dense(routing, 4)
    router.eval()
    assert ((dense(router(x, TokenGroups(12))[0], 4) > 0) == (trained > 0)).double().mean() > 0.95


def test_a_token_type_reaches_its_own_experts_only() -> None:
    for selection in ("top_k", "expert_choice", "dense"):
        for score in ("softmax", "sigmoid"):
            settings = {"num_experts": 6, "expert_groups": (2, 4), "router": {"selection": selection, "score": score}}
            router = router_for(settings, token_types=[20])
            x = normal(8, 16, dtype=torch.float64)
            routing = router(x, TokenGroups(8, token_types=torch.zeros(8, dtype=torch.int64)))[0]
            used = set(routing.expert_ids.flatten().tolist()) - {6}
            assert used == {0, 1}
            upstream = normal(*routing.weights.shape, seed=3, dtype=torch.float64)
            ((routing.weights * upstream).sum() + routing.stats.aux_loss + routing.stats.z_loss).backward()
            assert router.weight.grad is not None
            assert (router.weight.grad[2:] == 0).all()
            assert router.weight.grad[:2].abs().max() > 0


def test_other_types_do_not_matter() -> None:
    """Tokens of one type may change and move, and the others are routed as before (MoMa, check 1)."""
    settings = {"num_experts": 6, "expert_groups": (2, 4), "router": {"selection": "expert_choice"} | RAW}
    router = router_for(settings, token_types=[20])
    types = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1])
    x = normal(8, 16, dtype=torch.float64)
    other = x.clone()
    other[types == 1] = normal(4, 16, seed=1, dtype=torch.float64)
    one, two = (router(v, TokenGroups(8, token_types=types))[0] for v in (x, other))
    assert torch.equal(one.expert_ids[types == 0], two.expert_ids[types == 0])
    assert not torch.equal(one.expert_ids[types == 1], two.expert_ids[types == 1])


def test_missing_types_are_an_error() -> None:
    router = router_for({"num_experts": 6, "expert_groups": (2, 4)}, token_types=[20])
    with pytest.raises(MoestroError, match="types"):
        router(normal(4, 16, dtype=torch.float64), TokenGroups(4))


def test_null_experts_take_their_share_and_go_nowhere() -> None:
    moe = moe_config(4, 2, {}, null_experts=4, null_output="input")
    routing = run(normal(4096, 8), moe)
    nowhere = (routing.expert_ids == 4).double().mean().item()
    assert nowhere == pytest.approx(0.5, abs=0.03)
    assert routing.stats.load[4:].sum() == (routing.expert_ids == 4).sum()
    assert routing.stats.dropped == 0
    assert routing.input_weight is not None
    torch.testing.assert_close(routing.weights.sum(1) + routing.input_weight, torch.ones(4096))
    assert run(normal(8, 8), moe_config(4, 2, {}, null_experts=4)).input_weight is None


def test_capacity_leaves_null_and_empty_places_alone() -> None:
    logits = torch.zeros(8, 3)
    logits[:, 2] = 5  # all want the null expert, then expert 0
    moe = moe_config(2, 2, {"capacity_factor": 0.25}, null_experts=1, null_output="input")
    routing = run(logits, moe)
    assert routing.input_weight is not None
    assert (routing.input_weight > 0.9).all()
    assert routing.stats.load.tolist() == [8, 0, 8]
    assert routing.stats.dropped == 6  # two places at expert 0
    base = moe_config(2, 2, {"selection": "dense", "capacity_factor": 0.5})
    routing = run(torch.zeros(8, 2), base)
    assert routing.stats.dropped == 8


def test_one_expert_one_token() -> None:
    for selection in ("top_k", "k_top_1", "sam", "base", "expert_choice", "dense", "dense_to_sparse"):
        moe = moe_config(1, 1, {"selection": selection})
        routing = run(torch.tensor([[0.5]]), moe, causal=torch.ones(1, 1))
        assert routing.expert_ids.tolist() == [[0]]
        assert routing.stats.token_entropy == 0
        padded = run(torch.tensor([[0.5]]), moe, TokenGroups(1, torch.tensor([False])), causal=torch.ones(1, 1))
        assert padded.expert_ids.tolist() == [[1]]
        assert padded.weights.sum() == 0
        assert padded.stats.load.sum() == 0
