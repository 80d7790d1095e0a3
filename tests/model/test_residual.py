"""Scaled residuals: plain sums at first, and their equations after."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moestro.model.attention.mask import positions_of
from moestro.model.norms import RMSNorm

from .helpers import build, error, model_config, normal, token_ids

KINDS = ("input", "output", "released")


@pytest.mark.parametrize("kind", KINDS)
def test_is_a_plain_transformer_at_first(kind: str) -> None:
    plain, scaled = (build(model_config({}, residual_scaling=k)) for k in ("none", kind))
    ids = token_ids(2, 7)
    torch.testing.assert_close(scaled(ids).hidden, plain(ids).hidden, rtol=0, atol=0)
    added = 16 * (4 * 2 * 2 + 2 * (kind == "released"))  # four vectors a join, two joins a layer
    assert sum(p.numel() for p in scaled.parameters()) - sum(p.numel() for p in plain.parameters()) == added


@pytest.mark.parametrize("kind", KINDS)
def test_follows_its_equation(kind: str) -> None:
    """One layer, term by term from the papers."""
    model = build(model_config(num_layers=1, residual_scaling=kind))
    with torch.no_grad():
        for i, (name, p) in enumerate(model.named_parameters()):
            if "residual" in name:
                p.add_(0.3 * normal(*p.shape, seed=i))
    ids = token_ids(2, 5)
    block, first = model.blocks()[0], model.input_residual
    assert model.embed_tokens is not None
    x = model.embed_tokens(ids)
    if kind == "released":
        assert first is not None
        x = (x + first.bias) * first.scale
    else:
        assert first is None
    position_ids = torch.arange(5).unsqueeze(0)
    positions = positions_of("full", model.config, position_ids, None, None, None)
    layers: list[tuple[Any, RMSNorm, Any]] = [
        (lambda y: block.self_attn(y, positions), block.input_layernorm, block.attention_residual),
        (block.mlp, block.post_attention_layernorm, block.feed_forward_residual),
    ]
    for layer, norm, r in layers:
        alpha, b, beta, c = r.residual_scale, r.residual_bias, r.output_scale, r.output_bias
        if kind == "input":
            x = alpha * x + b + layer(norm(beta * x + c))
        elif kind == "output":
            x = alpha * x + b + beta * layer(norm(x)) + c
        else:
            x = (x + b) * alpha + (layer(norm(x)) + c) * beta
    assert model.norm is not None
    assert error(model(ids).hidden, model.norm(x)) < 1e-6


def test_post_norm_is_after_the_layer() -> None:
    model = build(model_config(num_layers=1, norm_position="post"))
    ids = token_ids(1, 4)
    block = model.blocks()[0]
    positions = positions_of("full", model.config, torch.arange(4).unsqueeze(0), None, None, None)
    assert model.embed_tokens is not None
    assert model.norm is not None
    x = model.embed_tokens(ids)
    x = x + block.input_layernorm(block.self_attn(x, positions))
    x = x + block.post_attention_layernorm(block.mlp(x))
    assert error(model(ids).hidden, model.norm(x)) < 1e-6


def test_the_stream_may_be_fp32_in_a_bf16_model() -> None:
    """What bf16 sums lose: many small outputs on a large stream."""
    ids = token_ids(1, 6)
    streams: dict[bool, list[torch.dtype]] = {}
    hidden: dict[bool, Tensor] = {}
    for fp32 in (False, True):
        model = build(model_config({}, residual_fp32=fp32, num_layers=4), dtype=torch.bfloat16)
        seen: list[torch.dtype] = []
        for block in model.blocks():
            block.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(out.x.dtype))
        hidden[fp32] = model(ids).hidden
        streams[fp32] = seen
    assert streams[False] == [torch.bfloat16] * 4
    assert streams[True] == [torch.float32] * 4
    assert all(h.dtype == torch.bfloat16 for h in hidden.values())
    exact = build(model_config({}, num_layers=4))(ids).hidden
    assert error(hidden[True], exact) < error(hidden[False], exact)
