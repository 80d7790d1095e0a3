"""Numbers of adapters' parameters, against torch's matrices and by hand."""

import pytest
import torch

from moestro.config.adapters import ATTENTION, FEED_FORWARD, adapter_params
from moestro.config.attention import MLAConfig
from moestro.config.model import ModelConfig
from moestro.config.moe import MoEConfig
from moestro.errors import MoestroError

DENSE = ModelConfig(
    vocab_size=100, hidden_size=48, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=10, intermediate_size=70
)


def by_torch(rank: int, shapes: dict[str, tuple[int, int]]) -> int:
    pairs = [
        (torch.nn.Linear(inputs, rank, False, "meta"), torch.nn.Linear(rank, outputs, False, "meta"))
        for inputs, outputs in shapes.values()
    ]
    return sum(thin.weight.numel() for pair in pairs for thin in pair)


@pytest.mark.parametrize("rank", [1, 8])
def test_dense(rank: int) -> None:
    attention = {"q": (48, 60), "k": (48, 20), "v": (48, 20), "o": (60, 48)}
    feed_forward = {"gate": (48, 70), "up": (48, 70), "down": (70, 48)}
    assert adapter_params(DENSE, rank, ATTENTION) == 3 * by_torch(rank, attention)
    assert adapter_params(DENSE, rank, FEED_FORWARD) == 3 * by_torch(rank, feed_forward)
    assert adapter_params(DENSE, rank) == 3 * by_torch(rank, attention | feed_forward)


def test_every_expert_has_its_own() -> None:
    moe = MoEConfig(num_experts=4, top_k=2, expert_hidden_size=20, num_shared_experts=2, first_k_dense=1)
    model = DENSE.model_copy(update={"moe": moe})
    up = 70 + 48 + 2 * (4 * (20 + 48) + (40 + 48))
    assert adapter_params(model, 1, ["up"]) == up
    finer = model.model_copy(update={"moe": moe.model_copy(update={"granularity": 2})})
    assert adapter_params(finer, 1, ["up"]) == 70 + 48 + 2 * (8 * (10 + 48) + (40 + 48))


def test_two_matrices() -> None:
    model = DENSE.model_copy(update={"activation": "gelu"})
    assert adapter_params(model, 2, ["up", "down"]) == 3 * 2 * 2 * (48 + 70)
    with pytest.raises(MoestroError, match=r"no matrix 'gate'.*it has q, k, v, o, up, down"):
        adapter_params(model, 2)


def test_latent_attention_is_refused() -> None:
    mla = MLAConfig(q_rank=None, kv_rank=8, rope_head_dim=4, nope_head_dim=4, v_head_dim=4)
    with pytest.raises(MoestroError, match="not for mla"):
        adapter_params(DENSE.model_copy(update={"mla": mla}), 2)
