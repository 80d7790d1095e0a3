"""Collectives that autograd knows, over a group that may be `None`: a group of one, where they do nothing.

Gradients are sums: the backward of a gather is a reduce-scatter and the other way round. Nothing here divides.

On CPUs, short messages travel by gloo's all-to-all, which is one exchange where its other collectives are a chain of
them: about twice as fast on 4 and 8 ranks of two cores, and deterministic in the order of ranks (docs/benchmarks.md).
"""

from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

Group: TypeAlias = dist.ProcessGroup | None

SHORT_BYTES = 2**18  # of a message, above which the all-to-all's copies cost more than the chain

# Newer PyTorch renames the two and warns at the old names; 2.11 has only those.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def size_of(group: Group) -> int:
    return 1 if group is None else group.size()


def rank_in(group: Group) -> int:
    return 0 if group is None else group.rank()


def all_reduce(x: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce x in place over the group and return it; no gradient."""
    if group is None:
        return x
    if _is_short(x) and op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        everyone = x.new_empty((group.size(), *x.shape))
        all_gather_into(everyone, x.contiguous(), group)
        return x.copy_(everyone.sum(0) if op == dist.ReduceOp.SUM else everyone.amax(0))
    dist.all_reduce(x, op=op, group=group)
    return x


def all_gather_into(out: Tensor, x: Tensor, group: Group) -> None:
    """Fill `out` with the ranks' equally long x, in order of rank; both contiguous; no gradient."""
    out, x = out.view(-1), x.view(-1)
    if group is None:
        out.copy_(x)
    elif _is_short(out):
        dist.all_to_all_single(out, x.repeat(group.size()), group=group)
    else:
        _all_gather_single(out, x, group=group)


def reduce_scatter_into(out: Tensor, x: Tensor, group: Group) -> None:
    """Add the ranks' x and fill `out` with this rank's part; both contiguous; no gradient."""
    out, x = out.view(-1), x.view(-1)
    if group is None:
        out.copy_(x)
    elif _is_short(x):
        parts = torch.empty_like(x)
        dist.all_to_all_single(parts, x, group=group)
        torch.sum(parts.view(group.size(), -1), 0, out=out)
    else:
        _reduce_scatter_single(out, x, group=group)


def _is_short(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.nbytes <= SHORT_BYTES


def gather_list(x: Tensor, group: Group) -> list[Tensor]:
    """x of every rank, in order of rank; equal shapes; no gradient."""
    if group is None:
        return [x]
    out = x.new_empty((group.size(), *x.shape))
    all_gather_into(out, x.contiguous(), group)
    return list(out.unbind(0))


def all_gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Lay the ranks' x end to end along `dim`; backward adds the ranks' gradients and gives each its part."""
    result: Tensor = x if group is None else _AllGather.apply(x, dim, group)
    return result


def reduce_scatter(x: Tensor, dim: int, group: Group) -> Tensor:
    """Add the ranks' x and give each its part along `dim`, which the group's size must divide."""
    result: Tensor = x if group is None else _ReduceScatter.apply(x, dim, group)
    return result


def all_to_all(x: Tensor, receive: list[int], send: list[int], group: Group) -> Tensor:
    """Send `send[i]` consecutive rows of x to rank i and return the `receive[i]` rows from each, in order of rank."""
    result: Tensor = x if group is None else _AllToAll.apply(x, receive, send, group)
    return result


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _scatter(grad, ctx.dim, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.dim, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.receive, ctx.send, ctx.group = receive, send, group
        return _exchange(x, receive, send, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grad, ctx.send, ctx.receive, ctx.group), None, None, None


def _gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty((group.size() * front.shape[0], *front.shape[1:]))
    all_gather_into(out, front, group)
    return out.movedim(0, dim)


def _scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    front = x.movedim(dim, 0).contiguous()
    out = front.new_empty((front.shape[0] // group.size(), *front.shape[1:]))
    reduce_scatter_into(out, front, group)
    return out.movedim(0, dim)


def _exchange(x: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty((sum(receive), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out
