"""Batches of packed sequences: training samples by global index, and every held-out prediction once."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moestro.config import DataConfig
from moestro.data.mixture import Mixture, SequenceOrder
from moestro.data.packing import Packing, pack
from moestro.data.prepare import PreparedData
from moestro.data.shards import Shard

IGNORE = -100  # the label of padding, which PyTorch's cross entropy leaves out by default


@dataclass(frozen=True)
class Batch:
    """Packed sequences, padded at the end. Pieces of different documents must not attend to each other."""

    input_ids: Tensor  # [sequences, seq_len] int64; end of text at padding
    labels: Tensor  # [sequences, seq_len] int64; IGNORE at padding
    document_ids: Tensor  # [sequences, seq_len] int32: 0, 1, 2... for each piece of the sequence, -1 at padding
    position_ids: Tensor  # [sequences, seq_len] int64, from 0 in every piece; 0 at padding
    sample_ids: Tensor  # [sequences] int64, the global sample index, which seeds routing noise

    def to(self, device: torch.device | str) -> Self:
        moved = {f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)}
        return type(self)(**moved)


class TrainStream:
    """The endless stream of training samples.

    `batch` is a pure function of (data, seed, sample index): any rank may ask for any slice, and a run that resumes or
    changes its world size sees the same tokens.
    """

    def __init__(self, prepared: PreparedData, config: DataConfig, seed: int) -> None:
        self._sources = [_PackedSource(shard, config.seq_len) for shard in prepared.train]
        self._mixture = Mixture([source.weight for source in config.sources], seed)
        self._orders = [SequenceOrder(s.packing.num_sequences, seed, j) for j, s in enumerate(self._sources)]
        self._assembler = _Assembler(self._sources, config.seq_len)

    @property
    def num_sequences(self) -> int:
        """Packed sequences of all sources: one epoch of each."""
        return sum(source.packing.num_sequences for source in self._sources)

    @property
    def tokens(self) -> int:
        """Predictions in one epoch of every source: tokens and ends of text."""
        return sum(source.packing.num_predictions for source in self._sources)

    @property
    def fill(self) -> float:
        """The share of positions that are not padding, in one epoch of every source."""
        return self.tokens / sum(s.packing.num_sequences * s.packing.seq_len for s in self._sources)

    def batch(self, first_sample: int, count: int) -> Batch:
        """Samples first_sample to first_sample + count of the run."""
        samples = np.arange(first_sample, first_sample + count)
        source, index = self._mixture.locate(samples)
        sequence = np.empty_like(index)
        for j, order in enumerate(self._orders):
            here = source == j
            if here.any():
                sequence[here] = order.sequences(index[here])
        return self._assembler.batch(source, sequence, samples)


class ValidationStream:
    """Every held-out prediction of every source exactly once, in order.

    Bits per byte of a full pass is nll_sum / ln 2 / bytes, where the sum includes the ends of text. For the first
    batches only, take bytes * (predictions seen / predictions).
    """

    def __init__(self, prepared: PreparedData, config: DataConfig) -> None:
        self._sources = [_PackedSource(shard, config.seq_len) for shard in prepared.validation]
        self._assembler = _Assembler(self._sources, config.seq_len)
        self._source_of = np.repeat(np.arange(len(self._sources)), [s.packing.num_sequences for s in self._sources])
        self._sequence_of = np.concatenate([np.arange(s.packing.num_sequences) for s in self._sources])
        self.bytes: int = sum(int(shard.bytes.sum()) for shard in prepared.validation)
        self.predictions: int = sum(source.packing.num_predictions for source in self._sources)

    @property
    def num_sequences(self) -> int:
        return len(self._source_of)

    def batches(self, micro_batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """Batches of `micro_batch_size` sequences (the last may be smaller), at most `limit` of them."""
        firsts = range(0, self.num_sequences, micro_batch_size)
        for first in firsts if limit is None else firsts[:limit]:
            part = slice(first, first + micro_batch_size)
            samples = np.arange(self.num_sequences)[part]
            yield self._assembler.batch(self._source_of[part], self._sequence_of[part], samples)


class _PackedSource:
    """A shard and its packing, with each piece's place in the shard's tokens worked out."""

    def __init__(self, shard: Shard, seq_len: int) -> None:
        self.tokens: NDArray[Any] = shard.tokens
        self.packing: Packing = pack(shard.document_lengths, seq_len)
        self.piece_token = shard.offsets[self.packing.piece_document] + self.packing.piece_start


class _Assembler:
    """Gathers sequences of several sources into the tensors of a batch."""

    def __init__(self, sources: list[_PackedSource], seq_len: int) -> None:
        self._sources = sources
        self._seq_len = seq_len

    def batch(self, source: NDArray[np.int64], sequence: NDArray[np.int64], samples: NDArray[np.int64]) -> Batch:
        shape = (len(samples), self._seq_len)
        outs: list[NDArray[Any]] = [np.empty(shape, dtype) for dtype in (np.int64, np.int64, np.int32, np.int64)]
        for j in np.unique(source).tolist():
            rows = np.flatnonzero(source == j)
            parts = self._assemble(self._sources[j], sequence[rows])
            for out, part in zip(outs, parts, strict=True):
                out[rows] = part.reshape(len(rows), self._seq_len)
        return Batch(*(torch.from_numpy(array) for array in (*outs, samples)))

    def _assemble(self, source: _PackedSource, sequences: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
        """Flat inputs, labels, document and position ids of the sequences.

        Runs of positions are the pieces of each sequence and, last, its padding, which is a run like any other until
        its values are overwritten: so every array is one `repeat` over the runs.
        """
        packing = source.packing
        first, last = packing.offsets[sequences], packing.offsets[sequences + 1]
        runs_of = last - first + 1
        run_end = np.cumsum(runs_of)
        run_in_sequence = np.arange(run_end[-1]) - np.repeat(run_end - runs_of, runs_of)
        is_padding = np.zeros(len(run_in_sequence), dtype=bool)
        is_padding[run_end - 1] = True
        piece = (np.repeat(first, runs_of) + run_in_sequence)[~is_padding]

        length = np.zeros(len(is_padding), dtype=np.int64)
        length[~is_padding] = packing.piece_length[piece]
        used = np.add.reduceat(length, run_end - runs_of)
        length[is_padding] = self._seq_len - used
        start = np.cumsum(length) - length
        token = np.ones_like(length)  # padding's input is then the end of text at the shard's start
        token[~is_padding] = source.piece_token[piece]

        place = np.arange(len(sequences) * self._seq_len)
        positions = place - np.repeat(start, length)
        padding = np.repeat(is_padding, length)
        positions[padding] = 0
        where = positions + np.repeat(token, length)
        labels = source.tokens[where].astype(np.int64)
        labels[padding] = IGNORE
        inputs = source.tokens[where - 1].astype(np.int64)
        documents = np.repeat(np.where(is_padding, -1, run_in_sequence).astype(np.int32), length)
        return inputs, labels, documents, positions
