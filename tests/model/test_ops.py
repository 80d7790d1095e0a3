import pytest
import torch

from moestro.model import ops
from moestro.model.ops import Linear, linear, product_dtype

from .helpers import normal, relative


@pytest.fixture(params=[False, True], ids=["widened", "native"])
def _units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without and with bf16 units: both must give the same numbers."""
    monkeypatch.setattr(ops, "cpu_has_bf16_units", lambda: request.param)


def test_product_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "cpu_has_bf16_units", lambda: False)
    for dtype in (torch.bfloat16, torch.float16):
        assert product_dtype(torch.ones(1, dtype=dtype)) == torch.float32
        assert product_dtype(torch.ones(1, dtype=dtype, device="meta")) == dtype
    for dtype in (torch.float32, torch.float64):
        assert product_dtype(torch.ones(1, dtype=dtype)) == dtype
    monkeypatch.setattr(ops, "cpu_has_bf16_units", lambda: True)
    assert product_dtype(torch.ones(1, dtype=torch.bfloat16)) == torch.bfloat16


@pytest.mark.usefixtures("_units")
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_a_bf16_product_is_the_fp32_product_of_rounded_operands(weight_dtype: torch.dtype) -> None:
    x = normal(2, 5, 32, dtype=torch.bfloat16, grad=True)
    weight = normal(24, 32, seed=1, dtype=weight_dtype, grad=True)
    upstream = normal(2, 5, 24, seed=2, dtype=torch.bfloat16)
    out = linear(x, weight)
    assert out.dtype == torch.bfloat16
    out.backward(upstream)
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, weight_dtype)
    rounded_x, rounded_weight = x.detach().float(), weight.detach().bfloat16().float()
    # Nearly every element is the exact product rounded once; the order of a sum moves a few to the neighbour.
    for found, product in ((out, rounded_x @ rounded_weight.t()), (x.grad, upstream.float() @ rounded_weight)):
        assert (found == product.bfloat16()).float().mean() > 0.95
        assert relative(found, product) < 3e-3
    assert relative(weight.grad, upstream.float().flatten(0, 1).t() @ rounded_x.flatten(0, 1)) < 3e-3


def test_a_widened_product_keeps_no_wide_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "cpu_has_bf16_units", lambda: False)
    x = normal(4, 8, dtype=torch.bfloat16, grad=True)
    weight = normal(6, 8, grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(x, weight)
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), weight.data_ptr()}


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_only_the_wanted_gradient(monkeypatch: pytest.MonkeyPatch, needs: tuple[bool, bool]) -> None:
    monkeypatch.setattr(ops, "cpu_has_bf16_units", lambda: False)
    x = normal(4, 8, dtype=torch.bfloat16, grad=needs[0])
    weight = normal(6, 8, grad=needs[1])
    linear(x, weight).sum().backward()
    assert (x.grad is not None, weight.grad is not None) == needs


def test_linear_has_no_bias_and_takes_a_float64_input() -> None:
    layer = Linear(3, 2)
    assert layer.bias is None
    x = normal(4, 3, dtype=torch.float64)
    torch.testing.assert_close(layer(x), x @ layer.weight.double().t())
