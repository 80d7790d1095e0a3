"""On how many ranks the matrices lie that Muon needs whole, where ZeRO-1 cuts all of them, laid end to end, into equal
slices. Numbers alone, without PyTorch."""

from collections.abc import Iterable
from typing import NamedTuple


class Sharing(NamedTuple):
    """Of the matrices in one buffer: how many are on one rank, on two (which send to each other), and on more (one of
    which gathers them). most_ranks: may share the buffer so that none is on more than two, wherever it begins."""

    alone: int
    on_two: int
    on_more: int
    most_ranks: int


def muon_spans(matrix_elements: Iterable[int], slice_elements: int) -> list[int]:
    """Over how many ZeRO-1 slices each matrix lies, all laid end to end."""
    spans, start = [], 0
    for elements in matrix_elements:
        spans.append((start + elements - 1) // slice_elements - start // slice_elements + 1)
        start += elements
    return spans


def largest_two_rank_dp(total_elements: int, largest_matrix: int) -> int:
    """The most ranks that may share `total_elements` so that no matrix, wherever it lies, is on more than two."""
    return total_elements // largest_matrix


def sharing_of(matrix_elements: Iterable[int], ranks: int) -> Sharing:
    """Of one buffer over `ranks` ranks."""
    sizes = list(matrix_elements)
    if not sizes:
        return Sharing(0, 0, 0, 0)
    spans = muon_spans(sizes, -(-sum(sizes) // ranks))
    alone, on_two = spans.count(1), spans.count(2)
    return Sharing(alone, on_two, len(spans) - alone - on_two, largest_two_rank_dp(sum(sizes), max(sizes)))
