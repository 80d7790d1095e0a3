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
    query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None, group: dist.ProcessGroup
) -> Tensor:
    """Causal attention, inside documents, of the queries here to the keys of all ranks of the group.

    query: [batch, heads, positions here, head_dim]; key, value: [batch, kv_heads, positions here, head_dim], of the
    chunks `chunks_of(group)`; document_ids: [batch, all positions] or None; returns like query.
    """
    result: Tensor = _Ring.apply(query, key, value, document_ids, group)
    return result


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None, group: dist.ProcessGroup
    ) -> Tensor:
        grouped = _group_heads(query, key)
        sums = torch.promote_types(grouped.dtype, torch.float32)
        out = torch.zeros_like(grouped, dtype=sums)
        log_sum = torch.full((*grouped.shape[:-1], 1), -torch.inf, dtype=sums, device=query.device)
        for source, (k, v) in _around(torch.stack((key, value)), group):
            for rows, columns, mask in _blocks(source, key.shape[2], document_ids, query.device, group):
                scores = _scores(grouped[..., rows, :], k[:, :, columns].to(grouped.dtype), mask, sums)
                log_block = scores.logsumexp(-1, keepdim=True)
                log_new = torch.logaddexp(log_sum[..., rows, :], log_block)
                share = _times(scores.sub_(log_new).exp_(), v[:, :, columns].to(grouped.dtype), sums)
                out[..., rows, :] = out[..., rows, :] * (log_sum[..., rows, :] - log_new).exp_() + share
                log_sum[..., rows, :] = log_new
        result = out.flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, document_ids, result, log_sum)
        ctx.group = group
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, document_ids, out, log_sum = ctx.saved_tensors
        grouped, sums = _group_heads(query, key), log_sum.dtype
        grad_out = _group_heads(grad, key)
        inner = (grad.to(sums) * out).sum(-1, keepdim=True).view_as(log_sum)
        grad_query = torch.zeros_like(grouped, dtype=sums)
        travelling: Tensor | None = None
        pending: list[dist.Work] = []
        for source, (k, v) in _around(torch.stack((key, value)), ctx.group):
            grad_kv = torch.zeros((2, *key.shape), dtype=sums, device=key.device)
            for rows, columns, mask in _blocks(source, key.shape[2], document_ids, key.device, ctx.group):
                q, g = grouped[..., rows, :], grad_out[..., rows, :]
                keys, values = k[:, :, columns].to(q.dtype), v[:, :, columns].to(q.dtype)
                p = _scores(q, keys, mask, sums).sub_(log_sum[..., rows, :]).exp_()
                grad_scores = _times(g, values.mT, sums).sub_(inner[..., rows, :]).mul_(p).mul_(q.shape[-1] ** -0.5)
                grad_kv[1, :, :, columns] += _transposed_times(p, g)
                grad_kv[0, :, :, columns] += _transposed_times(grad_scores, q)
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
        grad_key, grad_value = travelling.to(key.dtype).unbind(0)
        return grad_query.flatten(1, 2).to(query.dtype), grad_key, grad_value, None, None


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
    source: int, positions: int, document_ids: Tensor | None, device: torch.device, group: dist.ProcessGroup
) -> Iterator[Block]:
    """What the queries here see of rank `source`'s keys: (queries, keys, which see which or None for all).

    Slices count the positions that a rank holds. A query's own block comes first, so that no sum is ever empty.
    """
    mine, theirs = chunks_of(group.size(), group.rank()), chunks_of(group.size(), source)
    length = positions // 2
    pairs = [(i, j) for i in range(2) for j in range(2) if theirs[j] <= mine[i]]
    for i, j in sorted(pairs, key=lambda pair: mine[pair[0]] != theirs[pair[1]]):
        own = mine[i] == theirs[j]
        for start in range(0, length, ROWS):
            stop = min(start + ROWS, length)
            keys = stop if own else length
            mask = None
            if document_ids is not None:
                q = document_ids[:, mine[i] * length + start : mine[i] * length + stop]
                k = document_ids[:, theirs[j] * length : theirs[j] * length + keys]
                mask = (q.unsqueeze(2) == k.unsqueeze(1))[:, None, None]
            elif own:
                mask = torch.ones(stop - start, keys, dtype=torch.bool, device=device)
            if own and mask is not None:
                mask.tril_(start)
            yield slice(i * length + start, i * length + stop), slice(j * length, j * length + keys), mask


def _group_heads(x: Tensor, key: Tensor) -> Tensor:
    """[batch, heads, rows, n] → [batch, kv_heads, heads of a kv head, rows, n], in the dtype for products."""
    return x.to(product_dtype(x)).unflatten(1, (key.shape[1], -1))


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
    """q k / sqrt(d), [batch, kv_heads, group, rows, keys] in dtype; -inf where the query does not see the key."""
    # A product in bf16 would round the scores before the softmax, as no fused attention does.
    scores = _times(query, key.mT.to(dtype), dtype).mul_(query.shape[-1] ** -0.5)
    return scores if mask is None else scores.masked_fill_(~mask, -torch.inf)


def _times(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """x [batch, kv_heads, group, rows, n] @ y [batch, kv_heads, n, m] in y's dtype; nothing is repeated."""
    product = x.flatten(2, 3).to(y.dtype) @ y
    return product.view(*x.shape[:-1], y.shape[-1]).to(dtype)


def _transposed_times(x: Tensor, y: Tensor) -> Tensor:
    """Σ over the group of xᵀ y: [batch, kv_heads, group, rows, n], [..., rows, m] → [batch, kv_heads, n, m]."""
    return x.flatten(2, 3).to(y.dtype).mT @ y.flatten(2, 3)
