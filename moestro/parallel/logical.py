"""A rank's part of a logical tensor: boxes of the whole, with the local memory that holds each.

This is how checkpoints see parameters and optimizer state, whatever cut them: tensor and expert parallelism (one box),
FSDP2 (one box), or a ZeRO-1 slice of the flattened tensor (a few boxes, see `boxes_of_slice`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor, nn

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start, size


@dataclass(frozen=True)
class Chunk:
    """`tensor` (any storage, the box's shape) holds the elements of the whole from `start` on."""

    start: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True)
class LogicalTensor:
    shape: tuple[int, ...]  # of the whole
    chunks: list[Chunk]


def whole(tensor: Tensor) -> LogicalTensor:
    """A tensor that this rank holds all of."""
    return LogicalTensor(tuple(tensor.shape), [Chunk((0,) * tensor.dim(), tensor.detach())])


def model_tensors(model: nn.Module) -> dict[str, LogicalTensor]:
    """`model.<name>` of a model that this rank holds all of: its parameters and saved buffers, not copied."""
    return {f"model.{name}": whole(tensor) for name, tensor in model.state_dict().items()}


def tiles(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Whether the boxes cover every element of a tensor of `shape` exactly once.

    Boxes add up to the whole exactly if their corners do, counted +1 or -1 as an even or odd number of coordinates lies
    at a box's end: these are the mixed differences of the number of boxes over each element.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, (start, size) in [(-1, ((0,) * len(shape), shape)), *((1, box) for box in boxes)]:
        if any(s < 0 or n < 1 for s, n in zip(start, size, strict=True)):
            return False
        for ends in product((0, 1), repeat=len(shape)):
            corner = tuple(s + n if end else s for s, n, end in zip(start, size, ends, strict=True))
            corners[corner] += -sign if sum(ends) % 2 else sign
    return not any(corners.values())


def boxes_of_slice(shape: Sequence[int], first: int, last: int) -> Iterator[Box]:
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
