"""A weighted mixture of sources with exact proportions and random access.

Samples are dealt in blocks of a fixed size. After every block each source has had its weight's share of all samples so
far to within one sample (largest-remainder apportionment of the exact rational quota); inside a block the order is a
seeded permutation. Which sample is which depends on (seed, sample index) only.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from moestro.errors import MoestroError

MIN_BLOCK_SAMPLES = 256
# A block's permutation is held in memory; this bounds it to tens of megabytes, and the smallest weight with it.
MAX_BLOCK_SAMPLES = 2**20
# A block gives every source at least this many, so that the counts of successive blocks cannot fall.
_MIN_SAMPLES_PER_BLOCK = 4
_CACHED = 4

Value = TypeVar("Value")

# Keep the random streams of the two uses of a seed apart.
_ORDER_OF_SOURCES = 1
ORDER_OF_SEQUENCES = 2


def permutation(size: int, *key: int) -> NDArray[np.int64]:
    """A random permutation of range(size) that depends on the key only.

    It sorts the raw output of Philox, which NumPy promises to keep; `Generator.permutation` may change between
    versions, and a resumed run must not see other data.
    """
    raw = np.random.Philox(np.random.SeedSequence(key)).random_raw(size)
    return np.argsort(raw, kind="stable")


@dataclass(frozen=True)
class _Block:
    source: NDArray[np.int64]  # [block], the source of each sample
    index: NDArray[np.int64]  # [block], the sample's index within its source's stream


class Mixture:
    """Maps a sample's index over the whole run to (source, index within that source's endless stream)."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        """`weights` are relative; a source of weight 0 gets nothing.

        Raises:
            MoestroError: a source's share is too small to be dealt exactly.
        """
        exact = [Fraction(weight) for weight in weights]
        self._shares = [weight / sum(exact) for weight in exact]
        wanted = max(Fraction(MIN_BLOCK_SAMPLES), _MIN_SAMPLES_PER_BLOCK / min(filter(None, self._shares)))
        self.block_samples = 1 << (-(-wanted.numerator // wanted.denominator) - 1).bit_length()
        if self.block_samples > MAX_BLOCK_SAMPLES:
            smallest = min((j for j, weight in enumerate(exact) if weight), key=exact.__getitem__)
            raise MoestroError(
                f"data.sources.{smallest}.weight = {weights[smallest]:g} is {float(self._shares[smallest]):.1e} of all "
                f"samples; the smallest share is {_MIN_SAMPLES_PER_BLOCK / MAX_BLOCK_SAMPLES:.1e}. "
                "Raise it or leave the source out"
            )
        self._seed = seed
        self._blocks: dict[int, _Block] = {}

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sources and source-local indices of global sample indices, all of shape [samples]."""
        block_of, inside = np.divmod(samples, self.block_samples)
        source, index = np.empty_like(samples), np.empty_like(samples)
        for number in np.unique(block_of).tolist():
            block = self._block(number)
            here = block_of == number
            source[here] = block.source[inside[here]]
            index[here] = block.index[inside[here]]
        return source, index

    def counts_after(self, blocks: int) -> list[int]:
        """How many samples each source has had in the first `blocks` blocks."""
        samples = blocks * self.block_samples
        quotas = [share * samples for share in self._shares]
        counts = [quota.numerator // quota.denominator for quota in quotas]
        by_remainder = sorted(range(len(quotas)), key=lambda j: (counts[j] - quotas[j], j))
        for j in by_remainder[: samples - sum(counts)]:
            counts[j] += 1
        return counts

    def counts_at(self, samples: int) -> list[int]:
        """How many of the first `samples` samples each source has had."""
        blocks, inside = divmod(samples, self.block_samples)
        begun = np.bincount(self._block(blocks).source[:inside], minlength=len(self._shares))
        return [before + here for before, here in zip(self.counts_after(blocks), begun.tolist(), strict=True)]

    def _block(self, number: int) -> _Block:
        if number not in self._blocks:
            before, after = self.counts_after(number), self.counts_after(number + 1)
            counts = [b - a for a, b in zip(before, after, strict=True)]
            dealt = np.repeat(np.arange(len(counts)), counts)
            source = dealt[permutation(self.block_samples, self._seed, _ORDER_OF_SOURCES, number)]
            index = np.empty_like(source)
            for j, count in enumerate(counts):
                index[source == j] = before[j] + np.arange(count)
            _remember(self._blocks, number, _Block(source, index))
        return self._blocks[number]


class BatchMixture:
    """A mixture that deals whole batches: all samples of one come from sources of one kind.

    Batches are dealt among the kinds as samples are among sources, and a kind's samples among its sources.
    """

    def __init__(self, weights: Sequence[float], kinds: Sequence[Hashable], batch_size: int, seed: int) -> None:
        """kinds: of each source; batch_size: samples in a batch, the first of which is sample 0."""
        self._batch_size, self._num_sources = batch_size, len(weights)
        distinct = list(dict.fromkeys(kind for kind, weight in zip(kinds, weights, strict=True) if weight))
        self._members = [[j for j, k in enumerate(kinds) if k == kind and weights[j]] for kind in distinct]
        self._kinds = Mixture([sum(weights[j] for j in members) for members in self._members], seed)
        self._within = [Mixture([weights[j] for j in members], seed) for members in self._members]

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `Mixture.locate`."""
        batch, inside = np.divmod(samples, self._batch_size)
        kind, number = self._kinds.locate(batch)
        source, index = np.empty_like(samples), np.empty_like(samples)
        for k, (members, mixture) in enumerate(zip(self._members, self._within, strict=True)):
            here = kind == k
            member, index[here] = mixture.locate(number[here] * self._batch_size + inside[here])
            source[here] = np.array(members)[member]
        return source, index

    def counts_at(self, samples: int) -> list[int]:
        """How many of the first `samples` samples each source has had."""
        batches, inside = divmod(samples, self._batch_size)
        dealt = [count * self._batch_size for count in self._kinds.counts_at(batches)]
        dealt[self._kinds.locate(np.array([batches]))[0][0]] += inside
        counts = [0] * self._num_sources
        for members, mixture, of_kind in zip(self._members, self._within, dealt, strict=True):
            for j, count in zip(members, mixture.counts_at(of_kind), strict=True):
                counts[j] = count
        return counts


class SequenceOrder:
    """A source's endless stream: every epoch visits each of its sequences once, in an order of its own."""

    def __init__(self, num_sequences: int, seed: int, source: int) -> None:
        self.num_sequences = num_sequences
        self._key = (seed, ORDER_OF_SEQUENCES, source)
        self._epochs: dict[int, NDArray[np.int64]] = {}

    def sequences(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The packed sequence at each index of the stream, both of shape [samples]."""
        epoch_of, inside = np.divmod(indices, self.num_sequences)
        out = np.empty_like(indices)
        for epoch in np.unique(epoch_of).tolist():
            here = epoch_of == epoch
            out[here] = self.epoch(epoch)[inside[here]]
        return out

    def epoch(self, number: int) -> NDArray[np.int64]:
        """All sequences in the order of one epoch."""
        if number not in self._epochs:
            _remember(self._epochs, number, permutation(self.num_sequences, *self._key, number))
        return self._epochs[number]


def _remember(cache: dict[int, Value], key: int, value: Value) -> None:
    """Add to a small cache, forgetting the oldest entries: batches move forward and rarely span more than two."""
    while len(cache) >= _CACHED:
        del cache[next(iter(cache))]
    cache[key] = value
