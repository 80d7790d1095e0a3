"""Documents with images and sounds, documents of ready-made ids, and batches of one modality."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.config import DataConfig, EncoderConfig, SourceConfig
from moestro.data.batches import IGNORE, Batch, TrainStream, ValidationStream
from moestro.data.media import Item, load_item
from moestro.data.mixture import BatchMixture, Mixture
from moestro.data.packing import pack
from moestro.data.prepare import PreparedData, prepare
from moestro.data.readers import BadRecords
from moestro.data.reference import xz_bits_per_byte
from moestro.data.shards import Shard
from moestro.data.sources import resolve_source
from moestro.errors import MoestroError

from .helpers import data_config, write_jsonl

EOT = 256
IMAGE = EncoderConfig(name="image", input_size=3, max_patches=4, hidden_size=4, num_layers=0, num_tokens=4)
SOUND = EncoderConfig(
    name="sound", input_size=2, max_patches=5, shape="line", hidden_size=4, num_layers=0, num_tokens=3,
)  # fmt: skip
ENCODERS = (IMAGE, SOUND)


def save(folder: Path, name: str, patches: int, size: int, value: float) -> str:
    np.save(folder / name, np.full((patches, size), value, dtype=np.float16))
    return name


def write_media(folder: Path, name: str = "media.jsonl", documents: int = 60) -> Path:
    """Every document has an image of its number, every third a sound before it, and text of various lengths."""
    lines = []
    for i in range(documents):
        text, files = f"{'ab' * (i % 9)}<image>{'c' * (i % 5 + 1)}", [save(folder, f"{name}{i}.npy", 4, 3, i)]
        if i % 3 == 0:
            text, files = f"<sound>{text}", [save(folder, f"{name}{i}s.npy", i % 5 + 1, 2, i), *files]
        lines.append({"text": text, "media": files})
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def media_data(folder: Path, **settings: Any) -> tuple[PreparedData, DataConfig]:
    config = data_config(folder, sources=[{"path": str(write_media(folder)), "format": "media"}], **settings)
    return prepare(config, progress=False, encoders=ENCODERS), config


def described(batch: Batch) -> list[tuple[list[Any], list[int]]]:
    """Each piece as its inputs, where an item is (encoder, value, patches) at each of its places, and its labels.

    Every item stands whole in one piece.
    """
    items = {m.encoder: list(zip(m.patches, m.numbers.tolist(), strict=True)) for m in batch.media}
    used: Counter[int] = Counter()
    pieces = []
    for row in range(len(batch.labels)):
        inputs: list[Any] = []
        for token in batch.input_ids[row].tolist():
            if token >= 0:
                inputs.append(token)
                continue
            encoder = -1 - token
            patches, number = items[encoder][used[encoder] // ENCODERS[encoder].num_tokens]
            used[encoder] += 1
            assert (patches[:number] == patches[0, 0]).all()
            assert not patches[number:].any()
            inputs.append((encoder, patches[0, 0].item(), number))
        for document in range(int(batch.document_ids[row].max()) + 1):
            own = batch.document_ids[row] == document
            piece = [token for token, here in zip(inputs, own.tolist(), strict=True) if here]
            for item, count in Counter(token for token in piece if isinstance(token, tuple)).items():
                assert count == ENCODERS[item[0]].num_tokens, "an item was cut"
            pieces.append((piece, batch.labels[row][own].tolist()))
    assert used == {e: len(found) * ENCODERS[e].num_tokens for e, found in items.items()}, "items without a place"
    return pieces


def whole_document(i: int) -> tuple[list[Any], list[int]]:
    """Inputs and labels of document i of `write_media` in one piece."""
    stream: list[Any] = [EOT]
    if i % 3 == 0:
        stream += [(1, float(i), i % 5 + 1)] * 3
    stream += [*b"ab" * (i % 9)] + [(0, float(i), 4)] * 4 + [*b"c" * (i % 5 + 1), EOT]
    return stream[:-1], [IGNORE if isinstance(token, tuple) else token for token in stream[1:]]


@pytest.mark.parametrize("seq_len", [7, 16, 64])
def test_every_item_stands_whole_where_it_was_written(seq_len: int, tmp_path: Path) -> None:
    data, config = media_data(tmp_path, seq_len=seq_len)
    stream = ValidationStream(data, config)
    found = [piece for batch in stream.batches(3) for piece in described(batch)]
    held_out = [whole_document(i) for i in range(3, 60, 4)]
    assert sum(len(inputs) for inputs, _ in found) == sum(len(inputs) for inputs, _ in held_out)
    if seq_len == 64:
        assert sorted(found, key=str) == sorted(held_out, key=str)
    assert stream.predictions == sum(label != IGNORE for _, labels in found for label in labels)
    assert stream.bytes == sum(2 * (i % 9) + i % 5 + 1 for i in range(3, 60, 4))
    assert stream.predictions == stream.bytes + 15


def test_one_epoch_of_training_is_every_item_once(tmp_path: Path) -> None:
    data, config = media_data(tmp_path, seq_len=9)
    stream = TrainStream(data, config, seed=1)
    batch = stream.batch(0, stream.num_sequences)
    images = [m for m in batch.media if m.encoder == 0]
    assert sorted(images[0].patches[:, 0, 0].tolist()) == [i for i in range(60) if i % 4 != 3]
    assert stream.tokens == int((batch.labels != IGNORE).sum())
    assert stream.fill == pytest.approx((batch.document_ids >= 0).float().mean().item())
    described(batch)
    again = TrainStream(data, config, seed=1)
    parts = [again.batch(i, 5) for i in range(0, 20, 5)]  # how samples are split does not matter
    joined = torch.cat([m.patches for part in parts for m in part.media if m.encoder == 0])
    assert torch.equal(joined, images[0].patches[: len(joined)])
    assert torch.equal(torch.cat([part.input_ids for part in parts]), batch.input_ids[:20])


def test_a_change_of_length_loses_no_item(tmp_path: Path) -> None:
    """The rest of an epoch, packed anew at another length, holds the items that are left, and holds them whole."""
    data, config = media_data(tmp_path, seq_len=16)
    first = TrainStream(data, config, seed=1)
    for done in range(1, first.num_sequences, 4):
        second = first.then(data, config.model_copy(update={"seq_len": 4}), done)
        stream = second.streams_at(done)[0]
        assert stream is not None
        assert stream[0].rest is not None
        seen = Counter[float]()
        for batch in (first.batch(0, done), second.batch(done, stream[0].rest.packing.num_sequences)):
            described(batch)
            for m in batch.media:
                seen.update(m.patches[:, 0, 0].tolist() if m.encoder == 0 else [])
        assert seen == {float(i): 1 for i in range(60) if i % 4 != 3}


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_packing_never_cuts_an_item(data: st.DataObject) -> None:
    seq_len = data.draw(st.integers(2, 12))
    lengths, items = [], []
    for document in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, 9))
        for _ in range(data.draw(st.integers(0, 4))):
            size = data.draw(st.integers(1, seq_len))
            items.append((document, place + 1, size))  # the prediction after its first token
            place += size + data.draw(st.integers(0, 15))
        lengths.append(place + 1)
    packing = pack(np.array(lengths), seq_len, np.array(items, dtype=np.int64).reshape(-1, 3))
    ends = packing.piece_start + packing.piece_length
    covered: Counter[tuple[int, int]] = Counter()
    for document, start, end in zip(packing.piece_document, packing.piece_start, ends, strict=True):
        assert 0 < end - start <= seq_len
        covered.update((int(document), p) for p in range(start, end))
        for owner, first, size in items:
            inside = set(range(first, first + size)) & set(range(start, end)) if owner == document else set()
            assert len(inside) in (0, size)
    assert covered == {(d, p): 1 for d, n in enumerate(lengths) for p in range(n)}
    used = [packing.piece_length[a:b].sum() for a, b in zip(packing.offsets, packing.offsets[1:], strict=False)]
    assert max(used) <= seq_len


# Records and files


def read(path: Path, format: str, policy: Any = "error") -> list[Any]:
    source = resolve_source(SourceConfig(path=str(path), format=format), ENCODERS)
    return list(source.documents(BadRecords(policy)))


@pytest.mark.parametrize(
    ("text", "files", "message"),
    [
        ("<image> a", [], "the text has 1 placeholders, but 'media' lists 0 files"),
        ("a <video>", ["good.npy"], "the text has 0 placeholders, but 'media' lists 1 files"),
        ("<image> a", "good.npy", "'media' is not a list of file names"),
        ("<image> a", ["none.npy"], "cannot read .*none.npy as an .npy array"),
        ("<image> a", ["text.npy"], "cannot read .*text.npy as an .npy array"),
        ("<image> a", ["small.npy"], r"small.npy is \[3, 3\]; the encoder 'image' takes \[4, 3\]"),
        ("<sound> a", ["good.npy"], r"good.npy is \[4, 3\]; the encoder 'sound' takes \[1 to 5, 2\]"),
        ("<sound> a", ["long.npy"], r"long.npy is \[6, 2\]"),
        ("<image> a", ["words.npy"], "words.npy holds values of type <U4, not numbers"),
        ("<image>", ["good.npy"], "empty document"),
    ],
)
def test_bad_media(text: str, files: Any, message: str, tmp_path: Path) -> None:
    for name, patches, size in (("good", 4, 3), ("small", 3, 3), ("long", 6, 2)):
        save(tmp_path, f"{name}.npy", patches, size, 0)
    np.save(tmp_path / "words.npy", np.full((4, 3), "word"))
    (tmp_path / "text.npy").write_text("no array")
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "good <image> fine", "media": ["good.npy"]}) + "\n")
    assert len(read(path, "media")) == 1
    with path.open("a") as file:
        file.write(json.dumps({"text": text, "media": files}) + "\n")
    with pytest.raises(MoestroError, match=f"line 2: .*{message}"):
        read(path, "media")
    assert len(read(path, "media", "skip")) == 1


def test_not_finite_and_missing_encoders(tmp_path: Path) -> None:
    save(tmp_path, "nan.npy", 4, 3, float("nan"))
    with pytest.raises(MoestroError, match=r"nan.npy holds NaN"):
        load_item(Item(0, tmp_path / "nan.npy"), ENCODERS)
    source = SourceConfig(path=str(write_media(tmp_path, documents=2)), format="media")
    with pytest.raises(MoestroError, match=r"the model has no \[\[model.encoders\]\]"):
        resolve_source(source)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(MoestroError, match=r'format = "media" is read from .jsonl'):
        read(tmp_path / "a.txt", "media")


def test_altered_patches_are_found_and_encoders_are_part_of_the_key(tmp_path: Path) -> None:
    data, config = media_data(tmp_path)
    other = (IMAGE.model_copy(update={"num_tokens": 1}), SOUND)
    assert prepare(config, progress=False, encoders=other).folder != data.folder
    assert prepare(config, progress=False, encoders=ENCODERS).folder == data.folder
    path = data.train[0].folder / "patches-image.bin"
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)
    with pytest.raises(MoestroError, match="patches of media were altered"):
        Shard.open(data.train[0].folder)


# Ready-made ids


def test_ready_made_ids_come_as_they_are(tmp_path: Path) -> None:
    documents = [[1, 300 + i, 70_000] for i in range(8)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"tokens": ids}) + "\n" for ids in documents))
    write_jsonl(tmp_path / "a.jsonl", ["abc"] * 8)
    sources = [{"path": str(tmp_path / "t.jsonl"), "format": "tokens"}, {"path": str(tmp_path / "a.jsonl")}]
    config = data_config(tmp_path, sources=sources)
    data = prepare(config, progress=False)
    assert [data.train[0].document(i).tolist() for i in range(6)] == [documents[i] for i in (0, 1, 2, 4, 5, 6)]
    assert data.train[1].tokens.dtype == np.uint16
    assert data.vocab_size == 70_001
    assert data.train[0].bytes.tolist() == [12] * 6
    assert xz_bits_per_byte(data) > 0
    batch = TrainStream(data, config, seed=0).batch(0, 40)
    assert int(batch.input_ids.max()) == 70_000


@pytest.mark.parametrize("ids", [None, [], [1, "a"], [1.5], [True], [-1], [2**31]])
def test_bad_ids(ids: Any, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"tokens": ids}) + "\n")
    with pytest.raises(MoestroError, match=r"line 1: not a record of tokens \((token id|'tokens')"):
        read(tmp_path / "t.jsonl", "tokens")


# Mixtures


def test_three_sources_come_in_their_shares() -> None:
    """MM1's captions, interleaved documents and text (arXiv 2403.09611): 45, 45 and 10 in a hundred."""
    mixture = Mixture([45, 45, 10], seed=0)
    source, _ = mixture.locate(np.arange(10_000))
    for share, count in zip((0.45, 0.45, 0.1), np.bincount(source).tolist(), strict=True):
        assert abs(count / 10_000 - share) < 0.01
    again, _ = Mixture([45, 45, 10], seed=0).locate(np.arange(7_000, 10_000))
    assert np.array_equal(again, source[7_000:])


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from("abc")), min_size=1, max_size=5).filter(
        lambda sources: any(weight for weight, _ in sources)
    ),
    st.integers(1, 7),
    st.integers(0, 5),
)
def test_a_batch_is_of_one_kind_and_no_sample_is_left_out(
    sources: list[tuple[int, str]], batch_size: int, seed: int
) -> None:
    weights, kinds = [float(w) for w, _ in sources], [k for _, k in sources]
    mixture = BatchMixture(weights, kinds, batch_size, seed)
    samples = np.arange(300 * batch_size)
    source, index = mixture.locate(samples)
    for batch in source.reshape(-1, batch_size):
        assert len({kinds[j] for j in batch}) == 1
    for j, weight in enumerate(weights):
        # Each source's stream from 0 on without a gap, so that an epoch of it is each of its sequences once.
        assert index[source == j].tolist() == list(range(int((source == j).sum())))
        assert weight or not (source == j).any()
    for end in (0, 1, 256 * batch_size, 300 * batch_size - 1):
        assert mixture.counts_at(end) == np.bincount(source[:end], minlength=len(weights)).tolist()
    later = np.arange(100, 140)  # any slice by itself, as another rank or a resumed run asks for it
    assert np.array_equal(BatchMixture(weights, kinds, batch_size, seed).locate(later)[0], source[100:140])


def test_batches_by_modality(tmp_path: Path) -> None:
    captions = tmp_path / "captions.jsonl"
    lines = [{"text": "<image> a", "media": [save(tmp_path, f"{i}.npy", 4, 3, i)]} for i in range(30)]
    captions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = write_jsonl(tmp_path / "text.jsonl", ["plain text"] * 30)
    media = {"path": str(captions), "format": "media"}
    config = data_config(tmp_path, sources=[media, {"path": str(texts), "weight": 2.0}], batch_by="modality")
    data = prepare(config, progress=False, encoders=ENCODERS)
    stream = TrainStream(data, config, seed=0, batch_size=6)
    held = [(stream.batch(i, 6).input_ids < 0).any(1) for i in range(0, 256 * 6, 6)]
    assert all(bool(rows.all()) or not rows.any() for rows in held)
    assert abs(sum(bool(rows.all()) for rows in held) - 256 / 3) < 1
    assert stream.then(data, config, 12, 6) is stream
    assert stream.then(data, config, 12, 8) is not stream

    mixed = data_config(
        tmp_path, sources=[{"path": str(write_media(tmp_path)), "format": "media"}], batch_by="modality"
    )
    with pytest.raises(MoestroError, match="hold image, image and sound; split it"):
        TrainStream(prepare(mixed, progress=False, encoders=ENCODERS), mixed, seed=0, batch_size=6)
