from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.config import ModelConfig, count
from moestro.errors import MoestroError
from moestro.model.moe.router import TokenGroups
from moestro.model.moe.split import split_model
from moestro.model.transformer import Transformer

from ..helpers import build, model_config, normal, token_ids

SOFTMAX: dict[str, Any] = {"renormalize": False}
SIGMOID: dict[str, Any] = {"score": "sigmoid", "renormalize": False}
MODELS: dict[str, dict[str, Any]] = {
    "softmax": {"router": SOFTMAX},
    "softmax, renormalised": {},
    "softmax of the chosen": {"router": SOFTMAX | {"top_k_before_score": True}},
    "sigmoid": {"router": SIGMOID},
    "sigmoid, renormalised and scaled": {"router": {"score": "sigmoid", "scaling_factor": 2.5}},
    "top-1": {"top_k": 1, "router": SOFTMAX},
    "every expert": {"top_k": 4, "router": SOFTMAX},
    "one expert": {"num_experts": 1, "top_k": 1},
    "biases": {"activation": "clamped_swiglu", "expert_bias": True, "router": SOFTMAX | {"bias": True}},
    "biases, sigmoid": {"activation": "geglu", "expert_bias": True, "router": SIGMOID | {"bias": True}},
    "no gate, latent, shared": {"activation": "relu2", "latent_size": 8, "num_shared_experts": 2},
    "selection bias": {"balance": {"bias_rule": "sign"}, "router": SOFTMAX},
    "selection bias, sigmoid": {"balance": {"bias_rule": "adamw"}, "router": {"score": "sigmoid"}},
    "selection bias on logits": {"balance": {"bias_rule": "sign"}, "router": {"top_k_before_score": True}},
    "capacity": {"router": SOFTMAX | {"capacity_factor": 0.75}},
    "groups": {"router": {"num_groups": 2, "top_groups": 1, "group_score": "max"}},
    "other layers": {"top_k": [1, 3], "first_k_dense": 1, "router": SOFTMAX},
    "null": {"null_experts": 2, "null_output": "input", "balance": {"bias_rule": "sign"}},
    "null, sigmoid": {"null_experts": 1, "router": SIGMOID},
    "mutual information": {"balance": {"mi_coef": 0.1}},
    "types": {"expert_groups": [3, 1], "top_k": 1, "router": SOFTMAX},
}


def trained(config: ModelConfig) -> Transformer:
    """With biases and buffers that are not what they start as."""
    model = build(config, dtype=torch.float64).double()
    for i, (name, value) in enumerate(sorted(model.state_dict().items())):
        if name.endswith(("bias", "bias_moments")):
            value.copy_(normal(*value.shape, seed=i, dtype=torch.float64) / 3)
        if "router.weight" in name:
            value.mul_(4)
    return model.eval()


def twin_of(model: Transformer, granularity: int) -> Transformer:
    state, config = split_model(model.state_dict(), model.config, granularity)
    twin = Transformer(config, dtype=torch.float64).double()
    twin.load_state_dict(state)
    return twin.eval()


def config_of(name: str, **settings: Any) -> ModelConfig:
    moe = dict(MODELS[name])
    layers = {"num_layers": 3} if "first_k_dense" in moe else {}
    types = {"token_types": [20]} if "expert_groups" in moe else {}
    return model_config(moe, **layers, **types, **settings)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_identical(name: str) -> None:
    model = trained(config_of(name))
    ids, documents = token_ids(2, 11), torch.zeros(2, 11, dtype=torch.int64)
    documents[1, 8:] = -1  # padding
    hidden = model(ids, document_ids=documents).hidden
    for granularity in (1, 3, 12):
        twin = twin_of(model, granularity)
        output = twin(ids, document_ids=documents)
        torch.testing.assert_close(output.hidden, hidden, rtol=1e-10, atol=1e-10)
        for layer in twin.moe_layers():
            expected_width = 12 // granularity
            assert layer.experts.down_proj.shape[2] == expected_width
            assert layer.router.global_load.sum() == pytest.approx(1)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_outputs_are_identical_for_any_sizes(data: st.DataObject) -> None:
    experts, width, granularity = (data.draw(st.integers(1, 4)) for _ in range(3))
    before = data.draw(st.integers(1, 2))  # a model that has granularity already
    router = {"score": data.draw(st.sampled_from(["softmax", "sigmoid"])), "renormalize": False}
    moe = {
        "num_experts": experts,
        "top_k": data.draw(st.integers(1, experts)),
        "expert_hidden_size": width * granularity * before,
        "granularity": before,
        "expert_bias": data.draw(st.booleans()),
        "router": router,
    }
    model = trained(model_config(moe, num_layers=1))
    twin = twin_of(model, granularity)
    assert twin.config.moe is not None
    assert twin.config.moe.granularity == before * granularity
    ids = token_ids(1, data.draw(st.integers(1, 6)))
    torch.testing.assert_close(twin(ids).hidden, model(ids).hidden, rtol=1e-10, atol=1e-10)


def test_the_pieces_are_those_of_the_chosen_experts() -> None:
    """Token for token, the best 3 k are the three pieces of each of the best k, in their order."""
    model = trained(config_of("softmax"))
    layer, finer = (m.moe_layers()[0] for m in (model, twin_of(model, 3)))
    x = normal(20, 16, seed=5, dtype=torch.float64)
    coarse, fine = (each.router(x, TokenGroups(20))[0] for each in (layer, finer))
    expected = coarse.expert_ids.unsqueeze(2) * 3 + torch.arange(3)
    assert torch.equal(fine.expert_ids, expected.flatten(1))
    torch.testing.assert_close(fine.weights, coarse.weights.repeat_interleave(3, 1) / 3)


@pytest.mark.parametrize("name", ["softmax", "biases", "no gate, latent, shared", "other layers"])
def test_as_many_parameters_and_flops_but_for_the_router(name: str) -> None:
    config = config_of(name)
    model = build(config)
    twin = twin_of(trained(config), 4)
    grown = sum(
        p.numel() - model.get_parameter(n).numel()
        for n, p in twin.named_parameters()
        if ".router." in n or "down_bias" in n  # every piece has its expert's output bias
    )
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, twin)]
    assert sizes[1] - sizes[0] == grown
    coarse, fine = count(config, 8), count(twin.config, 8)
    assert fine.total_params - coarse.total_params == grown
    router = 16 * 3 * 4 * sum(config.moe_layers)  # 3 · 4 more rows a layer
    assert fine.matmul_params - coarse.matmul_params == router
    assert fine.train_flops_per_token - coarse.train_flops_per_token == 6 * router
    if config.moe is not None and not config.moe.expert_bias:
        assert fine.active_params - coarse.active_params == router


def test_multi_token_prediction_is_split_too() -> None:
    config = model_config({"router": SOFTMAX}, mtp={"depth": 1})
    model = trained(config)
    twin = twin_of(model, 2)
    ids, labels = token_ids(1, 6), token_ids(1, 6, seed=1)
    losses = [m(ids, labels=labels, ahead=labels.roll(-1, 1).unsqueeze(0)).mtp_loss for m in (model, twin)]
    torch.testing.assert_close(*losses, rtol=1e-10, atol=0)


def test_the_given_state_is_left_alone() -> None:
    model = trained(config_of("biases"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    split_model(model.state_dict(), model.config, 3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("moe", "granularity", "message"),
    [
        (None, 2, "no experts to split"),
        ({}, 5, "experts of width 12 cannot be split in 5"),
        ({}, 0, "cannot be split in 0"),
        ({"granularity": 4}, 2, "experts of width 3 cannot be split in 2"),
        ({"router": {"kind": "mlp"}}, 2, 'only "linear" with "top_k" can be split'),
        ({"router": {"selection": "k_top_1"}}, 2, 'only "linear" with "top_k" can be split'),
        ({"router": {"num_groups": 2, "top_groups": 1}}, 2, "sum_of_two"),
        ({"null_experts": 1, "null_output": "input", "router": SIGMOID}, 2, "not renormalised"),
        ({"null_experts": 1, "null_ends_choice": True}, 2, "null_ends_choice"),
    ],
)
def test_what_cannot_be_equal_is_refused(moe: dict[str, Any] | None, granularity: int, message: str) -> None:
    with pytest.raises(MoestroError, match=message):
        split_model({}, model_config(moe), granularity)
