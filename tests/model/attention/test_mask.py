import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moestro.model.attention.gqa import GroupedQueryAttention
from moestro.model.attention.mask import CAUSAL, AttentionMask, attend, continuation_mask, document_mask
from moestro.model.rope import rope_tables

from ..helpers import model_config, normal, relative


def slow_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """One head and one query at a time. allowed: [batch, queries, keys] bool."""
    batch, heads, queries, width = query.shape
    share = heads // key.shape[1]
    out = torch.empty_like(query)
    for b in range(batch):
        for h in range(heads):
            for q in range(queries):
                seen = allowed[b, q].nonzero().flatten()
                scores = key[b, h // share, seen] @ query[b, h, q] / width**0.5
                out[b, h, q] = scores.softmax(0) @ value[b, h // share, seen]
    return out


def causal(batch: int, queries: int, keys: int) -> Tensor:
    """[batch, queries, keys]: the queries are the last of the keys' positions."""
    past = keys - queries
    row = torch.tensor([[k <= q + past for k in range(keys)] for q in range(queries)])
    return row.expand(batch, queries, keys)


def inside_documents(documents: Tensor) -> Tensor:
    seq = documents.shape[1]
    pairs = [[[k <= q and row[k] == row[q] for k in range(seq)] for q in range(seq)] for row in documents.tolist()]
    return torch.tensor(pairs)


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


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 4), st.booleans())
def test_packed_documents_equal_each_document_alone(lengths: list[int], padding: int, qk_norm: bool) -> None:
    """Forward, and gradients by the input and the weights."""
    config = model_config(qk_norm=qk_norm)
    torch.manual_seed(0)
    layer = GroupedQueryAttention(config)
    documents = [i for i, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    positions = [p for length in lengths for p in range(length)] + [0] * padding
    x = normal(1, len(documents), 16, grad=True)
    upstream = normal(1, len(documents), 16, seed=1)
    upstream[:, sum(lengths) :] = 0

    def rope(position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return rope_tables(position_ids, config.resolved_head_dim, config.rope_theta)

    packed = layer(x, rope(torch.tensor([positions])), document_mask(torch.tensor([documents]), "sdpa"))
    packed.backward(upstream)
    found = [p.grad for p in [x, *layer.parameters()]]
    layer.zero_grad()
    y = x.detach().clone().requires_grad_()
    start = 0
    for length in lengths:
        alone = layer(y[:, start : start + length], rope(torch.arange(length).unsqueeze(0)), CAUSAL)
        torch.testing.assert_close(packed[:, start : start + length], alone, rtol=1e-5, atol=1e-5)
        alone.backward(upstream[:, start : start + length])
        start += length
    for one, other in zip(found, [y.grad, *(p.grad for p in layer.parameters())], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
