from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moestro.model.moe.layer import MoELayer
from moestro.model.moe.router import Routing, TokenGroups

from ..helpers import build, model_config, normal


def layer_of(moe: dict[str, Any], layer: int = 0) -> MoELayer:
    built = MoELayer(model_config(moe), layer)
    for i, parameter in enumerate(built.parameters()):
        with torch.no_grad():
            parameter.copy_(normal(*parameter.shape, seed=i) / 4)
    return built


def formula(layer: MoELayer, tokens: Tensor, top_k: int) -> Tensor:
    """Softmax, top_k and renormalise, then every expert over every token, weighted with zero where not chosen."""
    top = F.linear(tokens, layer.router.weight).softmax(-1).topk(top_k)
    experts, seen = layer.experts, tokens
    if layer.latent_in is not None:
        seen = tokens @ layer.latent_in.weight.t()
    total = torch.zeros_like(seen)
    for e in range(len(experts.down_proj)):
        weight = ((top.indices == e) * top.values / top.values.sum(1, keepdim=True)).sum(1, keepdim=True)
        products = [seen @ matrix.t() for matrix in experts.gate_up_proj[e]]
        if experts.gate_up_bias is not None:
            products = [p + b for p, b in zip(products, experts.gate_up_bias[e], strict=True)]
        hidden = F.silu(products[0]) * products[1] if experts.activation == "swiglu" else F.relu(products[0]) ** 2
        total = total + weight * (
            hidden @ experts.down_proj[e].t() + (0 if experts.down_bias is None else experts.down_bias[e])
        )
    if layer.latent_out is not None:
        total = total @ layer.latent_out.weight.t()
    if layer.shared_experts is not None:
        total = total + layer.shared_experts(tokens)
    return total


@pytest.mark.parametrize("experts", ["auto", "reference", "grouped", "segmented"])
@pytest.mark.parametrize(
    "moe",
    [
        {},
        {"num_shared_experts": 2},
        {"activation": "relu2", "expert_bias": True},
        {"latent_size": 8},
        {"latent_size": 8, "num_shared_experts": 1, "activation": "relu2", "expert_bias": True, "granularity": 3},
    ],
    ids=str,
)
def test_the_layer_equals_its_formula(experts: str, moe: dict[str, Any]) -> None:
    layer = layer_of({"experts": experts} | moe)
    x, top_k = normal(2, 5, 16, seed=9, grad=True), 2 * moe.get("granularity", 1)
    upstream = normal(2, 5, 16, seed=10)
    out, stats, _ = layer(x, TokenGroups(5))
    expected = formula(layer, x.flatten(0, 1), top_k).view_as(x)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert stats.load.sum() == 10 * top_k
    inputs = [x, *layer.parameters()]
    for one, other in zip(
        torch.autograd.grad(out, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_granularity_splits_routed_experts_alone() -> None:
    layer = layer_of({"granularity": 3, "num_shared_experts": 2})
    assert layer.experts.down_proj.shape == (4 * 3, 16, 12 // 3)
    assert layer.shared_experts is not None
    assert layer.shared_experts.down_proj.weight.shape == (16, 2 * 12)


def test_experts_work_on_the_latent_the_rest_on_the_hidden_state() -> None:
    layer = layer_of({"latent_size": 6, "num_shared_experts": 1})
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    assert shapes["latent_in.weight"] == (6, 16)
    assert shapes["latent_out.weight"] == (16, 6)
    assert shapes["experts.gate_up_proj"] == (4, 2, 12, 6)
    assert shapes["router.weight"] == (4, 16)
    assert shapes["shared_experts.up_proj.weight"] == (12, 16)


class WithInput(nn.Module):
    """A router that sends some of the input straight through."""

    def __init__(self, router: nn.Module, weight: Tensor) -> None:
        super().__init__()
        self.router, self.input_weight = router, weight

    def forward(self, *args: Any) -> tuple[Routing, Tensor | None]:
        routing, state = self.router(*args)
        return replace(routing, input_weight=self.input_weight), state


@pytest.mark.parametrize("moe", [{}, {"latent_size": 8, "num_shared_experts": 1}], ids=str)
def test_input_weight_adds_the_layers_input(moe: dict[str, Any]) -> None:
    layer = layer_of(moe)
    x = normal(2, 5, 16, seed=9)
    without, *_ = layer(x, TokenGroups(5))
    weight = normal(10, seed=3, grad=True)
    layer.router = WithInput(layer.router, weight)  # type: ignore[assignment]
    out, *_ = layer(x, TokenGroups(5))
    torch.testing.assert_close(out, without + weight.view(2, 5, 1) * x)
    (grad,) = torch.autograd.grad(out.sum(), weight)
    torch.testing.assert_close(grad, x.sum(-1).flatten())
    assert layer(x.bfloat16(), TokenGroups(5))[0].dtype == torch.bfloat16


def test_a_dropped_token_gets_nothing_from_routed_experts() -> None:
    layer = layer_of({"top_k": 1, "router": {"capacity_factor": 0.5, "renormalize": False}})  # one place an expert
    x = normal(1, 1, 16, seed=9).repeat(1, 8, 1)  # eight times the same token
    out, stats, _ = layer(x, TokenGroups(8))
    assert stats.dropped == 7
    assert (out[0, 0] != 0).any()
    assert (out[0, 1:] == 0).all()


def test_padding_gets_nothing() -> None:
    layer = layer_of({})
    valid = torch.tensor([True, True, False, True, False])
    x = normal(1, 5, 16, seed=9)
    out, stats, _ = layer(x, TokenGroups(5, valid))
    assert (out[0, ~valid] == 0).all()
    assert stats.tokens == 3
    alone, *_ = layer(x[:, valid], TokenGroups(3))
    torch.testing.assert_close(out[:, valid], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "segmented", "grouped"])
def test_all_tokens_padded(implementation: str) -> None:
    layer = layer_of({"experts": implementation})
    x = normal(1, 5, 16, seed=9, grad=True)
    out, stats, _ = layer(x, TokenGroups(5, torch.zeros(5, dtype=torch.bool)))
    (out.sum() + stats.aux_loss + stats.z_loss).backward()
    assert (out == 0).all()
    assert stats.tokens == 0
    for parameter in layer.parameters():
        assert parameter.grad is None or (parameter.grad == 0).all()


@pytest.mark.parametrize("moe", [{"top_k": 1, "router": {"renormalize": False}}, {}], ids=str)
def test_the_task_loss_reaches_the_router(moe: dict[str, Any]) -> None:
    """Through the gate weights alone; where these would be constant the config refuses."""
    layer = layer_of(moe)
    layer(normal(2, 5, 16, seed=9), TokenGroups(5))[0].square().sum().backward()
    assert layer.router.weight.grad is not None
    assert layer.router.weight.grad.abs().max() > 1e-6


@pytest.mark.parametrize("latent", [None, 64])
def test_initial_values(latent: int | None) -> None:
    """Biases start at 0; the last projection before the residual stream, and it alone, is scaled down."""
    config = model_config({"latent_size": latent, "expert_bias": True, "expert_hidden_size": 64}, hidden_size=64)
    state = build(config).state_dict()
    residual = (2 * config.num_layers) ** -0.5
    expected = {
        "experts.gate_up_bias": 0.0,
        "experts.down_bias": 0.0,
        "experts.gate_up_proj": 1 / 8,
        "experts.down_proj": 1 / 8 * (residual if latent is None else 1),
    }
    if latent is not None:
        expected |= {"latent_in.weight": 1 / 8, "latent_out.weight": 1 / 8 * residual}
    for name, std in expected.items():  # a normal cut at two sigma has 0.88 of its deviation
        assert float(state[f"layers.1.mlp.{name}"].std()) == pytest.approx(0.88 * std, rel=0.05), name


def test_bf16_in_bf16_out() -> None:
    layer = layer_of({"num_shared_experts": 1})
    x = normal(2, 5, 16, seed=9)
    out, stats, _ = layer(x.bfloat16(), TokenGroups(5))
    assert out.dtype == torch.bfloat16
    assert stats.aux_loss.dtype == torch.float32
    expected, *_ = layer(x.bfloat16().float(), TokenGroups(5))
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.02)
