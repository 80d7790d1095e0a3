import pytest
import torch

from moestro.model.attention.cache import KVCache

from ..helpers import build, model_config, normal, token_ids

LENGTH = 72


def test_a_layer_cache_returns_all_entries_so_far() -> None:
    cache = KVCache(model_config(), batch=2, max_len=8, device="cpu", dtype=torch.float32)
    assert (len(cache.layers), cache.length, cache.max_len) == (2, 0, 8)
    keys, values = normal(2, 2, 8, 4), normal(2, 2, 8, 4, seed=1)
    for start, end in ((0, 3), (3, 4), (4, 8)):
        key, value = cache.layers[0].append(keys[:, :, start:end], values[:, :, start:end])
        assert torch.equal(key, keys[:, :, :end])
        assert torch.equal(value, values[:, :, :end])
        assert cache.length == end
    assert cache.layers[1].length == 0


def test_a_full_cache_takes_nothing_more() -> None:
    cache = KVCache(model_config(), batch=1, max_len=4, device="cpu", dtype=torch.float32)
    with pytest.raises(RuntimeError):
        cache.layers[0].append(normal(1, 2, 5, 4), normal(1, 2, 5, 4))


@pytest.mark.parametrize("chunks", [[1] * LENGTH, [5, 1, 1, 30, 3, 1, 31], [LENGTH]], ids=["single", "chunks", "all"])
@pytest.mark.parametrize(
    "moe", [None, {"num_shared_experts": 1}, {"router": {"score": "sigmoid"}, "first_k_dense": 1}], ids=str
)
def test_decoding_equals_the_full_forward(chunks: list[int], moe: dict[str, object] | None) -> None:
    assert sum(chunks) == LENGTH
    model = build(model_config(moe)).eval()
    ids = token_ids(2, LENGTH)
    with torch.no_grad():
        expected = model.logits(model(ids).hidden)
        cache = KVCache(model.config, 2, LENGTH + 3, "cpu", torch.float32)
        out, start = [], 0
        for size in chunks:
            out.append(model.logits(model(ids[:, start : start + size], cache=cache).hidden))
            start += size
            assert cache.length == start
    found = torch.cat(out, dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def test_a_bf16_cache_decodes_like_a_bf16_forward() -> None:
    model = build(model_config(), dtype=torch.bfloat16).eval()
    ids = token_ids(1, 16)
    with torch.no_grad():
        expected = model.logits(model(ids).hidden)
        cache = KVCache(model.config, 1, 16, "cpu", torch.bfloat16)
        found = torch.cat([model.logits(model(ids[:, i : i + 1], cache=cache).hidden) for i in range(16)], dim=1)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_a_cache_is_filled_when_blocks_are_recomputed() -> None:
    """Outside no_grad too: the setting is about training and must not change what decoding returns."""
    model = build(model_config(), recompute=True).eval()
    ids = token_ids(1, 6)
    cache = KVCache(model.config, 1, 8, "cpu", torch.float32)
    model(ids[:, :4], cache=cache)
    assert cache.length == 4
    torch.testing.assert_close(model(ids[:, 4:], cache=cache).hidden, model(ids).hidden[:, 4:], rtol=1e-5, atol=1e-5)
