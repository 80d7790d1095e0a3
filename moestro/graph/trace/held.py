"""What a traced rank holds: the peaks of its memory, and of what they are made."""

from collections import Counter
from collections.abc import Sequence

from moestro.graph.trace.allocator import reserved_bytes
from moestro.graph.trace.program import KINDS, TracedMemory
from moestro.graph.trace.recorder import Memory


def held(memory: Memory, starts: Sequence[int]) -> TracedMemory:
    """starts: of each step, its first place among the changes of `memory`; there is one at least."""
    alive, sizes = 0, list[int]()
    for number, size in memory.changes:
        alive += size or -memory.lives[number].bytes
        sizes.append(alive)
    before = [0, *sizes]  # alive before each change, and after the last

    def peak(first: int, end: int) -> tuple[int, int]:
        """The most bytes, and after how many changes."""
        return max((before[at], -at) for at in range(first, end + 1))

    last = peak(starts[-1], len(sizes))
    second = starts[1] if len(starts) > 1 else len(sizes)
    allocated, reserved = reserved_bytes(memory.changes)
    return TracedMemory(
        init=peak(0, starts[0])[0],
        first_step=peak(starts[0], second)[0],
        steady=last[0],
        by_kind=_by_kind(memory, -last[1]),
        allocated=allocated,
        reserved=reserved,
    )


def _by_kind(memory: Memory, changes: int) -> dict[str, int]:
    found = Counter(dict.fromkeys(KINDS, 0))
    for number, size in memory.changes[:changes]:
        life = memory.lives[number]
        found[life.kind or "temporary"] += size or -life.bytes
    return dict(found)
