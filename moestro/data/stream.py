"""A source's endless stream of packed sequences, and how it goes on when the length of sequences changes.

Every epoch makes each prediction of the source once. A phase with other sequences cuts the running epoch off: what is
left of it is packed at the new length and comes first, and whole epochs follow. So no prediction is made a second time
before all others have been made, whatever the phases.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moestro.data.mixture import ORDER_OF_SEQUENCES, SequenceOrder, permutation
from moestro.data.packing import Packing, pack
from moestro.data.shards import Shard


@dataclass(frozen=True)
class Spans:
    """Parts of documents, in predictions (a document's tokens and its end of text)."""

    document: NDArray[np.int64]  # [spans]
    start: NDArray[np.int64]  # [spans]
    length: NDArray[np.int64]  # [spans], 0 for a document that trimming has left out at this length


class PackedSource:
    """Spans of a shard's documents (None: all of them whole), packed into sequences."""

    def __init__(self, shard: Shard, seq_len: int, spans: Spans | None = None) -> None:
        self.tokens: NDArray[Any] = shard.tokens
        self.media = shard.media
        self.spans = spans
        lengths = shard.document_lengths if spans is None else spans.length
        self.packing: Packing = pack(lengths, seq_len, self._items(shard, lengths))
        document, start = self.pieces(slice(None))
        self.piece_token = shard.offsets[document] + start

    def _items(self, shard: Shard, lengths: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The items in the spans, as `pack` wants them; one lies in a single span, since no piece ends inside it."""
        if shard.media is None:
            return None
        first = shard.offsets[:-1] if self.spans is None else shard.offsets[self.spans.document] + self.spans.start
        seen_by = shard.media.items[:, 0] + 1  # the prediction after its first token, among all of the shard
        span = np.searchsorted(first, seen_by, side="right") - 1
        count = shard.media.num_tokens[shard.media.items[:, 1]]
        here = (span >= 0) & (seen_by - first[span] < lengths[span])
        return np.stack([span, seen_by - first[span], count], axis=1)[here]

    @property
    def num_predictions(self) -> int:
        """Labels of an epoch; placeholders of media are none."""
        return self.packing.num_predictions - (0 if self.media is None else self.media.num_placeholders)

    def max_patches(self, encoder: int) -> int:
        assert self.media is not None
        return int(self.media.max_patches[encoder])

    def items(self, sequence: int) -> list[tuple[int, NDArray[np.float32]]]:
        """Encoder and patches of each item in a sequence, in the order of their places."""
        if self.media is None:
            return []
        found = []
        for piece in range(*self.packing.offsets[sequence : sequence + 2].tolist()):
            start = int(self.piece_token[piece]) - 1  # of the inputs, which are one token behind
            found += self.media.between(start, start + int(self.packing.piece_length[piece]))
        return found

    def pieces(self, which: slice | NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Document and start of each of the pieces, both [pieces]."""
        span, start = self.packing.piece_document[which], self.packing.piece_start[which]
        return (span, start) if self.spans is None else (self.spans.document[span], self.spans.start[span] + start)

    def pieces_of(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of the pieces in the sequences."""
        chosen = np.zeros(self.packing.num_sequences, dtype=bool)
        chosen[sequences] = True
        return np.flatnonzero(np.repeat(chosen, np.diff(self.packing.offsets)))


class SourceStream:
    """Source number `source` from the start, or (see `repacked`) from the middle of an epoch."""

    def __init__(
        self,
        shard: Shard,
        seq_len: int,
        seed: int,
        source: int,
        epoch: int = 0,
        rest: Spans | None = None,
        change: int = 0,
    ) -> None:
        """rest: what is left of the epoch before number `epoch`; change: how often the length has changed so far."""
        self.shard, self.seq_len = shard, seq_len
        self.whole = PackedSource(shard, seq_len)
        self.rest = None if rest is None else PackedSource(shard, seq_len, rest)
        self._seed, self._source, self._epoch, self._change = seed, source, epoch, change
        self._order = SequenceOrder(self.whole.packing.num_sequences, seed, source)
        size = 0 if self.rest is None else self.rest.packing.num_sequences
        self._rest_order = permutation(size, seed, ORDER_OF_SEQUENCES, source, epoch, change)

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """For each index of the stream whether it lies in `rest`, and the sequence there or else in `whole`."""
        size = len(self._rest_order)
        in_rest = indices < size
        sequence = np.empty_like(indices)
        sequence[in_rest] = self._rest_order[indices[in_rest]]
        later = indices[~in_rest] - size + self._epoch * self._order.num_sequences
        if len(later):
            sequence[~in_rest] = self._order.sequences(later)
        return in_rest, sequence

    def repacked(self, index: int, shard: Shard, seq_len: int) -> Self:
        """The stream from `index` on, with sequences of `seq_len`.

        `shard` holds the same documents, perhaps trimmed otherwise; then a document counts as seen when any of it was.
        """
        rest, epoch = self._left(index, shard)
        return type(self)(shard, seq_len, self._seed, self._source, epoch, rest, self._change + 1)

    def _left(self, index: int, shard: Shard) -> tuple[Spans | None, int]:
        """What comes from `index` to the end of the running epoch, and the number of the epoch after."""
        size = len(self._rest_order)
        if index < size:
            assert self.rest is not None
            packed, order, inside, epoch = self.rest, self._rest_order, index, self._epoch
        else:
            passed, inside = divmod(index - size, max(1, self._order.num_sequences))
            if inside == 0:
                return None, self._epoch + passed
            packed, order, epoch = self.whole, self._order.epoch(self._epoch + passed), self._epoch + passed + 1
        if shard.folder != self.shard.folder:
            seen, _ = packed.pieces(packed.pieces_of(order[:inside]))
            begun = np.arange(shard.num_documents) if packed.spans is None else packed.spans.document
            left = np.setdiff1d(begun, seen)
            return Spans(left, np.zeros_like(left), shard.document_lengths[left]), epoch
        pieces = packed.pieces_of(order[inside:])
        return _merged(*packed.pieces(pieces), packed.packing.piece_length[pieces]), epoch


def _merged(document: NDArray[np.int64], start: NDArray[np.int64], length: NDArray[np.int64]) -> Spans:
    """Pieces in any order as spans, those that touch in one."""
    order = np.lexsort((start, document))
    document, start, length = document[order], start[order], length[order]
    joins = (document[1:] == document[:-1]) & (start[1:] == start[:-1] + length[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~joins]))
    return Spans(document[first], start[first], np.add.reduceat(length, first))
