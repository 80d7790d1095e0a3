"""What makes the logits: formulas, parameter counts, gradients, noise, hashing, and equal modules of transformers."""

import itertools
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from moestro.errors import MoestroError
from moestro.model.moe.noise import logit_noise
from moestro.model.moe.router import Router, TokenGroups
from moestro.model.shards import SequenceShard

from ..helpers import build, error, model_config, normal
from .slow_selection import router_for

D, R, E = 16, 8, 4
KINDS = ["linear", "mlp", "attention", "hybrid", "mlp_hadamard", "zaya", "hash"]


def kind(name: str, **router: Any) -> dict[str, Any]:
    return {"router": {"kind": name, "hidden_size": R, **router}}


def logits_of(router: Router, x: Tensor) -> Tensor:
    """ln of the weights of all experts, which are the logits up to a constant of the token."""
    routing = router(x, TokenGroups(len(x)))[0]
    order = routing.expert_ids.argsort(1)
    return routing.weights.gather(1, order).log()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear", D * E),
        ("mlp", D * R + R * E),
        ("attention", D * R + E * R),
        ("hybrid", D * E + D * R + E * R + 1),
        ("mlp_hadamard", 2 * D * R + R * E),
        ("zaya", D * R + R + R + 2 * (R * R + R) + R * E),
        ("hash", 0),
    ],
)
def test_parameter_counts(name: str, expected: int) -> None:
    assert sum(p.numel() for p in router_for(kind(name)).parameters()) == expected
    # The second layer of ZAYA1 has the scale of the state; a bias has one number an expert.
    later = router_for(kind(name), layer=1)
    assert sum(p.numel() for p in later.parameters()) == expected + (R if name == "zaya" else 0)
    if name == "linear":
        assert sum(p.numel() for p in router_for(kind(name, bias=True)).parameters()) == expected + E


def test_formulas() -> None:
    x = normal(5, D, seed=1, dtype=torch.float64)

    def expect(router: Router, logits: Tensor) -> None:
        torch.testing.assert_close(logits_of(router, x), logits.log_softmax(-1))

    everything = {"top_k": E}
    linear = router_for(kind("linear", bias=True) | everything)
    expect(linear, x @ linear.weight.t() + linear.logit_bias)
    mlp = router_for(kind("mlp") | everything)
    expect(mlp, F.gelu(x @ mlp.in_proj.weight.t()) @ mlp.out_proj.weight.t())
    attention = router_for(kind("attention") | everything)
    attended = (x @ attention.query.weight.t()) @ attention.keys.t() / R**0.5
    expect(attention, attended)
    hadamard = router_for(kind("mlp_hadamard") | everything)
    both = (x @ hadamard.in_proj.weight.t()) * (x @ hadamard.factor_proj.weight.t())
    expect(hadamard, both @ hadamard.out_proj.weight.t())
    hybrid = router_for(kind("hybrid") | everything)
    share = hybrid.mix_bias.sigmoid()
    attended = (x @ hybrid.query.weight.t()) @ hybrid.keys.t() / R**0.5
    expect(hybrid, share * (x @ hybrid.weight.t()) + (1 - share) * attended)


@pytest.mark.parametrize("name", KINDS[:-1])
def test_gradients_reach_every_parameter(name: str) -> None:
    """Of two layers, the second with the first's state; from the weights alone."""
    routers = [router_for(kind(name), layer) for layer in (0, 1)]
    x, state = normal(9, D, seed=1, dtype=torch.float64, grad=True), None
    loss = x.new_zeros(())
    for router in routers:
        routing, state = router(x, TokenGroups(9), state)
        loss = loss + (routing.weights * normal(9, 2, seed=2)).sum()
    loss.backward()
    for router in routers:
        for parameter_name, parameter in router.named_parameters():
            assert parameter.grad is not None, parameter_name
            assert parameter.grad.abs().max() > 0, parameter_name
    assert x.grad is not None


def test_initial_values() -> None:
    """2-D weights have the router's own scale; vectors start at 1, biases at 0."""
    moe = kind("zaya", init_scale=0.25, hidden_size=64) | {"null_experts": 1, "null_bias": -1.0}
    model = build(model_config(moe, hidden_size=64, head_dim=4))
    router = model.moe_layers()[1].router
    assert (router.state_scale == 1).all()
    assert (router.norm.weight == 1).all()
    for layer in (router.in_proj, router.fc1, router.fc2):
        assert (layer.bias == 0).all()
        assert layer.weight.std().item() == pytest.approx((0.25 / 64) ** 0.5 * 0.88, rel=0.1)  # cut at two sigma
    assert router.bias.tolist() == [0, 0, 0, 0, -1]
    hybrid = build(model_config(kind("hybrid"))).moe_layers()[0].router
    assert hybrid.mix_bias.item() == 0


def test_the_state_is_what_comes_before_the_norm() -> None:
    first, second = (router_for(kind("zaya"), layer) for layer in (0, 1))
    x = normal(3, D, seed=1, dtype=torch.float64)
    _, state = first(x, TokenGroups(3))
    torch.testing.assert_close(state, x @ first.in_proj.weight.t() + first.in_proj.bias)
    _, after = second(x, TokenGroups(3), state)
    torch.testing.assert_close(after, x @ second.in_proj.weight.t() + second.in_proj.bias + second.state_scale * state)
    # What a pipeline hands to the first MoE layer is nothing, and is not read.
    assert torch.equal(first(x, TokenGroups(3), torch.ones_like(state))[1], state)
    alone = router_for(kind("zaya", carry_state=False), layer=1)
    assert not hasattr(alone, "state_scale")
    assert alone(x, TokenGroups(3))[1] is None


def test_the_first_moe_layer_has_no_scale() -> None:
    moe = kind("zaya") | {"first_k_dense": 1}
    assert not hasattr(router_for(moe, layer=1, num_layers=3), "state_scale")
    assert hasattr(router_for(moe, layer=2, num_layers=3), "state_scale")


def test_equal_weights_in_another_kind_are_the_same_router() -> None:
    linear, hybrid = router_for({}), router_for(kind("hybrid"))
    with torch.no_grad():
        hybrid.weight.copy_(linear.weight)
        hybrid.mix_bias.fill_(60.0)
    x = normal(9, D, seed=1, dtype=torch.float64)
    one, two = (router(x, TokenGroups(9))[0] for router in (linear, hybrid))
    assert torch.equal(one.expert_ids, two.expert_ids)
    torch.testing.assert_close(one.weights, two.weights)


@pytest.mark.parametrize("name", KINDS[:-1])
def test_low_precision(name: str) -> None:
    """fp32 products of bf16 inputs by default, else bf16 ones; scores are fp32 in both."""
    x = normal(6, D, seed=1).bfloat16()
    exact = logits_of(router_for(kind(name) | {"top_k": E}).float(), x.float())
    assert torch.equal(logits_of(router_for(kind(name) | {"top_k": E}).float(), x), exact)
    low = logits_of(router_for(kind(name, fp32=False) | {"top_k": E}).float(), x)
    assert low.dtype == torch.float32
    assert not torch.equal(low, exact)
    assert error(low, exact) < 0.03


# Hashing


def hashed(ids: Tensor, top_k: int = 1, layer: int = 0, **groups: Any) -> Any:
    router = router_for(kind("hash") | {"num_experts": 8, "top_k": top_k}, layer)
    return router(normal(len(ids), D), TokenGroups(len(ids), token_ids=ids, **groups))[0]


def test_hashing_is_even_and_fixed() -> None:
    ids = torch.arange(16000)
    routing = hashed(ids)
    load = routing.stats.load
    assert load.max() / load.mean() < 1.1
    assert load.min() / load.mean() > 0.9
    assert (routing.weights == 1).all()
    assert routing.stats.z_loss.abs() < 1e-9
    order = torch.randperm(16000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(hashed(ids[order]).expert_ids, routing.expert_ids[order])
    same = (hashed(ids, layer=1).expert_ids == routing.expert_ids).double().mean().item()
    assert same == pytest.approx(1 / 8, abs=0.02)  # another layer, another hash
    assert hashed(torch.zeros(10, dtype=torch.int64)).expert_ids.unique().numel() == 1  # the skew of the ids stays


def test_hashing_to_several_experts() -> None:
    routing = hashed(torch.arange(4000), top_k=3)
    assert all(len(set(row)) == 3 for row in routing.expert_ids.tolist())
    assert (routing.weights == 1 / 3).all()
    pairs = torch.bincount(routing.expert_ids[:, 0] * 8 + routing.expert_ids[:, 1], minlength=64).view(8, 8)
    assert pairs[~torch.eye(8, dtype=torch.bool)].min() > 40  # of 71 on average


def test_vectors_without_an_id_are_spread_by_their_place() -> None:
    ids = torch.full((4000,), -1)
    load = hashed(ids).stats.load
    assert load.max() / load.mean() < 1.2
    twice = hashed(torch.full((16,), -1)).expert_ids
    router = router_for(kind("hash") | {"num_experts": 8, "top_k": 1})
    two = router(normal(32, D), TokenGroups(16, token_ids=torch.full((32,), -1)))[0].expert_ids
    assert torch.equal(two, torch.cat((twice, twice)))


def test_hashing_inside_a_type() -> None:
    moe = kind("hash") | {"num_experts": 8, "top_k": 2, "expert_groups": (2, 6)}
    types = torch.arange(100) % 2
    router = router_for(moe, token_types=[20])
    ids = router(normal(100, D), TokenGroups(100, token_ids=torch.arange(100), token_types=types))[0].expert_ids
    assert ((ids >= 2) == (types.unsqueeze(1) == 1)).all()


def test_hashing_without_ids_is_an_error() -> None:
    with pytest.raises(MoestroError, match="token ids"):
        router_for(kind("hash"))(normal(4, D), TokenGroups(4))


@pytest.mark.parametrize("other", [{"null_experts": 1}, {"balance": {"bias_rule": "sign"}}])
def test_hashing_takes_no_other_choice(other: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="selection by itself"):
        model_config(kind("hash") | other)


# Noise


class Odd:
    """Every second position of each sequence."""

    parts, splits_attention = 2, False

    def __init__(self, whole: Tensor) -> None:
        self.whole = whole

    def gather(self, x: Tensor) -> Tensor:
        return self.whole

    def mine(self, x: Tensor) -> Tensor:
        return x[1::2]

    def attend(self, *_: Any) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("noise", ["gaussian", "gumbel"])
def test_noise_is_a_function_of_seed_and_layer(noise: Any) -> None:
    router = router_for(kind("linear", noise=noise, noise_scale=0.7) | {"top_k": E}, layer=1)
    x, seeds = normal(12, D, seed=1, dtype=torch.float64), torch.tensor([5, 1 << 40, 7])
    groups = TokenGroups(4, noise_seeds=seeds)
    plain, noisy = router(x, TokenGroups(4))[0].weights, router(x, groups)[0]
    assert not torch.equal(noisy.weights, plain)
    alone = router(x[4:8], TokenGroups(4, noise_seeds=seeds[1:2]))[0]
    torch.testing.assert_close(alone.weights, noisy.weights[4:8])
    shard: SequenceShard = Odd(x)
    part = router(x[1::2], TokenGroups(4, noise_seeds=seeds, shard=shard))[0]
    torch.testing.assert_close(part.weights, noisy.weights[1::2])
    assert torch.equal(router.eval()(x, groups)[0].weights, plain)


def test_the_distributions() -> None:
    like = torch.empty(0, dtype=torch.float64)
    draws = {
        name: logit_noise(torch.arange(4), 0, 200, 50, name, like)  # type: ignore[arg-type]
        for name in ("gaussian", "gumbel", "one_gumbel")
    }
    for name, mean, variance in (("gaussian", 0, 1), ("gumbel", 0, 3.2899), ("one_gumbel", 0.5772, 1.6449)):
        assert draws[name].mean().item() == pytest.approx(mean, abs=0.03)
        assert draws[name].var().item() == pytest.approx(variance, rel=0.05)
        assert draws[name].isfinite().all()
    for one, two in itertools.combinations(draws.values(), 2):
        assert abs(torch.corrcoef(torch.stack((one.flatten(), two.flatten())))[0, 1].item()) < 0.03


def test_dense_to_sparse_cools_and_sharpens() -> None:
    settings = {"selection": "dense_to_sparse", "temperature": 2.0, "temperature_decay": 0.5, "min_temperature": 0.1}
    router = router_for({"num_experts": 8, "router": settings})
    x = normal(64, D, seed=1, dtype=torch.float64)
    counts, temperatures = [], []
    for _ in range(6):
        assert router.temperature is not None
        temperatures.append(round(router.temperature.item(), 3))
        routing = router(x, TokenGroups(64))[0]
        counts.append((routing.expert_ids < 8).sum().item() / 64)
        router.update_balance(routing.stats.load, routing.stats.sums)
    assert temperatures == [2.0, 1.0, 0.5, 0.25, 0.125, 0.1]
    assert counts[0] > 2
    assert counts[0] > counts[2] > counts[-1] >= 1
    seeded = router(x, TokenGroups(64, noise_seeds=torch.tensor([1])))[0]
    assert not torch.equal(seeded.expert_ids, routing.expert_ids)


# Against transformers


def same(routing: Any, ids: Tensor, weights: Tensor) -> None:
    """Alike as sets: others do not sort."""
    order, other = routing.expert_ids.argsort(1), ids.argsort(1)
    assert torch.equal(routing.expert_ids.gather(1, order), ids.gather(1, other))
    torch.testing.assert_close(routing.weights.gather(1, order), weights.gather(1, other), rtol=1e-5, atol=1e-6)


def filled(module: nn.Module) -> None:
    for i, parameter in enumerate(module.parameters()):
        with torch.no_grad():
            parameter.copy_(normal(*parameter.shape, seed=i) * 0.5)


X = normal(40, D, seed=50)


def test_deepseek_v3() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = modeling.DeepseekV3Config(
        hidden_size=D, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5
    )
    theirs = modeling.DeepseekV3TopkRouter(config)
    filled(theirs)
    theirs.e_score_correction_bias.copy_(normal(16, seed=9) / 4)
    settings = {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "scaling_factor": 2.5}
    moe = {"num_experts": 16, "top_k": 4, "router": settings, "balance": {"bias_rule": "sign"}}
    ours = router_for(moe).float()
    ours.load_state_dict({"weight": theirs.weight, "bias": theirs.e_score_correction_bias}, strict=False)
    _, weights, ids = theirs(X)
    same(ours(X, TokenGroups(40))[0], ids, weights)


def test_deepseek_v2() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")
    config = modeling.DeepseekV2Config(
        hidden_size=D, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=1.5,
        topk_method="group_limited_greedy", num_attention_heads=4,
    )  # fmt: skip
    theirs = modeling.DeepseekV2TopkRouter(config)
    filled(theirs)
    settings = {"num_groups": 4, "top_groups": 2, "group_score": "max", "scaling_factor": 1.5, "renormalize": False}
    ours = router_for({"num_experts": 16, "top_k": 4, "router": settings}).float()
    ours.load_state_dict({"weight": theirs.weight}, strict=False)
    _, weights, ids = theirs(X)
    same(ours(X, TokenGroups(40))[0], ids, weights)


def test_gpt_oss() -> None:
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    theirs = modeling.GptOssTopKRouter(modeling.GptOssConfig(hidden_size=D, num_local_experts=8, num_experts_per_tok=3))
    filled(theirs)
    ours = router_for({"num_experts": 8, "top_k": 3, "router": {"bias": True, "top_k_before_score": True}}).float()
    ours.load_state_dict({"weight": theirs.weight, "logit_bias": theirs.bias}, strict=False)
    _, weights, ids = theirs(X)
    same(ours(X, TokenGroups(40))[0], ids, weights)


def test_zaya() -> None:
    """Two layers, the second with the state of the first; the skip class is our null expert."""
    modeling = pytest.importorskip("transformers.models.zaya.modeling_zaya")
    config = modeling.ZayaConfig(hidden_size=D, num_experts=6, num_experts_per_tok=1, router_hidden_size=R)
    moe = kind("zaya", renormalize=False) | {"num_experts": 6, "top_k": 1, "null_experts": 1, "null_bias": -1.0}
    state = their_state = None
    skipped = 0
    for layer in (0, 1):
        theirs = modeling.ZayaRouter(config, layer)
        filled(theirs)
        theirs.balancing_biases.copy_(normal(7, seed=layer) / 4)[-1] += 0.4
        ours = router_for(moe, layer, norm_eps=config.rms_norm_eps).float()
        names = {
            "down_proj": "in_proj",
            "router_states_scale": "state_scale",
            "router_mlp.": "",
            "balancing_biases": "bias",
        }
        renamed = {}
        for name, value in theirs.state_dict().items():
            for old, new in names.items():
                name = name.replace(old, new)
            renamed[name] = value
        missing = ours.load_state_dict(renamed, strict=False)
        assert set(missing.missing_keys) == {"bias_moments", "global_load"}
        assert not missing.unexpected_keys
        logits, weights, ids, their_state = theirs(X.unsqueeze(0), their_state)
        routing, state = ours(X, TokenGroups(40), state)
        torch.testing.assert_close(state, their_state[0])
        skip = routing.expert_ids == 6
        skipped += int(skip.sum())
        torch.testing.assert_close(routing.weights, weights)
        assert torch.equal(routing.expert_ids.masked_fill(skip, 0), ids)
        assert torch.equal(routing.stats.load[6], skip.sum().float())
        torch.testing.assert_close(routing.stats.z_loss, logits.logsumexp(-1).square().mean())
    assert 0 < skipped < 80
