from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moestro.optim import muon as muon_module
from moestro.optim.muon import Muon, orthogonalize

SHAPES = [(8, 8), (6, 16), (16, 6), (1, 9), (9, 1), (1, 1)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _fp32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU without bf16 units, whatever this machine has."""
    monkeypatch.setattr(muon_module, "cpu_has_bf16_units", lambda: False)


def plain_orthogonal(matrix: Tensor, steps: int) -> Tensor:
    x = matrix.float() / max(matrix.float().norm().item(), 1e-7)
    if x.shape[0] > x.shape[1]:
        return plain_orthogonal(matrix.t(), steps).t()
    for _ in range(steps):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class PlainMuon:
    """One matrix, no optimizer class: Muon with Nesterov momentum and AdamW's update size."""

    def __init__(self, matrix: Tensor, lr: float, momentum: float, weight_decay: float, steps: int) -> None:
        self.matrix, self.lr, self.momentum, self.decay, self.steps = matrix, lr, momentum, weight_decay, steps
        self.buffer = torch.zeros_like(matrix)

    def step(self, grad: Tensor) -> None:
        self.buffer = self.momentum * self.buffer + (1 - self.momentum) * grad
        update = (1 - self.momentum) * grad + self.momentum * self.buffer
        scale = 0.2 * max(self.matrix.shape) ** 0.5
        decayed = self.matrix * (1 - self.lr * self.decay)
        self.matrix = decayed - self.lr * scale * plain_orthogonal(update, self.steps)


SETTINGS: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.3}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 5])
def test_equals_the_plain_algorithm(shape: tuple[int, int], steps: int) -> None:
    parameter = normal(*shape).requires_grad_()
    plain = PlainMuon(parameter.detach().clone(), steps=steps, **SETTINGS)
    optimizer = Muon([parameter], newton_schulz_steps=steps, **SETTINGS)
    for step in range(4):
        grad = normal(*shape, seed=step + 1)
        parameter.grad = grad.clone()
        optimizer.step()
        plain.step(grad)
        torch.testing.assert_close(parameter.detach(), plain.matrix, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 8), (6, 16), (16, 6), (32, 48)])
def test_equals_pytorch_up_to_its_bf16(shape: tuple[int, int]) -> None:
    mine, other = (normal(*shape).requires_grad_() for _ in range(2))
    start = mine.detach().clone()
    ours = Muon([mine], newton_schulz_steps=5, **SETTINGS)
    theirs = torch.optim.Muon([other], ns_steps=5, nesterov=True, adjust_lr_fn="match_rms_adamw", **SETTINGS)
    for step in range(3):
        mine.grad, other.grad = (normal(*shape, seed=step + 1) for _ in range(2))
        ours.step()
        theirs.step()
    difference = (mine - other).norm() / (other - start).norm()
    assert difference.item() < 0.02


@pytest.mark.parametrize(("rows", "columns"), [(6, 10), (10, 6), (2, 2)])
def test_packed_experts_equal_separate_matrices(rows: int, columns: int) -> None:
    packed = normal(3, 2, rows, columns).requires_grad_()
    singles = [packed[i, j].detach().clone().requires_grad_() for i in range(3) for j in range(2)]
    together, apart = Muon([packed], **SETTINGS), Muon(singles, **SETTINGS)
    for step in range(3):
        grad = normal(3, 2, rows, columns, seed=step + 1) * torch.tensor([1.0, 100.0, 1e-3]).view(3, 1, 1, 1)
        packed.grad = grad.clone()
        for i, single in enumerate(singles):
            single.grad = grad.flatten(0, 1)[i].clone()
        together.step()
        apart.step()
    torch.testing.assert_close(packed.detach().flatten(0, 1), torch.stack(singles).detach(), rtol=1e-5, atol=1e-6)


def test_an_idle_expert_only_decays() -> None:
    packed = normal(2, 4, 6).requires_grad_()
    before = packed.detach().clone()
    packed.grad = normal(2, 4, 6, seed=1)
    packed.grad[0] = 0
    Muon([packed], lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(packed[0].detach(), before[0] * 0.95)
    assert (packed[1].detach() - before[1] * 0.95).abs().min() > 1e-4


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    parameters = [normal(3, 4, seed=i).requires_grad_() for i in range(2)]
    before = parameters[0].detach().clone()
    parameters[1].grad = normal(3, 4, seed=2)
    optimizer = Muon(parameters, lr=0.1)
    optimizer.step()
    assert torch.equal(parameters[0].detach(), before)
    assert len(optimizer.state) == 1


def test_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Muon takes matrices, got a parameter of shape \(4,\)"):
        Muon([torch.zeros(4, requires_grad=True)], lr=0.1)


def test_the_gradient_is_not_changed() -> None:
    parameter = normal(4, 6).requires_grad_()
    parameter.grad = normal(4, 6, seed=1)
    Muon([parameter], lr=0.1).step()
    assert torch.equal(parameter.grad, normal(4, 6, seed=1))


def test_resuming_from_a_state_dict_continues_the_momentum() -> None:
    def run(stop: int | None) -> Tensor:
        parameter = normal(4, 6).requires_grad_()
        optimizer = Muon([parameter], lr=0.1)
        for step in range(4):
            if step == stop:
                state = optimizer.state_dict()
                optimizer = Muon([parameter], lr=0.5)
                optimizer.load_state_dict(state)
            parameter.grad = normal(4, 6, seed=step)
            optimizer.step()
        return parameter.detach()

    assert torch.equal(run(None), run(2))


# Orthogonalisation


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64), (4, 48, 96)])
def test_singular_values_of_gaussian_gradients(shape: tuple[int, ...]) -> None:
    values = torch.linalg.svdvals(orthogonalize(normal(*shape), 5)).flatten()
    assert values.max() <= 1.25
    assert values.quantile(0.05) >= 0.65


@pytest.mark.parametrize("shape", [(32, 64), (64, 32), (16, 6)])
def test_singular_vectors_are_kept(shape: tuple[int, int]) -> None:
    matrix = normal(*shape)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.t() @ orthogonalize(matrix, 5) @ vh.t()
    diagonal = inner.diagonal()
    assert diagonal.min() > 0.5
    assert (inner - diagonal.diag()).abs().max() < 1e-4


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64), (3, 48, 96)])
def test_the_update_has_the_size_of_adamw(shape: tuple[int, ...]) -> None:
    """Root mean square 0.2 lr at singular values of one, whatever the shape; about 0.18 lr at Muon's."""
    parameter = torch.zeros(shape, requires_grad=True)
    parameter.grad = normal(*shape)
    Muon([parameter], lr=0.01, weight_decay=0.0).step()
    rms = parameter.detach().square().mean().sqrt().item()
    assert 0.17 * 0.01 <= rms <= 0.20 * 0.01


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3), st.floats(-3, 6))
def test_any_shape_and_scale(rows: int, columns: int, batch: int, exponent: float) -> None:
    shape = (batch, rows, columns) if batch else (rows, columns)
    matrices = normal(*shape, seed=rows)
    out = orthogonalize(matrices, 5)
    assert out.shape == matrices.shape
    assert out.isfinite().all()
    assert torch.linalg.svdvals(out).max() < 1.3
    scaled = orthogonalize(matrices * 10**exponent, 5)
    torch.testing.assert_close(scaled, out, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(orthogonalize(matrices.mT, 5), out.mT, rtol=1e-3, atol=1e-3)


def test_zero_stays_zero() -> None:
    assert (orthogonalize(torch.zeros(2, 3, 4), 5) == 0).all()


def test_bf16_products_where_the_machine_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = normal(16, 24)
    exact = orthogonalize(matrix, 5)
    assert exact.dtype == torch.float32
    monkeypatch.setattr(muon_module, "cpu_has_bf16_units", lambda: True)
    fast = orthogonalize(matrix, 5)
    assert fast.dtype == torch.bfloat16
    assert ((fast.float() - exact).norm() / exact.norm()).item() < 0.03
    parameter = matrix.clone().requires_grad_()
    parameter.grad = matrix.clone()
    Muon([parameter], lr=0.1).step()
    assert parameter.dtype == torch.float32
