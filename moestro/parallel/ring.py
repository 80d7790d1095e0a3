"""Ring attention (arXiv 2310.01889): keys and values pass from rank to rank; each adds what its queries see of them.

The softmax over keys that come one block at a time is kept as (output so far, log of the sum of exponentials so far).
Backward sends keys and values around once more, computes the probabilities again, and lets the gradients of keys and
values travel behind them, home to the rank that holds them.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moestro.model.ops import product_dtype

# Queries of one block of scores: [heads, ROWS, chunk] fp32 numbers are what a block needs.
ROWS = 1024

Block = tuple[slice, slice, Tensor | None]


def chunks_of(cp: int, rank: int) -> tuple[int, ...]:
    """The chunks of a sequence that cp rank `rank` holds, in order."""
    return (rank, 2 * cp - 1 - rank) if cp > 1 else (0,)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_ids: Tensor | None,
    group: dist.ProcessGroup,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention, inside documents, of the queries here to the keys of all ranks of the group.

    query: [batch, heads, positions here, head_dim]; key: [batch, kv_heads, positions here, head_dim], value: the same
    with a head_dim of its own, of the chunks `chunks_of(group)`; document_ids: [batch, all positions] or None. The
    rest is as `mask.attend` and `AttentionMask` have it; returns [batch, heads, positions here, head_dim of values].
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out, log_sum = _Ring.apply(query, key, value, document_ids, group, window, scale)
    if sinks is None:
        result: Tensor = out
        return result
    # With one more term in the softmax's sum, all that there was is multiplied by sum / (sum + exp(sink)).
    share = (log_sum - sinks[:, None, None]).sigmoid()
    return (out * share).to(query.dtype)


class _Ring(torch.autograd.Function):
    """Returns the output and the log of the softmax's sums, [batch, heads, positions here, 1]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        document_ids: Tensor | None,
        group: dist.ProcessGroup,
        window: int | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        grouped = _group_heads(query, key)
        sums = torch.promote_types(grouped.dtype, torch.float32)
        out = torch.zeros((*grouped.shape[:-1], value.shape[-1]), dtype=sums, device=query.device)
        log_sum = torch.full((*grouped.shape[:-1], 1), -torch.inf, dtype=sums, device=query.device)
        for source, kv in _around(torch.cat((key, value), -1), group):
            k, v = kv.to(grouped.dtype).tensor_split((key.shape[-1],), -1)
            for rows, columns, mask in _blocks(source, key.shape[2], document_ids, window, query.device, group):
                scores = _scores(grouped[..., rows, :], k[:, :, columns], mask, scale, sums)
                log_block = scores.logsumexp(-1, keepdim=True)
                log_new = torch.logaddexp(log_sum[..., rows, :], log_block)
                share = _times(scores.sub_(log_new).exp_(), v[:, :, columns], sums)
                out[..., rows, :] = out[..., rows, :] * (log_sum[..., rows, :] - log_new).exp_() + share
                log_sum[..., rows, :] = log_new
        result = out.flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, document_ids, result, log_sum)
        ctx.group, ctx.window, ctx.scale = group, window, scale
        return result, log_sum.flatten(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_log_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        query, key, value, document_ids, out, log_sum = ctx.saved_tensors
        grouped, sums = _group_heads(query, key), log_sum.dtype
        grad_out = _group_heads(grad, key)
        inner = (grad.to(sums) * out).sum(-1, keepdim=True).view_as(log_sum)
        if grad_log_sum is not None:  # the log of a sum of exponentials changes with a score by its probability
            inner.sub_(grad_log_sum.view_as(inner))
        grad_query = torch.zeros_like(grouped, dtype=sums)
        travelling: Tensor | None = None
        pending: list[dist.Work] = []
        width = key.shape[-1]
        for source, kv in _around(torch.cat((key, value), -1), ctx.group):
            k, v = kv.to(grouped.dtype).tensor_split((width,), -1)
            grad_kv = torch.zeros(kv.shape, dtype=sums, device=key.device)
            for rows, columns, mask in _blocks(source, key.shape[2], document_ids, ctx.window, key.device, ctx.group):
                q, g = grouped[..., rows, :], grad_out[..., rows, :]
                keys, values = k[:, :, columns], v[:, :, columns]
                p = _scores(q, keys, mask, ctx.scale, sums).sub_(log_sum[..., rows, :]).exp_()
                grad_scores = _times(g, values.mT, sums).sub_(inner[..., rows, :]).mul_(p).mul_(ctx.scale)
                grad_kv[:, :, columns, :width] += _transposed_times(grad_scores, q)
                grad_kv[:, :, columns, width:] += _transposed_times(p, g)
                grad_query[..., rows, :] += _times(grad_scores, keys, sums)
            # What the ranks before have added for these keys and values arrives only now, and goes on with ours.
            for request in pending:
                request.wait()
            sent = grad_kv if travelling is None else grad_kv.add_(travelling)
            travelling = torch.empty_like(sent)
            pending = _pass_on(sent, travelling, ctx.group)
        for request in pending:
            request.wait()
        assert travelling is not None
        grad_key, grad_value = travelling.to(key.dtype).tensor_split((width,), -1)
        return grad_query.flatten(1, 2).to(query.dtype), grad_key, grad_value, None, None, None, None


def _around(kv: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """(rank, its keys and values) of every rank, this one's first; the next travel while the caller computes."""
    ranks, rank = group.size(), group.rank()
    for step in range(ranks):
        arriving = torch.empty_like(kv)
        pending = _pass_on(kv, arriving, group) if step < ranks - 1 else []
        yield (rank - step) % ranks, kv
        for request in pending:
            request.wait()
        kv = arriving


def _pass_on(send: Tensor, receive: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """Start to send to the next rank and to receive from the one before."""
    ranks, rank = group.size(), group.rank()
    both = [
        dist.P2POp(dist.isend, send, group=group, group_peer=(rank + 1) % ranks),
        dist.P2POp(dist.irecv, receive, group=group, group_peer=(rank - 1) % ranks),
    ]
    # Every other rank receives first, so that nobody waits in a circle where sends wait for their receivers.
    requests: list[dist.Work] = dist.batch_isend_irecv(both if rank % 2 == 0 else both[::-1])
    return requests


def _blocks(
    source: int,
    positions: int,
    document_ids: Tensor | None,
    window: int | None,
    device: torch.device,
    group: dist.ProcessGroup,
) -> Iterator[Block]:
    """What the queries here see of rank `source`'s keys: (queries, keys, which see which or None for all).

    Slices count the positions that a rank holds. A query's own block comes first, so that no sum is ever empty.
    """
    mine, theirs = chunks_of(group.size(), group.rank()), chunks_of(group.size(), source)
    length = positions // 2
    pairs = [(i, j) for i in range(2) for j in range(2) if theirs[j] <= mine[i]]
    for i, j in sorted(pairs, key=lambda pair: mine[pair[0]] != theirs[pair[1]]):
        ahead = (mine[i] - theirs[j]) * length  # of the first query before the first key
        for start in range(0, length, ROWS):
            stop = min(start + ROWS, length)
            last = min(ahead + stop, length)
            first = 0 if window is None else max(0, ahead + start - window + 1)
            if first >= last:
                continue
            mask = _mask(ahead + start - first, (stop - start, last - first), window, device)
            if document_ids is not None:
                q = document_ids[:, mine[i] * length + start : mine[i] * length + stop]
                k = document_ids[:, theirs[j] * length + first : theirs[j] * length + last]
                same = (q.unsqueeze(2) == k.unsqueeze(1))[:, None, None]
                mask = same if mask is None else mask & same
            yield slice(i * length + start, i * length + stop), slice(j * length + first, j * length + last), mask


def _mask(ahead: int, shape: tuple[int, int], window: int | None, device: torch.device) -> Tensor | None:
    """[queries, keys], the first query `ahead` of the first key, or None where all queries see all keys."""
    queries, keys = shape
    if ahead >= keys - 1 and (window is None or ahead + queries - 1 < window):
        return None
    mask = torch.ones(shape, dtype=torch.bool, device=device).tril_(ahead)
    return mask if window is None else mask.triu_(ahead - window + 1)


def _group_heads(x: Tensor, key: Tensor) -> Tensor:
    """[batch, heads, rows, n] → [batch, kv_heads, heads of a kv head, rows, n], in the dtype for products."""
    return x.to(product_dtype(x)).unflatten(1, (key.shape[1], -1))


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """scale · q k, [batch, kv_heads, group, rows, keys] in dtype; -inf where the query does not see the key."""
    # A product in bf16 would round the scores before the softmax, as no fused attention does.
    scores = _times(query, key.mT.to(dtype), dtype).mul_(scale)
    return scores if mask is None else scores.masked_fill_(~mask, -torch.inf)


def _times(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """x [batch, kv_heads, group, rows, n] @ y [batch, kv_heads, n, m] in y's dtype; nothing is repeated."""
    product = x.flatten(2, 3).to(y.dtype) @ y
    return product.view(*x.shape[:-1], y.shape[-1]).to(dtype)


def _transposed_times(x: Tensor, y: Tensor) -> Tensor:
    """Σ over the group of xᵀ y: [batch, kv_heads, group, rows, n], [..., rows, m] → [batch, kv_heads, n, m]."""
    return x.flatten(2, 3).to(y.dtype).mT @ y.flatten(2, 3)
