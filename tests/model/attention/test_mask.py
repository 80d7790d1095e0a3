import itertools
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moestro.config import RopeConfig
from moestro.model.attention.mask import (
    CAUSAL,
    AttentionMask,
    Positions,
    attend,
    continuation_mask,
    document_mask,
    positions_of,
)
from moestro.model.rope import rope_tables

from ..helpers import model_config, normal, relative
from .options import OPTIONS, attention


def slow_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One head and one query at a time. allowed: [batch, queries, keys] bool."""
    batch, heads, queries, width = query.shape
    share = heads // key.shape[1]
    rows = []
    for b, h, q in itertools.product(range(batch), range(heads), range(queries)):
        seen = allowed[b, q].nonzero().flatten()
        scores = key[b, h // share, seen] @ query[b, h, q] * (width**-0.5 if scale is None else scale)
        if sinks is not None:
            scores = torch.cat((scores, sinks[h : h + 1]))
        rows.append(scores.softmax(0)[: len(seen)] @ value[b, h // share, seen])
    return torch.stack(rows).view(batch, heads, queries, value.shape[-1])


def causal(batch: int, queries: int, keys: int, window: int = 1000) -> Tensor:
    """[batch, queries, keys]: the queries are the last of the keys' positions."""
    past = keys - queries
    row = torch.tensor([[q + past - window < k <= q + past for k in range(keys)] for q in range(queries)])
    return row.expand(batch, queries, keys)


def inside_documents(documents: Tensor, window: int = 1000) -> Tensor:
    seq = documents.shape[1]
    rows = [
        [[q - window < k <= q and row[k] == row[q] for k in range(seq)] for q in range(seq)]
        for row in documents.tolist()
    ]
    return torch.tensor(rows)


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, -1, -1, -1]])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_causal_attention_equals_the_slow_one(kv_heads: int) -> None:
    query, key, value = normal(2, 4, 9, 6), normal(2, kv_heads, 9, 6, seed=1), normal(2, kv_heads, 9, 6, seed=2)
    expected = slow_attention(query, key, value, causal(2, 9, 9))
    torch.testing.assert_close(attend(query, key, value, CAUSAL), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_document_attention_equals_the_slow_one(kv_heads: int) -> None:
    query, key, value = normal(2, 4, 9, 6), normal(2, kv_heads, 9, 6, seed=1), normal(2, kv_heads, 9, 6, seed=2)
    expected = slow_attention(query, key, value, inside_documents(DOCUMENTS))
    found = attend(query, key, value, document_mask(DOCUMENTS, "sdpa"))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_flex_equals_sdpa(kv_heads: int) -> None:
    query, key, value = normal(2, 4, 9, 8), normal(2, kv_heads, 9, 8, seed=1), normal(2, kv_heads, 9, 8, seed=2)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # uncompiled on purpose
        mask = document_mask(DOCUMENTS, "flex")
        assert mask.block is not None
        found = attend(query, key, value, mask)
    torch.testing.assert_close(found, attend(query, key, value, document_mask(DOCUMENTS, "sdpa")), rtol=1e-5, atol=1e-5)


def test_auto_is_sdpa_on_a_cpu() -> None:
    mask = document_mask(DOCUMENTS, "auto")
    assert mask.block is None
    assert mask.dense is not None
    assert torch.equal(mask.dense[:, 0], inside_documents(DOCUMENTS))


def test_training_with_flex_on_a_cpu() -> None:
    """`attention = "flex"` is a valid setting everywhere, so a step with it must run everywhere."""
    query = normal(2, 2, 9, 8, grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attend(query, query, query, document_mask(DOCUMENTS, "flex")).sum().backward()
    other = query.detach().clone().requires_grad_()
    attend(other, other, other, document_mask(DOCUMENTS, "sdpa")).sum().backward()
    torch.testing.assert_close(query.grad, other.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 1), (1, 7), (3, 7), (6, 7)])
def test_continuation_equals_the_end_of_causal_attention(queries: int, keys: int) -> None:
    query, key, value = normal(2, 4, queries, 6), normal(2, 2, keys, 6, seed=1), normal(2, 2, keys, 6, seed=2)
    mask = continuation_mask(queries, keys, query.device)
    expected = slow_attention(query, key, value, causal(2, queries, keys))
    torch.testing.assert_close(attend(query, key, value, mask), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask", [CAUSAL, document_mask(DOCUMENTS, "sdpa")], ids=["causal", "documents"])
def test_grouped_heads_equal_repeated_heads(mask: AttentionMask) -> None:
    query, key, value = normal(2, 6, 9, 4), normal(2, 2, 9, 4, seed=1, grad=True), normal(2, 2, 9, 4, seed=2, grad=True)
    upstream = normal(2, 6, 9, 4, seed=3)
    grouped = attend(query, key, value, mask)
    repeated = attend(query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1), mask)
    torch.testing.assert_close(grouped, repeated, rtol=1e-5, atol=1e-5)
    for one, other in zip(
        torch.autograd.grad(grouped, [key, value], upstream),
        torch.autograd.grad(repeated, [key, value], upstream),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_bf16_is_close_to_fp32() -> None:
    query, key, value = (normal(2, 4, 9, 8, seed=i, dtype=torch.bfloat16) for i in range(3))
    found = attend(query, key, value, CAUSAL)
    assert found.dtype == torch.bfloat16
    assert relative(found, attend(query.float(), key.float(), value.float(), CAUSAL)) < 1e-2


# Windows, sinks, scales, values of another width


@pytest.mark.parametrize("window", [1, 2, 4, 8, 9, 20])
def test_a_window_equals_the_slow_one(window: int) -> None:
    query, key, value = normal(2, 4, 9, 6), normal(2, 2, 9, 6, seed=1), normal(2, 2, 9, 6, seed=2)
    expected = slow_attention(query, key, value, inside_documents(DOCUMENTS, window))
    dense = document_mask(DOCUMENTS, "sdpa", window)
    torch.testing.assert_close(attend(query, key, value, dense), expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # uncompiled on purpose
        flex = document_mask(DOCUMENTS, "flex", window)
        assert flex.block is not None
        torch.testing.assert_close(attend(query, key, value, flex), expected, rtol=1e-5, atol=1e-5)


def test_a_window_of_flex_attention_without_documents() -> None:
    """One row of document numbers stands for all rows of the batch."""
    config = model_config(sliding_window=3, attention="flex")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mask = positions_of("sliding", config, torch.arange(9).unsqueeze(0), None, None, None).mask
        assert mask.block is not None
        query, key, value = normal(2, 4, 9, 6), normal(2, 2, 9, 6, seed=1), normal(2, 2, 9, 6, seed=2)
        expected = slow_attention(query, key, value, causal(2, 9, 9, 3))
        torch.testing.assert_close(attend(query, key, value, mask), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (1, 3), (3, 5), (6, 8)])
def test_a_window_over_a_cache(queries: int, keys: int) -> None:
    query, key, value = normal(2, 4, queries, 6), normal(2, 2, keys, 6, seed=1), normal(2, 2, keys, 6, seed=2)
    mask = continuation_mask(queries, keys, query.device, 3)
    expected = slow_attention(query, key, value, causal(2, queries, keys, 3))
    torch.testing.assert_close(attend(query, key, value, mask), expected, rtol=1e-5, atol=1e-5)


def masks() -> dict[str, tuple[AttentionMask, Tensor]]:
    """Each kind of mask for 9 keys, and the same as [batch, queries, keys]."""
    return {
        "causal": (CAUSAL, causal(2, 9, 9)),
        "documents": (document_mask(DOCUMENTS, "sdpa", 4), inside_documents(DOCUMENTS, 4)),
        "one query": (continuation_mask(1, 9, DOCUMENTS.device), causal(2, 1, 9)),
        "continued": (continuation_mask(3, 9, DOCUMENTS.device), causal(2, 3, 9)),
    }


@pytest.mark.parametrize("kind", ["causal", "documents", "one query", "continued"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_sinks_equal_the_slow_ones(kind: str, kv_heads: int) -> None:
    """Forward and all gradients; with a scale, and values wider than keys."""
    mask, allowed = masks()[kind]
    shapes = [(2, 4, allowed.shape[1], 6), (2, kv_heads, 9, 6), (2, kv_heads, 9, 7), (4,)]
    leaves = [normal(*shape, seed=i, dtype=torch.float64, grad=True) for i, shape in enumerate(shapes)]
    query, key, value, sinks = leaves
    upstream = normal(2, 4, allowed.shape[1], 7, seed=9, dtype=torch.float64)
    found = attend(query, key, value, mask, 0.7, sinks)
    expected = slow_attention(query, key, value, allowed, 0.7, sinks)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    ours, slow = (torch.autograd.grad(out, leaves, upstream) for out in (found, expected))
    for one, other in zip(ours, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_sinks_of_flex_attention() -> None:
    query, key, value, sinks = normal(2, 4, 9, 8), normal(2, 2, 9, 8, seed=1), normal(2, 2, 9, 4, seed=2), normal(4)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # uncompiled on purpose
        found = attend(query, key, value, document_mask(DOCUMENTS, "flex", 3), 0.7, sinks)
    expected = slow_attention(query, key, value, inside_documents(DOCUMENTS, 3), 0.7, sinks)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_positions_of_layers() -> None:
    """A mask a type, none where the window holds all; the sliding layers' own positions."""
    config = model_config(**OPTIONS["gpt-oss"])
    ids = torch.arange(9).unsqueeze(0)
    full, sliding = (positions_of(kind, config, ids, None, None, None) for kind in ("full", "sliding"))
    assert full.mask is CAUSAL
    assert sliding.mask.dense is not None
    assert torch.equal(sliding.mask.dense[0], causal(1, 9, 9, 3))
    tables = rope_tables(ids, 4, RopeConfig(theta=100.0))
    assert torch.equal(torch.stack((sliding.cos, sliding.sin)), torch.stack(tables))
    assert not torch.equal(full.cos, sliding.cos)
    short = positions_of("sliding", config, ids[:, :3], None, None, None)
    assert short.mask is CAUSAL
    packed = positions_of("sliding", config, ids.expand(2, -1), DOCUMENTS, None, None)
    assert packed.mask.dense is not None
    assert torch.equal(packed.mask.dense[:, 0], inside_documents(DOCUMENTS, 3))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 4), st.sampled_from(sorted(OPTIONS)))
def test_packed_documents_equal_each_document_alone(lengths: list[int], padding: int, name: str) -> None:
    """Forward, and gradients by the input and the weights."""
    config = model_config(**OPTIONS[name])
    layer = attention(config)
    documents = torch.tensor([[i for i, length in enumerate(lengths) for _ in range(length)] + [-1] * padding])
    places = torch.tensor([[p for length in lengths for p in range(length)] + [0] * padding])
    x = normal(1, documents.shape[1], 16, grad=True)
    upstream = normal(1, documents.shape[1], 16, seed=1)
    upstream[:, sum(lengths) :] = 0

    def positions(position_ids: Tensor, document_ids: Tensor | None) -> Positions:
        return positions_of(config.layer_type(0), config, position_ids, document_ids, None, None)

    packed = layer(x, positions(places, documents))
    packed.backward(upstream)
    found = [p.grad for p in [x, *layer.parameters()]]
    layer.zero_grad()
    y = x.detach().clone().requires_grad_()
    start = 0
    for length in lengths:
        alone = layer(y[:, start : start + length], positions(torch.arange(length).unsqueeze(0), None))
        torch.testing.assert_close(packed[:, start : start + length], alone, rtol=1e-5, atol=1e-5)
        alone.backward(upstream[:, start : start + length])
        start += length
    for one, other in zip(found, [y.grad, *(p.grad for p in layer.parameters())], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
