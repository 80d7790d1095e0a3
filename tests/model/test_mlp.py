from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moestro.config.moe import GATED, Activation
from moestro.model.activations import activate, num_products
from moestro.model.mlp import Activate, FeedForward
from moestro.model.transformer import Transformer

from .helpers import model_config, normal, relative

LIMIT = 0.7  # so that many of a normal's values lie beyond it
KINDS: tuple[Activation, ...] = get_args(Activation)


def clamped(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


# Of gate and up; without a gate, of the single product.
FORMULAS: dict[Activation, Callable[..., Tensor]] = {
    "swiglu": lambda gate, up: gate / (1 + (-gate).exp()) * up,
    "geglu": lambda gate, up: gate * (1 + torch.erf(gate / 2**0.5)) / 2 * up,
    "clamped_swiglu": clamped,
    "relu2": lambda x: torch.where(x > 0, x * x, 0.0),
    "gelu": lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2,
}


def layer_of(kind: Activation, hidden: int = 6, width: int = 10) -> FeedForward:
    layer = FeedForward(hidden, width, kind, LIMIT)
    for i, parameter in enumerate(layer.parameters()):
        parameter.data = normal(*parameter.shape, seed=20 + i)
    return layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (1, 6), (0, 6)])
def test_equals_the_formula(kind: Activation, shape: tuple[int, ...]) -> None:
    layer = layer_of(kind)
    x, other = (normal(*shape, grad=True) for _ in range(2))
    upstream = normal(*shape, seed=1)
    out = layer(x)
    out.backward(upstream)
    found = [x.grad] + [p.grad for p in layer.parameters()]
    layer.zero_grad()
    products = [F.linear(other, p.weight) for p in (layer.gate_proj, layer.up_proj) if p is not None]
    assert len(products) == num_products(kind) == (2 if kind in GATED else 1)
    expected = F.linear(FORMULAS[kind](*products), layer.down_proj.weight)
    expected.backward(upstream)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for grad, wanted in zip(found, [other.grad] + [p.grad for p in layer.parameters()], strict=True):
        assert grad is not None
        assert wanted is not None
        torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind: Activation) -> None:
    gate = normal(3, 4, dtype=torch.float64, grad=True)
    up = normal(3, 4, seed=1, dtype=torch.float64, grad=True) if kind in GATED else None
    inputs = (gate,) if up is None else (gate, up)
    assert torch.autograd.gradcheck(lambda *given: Activate.apply(*(*given, None)[:2], kind, LIMIT), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_and_beyond_the_clamp(dtype: torch.dtype) -> None:
    """As in PyTorch's own clamp, a value on the limit still has a gradient, one beyond it has none."""
    at = torch.tensor([-9.0, -1.0, -0.5, 0.0, 0.5, 1.0, 9.0], dtype=dtype)
    gate, up = (t.flatten().requires_grad_() for t in torch.meshgrid(at, at, indexing="ij"))
    Activate.apply(gate, up, "clamped_swiglu", 1.0).sum().backward()
    wide = [t.detach().double().requires_grad_() for t in (gate, up)]
    cut = wide[0].clamp(max=1)
    (cut * torch.sigmoid(1.702 * cut) * (wide[1].clamp(-1, 1) + 1)).sum().backward()
    for found, expected in zip((gate, up), wide, strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert ((found.grad == 0) == (expected.grad == 0)).all()
        assert relative(found.grad, expected.grad) < (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_close_to_fp32(kind: Activation) -> None:
    layer = layer_of(kind, 16, 32)
    x = normal(8, 16, dtype=torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16
    assert relative(layer(x), layer(x.float())) < 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_the_activation_is_not_kept(kind: Activation) -> None:
    gate, up = normal(3, 4, grad=True), normal(3, 4, seed=1, grad=True) if kind in GATED else None
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        Activate.apply(gate, up, kind, LIMIT)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (gate, up) if t is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_the_products_are_left_as_they_are(kind: Activation) -> None:
    gate, up = normal(3, 4), normal(3, 4, seed=1) if kind in GATED else None
    hidden = activate(kind, gate, up, LIMIT)
    assert torch.equal(gate, normal(3, 4))
    assert up is None or torch.equal(up, normal(3, 4, seed=1))
    assert hidden.data_ptr() not in (gate.data_ptr(), None if up is None else up.data_ptr())


@pytest.mark.parametrize("kind", ["relu2", "geglu"])
def test_the_model_takes_it_from_its_config(kind: Any) -> None:
    blocks = Transformer(model_config(activation=kind)).blocks()
    names = {name for name, _ in blocks[0].mlp.named_parameters()}
    assert names == {"up_proj.weight", "down_proj.weight"} | ({"gate_proj.weight"} if kind in GATED else set())
    assert all(isinstance(block.mlp, FeedForward) and block.mlp.activation == kind for block in blocks)
