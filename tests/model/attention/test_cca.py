"""Convolutional attention against convolutions of single documents, Hugging Face's ZAYA, and itself with a cache."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from moestro.config import ModelConfig
from moestro.model.attention import cca
from moestro.model.attention.cca import ConvolutionalAttention
from moestro.model.rope import apply_rope

from ..helpers import build, error, model_config, normal, token_ids
from .kinds import fill, positions_at, run


def config_of(taps: tuple[int, int] = (2, 2), **settings: Any) -> ModelConfig:
    rope = {"fraction": 0.5}
    both = dict(zip(("depthwise_taps", "grouped_taps"), taps, strict=True))
    return model_config(**{"cca": both, "qk_norm": "none", "head_dim": 8, "rope": rope} | settings)


def reference(
    module: ConvolutionalAttention, x: Tensor, lengths: list[list[int]], config: ModelConfig, pad_each: bool = False
) -> Tensor:
    """Document by document, padded with zeros once (or, which is wrong, before each convolution)."""
    out = []
    for row, documents in zip(x, lengths, strict=True):
        for document in row.split(documents):
            at = positions_at(config, [[len(document)]])
            query, key, value = projected(module, document, config, pad_each)
            query, key = (apply_rope(y.transpose(0, 1)[None], at.cos, at.sin)[0] for y in (query, key))
            heads = []
            for head in range(config.num_heads):
                of = head * config.resolved_num_kv_heads // config.num_heads
                scores = query[head] @ key[of].t() / config.resolved_head_dim**0.5
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
                heads.append(scores.softmax(-1) @ value[:, of])
            out.append(torch.cat(heads, -1) @ module.o_proj.weight.t())
    return torch.cat(out).view_as(x)


def projected(
    module: ConvolutionalAttention, x: Tensor, config: ModelConfig, pad_each: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [seq, heads, head_dim] of one document [seq, hidden], before the rotation."""
    size, heads, kv_heads = config.resolved_head_dim, config.num_heads, config.resolved_num_kv_heads
    raw_query, raw_key = x @ module.q_proj.weight.t(), x @ module.k_proj.weight.t()
    z = torch.cat((raw_query, raw_key), -1).t()
    first, second = module.conv_qk_depthwise, module.conv_qk_grouped
    taps = first.kernel_size[0] - 1, second.kernel_size[0] - 1
    z = F.pad(z, (taps[0] if pad_each else sum(taps), 0))
    z = F.conv1d(z, first.weight, first.bias, groups=len(z))
    z = F.pad(z, (taps[1] if pad_each else 0, 0))
    convolved = F.conv1d(z, second.weight, second.bias, groups=heads + kv_heads).t().unflatten(1, (-1, size))
    queries, keys = [], []
    for kv in range(kv_heads):
        mine = range(kv * heads // kv_heads, (kv + 1) * heads // kv_heads)
        k = raw_key[:, kv * size : (kv + 1) * size]
        means = [(raw_query[:, h * size : (h + 1) * size] + k) / 2 for h in mine]
        queries += [convolved[:, h] + mean for h, mean in zip(mine, means, strict=True)]
        keys.append(convolved[:, heads + kv] + sum(means) / len(means))
    queries = [q / q.norm(dim=-1, keepdim=True) * size**0.5 for q in queries]
    keys = [k / k.norm(dim=-1, keepdim=True) * size**0.5 * t for k, t in zip(keys, module.key_temperature, strict=True)]
    before = F.pad(x, (0, 0, 1, 0))[:-1]
    value = torch.cat((x @ module.v_proj_current.weight.t(), before @ module.v_proj_delayed.weight.t()), -1)
    return torch.stack(queries, 1), torch.stack(keys, 1), value.unflatten(1, (kv_heads, size))


@settings(max_examples=12, deadline=None)
@given(
    taps=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3), (6, 2), (4, 1)]),
    lengths=st.sampled_from([[[1]], [[7]], [[2, 5], [6, 1]], [[1, 1, 5]], [[3, 2, 2]]]),
)
def test_equals_the_definition(taps: tuple[int, int], heads: tuple[int, int], lengths: list[list[int]]) -> None:
    config = config_of(taps, num_heads=heads[0], num_kv_heads=heads[1], head_dim=4)
    module = fill(ConvolutionalAttention(config, 0), torch.float64)
    x, grad = (normal(len(lengths), sum(lengths[0]), 16, seed=s, dtype=torch.float64) for s in (1, 2))
    out, grad_x, grads = run(module, x, positions_at(config, lengths), grad)
    module.zero_grad()
    x.requires_grad_()
    expected = reference(module, x, lengths, config)
    (expected * grad).sum().backward()
    assert x.grad is not None
    assert error(out, expected) < 1e-7  # rotations are in fp32 tables
    assert error(grad_x, x.grad) < 1e-7
    for name, p in module.named_parameters():
        assert (grads[name] - p.grad).abs().max() < 1e-7 * grad_x.abs().max(), name


def test_padding_once_is_not_padding_each_convolution() -> None:
    """The depthwise bias reaches the first position through the grouped convolution, and no other."""
    config = config_of()
    module = fill(ConvolutionalAttention(config, 0))
    x = normal(1, 6, 16)
    once, each = (projected(module, x[0], config, pad_each) for pad_each in (False, True))
    assert error(each[0][0], once[0][0]) > 1e-2
    assert error(each[0][1:], once[0][1:]) < 1e-6
    out = module(x, positions_at(config, [[6]]))
    assert error(out, reference(module, x, [[6]], config)) < 1e-5
    assert error(out, reference(module, x, [[6]], config, pad_each=True)) > 1e-2


def test_documents_do_not_see_each_other() -> None:
    config = config_of((3, 2))
    module = fill(ConvolutionalAttention(config, 0))
    lengths = [4, 1, 2, 1, 1, 5]
    x, grad = normal(1, 14, 16, seed=1), normal(1, 14, 16, seed=2)
    out, grad_x, grads = run(module, x, positions_at(config, [lengths]), grad)
    alone = [
        run(module, part, positions_at(config, [[part.shape[1]]]), g)
        for part, g in zip(x.split(lengths, 1), grad.split(lengths, 1), strict=True)
    ]
    assert error(out, torch.cat([a[0] for a in alone], 1)) < 1e-5
    assert error(grad_x, torch.cat([a[1] for a in alone], 1)) < 1e-5
    for name, value in grads.items():
        assert error(value, sum(a[2][name] for a in alone)) < 1e-5, name


def test_scores_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By temperature · sqrt(head_dim), whatever comes in; queries and keys have exactly these lengths."""
    seen: list[Tensor] = []
    real = cca.attend

    def looking(query: Tensor, key: Tensor, *rest: Any) -> Tensor:
        seen.extend((query, key))
        return real(query, key, *rest)

    monkeypatch.setattr(cca, "attend", looking)
    config = config_of()
    module = fill(ConvolutionalAttention(config, 0))
    with torch.no_grad():
        module.key_temperature.copy_(torch.tensor([0.5, 3.0]))
        module(100 * normal(2, 9, 16), positions_at(config, [[9], [4, 5]]))
    query, key = seen
    root = config.resolved_head_dim**0.5
    assert torch.allclose(query.norm(dim=-1), torch.tensor(root))
    assert torch.allclose(key.norm(dim=-1), root * module.key_temperature.view(1, 2, 1))
    scores = query.unflatten(1, (2, 2)) @ key.unsqueeze(2).mT / root
    assert (scores.abs().amax((0, 2, 3, 4)) <= module.key_temperature * root * (1 + 1e-6)).all()
    assert scores.abs().max() > 2 * root  # or the bound would say nothing


def test_values_come_from_this_token_and_the_one_before() -> None:
    """With two key-value heads, the first has this token's, the second the token's before."""
    config = config_of(num_heads=2)
    module = fill(ConvolutionalAttention(config, 0))
    with torch.no_grad():
        module.o_proj.weight.copy_(torch.eye(16))
        x = normal(1, 1, 16)
        alone = module(x, positions_at(config, [[1]]))  # attention to itself only: its own value
    assert error(alone[0, 0, :8], module.v_proj_current(x)[0, 0]) < 1e-6
    assert (alone[0, 0, 8:] == 0).all()


def test_parameters_of_zaya1() -> None:
    sizes = {"hidden_size": 2048, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    with torch.device("meta"):
        module = ConvolutionalAttention(config_of(**sizes), 0)
    counts = {"proj": 0, "conv": 0, "temperature": 0}
    for name, p in module.named_parameters():
        counts[next(kind for kind in counts if kind in name)] += p.numel()
    assert counts == {"proj": 5_242_880, "conv": 332_800, "temperature": 2}


# --- Hugging Face ----------------------------------------------------------------------------------------------------

NAMES = {"qkv_proj.": "", "qk_norm.temp": "key_temperature"}


@pytest.mark.parametrize("taps", [(2, 2), (3, 1)])
def test_equals_hugging_face(taps: tuple[int, int]) -> None:
    pytest.importorskip("transformers")
    from transformers import ZayaConfig
    from transformers.models.zaya import modeling_zaya as zaya

    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    other_config = ZayaConfig(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1, vocab_size=40,
        cca_time0=taps[0], cca_time1=taps[1], rope_parameters={"hybrid": rope}, max_position_embeddings=64,
        attn_implementation="eager",
    )  # fmt: skip
    other, tables = fill(zaya.ZayaAttention(other_config, 0)), zaya.ZayaRotaryEmbedding(other_config)
    config, batch, seq = config_of(taps), 2, 20
    module = fill(ConvolutionalAttention(config, 0))
    weights = {}
    for name, p in other.named_parameters():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        weights[name] = p
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(weights[name])
    x, grad = normal(batch, seq, 16, seed=1), normal(batch, seq, 16, seed=2)
    out, grad_x, grads = run(module, x, positions_at(config, [[seq]] * batch), grad)
    x.requires_grad_()
    mask = torch.full((seq, seq), float("-inf")).triu(1)[None, None]
    embedding = tables(x, torch.arange(seq).expand(batch, -1), "hybrid")
    expected = other(hidden_states=x, position_embeddings=embedding, attention_mask={"causal": mask})[0]
    (expected * grad).sum().backward()
    assert x.grad is not None
    assert error(out, expected) < 1e-5
    assert error(grad_x, x.grad) < 1e-5
    assert set(grads) == set(weights)
    for name, value in grads.items():
        assert error(value, weights[name].grad) < 2e-5, name


# --- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("taps", "window"), [((2, 2), None), ((1, 4), 7), ((1, 1), None)])
def test_decoding_equals_the_whole_sequence(taps: tuple[int, int], window: int | None) -> None:
    model = fill(build(config_of(taps, sliding_window=window, num_layers=1))).eval()
    length = 256 if taps == (2, 2) else 64
    ids = token_ids(2, length, seed=3)
    with torch.no_grad():
        expected = model.logits(model(ids).hidden)
        cache = model.new_cache(2, length, "cpu", torch.float32)
        pieces = [1, 1, 20, 5, *[1] * (length - 27)]
        found = torch.cat([model.logits(model(part, cache=cache).hidden) for part in ids.split(pieces, 1)], 1)
    assert error(found, expected) < 1e-4
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_state_of_decoding() -> None:
    """The last latents and delayed value in fp32, besides keys and values."""
    model = build(config_of((3, 2), num_layers=1), dtype=torch.bfloat16).eval()
    cache = model.new_cache(2, 16, "cpu", torch.bfloat16)
    with torch.no_grad():
        for part in token_ids(2, 6).split([1, 5], 1):
            model(part, cache=cache)
    (layer,) = cache.layers
    assert {name: tuple(state.shape) for name, state in layer.state.items()} == {
        "latents": (2, 3, 6 * 8),
        "delayed": (2, 1, 8),
    }
    assert {state.dtype for state in layer.state.values()} == {torch.float32}
    assert sum(buffer.nbytes for buffer in layer.buffers.values()) == 2 * 16 * 2 * 2 * 8 * 2


def test_bf16_is_near_fp32() -> None:
    config = config_of()
    module = fill(ConvolutionalAttention(config, 0))
    x, positions = normal(2, 9, 16), positions_at(config, [[9], [4, 5]])
    out = module(x.bfloat16(), positions)
    assert out.dtype == torch.bfloat16
    assert error(out, module(x, positions)) < 5e-2
