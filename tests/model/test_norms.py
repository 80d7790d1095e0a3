import pytest
import torch
from torch import Tensor

from moestro.model.norms import RMSNorm, _RMSNorm

from .helpers import error, normal, relative


def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 6), (2, 3, 4, 7), (1, 1)])
def test_forward_and_backward_equal_the_formula(shape: tuple[int, ...]) -> None:
    x, expected_x = (normal(*shape, grad=True) for _ in range(2))
    norm = RMSNorm(shape[-1], eps=1e-3)
    with torch.no_grad():
        norm.weight.copy_(normal(shape[-1], seed=1))
    expected_weight = norm.weight.detach().clone().requires_grad_()
    upstream = normal(*shape, seed=2)
    out, expected = norm(x), plain(expected_x, expected_weight, 1e-3)
    out.backward(upstream)
    expected.backward(upstream)
    for found, wanted in ((out, expected), (x.grad, expected_x.grad), (norm.weight.grad, expected_weight.grad)):
        assert found is not None
        assert wanted is not None
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_gradcheck() -> None:
    x = normal(3, 2, 5, dtype=torch.float64, grad=True)
    weight = normal(5, seed=1, dtype=torch.float64, grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: _RMSNorm.apply(x, weight, 1e-3), (x, weight))


def test_eps_bounds_a_zero_row() -> None:
    norm = RMSNorm(4, eps=1e-6)
    x = torch.zeros(2, 4, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    torch.testing.assert_close(x.grad, torch.full((2, 4), 1e3))  # 1 / sqrt(eps)


def test_bf16_has_fp32_statistics() -> None:
    # 2048 squares of 3: a bf16 sum would stall at 2048 · 9 / 2.
    x = torch.full((1, 2048), 3.0, dtype=torch.bfloat16)
    out = RMSNorm(2048, eps=1e-6)(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, torch.ones_like(x), rtol=0, atol=0)


def test_bf16_equals_fp32_on_rounded_input() -> None:
    norm = RMSNorm(32, eps=1e-6)
    with torch.no_grad():
        norm.weight.copy_(normal(32, seed=1))
    x = normal(6, 32, dtype=torch.bfloat16, grad=True)
    upstream = normal(6, 32, seed=2, dtype=torch.bfloat16)
    norm(x).backward(upstream)
    weight_grad, norm.weight.grad = norm.weight.grad, None
    wide = x.detach().float().requires_grad_()
    expected = norm(wide)
    expected.backward(upstream.float())
    assert weight_grad is not None
    assert norm.weight.grad is not None
    assert x.grad is not None
    assert wide.grad is not None
    assert error(norm(x), expected) < 4e-3
    assert relative(x.grad, wide.grad) < 4e-3
    assert error(weight_grad, norm.weight.grad) < 1e-5


def test_keeps_the_input_and_one_number_a_row() -> None:
    saved: list[Tensor] = []
    x = normal(7, 16, grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        RMSNorm(16, eps=1e-6)(x)
    assert sorted(t.numel() for t in saved) == [7, 16, 7 * 16]
