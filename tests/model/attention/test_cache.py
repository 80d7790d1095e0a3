from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.model.attention.cache import LayerCache

from ..helpers import build, model_config, normal, token_ids
from .options import OPTIONS

LENGTH = 72


def layer_cache(max_len: int, window: int | None = None) -> LayerCache:
    return LayerCache({"key": (2, 2, 4), "latent": (2, 3)}, max_len, "cpu", torch.float32, window)


def test_a_layer_cache_returns_all_entries_so_far() -> None:
    cache = layer_cache(8)
    keys, latents = normal(2, 2, 8, 4), normal(2, 8, 3, seed=1)
    for start, end in ((0, 3), (3, 4), (4, 8)):
        found = cache.append(key=keys[:, :, start:end], latent=latents[:, start:end])
        assert torch.equal(found["key"], keys[:, :, :end])
        assert torch.equal(found["latent"], latents[:, :end])
        assert cache.length == end


def test_a_full_cache_takes_nothing_more() -> None:
    cache = layer_cache(4)
    with pytest.raises(RuntimeError, match="the cache is full: 0 entries, and 5 more"):
        cache.append(key=normal(2, 2, 5, 4), latent=normal(2, 5, 3))
    cache = layer_cache(4)
    cache.append(key=normal(2, 2, 4, 4), latent=normal(2, 4, 3))
    with pytest.raises(RuntimeError, match="full"):
        cache.append(key=normal(2, 2, 1, 4), latent=normal(2, 1, 3))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_window_keeps_no_more_than_itself(window: int, chunks: list[int]) -> None:
    cache = layer_cache(100, window)
    latents = normal(2, sum(chunks), 3)
    keys, start = normal(2, 2, sum(chunks), 4, seed=1), 0
    for count in chunks:
        end = start + count
        found = cache.append(key=keys[:, :, start:end], latent=latents[:, start:end])["latent"]
        expected = latents[:, max(0, start - window + 1) : end]
        if count == 1:  # order does not matter to a single query
            found, expected = (x.sort(1).values for x in (found, expected))
        assert torch.equal(found, expected)
        assert cache.buffers["key"].shape == (2, 2, window, 4)
        start = end


def test_a_window_longer_than_the_cache_is_none() -> None:
    assert layer_cache(8, 8).window is None
    assert layer_cache(8, 7).window == 7


@pytest.mark.parametrize("chunks", [[1] * LENGTH, [5, 1, 1, 30, 3, 1, 31], [LENGTH]], ids=["single", "chunks", "all"])
@pytest.mark.parametrize(
    "moe", [None, {"num_shared_experts": 1}, {"router": {"score": "sigmoid"}, "first_k_dense": 1}], ids=str
)
def test_decoding_equals_the_full_forward(chunks: list[int], moe: dict[str, object] | None) -> None:
    assert sum(chunks) == LENGTH
    decode(model_config(moe), chunks)


@pytest.mark.parametrize("name", OPTIONS)
def test_decoding_of_every_option(name: str) -> None:
    decode(model_config(init_scale=4.0, **OPTIONS[name]), [20, *[1] * 100, 2, 3, 17, 50, *[1] * 64])


@torch.no_grad()
def decode(config: Any, chunks: list[int]) -> None:
    """Token-exact, chunk by chunk."""
    model, length = build(config).eval(), sum(chunks)
    for i, parameter in enumerate(model.parameters()):
        if parameter.dim() == 1:  # norms, biases, sinks
            parameter.add_(normal(*parameter.shape, seed=i) / 2)
    ids = token_ids(2, length)
    expected = model.logits(model(ids).hidden)
    cache = model.new_cache(2, length + 3, "cpu", torch.float32)
    assert (len(cache.layers), cache.length, cache.max_len) == (2, 0, length + 3)
    out, start = [], 0
    for size in chunks:
        out.append(model.logits(model(ids[:, start : start + size], cache=cache).hidden))
        start += size
        assert cache.length == start
    found = torch.cat(out, dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_sliding_layers_hold_their_window() -> None:
    model = build(model_config(**OPTIONS["gpt-oss"]))
    cache = model.new_cache(1, 50, "cpu", torch.float32)
    assert [layer.buffers["key"].shape[2] for layer in cache.layers] == [3, 50]


def test_a_bf16_cache_decodes_like_a_bf16_forward() -> None:
    model = build(model_config(), dtype=torch.bfloat16).eval()
    ids = token_ids(1, 16)
    with torch.no_grad():
        expected = model.logits(model(ids).hidden)
        cache = model.new_cache(1, 16, "cpu", torch.bfloat16)
        found = torch.cat([model.logits(model(ids[:, i : i + 1], cache=cache).hidden) for i in range(16)], dim=1)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_a_cache_is_filled_when_blocks_are_recomputed() -> None:
    """Outside no_grad too: the setting is about training and must not change what decoding returns."""
    model = build(model_config(), recompute=True).eval()
    ids = token_ids(1, 6)
    cache = model.new_cache(1, 8, "cpu", torch.float32)
    model(ids[:, :4], cache=cache)
    assert cache.length == 4
    torch.testing.assert_close(model(ids[:, 4:], cache=cache).hidden, model(ids).hidden[:, 4:], rtol=1e-5, atol=1e-5)
