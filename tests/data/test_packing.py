from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.data.packing import Packing, pack

lengths_and_seq_len = st.tuples(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(2, 40))


def sequences_of(packing: Packing) -> list[list[tuple[int, int, int]]]:
    pieces = list(zip(packing.piece_document, packing.piece_start, packing.piece_length, strict=True))
    return [pieces[a:b] for a, b in pairwise(packing.offsets.tolist())]


def naive_best_fit_decreasing(lengths: list[int], capacity: int) -> int:
    """The number of bins by the textbook rule, one item at a time."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in spaces if space >= length]
        if fitting:
            spaces.remove(min(fitting))
            spaces.append(min(fitting) - length)
        else:
            spaces.append(capacity - length)
    return len(spaces)


@given(lengths_and_seq_len)
def test_every_prediction_exactly_once_and_no_sequence_too_long(case: tuple[list[int], int]) -> None:
    lengths, seq_len = case
    packing = pack(np.array(lengths), seq_len)
    seen = [
        (d, start + i)
        for d, start, n in zip(packing.piece_document, packing.piece_start, packing.piece_length, strict=True)
        for i in range(n)
    ]
    assert sorted(seen) == [(d, i) for d, length in enumerate(lengths) for i in range(length)]
    totals = [sum(piece[2] for piece in sequence) for sequence in sequences_of(packing)]
    assert all(0 < total <= seq_len for total in totals)
    assert packing.fill == pytest.approx(sum(lengths) / (len(totals) * seq_len))


@given(lengths_and_seq_len)
def test_as_many_bins_as_textbook_best_fit_decreasing(case: tuple[list[int], int]) -> None:
    lengths, seq_len = case
    full = sum(length // seq_len for length in lengths)
    remainders = [length % seq_len for length in lengths if length % seq_len]
    packing = pack(np.array(lengths), seq_len)
    assert packing.num_sequences == full + naive_best_fit_decreasing(remainders, seq_len)


@given(lengths_and_seq_len)
def test_order_follows_the_corpus_and_is_deterministic(case: tuple[list[int], int]) -> None:
    lengths, seq_len = case
    sequences = sequences_of(pack(np.array(lengths), seq_len))
    assert all(sequence == sorted(sequence) for sequence in sequences)
    assert sequences == sorted(sequences)
    assert sequences == sequences_of(pack(np.array(lengths), seq_len))


def test_cuts_only_at_multiples_of_the_sequence_length() -> None:
    packing = pack(np.array([25]), 10)
    assert sequences_of(packing) == [[(0, 0, 10)], [(0, 10, 10)], [(0, 20, 5)]]


@settings(max_examples=5)
@given(st.integers(0, 2**32 - 1))
def test_many_short_documents_fill_almost_all_positions(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 300, 20_000)
    assert pack(lengths, 512).fill > 0.999
