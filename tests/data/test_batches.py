import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moestro.config import DataConfig
from moestro.data.batches import IGNORE, Batch, TrainStream, ValidationStream
from moestro.data.prepare import PreparedData

from .helpers import data_config, prepared, write_jsonl

EOT = 256


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreparedData, DataConfig]:
    """Two sources: many documents shorter than a sequence, and a few much longer."""
    folder = tmp_path_factory.mktemp("corpus")
    short = write_jsonl(folder / "short.jsonl", [chr(97 + i % 26) * (1 + i % 13) for i in range(300)])
    long = write_jsonl(folder / "long.jsonl", [f"{i}:" + "0123456789" * (10 + i) for i in range(20)])
    sources = [{"path": str(short), "weight": 3.0}, {"path": str(long), "weight": 1.0}]
    config = data_config(folder, sources=sources)
    return prepared(config), config


def join(*batches: Batch) -> dict[str, torch.Tensor]:
    names = [f.name for f in fields(Batch) if f.name != "media"]
    return {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}


def pieces(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    """(inputs, labels, positions) of every piece, after checking the padding."""
    out = []
    for inputs, labels, documents, positions in zip(
        batch.input_ids, batch.labels, batch.document_ids, batch.position_ids, strict=True
    ):
        padding = documents == -1
        assert (labels[padding] == IGNORE).all()
        assert (inputs[padding] == EOT).all()
        assert (positions[padding] == 0).all()
        assert not (labels[~padding] == IGNORE).any()
        count = int(documents.max()) + 1
        assert documents[~padding].tolist() == sorted(documents[~padding].tolist())
        assert set(documents.tolist()) - {-1} == set(range(count))
        for d in range(count):
            own = documents == d
            out.append((inputs[own].tolist(), labels[own].tolist(), positions[own].tolist()))
    return out


def check_against_documents(
    found: list[tuple[list[int], list[int], list[int]]], texts: list[str], seq_len: int
) -> None:
    """The pieces are those of the texts by the definition of packing, each once."""
    expected = []
    for text in texts:
        stream = [EOT, *text.encode(), EOT]
        for first in range(0, len(stream) - 1, seq_len):
            last = min(first + seq_len, len(stream) - 1)
            expected.append((stream[first:last], stream[first + 1 : last + 1], list(range(last - first))))
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("seq_len", [2, 3, 16, 400])
def test_validation_covers_every_prediction_once(seq_len: int, corpus: tuple[PreparedData, DataConfig]) -> None:
    data, config = corpus
    texts = [data.tokenizer.decode(s.document(i)) for s in data.validation for i in range(s.num_documents)]
    stream = ValidationStream(data, config.model_copy(update={"seq_len": seq_len}))
    batches = list(stream.batches(7))
    check_against_documents([piece for batch in batches for piece in pieces(batch)], texts, seq_len)
    assert stream.bytes == sum(len(text.encode()) for text in texts)
    assert stream.predictions == sum(int((batch.labels != IGNORE).sum()) for batch in batches)
    assert stream.predictions == stream.bytes + len(texts)
    assert torch.cat([batch.sample_ids for batch in batches]).tolist() == list(range(stream.num_sequences))


def test_validation_limit_and_batch_size(corpus: tuple[PreparedData, DataConfig]) -> None:
    stream = ValidationStream(*corpus)
    parts, whole = join(*stream.batches(3)), join(*stream.batches(1000))
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    limited = list(stream.batches(3, limit=2))
    assert [len(batch.sample_ids) for batch in limited] == [3, 3]
    assert torch.equal(join(*limited)["labels"], whole["labels"][:6])


@pytest.mark.parametrize("seq_len", [2, 16, 400])
def test_one_epoch_of_training_is_every_document_once(seq_len: int, corpus: tuple[PreparedData, DataConfig]) -> None:
    data, config = corpus
    alone = PreparedData(data.folder, data.tokenizer, data.train[:1], data.validation[:1], [], {})
    config = config.model_copy(update={"seq_len": seq_len, "sources": config.sources[:1]})
    texts = [data.tokenizer.decode(data.train[0].document(i)) for i in range(data.train[0].num_documents)]
    stream = TrainStream(alone, config, seed=3)
    batch = stream.batch(0, stream.num_sequences)
    check_against_documents(pieces(batch), texts, seq_len)
    assert stream.tokens == int((batch.labels != IGNORE).sum()) == data.train[0].num_tokens
    assert stream.fill == pytest.approx(stream.tokens / batch.labels.numel())
    again = stream.batch(stream.num_sequences, stream.num_sequences)
    check_against_documents(pieces(again), texts, seq_len)
    assert not torch.equal(again.input_ids, batch.input_ids)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.integers(0, 5000), sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6), fresh=st.booleans())
def test_batches_do_not_depend_on_how_samples_are_split(
    corpus: tuple[PreparedData, DataConfig], first: int, sizes: list[int], fresh: bool
) -> None:
    stream = TrainStream(*corpus, seed=7)
    whole = join(stream.batch(first, sum(sizes)))
    starts = (first + np.cumsum([0, *sizes[:-1]])).tolist()
    # Later parts first, as another rank or a resumed run would ask for them.
    streams = [TrainStream(*corpus, seed=7) if fresh else stream for _ in sizes]
    parts = [s.batch(start, size) for s, start, size in reversed(list(zip(streams, starts, sizes, strict=True)))]
    joined = join(*reversed(parts))
    assert all(torch.equal(joined[name], whole[name]) for name in whole)
    assert whole["sample_ids"].tolist() == list(range(first, first + sum(sizes)))


def test_weights_are_realised_and_seeds_differ(corpus: tuple[PreparedData, DataConfig]) -> None:
    stream = TrainStream(*corpus, seed=0)
    inputs = stream.batch(0, 1024).input_ids
    letters = ((inputs >= ord("a")) & (inputs <= ord("z"))).any(dim=1)
    assert int(letters.sum()) == 768
    assert not torch.equal(inputs[:32], TrainStream(*corpus, seed=1).batch(0, 32).input_ids)


def test_shapes_types_and_move(corpus: tuple[PreparedData, DataConfig]) -> None:
    batch = TrainStream(*corpus, seed=0).batch(5, 3).to("cpu")
    assert [getattr(batch, f.name).dtype for f in fields(Batch)[:5]] == [torch.int64] * 2 + [torch.int32] + [
        torch.int64
    ] * 2
    assert (
        batch.input_ids.shape == batch.labels.shape == batch.document_ids.shape == batch.position_ids.shape == (3, 16)
    )
    assert batch.sample_ids.tolist() == [5, 6, 7]
    assert batch.to("meta").labels.device.type == "meta"


def test_wide_vocabulary_and_one_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("tiny")
    config = data_config(tmp_path, tmp_path / "a.txt", seq_len=64)
    stream = TrainStream(prepared(config), config, seed=0)
    batch = stream.batch(0, 4)  # more samples than sequences: four epochs of one
    assert batch.input_ids[:, :4].tolist() == [[EOT, *b"tin"]] * 4
    assert batch.labels[:, :5].tolist() == [[*b"tin", EOT, IGNORE]] * 4


def test_only_batches_loads_torch() -> None:
    modules = "moestro.data.prepare, moestro.data.packing, moestro.data.mixture"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
