"""Latent attention against a slow reference, Hugging Face's DeepSeek, itself unpacked, and itself with a cache."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from moestro.config import ModelConfig
from moestro.model.attention.mla import LatentAttention
from moestro.model.rope import apply_rope

from ..helpers import build, error, model_config, normal, token_ids
from .kinds import fill, positions_at, run

MLA: dict[str, Any] = {"q_rank": 10, "kv_rank": 8, "nope_head_dim": 4, "rope_head_dim": 6, "v_head_dim": 5}


def config_of(mla: dict[str, Any] | None = None, **settings: Any) -> ModelConfig:
    return model_config(mla=MLA | (mla or {}), qk_norm="none", num_kv_heads=None, **settings)


def reference(module: LatentAttention, x: Tensor, lengths: list[list[int]], config: ModelConfig) -> Tensor:
    """Document by document, head by head, query by query."""
    mla, heads, out = module.mla, config.num_heads, []
    for row, documents in zip(x, lengths, strict=True):
        for document in row.split(documents):
            at = positions_at(config, [[len(document)]])
            query = document if mla.q_rank is None else module.q_a_layernorm(document @ module.q_a_proj.weight.t())
            query = query @ (module.q_proj if mla.q_rank is None else module.q_b_proj).weight.t()
            down = document @ module.kv_a_proj_with_mqa.weight.t()
            up = module.kv_a_layernorm(down[:, : mla.kv_rank]) @ module.kv_b_proj.weight.t()
            rope_key = apply_rope(down[None, None, :, mla.kv_rank :], at.cos, at.sin)[0, 0]
            found = []
            for head in range(heads):
                q = query.chunk(heads, -1)[head]
                kv = up.chunk(heads, -1)[head]
                rope_query = apply_rope(q[None, None, :, mla.nope_head_dim :], at.cos, at.sin)[0, 0]
                q = torch.cat((q[:, : mla.nope_head_dim], rope_query), -1)
                k = torch.cat((kv[:, : mla.nope_head_dim], rope_key), -1)
                rows = [
                    (q[i] @ k[: i + 1].t() / mla.qk_head_dim**0.5).softmax(0) @ kv[: i + 1, mla.nope_head_dim :]
                    for i in range(len(document))
                ]
                found.append(torch.stack(rows))
            out.append(torch.cat(found, -1) @ module.o_proj.weight.t())
    return torch.cat(out).view_as(x)


@settings(max_examples=12, deadline=None)
@given(
    q_rank=st.sampled_from([None, 1, 7]),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 5), st.sampled_from([2, 4]), st.integers(1, 6)),
    lengths=st.sampled_from([[[1]], [[5]], [[2, 3], [1, 4]], [[1, 1, 4]]]),
)
def test_equals_the_definition(q_rank: int | None, sizes: tuple[int, ...], lengths: list[list[int]]) -> None:
    names = ("kv_rank", "nope_head_dim", "rope_head_dim", "v_head_dim")
    config = config_of({"q_rank": q_rank} | dict(zip(names, sizes, strict=True)))
    module = fill(LatentAttention(config, 0), torch.float64)
    x, grad = (normal(len(lengths), sum(lengths[0]), 16, seed=s, dtype=torch.float64) for s in (1, 2))
    out, grad_x, grads = run(module, x, positions_at(config, lengths), grad)
    module.zero_grad()
    x.requires_grad_()
    expected = reference(module, x, lengths, config)
    (expected * grad).sum().backward()
    assert x.grad is not None
    assert error(out, expected) < 1e-7  # rotations are in fp32 tables
    assert error(grad_x, x.grad) < 1e-7
    for name, p in module.named_parameters():  # queries that see one key have no gradient
        assert (grads[name] - p.grad).abs().max() < 1e-7 * grad_x.abs().max(), name


def test_documents_do_not_see_each_other() -> None:
    config = config_of()
    module = fill(LatentAttention(config, 0))
    x, grad = normal(1, 12, 16, seed=1), normal(1, 12, 16, seed=2)
    out, grad_x, grads = run(module, x, positions_at(config, [[5, 1, 6]]), grad)
    alone = [
        run(module, part, positions_at(config, [[part.shape[1]]]), g)
        for part, g in zip(x.split([5, 1, 6], 1), grad.split([5, 1, 6], 1), strict=True)
    ]
    assert error(out, torch.cat([a[0] for a in alone], 1)) < 1e-5
    assert error(grad_x, torch.cat([a[1] for a in alone], 1)) < 1e-5
    for name, value in grads.items():
        assert error(value, sum(a[2][name] for a in alone)) < 1e-5, name


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def theirs(version: str, q_rank: int | None, interleave: bool, rope: dict[str, Any]) -> tuple[nn.Module, Any]:
    pytest.importorskip("transformers")
    from transformers import DeepseekV2Config, DeepseekV3Config
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3

    sizes: dict[str, Any] = {
        "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": q_rank,
        "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 6, "v_head_dim": 5, "num_hidden_layers": 1,
        "max_position_embeddings": 256, "rope_parameters": {"rope_theta": 1e4} | rope, "attn_implementation": "eager",
    }  # fmt: skip
    if version == "v2":
        other = DeepseekV2Config(**sizes)
        return v2.DeepseekV2Attention(other, 0), v2.DeepseekV2RotaryEmbedding(other)
    other = DeepseekV3Config(**sizes, rope_interleave=interleave)
    return v3.DeepseekV3Attention(other, 0), v3.DeepseekV3RotaryEmbedding(other)


def in_halves(name: str, weight: Tensor) -> Tensor:
    """A weight (or its gradient) whose rotary rows are pairs, with those rows in halves."""
    order = torch.arange(6).view(3, 2).t().flatten()
    if name in ("q_proj.weight", "q_b_proj.weight"):
        rows = weight.view(4, 10, -1)
        return torch.cat((rows[:, :4], rows[:, 4:][:, order]), 1).view_as(weight)
    return torch.cat((weight[:8], weight[8:][order])) if name.startswith("kv_a_proj") else weight


YARN = {
    "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
    "mscale": 0.7, "mscale_all_dim": 0.7,
}  # fmt: skip


@pytest.mark.parametrize(
    ("version", "q_rank", "interleave", "yarn"),
    [("v3", 10, False, False), ("v3", 10, True, True), ("v3", None, True, False), ("v2", 10, True, False),
     ("v2", None, True, True)],
)  # fmt: skip
def test_equals_hugging_face(version: str, q_rank: int | None, interleave: bool, yarn: bool) -> None:
    rope = {"rope_type": "yarn"} | YARN if yarn else {"rope_type": "default"}
    other, tables = theirs(version, q_rank, interleave, rope)
    scaling = {
        "scaling": "yarn", "factor": 4.0, "original_max_seq_len": 64, "mscale": 0.7, "mscale_all_dim": 0.7,
    } if yarn else {}  # fmt: skip
    config = config_of({"q_rank": q_rank}, rope=scaling)
    module, batch, seq = fill(LatentAttention(config, 0)), 2, 20
    turn = in_halves if interleave else lambda _, weight: weight
    with torch.no_grad():
        weights = dict(fill(other).named_parameters())
        for name, p in module.named_parameters():
            p.copy_(turn(name, weights[name]))
    x, grad = normal(batch, seq, 16, seed=1), normal(batch, seq, 16, seed=2)
    out, grad_x, grads = run(module, x, positions_at(config, [[seq]] * batch), grad)
    x.requires_grad_()
    mask = torch.full((seq, seq), float("-inf")).triu(1)[None, None]
    embedding = tables(x, torch.arange(seq).expand(batch, -1))
    expected = other(hidden_states=x, position_embeddings=embedding, attention_mask=mask)[0]
    (expected * grad).sum().backward()
    assert x.grad is not None
    assert error(out, expected) < 1e-5
    assert error(grad_x, x.grad) < 1e-5
    assert set(grads) == set(weights)
    for name, value in grads.items():
        assert error(value, turn(name, weights[name].grad)) < 2e-5, name


# --- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 7])
def test_decoding_equals_the_whole_sequence(window: int | None) -> None:
    model = build(config_of(sliding_window=window, num_layers=1)).eval()
    ids = token_ids(2, 256, seed=3)
    with torch.no_grad():
        expected = model.logits(model(ids).hidden)
        cache = model.new_cache(2, 256, "cpu", torch.float32)
        pieces = [40, 1, 5, *[1] * 210]
        found = torch.cat([model.logits(model(part, cache=cache).hidden) for part in ids.split(pieces, 1)], 1)
    assert error(found, expected) < 1e-4
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_absorbed_equals_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fill(build(config_of())).eval()
    ids, taken, found = token_ids(2, 24), list[int](), list[Tensor]()
    real = LatentAttention._attend_to_latents

    def counted(self: LatentAttention, query: Tensor, *rest: Any) -> Tensor:
        taken.append(query.shape[2])
        return real(self, query, *rest)

    monkeypatch.setattr(LatentAttention, "_attend_to_latents", counted)
    for absorbs in (True, False):
        monkeypatch.setattr(LatentAttention, "_absorbs", lambda _, queries, keys, a=absorbs: a and queries < keys)
        cache = model.new_cache(2, 24, "cpu", torch.float32)
        with torch.no_grad():
            parts = ids.split([10, 1, 1, 4, 8], 1)
            found.append(torch.cat([model.logits(model(part, cache=cache).hidden) for part in parts], 1))
    assert taken[::2] == taken[1::2] == [1, 1, 4, 8]  # in both layers, the first time only
    assert error(found[0], found[1]) < 1e-5


def test_cache_holds_latents_and_rotary_keys_only() -> None:
    config = config_of(num_layers=3)
    cache = build(config).new_cache(2, 16, "cpu", torch.bfloat16)
    held = sum(buffer.nbytes for layer in cache.layers for buffer in layer.buffers.values())
    assert held == 2 * 16 * 3 * (8 + 6) * 2  # sequences · tokens · layers · numbers · bytes
    assert not any(layer.state for layer in cache.layers)


def test_absorbing_is_chosen_where_it_is_less_work() -> None:
    deepseek = {"q_rank": 1536, "kv_rank": 512, "nope_head_dim": 128, "rope_head_dim": 64, "v_head_dim": 128}
    with torch.device("meta"):
        module = LatentAttention(config_of(deepseek), 0)
    assert module._absorbs(1, 2)
    assert module._absorbs(1, 100_000)
    assert module._absorbs(170, 10**9)  # 170 (2 · 512 - 256) < 512 · 256
    assert not module._absorbs(171, 10**9)
    with torch.device("meta"):
        module = LatentAttention(config_of({"kv_rank": 1}), 0)
    assert module._absorbs(63, 64)
    assert not module._absorbs(64, 64)  # a prefill takes the plain path even where the other is less work


def test_bf16_is_near_fp32() -> None:
    config = config_of()
    module = fill(LatentAttention(config, 0))
    x = normal(2, 9, 16)
    out = module(x.bfloat16(), positions_at(config, [[9], [9]]))
    assert out.dtype == torch.bfloat16
    assert error(out, module(x, positions_at(config, [[9], [9]]))) < 3e-2
