"""Ways to lay whole tensors over ranks, as the trainer does: replicas, tensor and expert parallelism, flat slices."""

import math
from itertools import pairwise, product

import torch
from torch import Tensor

from moestro.parallel.logical import Chunk, LogicalTensor, boxes_of_slice

Cuts = list[list[int]]  # of each axis, from 0 to its length


def grid(tensor: Tensor, cuts: Cuts) -> list[list[Chunk]]:
    """A part for each cell of a grid, with memory of its own."""
    cells = product(*(list(pairwise(ends)) for ends in cuts))
    return [
        [Chunk(tuple(a for a, _ in cell), tensor[tuple(slice(a, b) for a, b in cell)].clone())]
        for cell in cells
    ]  # fmt: skip


def slices(tensor: Tensor, ranks: int) -> list[list[Chunk]]:
    """Each rank's equal slice of the flattened tensor as boxes; the chunks are views of one buffer a rank."""
    flat, parts = tensor.reshape(-1), []
    length = -(-flat.numel() // ranks)
    for rank in range(ranks):
        first, last = min(rank * length, flat.numel()), min((rank + 1) * length, flat.numel())
        buffer, at, chunks = flat[first:last].clone(), 0, []
        for start, size in boxes_of_slice(tensor.shape, first, last):
            count = math.prod(size)
            chunks.append(Chunk(start, buffer[at : at + count].view(size)))
            at += count
        parts.append(chunks)
    return parts


def even(length: int, parts: int) -> list[int]:
    return [length * i // parts for i in range(parts + 1)]


def layout(tensors: dict[str, Tensor], kind: str, ranks: int) -> list[dict[str, LogicalTensor]]:
    """What each of `ranks` ranks holds: `replicas`, `slices` (ZeRO-1), `rows` or `columns` (first or last axis)."""
    held: list[dict[str, LogicalTensor]] = [{} for _ in range(ranks)]
    for name, tensor in tensors.items():
        axis = 0 if kind == "rows" else tensor.dim() - 1
        if kind == "slices":
            parts = slices(tensor, ranks)
        elif kind == "replicas" or tensor.dim() == 0:
            parts = [[Chunk((0,) * tensor.dim(), tensor.clone())] for _ in range(ranks)]
        else:
            cuts = [[0, n] if i != axis else even(n, ranks) for i, n in enumerate(tensor.shape)]
            parts = grid(tensor, cuts)
        for rank in range(ranks):
            held[rank][name] = LogicalTensor(tuple(tensor.shape), parts[rank])
    return held


def blank(tensors: dict[str, LogicalTensor]) -> dict[str, LogicalTensor]:
    """The same boxes with other memory, filled with what no test stores."""
    return {
        name: LogicalTensor(t.shape, [Chunk(c.start, torch.full_like(c.tensor, 77)) for c in t.chunks])
        for name, t in tensors.items()
    }


def assert_same(got: dict[str, LogicalTensor], expected: dict[str, LogicalTensor]) -> None:
    """Bitwise, box by box."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        for mine, theirs in zip(got[name].chunks, tensor.chunks, strict=True):
            assert mine.start == theirs.start
            assert torch.equal(mine.tensor, theirs.tensor), f"{name} from {mine.start} on differs"
