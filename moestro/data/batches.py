"""Batches of packed sequences: training samples by global index, and every held-out prediction once."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moestro.config import DataConfig
from moestro.data.mixture import BatchMixture, Mixture
from moestro.data.prepare import PreparedData
from moestro.data.shards import Shard
from moestro.data.stream import PackedSource, SourceStream
from moestro.errors import MoestroError
from moestro.model.media import Media, placeholder

IGNORE = -100  # the label of padding, which PyTorch's cross entropy leaves out by default


@dataclass(frozen=True)
class Batch:
    """Packed sequences, padded at the end. Pieces of different documents must not attend to each other."""

    input_ids: Tensor  # [sequences, seq_len] int64; end of text at padding
    labels: Tensor  # [sequences, seq_len] int64; IGNORE at padding
    document_ids: Tensor  # [sequences, seq_len] int32: 0, 1, 2... for each piece of the sequence, -1 at padding
    position_ids: Tensor  # [sequences, seq_len] int64, from 0 in every piece; 0 at padding
    sample_ids: Tensor  # [sequences] int64, the global sample index, which seeds routing noise
    # What stands at placeholders, which are input ids below 0 and no labels; of each encoder that has any.
    media: tuple[Media, ...] = ()

    def to(self, device: torch.device | str) -> Self:
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "media"}
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
        return type(self)(**moved, media=tuple(item.to(device) for item in self.media))


class TrainStream:
    """The endless stream of training samples of one phase.

    `batch` is a pure function of (data, phases, seed, sample index): any rank may ask for any slice, and a run that
    resumes or changes its world size sees the same tokens.
    """

    def __init__(
        self,
        prepared: PreparedData,
        config: DataConfig,
        seed: int,
        before: "TrainStream | None" = None,
        first_sample: int = 0,
        batch_size: int = 1,
    ) -> None:
        """before: the stream of the phase before, up to sample number `first_sample` of the run; None: the first.
        batch_size: samples of a global batch, for data.batch_by = "modality"."""
        self._config, self._seed, self._first_sample, self._batch_size = config, seed, first_sample, batch_size
        weights = [source.weight for source in config.sources]
        self._mixture: Mixture | BatchMixture = Mixture(weights, seed)
        if config.batch_by == "modality":
            self._mixture = BatchMixture(weights, [_kind(shard) for shard in prepared.train], batch_size, seed)
        # Each source's stream and its index at the phase's start; those without a weight keep what they had.
        self._streams: list[tuple[SourceStream, int] | None] = [None] * len(weights)
        if before is not None:
            self._streams = before.streams_at(first_sample)
        for j, (shard, weight) in enumerate(zip(prepared.train, weights, strict=True)):
            begun = self._streams[j]
            if not weight:
                continue
            if begun is None:
                self._streams[j] = SourceStream(shard, config.seq_len, seed, j), 0
            elif (begun[0].seq_len, begun[0].shard.folder) != (config.seq_len, shard.folder):
                self._streams[j] = begun[0].repacked(begun[1], shard, config.seq_len), 0
        self._used = {j: s for j, s in enumerate(self._streams) if s is not None and weights[j]}
        self._slots: dict[tuple[int, bool], int] = {}  # of a source's rest and of the whole of it
        packed: list[PackedSource] = []
        for j, (stream, _) in self._used.items():
            for is_rest, part in ((False, stream.whole), (True, stream.rest)):
                if part is not None:
                    self._slots[j, is_rest] = len(packed)
                    packed.append(part)
        self._assembler = _Assembler(packed, config.seq_len)

    def then(self, prepared: PreparedData, config: DataConfig, first_sample: int, batch_size: int = 1) -> "TrainStream":
        """The stream of the next phase, which begins with sample number `first_sample` of the run."""
        if config == self._config and (config.batch_by == "sample" or batch_size == self._batch_size):
            return self
        return TrainStream(prepared, config, self._seed, self, first_sample, batch_size)

    @property
    def num_sequences(self) -> int:
        """Packed sequences of all sources: one epoch of each."""
        return sum(stream.whole.packing.num_sequences for stream, _ in self._used.values())

    @property
    def tokens(self) -> int:
        """Predictions in one epoch of every source: tokens and ends of text."""
        return sum(stream.whole.num_predictions for stream, _ in self._used.values())

    @property
    def fill(self) -> float:
        """The share of positions that are not padding, in one epoch of every source."""
        filled = sum(stream.whole.packing.num_predictions for stream, _ in self._used.values())
        return filled / (self.num_sequences * self._config.seq_len)

    def batch(self, first_sample: int, count: int) -> Batch:
        """Samples first_sample to first_sample + count of the run."""
        samples = np.arange(first_sample, first_sample + count)
        source, index = self._mixture.locate(samples - self._first_sample)
        slot, sequence = np.empty_like(index), np.empty_like(index)
        for j, (stream, first) in self._used.items():
            here = source == j
            if here.any():
                in_rest, sequence[here] = stream.locate(index[here] + first)
                slot[here] = np.where(in_rest, self._slots.get((j, True), 0), self._slots[j, False])
        return self._assembler.batch(slot, sequence, samples)

    def streams_at(self, sample: int) -> list[tuple[SourceStream, int] | None]:
        """Each source's stream, and how far the samples before number `sample` of the run have come in it."""
        counts = self._mixture.counts_at(sample - self._first_sample)
        pairs = zip(self._streams, counts, strict=True)
        return [None if begun is None else (begun[0], begun[1] + count) for begun, count in pairs]


def _kind(shard: Shard) -> tuple[str, ...]:
    """The modalities of a source's documents.

    Raises:
        MoestroError: they differ.
    """
    kinds = [()] if shard.media is None else shard.media.kinds(shard.offsets)
    if len(kinds) > 1:
        found = ", ".join(" and ".join(kind) or "text alone" for kind in kinds)
        raise MoestroError(
            f'data.batch_by = "modality" wants sources of one modality, but documents of {shard.meta["source"]} hold '
            f"{found}; split it"
        )
    return kinds[0]


class ValidationStream:
    """Every held-out prediction of every source exactly once, in order.

    Bits per byte of a full pass is nll_sum / ln 2 / bytes, where the sum includes the ends of text. For the first
    batches only, take bytes * (predictions seen / predictions).
    """

    def __init__(self, prepared: PreparedData, config: DataConfig) -> None:
        self._sources = [PackedSource(shard, config.seq_len) for shard in prepared.validation]
        self._assembler = _Assembler(self._sources, config.seq_len)
        self._source_of = np.repeat(np.arange(len(self._sources)), [s.packing.num_sequences for s in self._sources])
        self._sequence_of = np.concatenate([np.arange(s.packing.num_sequences) for s in self._sources])
        self.bytes: int = sum(int(shard.bytes.sum()) for shard in prepared.validation)
        self.predictions: int = sum(source.num_predictions for source in self._sources)

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


class _Assembler:
    """Gathers sequences of several sources into the tensors of a batch."""

    def __init__(self, sources: list[PackedSource], seq_len: int) -> None:
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
        inputs, labels, documents, positions, sample_ids = (torch.from_numpy(array) for array in (*outs, samples))
        return Batch(inputs, labels, documents, positions, sample_ids, self._media(source, sequence))

    def _media(self, source: NDArray[np.int64], sequence: NDArray[np.int64]) -> tuple[Media, ...]:
        found: dict[int, list[NDArray[np.float32]]] = {}
        room: dict[int, int] = {}
        for j, s in zip(source.tolist(), sequence.tolist(), strict=True):
            for encoder, patches in self._sources[j].items(s):
                found.setdefault(encoder, []).append(patches)
                room[encoder] = self._sources[j].max_patches(encoder)
        return tuple(_stacked(encoder, found[encoder], room[encoder]) for encoder in sorted(found))

    def _assemble(self, source: PackedSource, sequences: NDArray[np.int64]) -> tuple[NDArray[Any], ...]:
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
        if source.media is not None:
            labels[labels >= source.media.first_id] = IGNORE
            encoder = inputs - source.media.first_id
            inputs = np.where(encoder >= 0, placeholder(0) - encoder, inputs)
        documents = np.repeat(np.where(is_padding, -1, run_in_sequence).astype(np.int32), length)
        return inputs, labels, documents, positions


def _stacked(encoder: int, items: list[NDArray[np.float32]], max_patches: int) -> Media:
    patches = np.zeros((len(items), max_patches, items[0].shape[1]), dtype=np.float32)
    for place, item in zip(patches, items, strict=True):
        place[: len(item)] = item
    numbers = torch.tensor([len(item) for item in items])
    return Media(encoder, torch.from_numpy(patches), numbers)
