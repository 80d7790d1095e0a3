"""PyTorch's caching allocator, replayed: what it takes from a device for the storages of a trace.

Blocks are rounded up to 512 bytes. Those of at most 1 MiB come from segments of 2 MiB, those below 10 MiB from segments
of 20 MiB, and larger ones get their own, rounded up to 2 MiB (its documentation, "Memory management" of the CUDA
notes; the sizes are those of its source). The smallest free block that is large enough is taken, its rest is free, and
free neighbours become one. Nothing is given back.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

ROUND = 512
SMALL, SMALL_SEGMENT = 2**20, 2 * 2**20
LARGE, LARGE_SEGMENT = 10 * 2**20, 20 * 2**20


@dataclass(slots=True, eq=False)
class _Block:
    at: int  # address; segments are far apart
    bytes: int
    small: bool
    before: "_Block | None" = None  # its neighbours in the segment
    after: "_Block | None" = None
    is_free: bool = False


class Allocator:
    """Of one stream, as nearly all allocations are. Sizes in bytes."""

    def __init__(self) -> None:
        self.allocated = self.allocated_peak = self.reserved = 0
        self._next = 0
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}  # by small; (bytes, address)

    def take(self, size: int) -> _Block:
        size = max(ROUND, -(-size // ROUND) * ROUND)
        small = size <= SMALL
        free = self._free[small]
        at = bisect_left(free, (size, -1))
        block = free.pop(at)[2] if at < len(free) else self._segment(size, small)
        block.is_free = False
        rest = block.bytes - size
        if rest >= ROUND if small else rest > SMALL:
            block.bytes = size
            other = _Block(block.at + size, rest, small, block, block.after)
            if block.after is not None:
                block.after.before = other
            block.after = other
            self._offer(other)
        self.allocated += block.bytes
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return block

    def give(self, block: _Block) -> None:
        self.allocated -= block.bytes
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.is_free:
                self._free[block.small].remove((neighbour.bytes, neighbour.at, neighbour))
                block = _joined(*((neighbour, block) if neighbour is block.before else (block, neighbour)))
        self._offer(block)

    def _segment(self, size: int, small: bool) -> _Block:
        taken = SMALL_SEGMENT if small else LARGE_SEGMENT if size < LARGE else -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        self.reserved += taken
        self._next += 2 * taken
        return _Block(self._next - taken, taken, small)

    def _offer(self, block: _Block) -> None:
        block.is_free = True
        insort(self._free[block.small], (block.bytes, block.at, block))


def _joined(left: _Block, right: _Block) -> _Block:
    left.bytes += right.bytes
    left.after = right.after
    if right.after is not None:
        right.after.before = left
    return left


def reserved_bytes(changes: Iterable[tuple[object, int]]) -> tuple[int, int]:
    """Most bytes in blocks at a time, and in segments, of storages that come (their bytes) and go (0), in order."""
    allocator, blocks = Allocator(), dict[object, _Block]()
    for storage, size in changes:
        if size:
            blocks[storage] = allocator.take(size)
        elif storage in blocks:
            allocator.give(blocks.pop(storage))
    return allocator.allocated_peak, allocator.reserved
