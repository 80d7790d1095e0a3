"""Which positions may see which: causal, and never across packed documents."""

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from moestro.config import ModelConfig
from moestro.config.model import LayerType
from moestro.model.ops import product_dtype
from moestro.model.rope import rope_tables
from moestro.model.shards import SequenceShard


@dataclass(frozen=True)
class AttentionMask:
    """A mask computed once per batch and used by every layer of one type."""

    causal: bool = True  # the first query stands at the first key, and no query looks ahead
    dense: Tensor | None = None  # [batch or 1, 1, queries, keys] bool, True where a query may look; replaces `causal`
    block: BlockMask | None = None  # the same for flex attention
    # Queries and keys are spread over ranks; with `documents` [batch, all positions] or None, and `window`, the tokens
    # that one sees, itself included (None: all before it), this replaces the rest.
    context: SequenceShard | None = None
    documents: Tensor | None = None
    window: int | None = None


CAUSAL = AttentionMask()


@dataclass(frozen=True)
class Positions:
    """Where the tokens of a batch stand, for the layers of one type."""

    position_ids: Tensor  # [batch or 1, seq] inside each document; under context parallelism, those attention has here
    cos: Tensor  # [batch or 1, 1, seq, rotated dims / 2] fp32, see `rope_tables`
    sin: Tensor
    mask: AttentionMask
    document_ids: Tensor | None = None  # [batch, seq], negative at padding; None: one document a row


def document_mask(
    document_ids: Tensor, kind: Literal["auto", "sdpa", "flex"], window: int | None = None
) -> AttentionMask:
    """Causal attention inside each document, to the last `window` tokens or to all.

    document_ids: [batch or 1, seq]; equal numbers mark one document.
    """
    batch, seq = document_ids.shape
    # Flex attention has no backward on a CPU; the dense mask says the same.
    flex_runs = document_ids.device.type != "cpu" or not torch.is_grad_enabled()
    if (kind == "flex" and flex_runs) or (kind == "auto" and document_ids.is_cuda):

        def allowed(b: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            near = q >= k if window is None else (q >= k) & (q - k < window)
            row = b % batch  # b counts the queries' rows, for all of which one of ids may stand
            return near & (document_ids[row, q] == document_ids[row, k])

        block = create_block_mask(allowed, batch, None, seq, seq, device=document_ids.device)
        return AttentionMask(causal=False, block=block)
    same = (document_ids.unsqueeze(2) == document_ids.unsqueeze(1)).tril_()
    if window is not None:
        same.triu_(1 - window)
    return AttentionMask(causal=False, dense=same.unsqueeze(1))


def continuation_mask(queries: int, keys: int, device: torch.device, window: int | None = None) -> AttentionMask:
    """Causal attention for `queries` new positions at the end of `keys`, of which the first sees all.

    With a window, the keys before the first query must be fewer than it: the others are not there (see `LayerCache`).
    """
    if queries == keys and (window is None or window >= keys):
        return CAUSAL
    if queries == 1:
        return AttentionMask(causal=False)
    dense = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    if window is not None:
        dense.triu_(keys - queries - window + 1)
    return AttentionMask(dense=dense[None, None], causal=False)


def positions_of(
    kind: LayerType,
    config: ModelConfig,
    position_ids: Tensor,
    document_ids: Tensor | None,
    past: int | None,
    shard: SequenceShard | None,
) -> Positions:
    """For the layers of type `kind`.

    Args:
        past: positions in the cache; None without one.
    """
    rope = config.rope_of(kind)
    tables = rope_tables(position_ids, config.rotated_dims(rope), rope)
    window = config.sliding_window if kind == "sliding" else None
    mask = mask_of(config, position_ids, document_ids, window, past, shard)
    return Positions(position_ids, *tables, mask, document_ids)


def mask_of(
    config: ModelConfig,
    position_ids: Tensor,
    document_ids: Tensor | None,
    window: int | None,
    past: int | None,
    shard: SequenceShard | None,
) -> AttentionMask:
    """For layers in which a token sees the last `window` ones, or all; the other arguments as in `positions_of`."""
    seq = position_ids.shape[1]
    if shard is not None and shard.splits_attention:
        return AttentionMask(context=shard, documents=document_ids, window=window)
    if past is not None:
        held = past if window is None else min(past, window - 1)
        return continuation_mask(seq, held + seq, position_ids.device, window)
    if document_ids is None and window is not None and window < seq:
        document_ids = position_ids.new_zeros(1, seq)
    return CAUSAL if document_ids is None else document_mask(document_ids, config.attention, window)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AttentionMask,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale · q k) v with grouped key-value heads.

    Args:
        query: [batch, heads, queries, head_dim].
        key: [batch, kv_heads, keys, head_dim].
        value: [batch, kv_heads, keys, its head_dim].
        scale: None: 1 / sqrt(head_dim).
        sinks: [heads], one more score for each softmax whose share gives nothing (GPT-OSS).
    Returns:
        [batch, heads, queries, head_dim of values], in query's dtype.
    """
    if mask.context is not None:
        return mask.context.attend(query, key, value, mask.documents, mask.window, scale, sinks)
    dtype, wide = query.dtype, product_dtype(query)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if mask.block is not None:
        return _attend_flex(query, key, value, mask.block, scale, sinks).to(dtype)
    dense, causal, width = mask.dense, mask.causal, value.shape[-1]
    if sinks is not None:
        query, key, value = _add_sinks(query, key, value, scale, sinks.to(wide), causal)
        dense = None if dense is None else F.pad(dense, (1, 0), value=True)
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=dense, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    if sinks is not None:
        out = out[:, :, int(causal) :, :width]
    return out.to(dtype)


def _add_sinks(
    query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with a first key whose score with each query is the sink and whose value is 0.

    One dimension more holds sink / scale in queries, 1 in that key and 0 in the others, so that any kernel will do.
    Causal attention gets a first query too, for that key; its output means nothing.
    """
    column = (sinks / scale)[None, :, None, None].expand(*query.shape[:3], 1)
    query = F.pad(torch.cat((query, column), -1), (0, 0, int(causal), 0))
    first = key.new_zeros(*key.shape[:2], 1, key.shape[-1] + 1)
    first[..., -1] = 1
    return query, torch.cat((first, F.pad(key, (0, 1))), 2), F.pad(value, (0, 1, 1, 0))


def _attend_flex(
    query: Tensor, key: Tensor, value: Tensor, block: BlockMask, scale: float, sinks: Tensor | None
) -> Tensor:
    flex, grouped = _flex(query.device.type), query.shape[1] != key.shape[1]
    if sinks is None:
        out: Tensor = flex(query, key, value, block_mask=block, scale=scale, enable_gqa=grouped)
        return out
    out, aux = flex(
        query, key, value, block_mask=block, scale=scale, enable_gqa=grouped, return_aux=AuxRequest(lse=True)
    )
    return out * (aux.lse - sinks[:, None]).sigmoid().unsqueeze(-1)


@cache
def _flex(device_type: str) -> Any:
    # Uncompiled flex attention materialises all scores; on CPU that is still the only path that is always there.
    return flex_attention if device_type == "cpu" else torch.compile(flex_attention)
