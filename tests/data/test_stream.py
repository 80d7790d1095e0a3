"""Sources across phases: nothing twice before all else once, exact mixtures, and the same from wherever one looks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.config import DataConfig
from moestro.data.batches import TrainStream
from moestro.data.prepare import PreparedData
from moestro.data.shards import Shard
from moestro.data.stream import SourceStream

from .helpers import data_config, prepared, write_jsonl


def shard_of(lengths: list[int], name: str = "s") -> Shard:
    """Documents of so many predictions; token i of the shard is number i."""
    offsets = 1 + np.cumsum([0, *lengths])
    return Shard(Path(name), np.arange(offsets[-1]), offsets, np.zeros(len(lengths), np.int64), {})


def predictions(stream: SourceStream, index: int) -> list[int]:
    """Places in the shard's tokens that sequence number `index` of the stream predicts."""
    in_rest, sequence = stream.locate(np.array([index]))
    packed = stream.rest if in_rest[0] else stream.whole
    assert packed is not None
    pieces = packed.pieces_of(sequence)
    lengths = packed.packing.piece_length[pieces]
    assert 0 < lengths.sum() <= stream.seq_len
    starts = packed.piece_token[pieces].tolist()
    return [p for start, length in zip(starts, lengths.tolist(), strict=True) for p in range(start, start + length)]


phases = st.lists(st.tuples(st.integers(2, 12), st.integers(0, 14)), min_size=2, max_size=5)


@settings(deadline=None, max_examples=15)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8), phases=phases, seed=st.integers(0, 3))
def test_no_prediction_is_made_twice_before_all_others_once(
    lengths: list[int], phases: list[tuple[int, int]], seed: int
) -> None:
    shard = shard_of(lengths)
    seen = np.zeros(sum(lengths), dtype=int)
    stream = SourceStream(shard, phases[0][0], seed, 0)
    for number, (seq_len, count) in enumerate(phases):
        if number:
            stream = stream.repacked(phases[number - 1][1], shard, seq_len)
        for index in range(count):
            seen[np.array(predictions(stream, index)) - 1] += 1
            assert seen.max() - seen.min() <= 1


def test_untouched_stream_is_packed_as_if_new() -> None:
    shard = shard_of([5, 17, 3, 9])
    changed, new = SourceStream(shard, 4, 0, 0).repacked(0, shard, 8), SourceStream(shard, 8, 0, 0)
    assert [predictions(changed, i) for i in range(9)] == [predictions(new, i) for i in range(9)]


def test_trimmed_otherwise_a_document_counts_as_seen_when_any_of_it_was() -> None:
    """At 4 document 2 is left out and 1 is cut; at 8 both are whole. None is seen twice in an epoch, none is missed."""
    short, long = shard_of([3, 4, 0, 2, 4], "short"), shard_of([3, 6, 7, 2, 8], "long")
    stream = SourceStream(short, 4, 0, 0)
    document_at = np.repeat(np.arange(5), [3, 4, 0, 2, 4])
    seen = [sorted({int(document_at[p - 1]) for p in predictions(stream, i)}) for i in range(2)]
    then = stream.repacked(2, long, 8)
    assert then.rest is not None
    assert then.rest.spans is not None
    left = then.rest.spans.document.tolist()
    assert sorted([*left, *seen[0], *seen[1]]) == [0, 1, 2, 3, 4]
    assert then.rest.spans.length.tolist() == [[3, 6, 7, 2, 8][d] for d in left]
    back = then.repacked(1, short, 4)  # document 2 does not fit again, and waits
    assert back.rest is not None
    assert back.rest.packing.num_predictions == sum([3, 4, 0, 2, 4][d] for d in back.rest.spans.document)  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreparedData, DataConfig]:
    folder = tmp_path_factory.mktemp("corpus")
    letters = write_jsonl(folder / "a.jsonl", [chr(97 + i % 26) + "ab" * (4 + i % 40) for i in range(90)])
    digits = write_jsonl(folder / "b.jsonl", [f"{i:03}" + "01" * (4 + i % 30) for i in range(60)])
    config = data_config(folder, letters, digits)
    return prepared(config), config


def of_letters(rows: torch.Tensor) -> torch.Tensor:
    """[sequences] whether a row is of the first source."""
    return ((rows >= ord("a")) & (rows <= ord("z"))).any(1)


def mixed(config: DataConfig, *weights: float, seq_len: int = 16) -> DataConfig:
    sources = tuple(
        source.model_copy(update={"weight": weight}) for source, weight in zip(config.sources, weights, strict=True)
    )
    return config.model_copy(update={"sources": sources, "seq_len": seq_len})


def chain(data: PreparedData, config: DataConfig) -> list[TrainStream]:
    """Phases from sample 0, 100 and 356: other weights, then longer sequences and one source only."""
    first = TrainStream(data, mixed(config, 1, 1), 5)
    second = first.then(data, mixed(config, 3, 1), 100)
    return [first, second, second.then(data, mixed(config, 0, 1, seq_len=64), 356)]


def test_mixtures_are_exact_in_each_phase(corpus: tuple[PreparedData, DataConfig]) -> None:
    first, second, third = chain(*corpus)
    for stream, start, count, wanted in ((second, 100, 256, 192), (third, 356, 64, 0)):
        assert int(of_letters(stream.batch(start, count).input_ids).sum()) == wanted
    assert third.batch(356, 2).input_ids.shape == (2, 64)
    assert first.batch(0, 2).input_ids.shape == (2, 16)


def test_sources_go_on_where_they_were(corpus: tuple[PreparedData, DataConfig]) -> None:
    """At one length the samples of two phases are those of a stream that was never changed, source by source."""
    first, second, _ = chain(*corpus)
    rows = torch.cat([first.batch(0, 100).input_ids, second.batch(100, 156).input_ids])
    for source, own in enumerate((rows[of_letters(rows)], rows[~of_letters(rows)])):
        alone = TrainStream(corpus[0], mixed(corpus[1], 1 - source, source), 5).batch(0, len(own)).input_ids
        assert torch.equal(own, alone)


def test_batches_do_not_depend_on_what_was_asked_before(corpus: tuple[PreparedData, DataConfig]) -> None:
    asked = chain(*corpus)
    for stream in asked:
        stream.batch(400, 30)
    whole = asked[2].batch(356, 40)
    fresh = chain(*corpus)[2]
    for start, count in ((380, 16), (356, 24)):
        part, rows = fresh.batch(start, count), slice(start - 356, start - 356 + count)
        assert torch.equal(part.input_ids, whole.input_ids[rows])
        assert part.sample_ids.tolist() == list(range(start, start + count))


def test_a_phase_that_changes_no_data_goes_on(corpus: tuple[PreparedData, DataConfig]) -> None:
    data, config = corpus
    stream = TrainStream(data, config, 0)
    assert stream.then(data, config.model_copy(), 10) is stream
    assert stream.then(replace(data), mixed(config, 1, 2), 10) is not stream
