from typing import Any

import pytest
import torch
from torch.nn import functional as F

from moestro.model.moe.layer import MoELayer
from moestro.model.moe.router import TokenGroups

from ..helpers import model_config, normal


def layer_of(moe: dict[str, Any], layer: int = 0) -> MoELayer:
    built = MoELayer(model_config(moe), layer)
    for i, parameter in enumerate(built.parameters()):
        with torch.no_grad():
            parameter.copy_(normal(*parameter.shape, seed=i) / 4)
    return built


@pytest.mark.parametrize("experts", ["auto", "reference", "grouped", "segmented"])
@pytest.mark.parametrize("shared", [0, 2])
def test_the_layer_equals_its_formula(experts: str, shared: int) -> None:
    layer = layer_of({"experts": experts, "num_shared_experts": shared})
    x = normal(2, 5, 16, seed=9)
    out, stats = layer(x, TokenGroups(5))
    tokens = x.flatten(0, 1)
    probs = F.linear(tokens, layer.router.weight).softmax(-1)
    top = probs.topk(2)
    expected = torch.zeros_like(tokens)
    for e, (gate_up, down) in enumerate(zip(layer.experts.gate_up_proj, layer.experts.down_proj, strict=True)):
        weight = ((top.indices == e) * top.values / top.values.sum(1, keepdim=True)).sum(1, keepdim=True)
        expected += weight * F.linear(F.silu(tokens @ gate_up[0].t()) * (tokens @ gate_up[1].t()), down)
    if layer.shared_experts is not None:
        assert layer.shared_experts.gate_proj.weight.shape == (2 * 12, 16)
        expected += layer.shared_experts(tokens)
    torch.testing.assert_close(out, expected.view_as(x), rtol=1e-5, atol=1e-5)
    assert stats.load.sum() == 20


def test_a_dropped_token_gets_nothing_from_routed_experts() -> None:
    layer = layer_of({"top_k": 1, "router": {"capacity_factor": 0.5, "renormalize": False}})  # one place an expert
    x = normal(1, 1, 16, seed=9).repeat(1, 8, 1)  # eight times the same token
    out, stats = layer(x, TokenGroups(8))
    assert stats.dropped == 7
    assert (out[0, 0] != 0).any()
    assert (out[0, 1:] == 0).all()


def test_padding_gets_nothing() -> None:
    layer = layer_of({})
    valid = torch.tensor([True, True, False, True, False])
    x = normal(1, 5, 16, seed=9)
    out, stats = layer(x, TokenGroups(5, valid))
    assert (out[0, ~valid] == 0).all()
    assert stats.tokens == 3
    alone, _ = layer(x[:, valid], TokenGroups(3))
    torch.testing.assert_close(out[:, valid], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "segmented", "grouped"])
def test_all_tokens_padded(implementation: str) -> None:
    layer = layer_of({"experts": implementation})
    x = normal(1, 5, 16, seed=9, grad=True)
    out, stats = layer(x, TokenGroups(5, torch.zeros(5, dtype=torch.bool)))
    (out.sum() + stats.aux_loss + stats.z_loss).backward()
    assert (out == 0).all()
    assert stats.tokens == 0
    for parameter in layer.parameters():
        assert parameter.grad is None or (parameter.grad == 0).all()


def test_the_task_loss_reaches_the_router() -> None:
    """Through the gate weights; with top-1 renormalised they are constant and nothing can."""
    x = normal(2, 5, 16, seed=9)
    for renormalize, reaches in ((False, True), (True, False)):
        layer = layer_of({"top_k": 1, "router": {"renormalize": renormalize}})
        layer(x, TokenGroups(5))[0].square().sum().backward()
        assert layer.router.weight.grad is not None
        assert (layer.router.weight.grad.abs().max() > 1e-6) == reaches


def test_bf16_in_bf16_out() -> None:
    layer = layer_of({"num_shared_experts": 1})
    x = normal(2, 5, 16, seed=9)
    out, stats = layer(x.bfloat16(), TokenGroups(5))
    assert out.dtype == torch.bfloat16
    assert stats.aux_loss.dtype == torch.float32
    expected, _ = layer(x.bfloat16().float(), TokenGroups(5))
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.02)
