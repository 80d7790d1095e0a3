"""Attention modules of Hugging Face's models give the same output and gradients from the same weights."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from moestro.config import ModelConfig
from moestro.model.attention.gqa import GroupedQueryAttention
from moestro.model.attention.mask import positions_of
from moestro.model.transformer import Transformer

from ..helpers import build, error, model_config, normal, token_ids
from .options import OPTIONS, attention

SEQ = 24
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "attn_implementation": "eager",
}
YARN = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Name in transformers: of the classes, their configuration; ours; layer.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int]] = {
    "qwen3": ("Qwen3", {"head_dim": 6}, {"qk_norm": "head", "head_dim": 6}, 0),
    "olmoe": ("Olmoe", {"clip_qkv": 0.8}, {"qk_norm": "projection", "clip_qkv": 0.8, "norm_eps": 1e-5}, 0),
    "llama": (
        "Llama",
        {"rope_parameters": {"rope_type": "llama3", "original_max_position_embeddings": 8, **LLAMA3}},
        {"rope": {"scaling": "llama3", "original_max_seq_len": 8, **LLAMA3}},
        0,
    ),
    "gpt_oss": (
        "GptOss",
        {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 16, **YARN}},
        {"rope": {"scaling": "yarn", "original_max_seq_len": 16, **YARN}},
        1,
    ),
}
FAMILIES["gpt_oss, sliding"] = ("GptOss", *FAMILIES["gpt_oss"][1:3], 0)


def theirs(family: str, settings: dict[str, Any], layer: int) -> tuple[Any, Any]:
    """The attention module and the one that makes its rotations."""
    transformers = pytest.importorskip("transformers")
    folder = {"GptOss": "gpt_oss"}.get(family, family.lower())
    code = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    if family == "GptOss":
        kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "num_hidden_layers": 2}
        settings = settings | kinds | {"attention_bias": True, "head_dim": 6}
    settings = {"rope_parameters": {"rope_type": "default"}} | settings
    settings["rope_parameters"] = settings["rope_parameters"] | {"rope_theta": 100.0}
    config = getattr(transformers, f"{family}Config")(**SIZES, **settings)
    return getattr(code, f"{family}Attention")(config, layer), getattr(code, f"{family}RotaryEmbedding")(config)


def ours(family: str, settings: dict[str, Any]) -> ModelConfig:
    if family == "GptOss":
        kinds = {"layer_types": ["sliding", "full"], "sliding_window": 5, "head_dim": 6}
        settings = settings | kinds | {"attention_bias": "all", "attention_sinks": True}
    settings = {"qk_norm": "none", "rope": {}} | settings
    settings["rope"] = settings["rope"] | {"theta": 100.0}
    return model_config(**settings)


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_transformers(name: str) -> None:
    family, their_settings, our_settings, layer = FAMILIES[name]
    other, rotary = theirs(family, their_settings, layer)
    config = ours(family, our_settings)
    module = attention(config, layer)
    weights = dict(module.named_parameters())
    assert weights.keys() == dict(other.named_parameters()).keys()
    with torch.no_grad():
        for key, parameter in other.named_parameters():
            parameter.copy_(weights[key])
    x, upstream = normal(2, SEQ, 16, seed=7, grad=True), normal(2, SEQ, 16, seed=8)
    y = x.detach().clone().requires_grad_()
    places = torch.arange(SEQ).unsqueeze(0)
    positions = positions_of(config.layer_type(layer), config, places, None, None, None)
    found = module(x, positions)
    expected: Tensor = other(y, rotary(y, places), float_mask(config.layer_type(layer) == "sliding"))[0]
    assert error(found, expected) < 1e-5
    found.backward(upstream)
    expected.backward(upstream)
    assert error(x.grad, y.grad) < 1e-5
    for key, parameter in other.named_parameters():
        assert error(weights[key].grad, parameter.grad) < 1e-5, key


def float_mask(sliding: bool) -> Tensor:
    distance = torch.arange(SEQ).unsqueeze(1) - torch.arange(SEQ)
    seen = (distance >= 0) & (distance < 5 if sliding else distance >= 0)
    return torch.zeros(1, 1, SEQ, SEQ).masked_fill(~seen, -torch.inf)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_parameter_matters(name: str) -> None:
    config = model_config(**OPTIONS[name])
    module = attention(config)
    positions = positions_of(config.layer_type(0), config, torch.arange(7).unsqueeze(0), None, None, None)
    module(normal(2, 7, 16), positions).square().sum().backward()
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().max() > 1e-6, key


def test_the_number_of_parameters() -> None:
    def count(**settings: Any) -> int:
        module = GroupedQueryAttention(model_config(**settings), 0)
        return sum(parameter.numel() for parameter in module.parameters())

    plain = count(qk_norm="none")
    assert plain == 16 * 16 * 2 + 16 * 8 * 2
    assert count(qk_norm="head") == plain + 2 * 4
    assert count(qk_norm="projection") == plain + 16 + 8
    assert count(qk_norm="none", attention_bias="qkv") == plain + 16 + 8 + 8
    assert count(qk_norm="none", attention_bias="all") == plain + 16 + 8 + 8 + 16
    assert count(qk_norm="none", attention_sinks=True) == plain + 4


def test_sinks_and_biases_start_at_zero() -> None:
    model = build(model_config(attention_sinks=True, attention_bias="all"))
    zeros = {name for name, value in model.named_parameters() if not value.any()}
    kinds = ("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias", "sinks")
    assert zeros == {f"layers.{layer}.self_attn.{kind}" for layer in (0, 1) for kind in kinds}


def test_the_base_of_rotations_changes_at_run_time() -> None:
    """A longer context is trained with another base; nothing may remember the first."""
    model, ids = build(model_config(init_scale=4.0)), token_ids(1, 30)
    before = model(ids).hidden
    model.config = model.config.model_copy(update={"rope": model.config.rope.model_copy(update={"theta": 1e6})})
    fresh = Transformer(model_config(init_scale=4.0, rope={"theta": 1e6}))
    fresh.init_weights(0)
    assert torch.equal(model(ids).hidden, fresh(ids).hidden)
    assert error(model(ids).hidden, before) > 1e-3
