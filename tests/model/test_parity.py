"""Hugging Face models of the same architecture give the same logits and gradients from the same weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moestro.config import ModelConfig
from moestro.model.loss import linear_cross_entropy
from moestro.model.transformer import Transformer

from .helpers import build, error, token_ids

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


def mixtral() -> tuple[nn.Module, ModelConfig]:
    config = transformers.MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, intermediate_size=12, sliding_window=None
    )
    return transformers.MixtralForCausalLM(config), ours()


def qwen3_moe() -> tuple[nn.Module, ModelConfig]:
    config = transformers.Qwen3MoeConfig(
        **SIZES,
        head_dim=6,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        intermediate_size=20,
        norm_topk_prob=True,
        mlp_only_layers=[0],
    )
    return (
        transformers.Qwen3MoeForCausalLM(config),
        ours(head_dim=6, qk_norm="head", intermediate_size=20, first_k_dense=1),
    )


def ours(first_k_dense: int = 0, **settings: Any) -> ModelConfig:
    moe = {"num_experts": 4, "top_k": 2, "expert_hidden_size": 12, "first_k_dense": first_k_dense}
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return ModelConfig.model_validate(sizes | settings | {"moe": moe})


def pairs(model: Transformer, other: nn.Module) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
    """(our name, our parameter, theirs); ours may have one axis more."""
    theirs = dict(other.named_parameters())
    out = []
    for name, parameter in model.named_parameters():
        found = name.replace(".mlp.router.", ".mlp.gate.")
        found = found if found.startswith("lm_head") else f"model.{found}"
        out.append((name, parameter, theirs.pop(found)))
    assert not theirs, "parameters of theirs without a counterpart"
    return out


@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
def test_logits_and_gradients_equal(make: Any) -> None:
    other, config = make()
    model = build(config)
    with torch.no_grad():
        for i, (_, mine, theirs) in enumerate(pairs(model, other)):
            if mine.dim() == 1:  # norms: away from one
                mine.add_(0.2 * torch.randn(mine.shape, generator=torch.Generator().manual_seed(i)))
            theirs.copy_(mine.view_as(theirs))
    ids = token_ids(2, 12)
    hidden = model(ids).hidden
    result: Tensor = other(input_ids=ids).logits
    assert error(model.logits(hidden), result) < 1e-5
    linear_cross_entropy(hidden[:, :-1], model.head_weight, ids[:, 1:], 1 / 22).backward()
    nn.functional.cross_entropy(result[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for name, mine, theirs in pairs(model, other):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert error(mine.grad.view_as(theirs), theirs.grad) < 2e-5, name
