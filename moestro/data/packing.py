"""Best-fit packing of documents into sequences of a fixed length.

A document t1..tn is predicted from the inputs [eot, t1..tn] with the labels [t1..tn, eot]: n + 1 predictions, each made
exactly once. It is cut into pieces of at most seq_len predictions; full pieces are sequences of their own, and the
remainders are packed best-fit-decreasing, which needs at most 11/9 of the fewest possible sequences plus 2/3
(Dósa and Sgall 2007; Ding et al. 2024, arXiv:2404.10830, use it to avoid needless truncation).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Packing:
    """Sequences of pieces of documents, as compressed rows: sequence s holds pieces offsets[s] to offsets[s + 1]."""

    seq_len: int
    piece_document: NDArray[np.int64]  # [pieces]
    piece_start: NDArray[np.int64]  # [pieces], the first prediction of the piece within its document
    piece_length: NDArray[np.int64]  # [pieces], predictions
    offsets: NDArray[np.int64]  # [sequences + 1]

    @property
    def num_sequences(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_predictions(self) -> int:
        return int(self.piece_length.sum())

    @property
    def fill(self) -> float:
        """The share of positions that are not padding."""
        return self.num_predictions / max(1, self.num_sequences * self.seq_len)


def pack(document_lengths: NDArray[Any], seq_len: int, items: NDArray[np.int64] | None = None) -> Packing:
    """Pack documents of `document_lengths` predictions each (tokens and end of text) into sequences of `seq_len`.

    Sequences are in the order of the first document they hold, and so are the pieces inside them: a prefix of the
    sequences is a prefix of the corpus, as near as packing allows. The result depends on the arguments only.

    items: [items, 3], of documents that hold any, in their order: document, first prediction whose input is a part of
    the item, and number of such predictions, at most seq_len. No piece ends inside one.
    """
    lengths = np.asarray(document_lengths, dtype=np.int64)
    pieces_of = -(-lengths // seq_len)
    document = np.repeat(np.arange(len(lengths)), pieces_of)
    first_piece = np.cumsum(pieces_of) - pieces_of
    start = (np.arange(len(document)) - first_piece[document]) * seq_len
    if items is not None:
        document, start = _around_items(document, start, lengths, seq_len, items)
    last = np.ones(len(document), dtype=bool)
    last[:-1] = document[1:] != document[:-1]
    end = np.empty_like(start)
    end[:-1] = start[1:]
    end[last] = lengths[document[last]]
    length = end - start

    sequence = np.empty(len(document), dtype=np.int64)
    full = np.flatnonzero(length == seq_len)
    rest = np.flatnonzero(length < seq_len)
    sequence[full] = np.arange(len(full))
    sequence[rest] = len(full) + _best_fit_decreasing(length[rest], seq_len)

    # Pieces are already ordered by (document, start), so the first piece of a sequence is where its id first occurs.
    _, first = np.unique(sequence, return_index=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    order = np.argsort(rank[sequence], kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(sequence, minlength=len(first))[np.argsort(first)])])
    return Packing(seq_len, document[order], start[order], length[order], offsets.astype(np.int64))


def _around_items(
    document: NDArray[np.int64],
    start: NDArray[np.int64],
    lengths: NDArray[np.int64],
    seq_len: int,
    items: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pieces whose cuts do not fall inside items: one that would is moved to the item's start."""
    long = np.unique(items[lengths[items[:, 0]] > seq_len, 0])
    documents, starts = [document[~np.isin(document, long)]], [start[~np.isin(document, long)]]
    for number in long.tolist():
        first, last = np.searchsorted(items[:, 0], [number, number + 1])
        begins, ends = items[first:last, 1], items[first:last, 1] + items[first:last, 2]
        cuts = [0]
        while cuts[-1] + seq_len < lengths[number]:
            cut = cuts[-1] + seq_len
            inside = np.flatnonzero((begins < cut) & (cut < ends))
            cuts.append(int(begins[inside[0]]) if len(inside) else cut)
        documents.append(np.full(len(cuts), number))
        starts.append(np.array(cuts))
    document, start = np.concatenate(documents), np.concatenate(starts)
    order = np.lexsort((start, document))
    return document[order], start[order]


def _best_fit_decreasing(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The bin of each item: longest items first, each into the fullest bin that still holds it.

    Items of one length are placed together. The fullest bin that holds an item stays the fullest that holds the next
    one until it is too full, so a bin with `space` left takes `space // length` of them at once, and so do all bins
    with the same space. A bit mask of the spaces that occur finds the best fit by its lowest bit.
    """
    bin_of = np.empty(len(lengths), dtype=np.int64)
    order = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    bins_with: list[list[int]] = [[] for _ in range(capacity + 1)]
    mask = 0
    num_bins = 0
    placed = 0
    for length, left in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left > 0:
            fitting = mask >> length
            space = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            per_bin = space // length
            bins_wanted = -(-left // per_bin)
            if fitting:
                chosen = bins_with[space][-bins_wanted:]
                del bins_with[space][-bins_wanted:]
                if not bins_with[space]:
                    mask ^= 1 << space
            else:
                chosen = list(range(num_bins, num_bins + bins_wanted))
                num_bins += bins_wanted
            taken = min(left, len(chosen) * per_bin)
            bin_of[order[placed : placed + taken]] = np.repeat(chosen, per_bin)[:taken]
            placed += taken
            left -= taken
            # Only the last chosen bin may have taken fewer than the others.
            last_space = space - length * (taken - (len(chosen) - 1) * per_bin)
            for rest, group in ((space - length * per_bin, chosen[:-1]), (last_space, chosen[-1:])):
                if rest > 0 and group:
                    bins_with[rest].extend(group)
                    mask |= 1 << rest
    return bin_of
