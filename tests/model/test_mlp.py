import pytest
import torch
from torch.nn import functional as F

from moestro.model.mlp import SwiGLU, _SiluMul

from .helpers import normal, relative


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (1, 6), (0, 6)])
def test_equals_the_formula(shape: tuple[int, ...]) -> None:
    layer = SwiGLU(6, 10)
    x, other = (normal(*shape, grad=True) for _ in range(2))
    upstream = normal(*shape, seed=1)
    out = layer(x)
    out.backward(upstream)
    found = [x.grad] + [p.grad for p in layer.parameters()]
    layer.zero_grad()
    gate, up, down = (p.weight for p in (layer.gate_proj, layer.up_proj, layer.down_proj))
    expected = F.linear(F.silu(F.linear(other, gate)) * F.linear(other, up), down)
    expected.backward(upstream)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    for grad, wanted in zip(found, [other.grad] + [p.grad for p in layer.parameters()], strict=True):
        assert grad is not None
        assert wanted is not None
        torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-6)


def test_gradcheck() -> None:
    gate = normal(3, 4, dtype=torch.float64, grad=True)
    up = normal(3, 4, seed=1, dtype=torch.float64, grad=True)
    assert torch.autograd.gradcheck(_SiluMul.apply, (gate, up))


def test_bf16_is_close_to_fp32() -> None:
    layer = SwiGLU(16, 32)
    x = normal(8, 16, dtype=torch.bfloat16)
    assert layer(x).dtype == torch.bfloat16
    assert relative(layer(x), layer(x.float())) < 1e-2


def test_the_activation_is_not_kept() -> None:
    gate, up = normal(3, 4, grad=True), normal(3, 4, seed=1, grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _SiluMul.apply(gate, up)
    assert {t.data_ptr() for t in saved} == {gate.data_ptr(), up.data_ptr()}
