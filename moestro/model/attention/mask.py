"""Which positions may see which: causal, and never across packed documents."""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from moestro.model.ops import product_dtype
from moestro.model.shards import SequenceShard


@dataclass(frozen=True)
class AttentionMask:
    """A mask computed once per batch and used by every layer."""

    causal: bool = True  # the first query stands at the first key, and no query looks ahead
    dense: Tensor | None = None  # [batch, 1, queries, keys] bool, True where a query may look; replaces `causal`
    block: BlockMask | None = None  # the same for flex attention
    # Queries and keys are spread over ranks; with `documents` [batch, all positions] or None this replaces the rest.
    context: SequenceShard | None = None
    documents: Tensor | None = None


CAUSAL = AttentionMask()


def document_mask(document_ids: Tensor, kind: Literal["auto", "sdpa", "flex"]) -> AttentionMask:
    """Causal attention inside each document. document_ids: [batch, seq]; equal numbers mark one document."""
    batch, seq = document_ids.shape
    # Flex attention has no backward on a CPU; the dense mask says the same.
    flex_runs = document_ids.device.type != "cpu" or not torch.is_grad_enabled()
    if (kind == "flex" and flex_runs) or (kind == "auto" and document_ids.is_cuda):

        def allowed(b: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (document_ids[b, q] == document_ids[b, k])

        block = create_block_mask(allowed, batch, None, seq, seq, device=document_ids.device)
        return AttentionMask(causal=False, block=block)
    same = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)
    return AttentionMask(causal=False, dense=same.tril_().unsqueeze(1))


def continuation_mask(queries: int, keys: int, device: torch.device) -> AttentionMask:
    """Causal attention for `queries` new positions at the end of `keys` cached ones."""
    if queries == keys:
        return CAUSAL
    if queries == 1:
        return AttentionMask(causal=False)
    dense = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    return AttentionMask(dense=dense[None, None], causal=False)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask) -> Tensor:
    """softmax(q k / sqrt(d)) v with grouped key-value heads.

    query: [batch, heads, queries, head_dim]; key, value: [batch, kv_heads, keys, head_dim]; returns like query.
    """
    if mask.context is not None:
        return mask.context.attend(query, key, value, mask.documents)
    dtype, wide = query.dtype, product_dtype(query)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    grouped = query.shape[1] != key.shape[1]
    if mask.block is not None:
        out = _flex(query.device.type)(query, key, value, block_mask=mask.block, enable_gqa=grouped)
    else:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask.dense, is_causal=mask.causal, enable_gqa=grouped
        )
    return out.to(dtype)


@cache
def _flex(device_type: str) -> Any:
    # Uncompiled flex attention materialises all scores; on CPU that is still the only path that is always there.
    return flex_attention if device_type == "cpu" else torch.compile(flex_attention)
