"""A rank's part of a logical tensor: boxes of the whole, with the local memory that holds each.

This is how checkpoints see parameters and optimizer state, whatever cut them: tensor and expert parallelism (one box),
FSDP2 (one box), or a ZeRO-1 slice of the flattened tensor (a few boxes, see `boxes_of_slice`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """`tensor` (any storage, the box's shape) holds the elements of the whole from `start` on."""

    start: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True)
class LogicalTensor:
    shape: tuple[int, ...]  # of the whole
    chunks: list[Chunk]


def boxes_of_slice(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(start, size) of boxes that together are the elements first … last - 1 of the flattened tensor, in order.

    At most 2 · dim - 1 boxes: the ragged ends of ever larger blocks, and the whole blocks between them.
    """
    if first >= last:
        return
    if not shape:
        yield (), ()
        return
    block = 1
    for n in shape[1:]:
        block *= n
    head, tail = -(-first // block), last // block  # the whole blocks are head … tail - 1
    if head > tail:  # inside one block
        for start, size in boxes_of_slice(shape[1:], first - tail * block, last - tail * block):
            yield (tail, *start), (1, *size)
        return
    if first < head * block:
        for start, size in boxes_of_slice(shape[1:], first - (head - 1) * block, block):
            yield (head - 1, *start), (1, *size)
    if head < tail:
        yield (head, *(0 for _ in shape[1:])), (tail - head, *shape[1:])
    if tail * block < last:
        for start, size in boxes_of_slice(shape[1:], 0, last - tail * block):
            yield (tail, *start), (1, *size)
