import pytest
import torch

from moestro.model.rope import apply_rope, rope_tables

from .helpers import normal

POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1], [7, 8, 900, 0, 4095, 3]])


@pytest.mark.parametrize("head_dim", [2, 6, 16])
@pytest.mark.parametrize("theta", [10_000.0, 500.0])
def test_equals_a_rotation_of_complex_numbers(head_dim: int, theta: float) -> None:
    x = normal(2, 3, 6, head_dim)
    out = apply_rope(x, *rope_tables(POSITIONS, head_dim, theta))
    half = head_dim // 2
    numbers = torch.complex(x[..., :half].double(), x[..., half:].double())
    frequency = torch.tensor([theta ** (-2 * j / head_dim) for j in range(half)], dtype=torch.float64)
    angle = POSITIONS[:, None, :, None].double() * frequency
    turned = numbers * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-3)  # fp32 angles up to 4095 radians
    near = POSITIONS[:, None, :, None].expand(2, 3, 6, head_dim) < 10
    torch.testing.assert_close(out.double()[near], expected[near], rtol=1e-5, atol=1e-5)


def test_gradcheck() -> None:
    x = normal(2, 2, 6, 4, dtype=torch.float64, grad=True)
    cos, sin = (table.double() for table in rope_tables(POSITIONS, 4, 100.0))
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, cos, sin), (x,))


def test_products_depend_on_the_distance_alone() -> None:
    q, k = normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=1)

    def score(q_position: int, k_position: int) -> float:
        turned = [
            apply_rope(x, *rope_tables(torch.tensor([[position]]), 8, 100.0))
            for x, position in ((q, q_position), (k, k_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(5, 2) == pytest.approx(score(25, 22), abs=1e-5)
    assert score(5, 2) != pytest.approx(score(2, 5), abs=1e-2)


def test_bf16_is_rotated_in_fp32() -> None:
    x = normal(2, 3, 6, 8, dtype=torch.bfloat16)
    tables = rope_tables(POSITIONS, 8, 10_000.0)
    out = apply_rope(x, *tables)
    assert out.dtype == torch.bfloat16
    assert tables[0].dtype == torch.float32
    torch.testing.assert_close(out, apply_rope(x.float(), *tables).bfloat16(), rtol=0, atol=0)


def test_keeps_only_the_tables() -> None:
    x = normal(2, 3, 6, 8, grad=True)
    tables = rope_tables(POSITIONS, 8, 100.0)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        apply_rope(x, *tables)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in tables}
