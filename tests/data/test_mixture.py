from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.data.mixture import Mixture, SequenceOrder, permutation
from moestro.errors import MoestroError


@settings(deadline=None)
@given(st.lists(st.one_of(st.floats(1e-3, 10.0), st.integers(1, 9)), min_size=1, max_size=6), st.integers(0, 10_000))
def test_within_one_sample_of_quota_at_every_block(weights: list[float], block: int) -> None:
    mixture = Mixture(weights, seed=0)
    samples = block * mixture.block_samples
    counts = mixture.counts_after(block)
    assert sum(counts) == samples
    total = sum(Fraction(weight) for weight in weights)
    errors = [count - samples * Fraction(weight) / total for weight, count in zip(weights, counts, strict=True)]
    assert all(abs(error) < 1 for error in errors)
    # Largest remainder: rounding up one quota in place of another could only make the errors larger.
    assert max(errors) - min(errors) <= 1
    assert all(after > count for count, after in zip(counts, mixture.counts_after(block + 1), strict=True))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4), st.integers(0, 3))
def test_source_streams_are_gapless_and_shares_realised(weights: list[float], seed: int) -> None:
    mixture = Mixture(weights, seed)
    size = 3 * mixture.block_samples
    source, index = mixture.locate(np.arange(size))
    for j in range(len(weights)):
        own = index[source == j]
        assert own.tolist() == list(range(mixture.counts_after(3)[j]))


def test_tiny_weight_is_dealt_and_an_impossible_one_refused() -> None:
    mixture = Mixture([1.0, 1e-5], seed=0)
    source, _ = mixture.locate(np.arange(mixture.block_samples))
    assert (source == 1).sum() == round(mixture.block_samples * 1e-5 / 1.00001)
    with pytest.raises(MoestroError, match=r"data\.sources\.1\.weight = 1e-09.*smallest share"):
        Mixture([1.0, 1e-9], seed=0)


def test_random_access_equals_sequential() -> None:
    weights = [0.7, 0.2, 0.1]
    source, index = Mixture(weights, 5).locate(np.arange(2000))
    for first in (1999, 700, 255, 256, 0):
        one_source, one_index = Mixture(weights, 5).locate(np.array([first]))
        assert (one_source[0], one_index[0]) == (source[first], index[first])


def test_the_order_depends_on_the_seed_and_the_block() -> None:
    def source(seed: int, block: int) -> list[int]:
        return Mixture([1, 1], seed).locate(np.arange(256) + 256 * block)[0].tolist()

    assert source(0, 0) != source(1, 0)
    assert source(0, 0) != source(0, 1)


def test_every_epoch_is_a_new_order_of_all_sequences() -> None:
    order = SequenceOrder(10, seed=1, source=0)
    stream = order.sequences(np.arange(30)).reshape(3, 10)
    assert (np.sort(stream, axis=1) == np.arange(10)).all()
    assert len({tuple(epoch) for epoch in stream.tolist()}) == 3
    assert SequenceOrder(10, seed=1, source=1).sequences(np.arange(10)).tolist() != stream[0].tolist()
    # Going back after the epoch left the cache gives the same.
    order.sequences(np.arange(200))
    assert order.sequences(np.arange(10)).tolist() == stream[0].tolist()


def test_permutation_is_frozen() -> None:
    """A resumed run must see the same order under any version of NumPy."""
    assert permutation(8, 0, 1, 2).tolist() == [6, 7, 2, 3, 0, 5, 1, 4]
