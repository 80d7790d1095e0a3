"""ZeRO-1: parameters laid end to end in one buffer, of which each rank of a group updates an equal slice."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from moestro.parallel.comm import Group, all_gather_into, all_reduce, rank_in, reduce_scatter_into, size_of

ALIGNMENT_BYTES = 16  # of every parameter and slice: what grouped products and vector loads want
BUCKET_BYTES = 32 << 20  # gradients added up in one collective: enough to fill a link, little beside a model


@dataclass(frozen=True)
class Span:
    """Elements first … last - 1 of a flattened tensor are `rank`'s, from `offset` of what that rank holds."""

    rank: int
    first: int
    last: int
    offset: int


class FlatShard:
    """Parameters of one dtype and device whose gradients `group` adds up.

    Their `data` and `grad` become views of two buffers, and must stay that: backward adds to `grad` in place, and only
    `zero_grad` clears it. `shard` is this rank's slice as a parameter of its own, for an optimizer to step; its `grad`
    is a view as well.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group) -> None:
        self.parameters, self.group = list(parameters), group
        unit = ALIGNMENT_BYTES // parameters[0].element_size()
        self.starts, end = [], 0
        for parameter in parameters:
            self.starts.append(end)
            end += -(-parameter.numel() // unit) * unit
        ranks, rank = size_of(group), rank_in(group)
        self.slice_elements = -(-end // (unit * ranks)) * unit
        self._buffer = parameters[0].new_zeros(ranks * self.slice_elements)
        self._grads = torch.zeros_like(self._buffer)
        self._views = []
        for parameter, start in zip(parameters, self.starts, strict=True):
            place = slice(start, start + parameter.numel())
            self._buffer[place].copy_(parameter.detach().view(-1))
            parameter.data = self._buffer[place].view(parameter.shape)
            self._views.append(self._grads[place].view(parameter.shape))
            parameter.grad = self._views[-1]
        mine = slice(rank * self.slice_elements, (rank + 1) * self.slice_elements)
        self.shard = nn.Parameter(self._buffer[mine])
        self.shard.grad = self._grads[mine]

    def spans(self, index: int, first: int = 0, last: int | None = None) -> list[Span]:
        """Which ranks hold elements first … last - 1 of flattened parameter `index` (offsets in `shard`)."""
        last = self.parameters[index].numel() if last is None else last
        size, start = self.slice_elements, self.starts[index]
        found = []
        for rank in range((start + first) // size, -(-(start + last) // size)):
            low, high = max(start + first, rank * size), min(start + last, (rank + 1) * size)
            found.append(Span(rank, low - start, high - start, low - rank * size))
        return found

    def zero_grad(self) -> None:
        self._grads.zero_()

    def reduce_gradients(self) -> None:
        """Add the ranks' gradients: `shard.grad` is then the sum, and the other slices are of no use."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            assert parameter.grad is view, "a gradient has been replaced, so that its values would be lost"
        assert self.shard.grad is not None
        reduce_scatter_into(self.shard.grad, self._grads, self.group)

    def gather_parameters(self) -> None:
        """Give every rank the slices that the others have updated."""
        all_gather_into(self._buffer, self.shard.detach(), self.group)


def all_reduce_buckets(tensors: Sequence[torch.Tensor], group: Group) -> None:
    """Add the ranks' tensors in place, small ones together: one collective a bucket."""
    bucket: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        if bucket and filled + tensor.nbytes > BUCKET_BYTES:
            _all_reduce_bucket(bucket, group)
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.nbytes
    if bucket:
        _all_reduce_bucket(bucket, group)


def _all_reduce_bucket(bucket: list[torch.Tensor], group: Group) -> None:
    if len(bucket) == 1 and bucket[0].is_contiguous():
        all_reduce(bucket[0], group)
        return
    flat = all_reduce(torch.cat([tensor.reshape(-1) for tensor in bucket]), group)
    for tensor, total in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
        tensor.copy_(total.view(tensor.shape))
