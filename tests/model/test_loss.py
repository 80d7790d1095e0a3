from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from moestro.model import loss as loss_module
from moestro.model.loss import IGNORE, linear_cross_entropy

from .helpers import normal, relative

LABELS = torch.tensor([3, 0, IGNORE, 10, 7, 3, IGNORE, 1, 2, 10, 0])


@pytest.fixture(params=[1, 3, 4, 11, 64], ids=lambda rows: f"block{rows}")
def _block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_block_rows", lambda *_: request.param)


class Products(TorchDispatchMode):
    """Names of the matrix products that run inside (the FLOP counter of PyTorch misses those in place)."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.__name__:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
    logits = (hidden @ weight.t()).flatten(0, -2)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORE) * scale


@pytest.mark.usefixtures("_block")
@pytest.mark.parametrize("scale", [1.0, 0.125])
@pytest.mark.parametrize("upstream", [1.0, -2.5])
def test_equals_pytorch(scale: float, upstream: float) -> None:
    inputs = [(normal(11, 6, grad=True), normal(11, 6, seed=1, grad=True)) for _ in range(2)]
    found = linear_cross_entropy(*inputs[0], LABELS, scale)
    expected = plain(*inputs[1], LABELS, scale)
    torch.testing.assert_close(found, expected)
    (found * upstream).backward()
    (expected * upstream).backward()
    for mine, other in zip(*inputs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_any_leading_shape() -> None:
    hidden, weight = normal(2, 4, 6, grad=True), normal(9, 6, seed=1)
    labels = torch.tensor([[1, 2, IGNORE, 8], [0, 0, 5, IGNORE]])
    found = linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(found, plain(hidden, weight, labels))
    found.backward()
    assert hidden.grad is not None
    assert hidden.grad.shape == (2, 4, 6)
    assert (hidden.grad[0, 2] == 0).all()
    assert (hidden.grad[1, 3] == 0).all()


@pytest.mark.usefixtures("_block")
def test_gradcheck() -> None:
    hidden = normal(11, 3, dtype=torch.float64, grad=True)
    weight = normal(11, 3, seed=1, dtype=torch.float64, grad=True)
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, LABELS, 0.3), (hidden, weight))


def test_nothing_predicted() -> None:
    hidden, weight = normal(5, 4, grad=True), normal(7, 4, seed=1, grad=True)
    found = linear_cross_entropy(hidden, weight, torch.full((5,), IGNORE))
    assert found == 0
    found.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert (hidden.grad == 0).all()
    assert (weight.grad == 0).all()


def test_no_tokens() -> None:
    weight = normal(7, 4, grad=True)
    found = linear_cross_entropy(normal(0, 4), weight, torch.empty(0, dtype=torch.int64))
    found.backward()
    assert found == 0
    assert (weight.grad == 0).all()


def test_tied_weights_get_both_gradients() -> None:
    ids = torch.tensor([1, 4, 2, 4])
    tables = [normal(6, 5, grad=True) for _ in range(2)]
    linear_cross_entropy(F.embedding(ids, tables[0]).tanh(), tables[0], ids.flip(0)).backward()
    plain(F.embedding(ids, tables[1]).tanh(), tables[1], ids.flip(0)).backward()
    torch.testing.assert_close(tables[0].grad, tables[1].grad, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_block")
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_bf16_is_close_to_fp32_on_rounded_operands(weight_dtype: torch.dtype) -> None:
    hidden = normal(11, 16, dtype=torch.bfloat16, grad=True)
    weight = normal(11, 16, seed=1, dtype=weight_dtype, grad=True)
    found = linear_cross_entropy(hidden, weight, LABELS, 0.25)
    assert found.dtype == torch.float32
    found.backward()
    wide_hidden = hidden.detach().float().requires_grad_()
    wide_weight = weight.detach().bfloat16().float().requires_grad_()
    expected = plain(wide_hidden, wide_weight, LABELS, 0.25)
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=2e-3)
    assert hidden.grad is not None
    assert weight.grad is not None
    assert wide_hidden.grad is not None
    assert wide_weight.grad is not None
    assert hidden.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == weight_dtype
    assert relative(hidden.grad, wide_hidden.grad) < 1e-2
    assert relative(weight.grad, wide_weight.grad) < 1e-2


def test_a_large_logit_does_not_overflow() -> None:
    hidden = torch.tensor([[1e4, 0.0]], requires_grad=True)
    weight = torch.eye(2)
    found = linear_cross_entropy(hidden, weight, torch.tensor([1]))
    found.backward()
    assert found == 1e4
    torch.testing.assert_close(hidden.grad, torch.tensor([[1.0, -1.0]]))


@pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)])
def test_only_the_wanted_gradient(needs: tuple[bool, bool]) -> None:
    hidden, weight = normal(11, 6, grad=needs[0]), normal(11, 6, seed=1, grad=needs[1])
    found = linear_cross_entropy(hidden, weight, LABELS)
    assert found.requires_grad == any(needs)
    if any(needs):
        found.backward()
    assert (hidden.grad is not None, weight.grad is not None) == needs


def test_without_gradients_none_is_computed() -> None:
    """Evaluation must not pay for a backward pass."""
    hidden, weight = normal(11, 6), normal(11, 6, seed=1, grad=True)
    expected = linear_cross_entropy(hidden, weight, LABELS).detach()
    with torch.no_grad(), Products() as products:
        found = linear_cross_entropy(hidden, weight, LABELS)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected)
    assert len(products.names) == 1


def test_backward_may_be_repeated() -> None:
    hidden, weight = normal(11, 6), normal(11, 6, seed=1, grad=True)
    found = linear_cross_entropy(hidden, weight, LABELS)
    found.backward(retain_graph=True)
    assert weight.grad is not None
    once = weight.grad.clone()
    found.backward(retain_graph=True)
    found.backward()
    torch.testing.assert_close(weight.grad, 3 * once)


def test_all_logits_are_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_block_rows", lambda *_: 4)
    largest = 0
    log_softmax = torch.log_softmax

    def watched(logits: Tensor, dim: int) -> Tensor:
        nonlocal largest
        largest = max(largest, len(logits))
        return log_softmax(logits, dim)

    monkeypatch.setattr(torch, "log_softmax", watched)
    linear_cross_entropy(normal(11, 6, grad=True), normal(11, 6, seed=1, grad=True), LABELS).backward()
    assert largest == 4


def test_block_rows() -> None:
    assert loss_module._block_rows(torch.empty(1, 1), torch.empty(1024, 1)) == 4096  # 16 MiB of fp32
    assert loss_module._block_rows(torch.empty(1, 1), torch.empty(2**20, 1, device="meta")) == 64
