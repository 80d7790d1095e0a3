import math
from typing import Any

import pytest
import torch

from moestro.config import RopeConfig
from moestro.model.attention.mla import LatentAttention
from moestro.model.rope import apply_rope, rope_tables, softmax_scale

from .helpers import model_config, normal

POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1], [7, 8, 900, 0, 4095, 3]])


@pytest.mark.parametrize("head_dim", [2, 6, 16])
@pytest.mark.parametrize("theta", [10_000.0, 500.0])
def test_equals_a_rotation_of_complex_numbers(head_dim: int, theta: float) -> None:
    x = normal(2, 3, 6, head_dim)
    out = apply_rope(x, *rope_tables(POSITIONS, head_dim, RopeConfig(theta=theta)))
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
    cos, sin = (table.double() for table in rope_tables(POSITIONS, 4, RopeConfig(theta=100.0)))
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, cos, sin), (x,))


def test_products_depend_on_the_distance_alone() -> None:
    q, k = normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=1)

    def score(q_position: int, k_position: int) -> float:
        turned = [
            apply_rope(x, *rope_tables(torch.tensor([[position]]), 8, RopeConfig(theta=100.0)))
            for x, position in ((q, q_position), (k, k_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(5, 2) == pytest.approx(score(25, 22), abs=1e-5)
    assert score(5, 2) != pytest.approx(score(2, 5), abs=1e-2)


def test_bf16_is_rotated_in_fp32() -> None:
    x = normal(2, 3, 6, 8, dtype=torch.bfloat16)
    tables = rope_tables(POSITIONS, 8, RopeConfig(theta=10_000.0))
    out = apply_rope(x, *tables)
    assert out.dtype == torch.bfloat16
    assert tables[0].dtype == torch.float32
    torch.testing.assert_close(out, apply_rope(x.float(), *tables).bfloat16(), rtol=0, atol=0)


def test_keeps_only_the_tables() -> None:
    x = normal(2, 3, 6, 8, grad=True)
    tables = rope_tables(POSITIONS, 8, RopeConfig(theta=100.0))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        apply_rope(x, *tables)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in tables}


# Longer contexts, and heads that are rotated in part

YARN = {"scaling": "yarn", "factor": 8.0, "original_max_seq_len": 64}
STRETCHED: dict[str, dict[str, Any]] = {
    "linear": {"scaling": "linear", "factor": 4.0},
    "yarn": YARN,
    "yarn, borders as they are": YARN | {"truncate": False},
    "yarn, its own factor": YARN | {"attention_factor": 1.7},
    "yarn, deepseek": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, all within the length": YARN | {"original_max_seq_len": 4_000_000, "factor": 1.0},
    "llama3": {"scaling": "llama3", "factor": 8.0, "original_max_seq_len": 64},
    "llama3, wider": {"scaling": "llama3", "factor": 3.0, "original_max_seq_len": 200, "low_freq_factor": 2.0},
}


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("name", STRETCHED)
def test_tables_equal_those_of_transformers(name: str, fraction: float) -> None:
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    rope = RopeConfig(theta=1000.0, fraction=fraction, **STRETCHED[name])
    settings = rope.model_dump(exclude={"theta", "fraction", "scaling", "original_max_seq_len"}, exclude_none=True)
    settings |= {"rope_type": rope.scaling, "rope_theta": rope.theta, "partial_rotary_factor": fraction}
    settings["high_freq_factor"] = rope.high_freq_factor
    if rope.original_max_seq_len is not None:
        settings["original_max_position_embeddings"] = rope.original_max_seq_len
    if rope.mscale_all_dim == 0:
        del settings["mscale"], settings["mscale_all_dim"]
    config = LlamaConfig(hidden_size=128, num_attention_heads=4, head_dim=32, rope_parameters=settings)
    frequency, factor = utils.ROPE_INIT_FUNCTIONS[rope.scaling](config, "cpu")
    angle = POSITIONS[:, None, :, None].float() * frequency
    cos, sin = rope_tables(POSITIONS, int(32 * fraction), rope)
    near = POSITIONS[:, None, :, None].expand(angle.shape) < 1000
    torch.testing.assert_close(cos[near], (angle.cos() * factor)[near], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sin[near], (angle.sin() * factor)[near], rtol=1e-4, atol=1e-4)
    plain = rope_tables(POSITIONS, int(32 * fraction), RopeConfig(theta=1000.0))[0]
    assert torch.equal(plain, cos) == (rope.factor == 1)


def test_the_softmax_scale_of_latent_attention() -> None:
    mla = {"kv_rank": 8, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 6}
    assert softmax_scale(model_config(mla=mla, qk_norm="none")) == 10**-0.5
    for all_dim, m in ((0.0, 1.0), (1.0, 0.1 * math.log(40) + 1)):
        rope = YARN | {"factor": 40.0, "mscale_all_dim": all_dim}
        config = model_config(mla=mla, rope=rope, qk_norm="none")
        assert softmax_scale(config) == pytest.approx(m**2 / 10**0.5, rel=1e-12)
        # A layer's scale is that of its own embeddings.
        config = model_config(
            mla=mla, rope={}, sliding_rope=rope, sliding_window=4, layer_types=["full", "sliding"], qk_norm="none"
        )
        scales = [LatentAttention(config, layer).scale for layer in range(2)]
        assert scales == [10**-0.5, pytest.approx(m**2 / 10**0.5, rel=1e-12)]


def test_the_rest_of_a_head_passes_through() -> None:
    x = normal(2, 3, 6, 10, dtype=torch.float64, grad=True)
    tables = rope_tables(POSITIONS, 4, RopeConfig(theta=100.0))
    out = apply_rope(x, *tables)
    assert torch.equal(out[..., 4:], x[..., 4:])
    assert torch.equal(out[..., :4], apply_rope(x[..., :4].contiguous(), *tables))
    cos, sin = (table.double() for table in tables)
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, cos, sin), (x,))
