import os
import time
from pathlib import Path
from typing import Any

import pytest

from moestro.data import prepare as prepare_module
from moestro.data.batches import TrainStream
from moestro.data.prepare import PreparedData, split_documents
from moestro.data.readers import Document
from moestro.data.shards import Shard
from moestro.data.tokenizer import Tokenizer
from moestro.errors import MoestroError

from .helpers import data_config, prepared, write_jsonl

TEXTS = [f"document {i} é" for i in range(10)]


def texts_of(data: PreparedData, shard: Shard) -> list[str]:
    return [data.tokenizer.decode(shard.document(i)) for i in range(shard.num_documents)]


def folders(tmp_path: Path) -> list[str]:
    return sorted(p.name for p in (tmp_path / "cache").iterdir())


def test_split_tokens_and_bytes(tmp_path: Path) -> None:
    data = prepared(data_config(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS)))
    assert texts_of(data, data.validation[0]) == [TEXTS[3], TEXTS[7]]
    assert texts_of(data, data.train[0]) == [t for i, t in enumerate(TEXTS) if i not in (3, 7)]
    assert data.validation[0].bytes.tolist() == [len(TEXTS[3].encode())] * 2
    assert (data.notices, data.skipped) == ([], {})


@pytest.mark.parametrize(
    ("count", "held_out"), [(2, [1]), (3, [2]), (4, [3]), (5, [3]), (7, [3]), (8, [3, 7]), (9, [3, 7])]
)
def test_holdout_rule(count: int, held_out: list[int]) -> None:
    documents = (Document(str(i), 0) for i in range(count))
    split = [(kind, document.text) for kind, document in split_documents(documents, 4)]
    assert [text for _, text in split] == [str(i) for i in range(count)]
    assert [int(text) for kind, text in split if kind == "validation"] == held_out


@pytest.mark.parametrize("text", ["0123456789é你" * 10, "ab"])
def test_single_document_gives_its_tail(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    data = prepared(data_config(tmp_path, tmp_path / "a.txt"))
    train, validation = texts_of(data, data.train[0]), texts_of(data, data.validation[0])
    assert train[0] + validation[0] == text
    assert len(validation[0]) == max(1, len(text) // 4)


@pytest.mark.parametrize("text", ["a", "", "[skipped]"])
def test_too_little_text(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text if text != "[skipped]" else " ")
    config = data_config(tmp_path, tmp_path / "a.txt", on_bad_record="skip")
    with pytest.raises(MoestroError, match="too little text to train and validate on"):
        prepared(config)
    assert folders(tmp_path) == []


def test_skipped_records_are_counted_once_and_kept(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [*TEXTS, "", "  "] * 3)
    with pytest.raises(MoestroError, match=r"a\.jsonl, line 11: empty document"):
        prepared(data_config(tmp_path, path))
    bpe = {"kind": "bpe", "vocab_size": 258}
    config = data_config(tmp_path, path, path, on_bad_record="skip", tokenizer=bpe)
    for _ in range(2):
        data = prepared(config)
        assert data.skipped == {"empty document": 12}
        assert data.train[1].meta["skipped"] == {"empty document": 6}


def test_cache_is_reused_until_something_that_matters_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    config = data_config(tmp_path, path)
    first = prepared(config).folder

    def changed(**update: Any) -> bool:
        return prepared(config.model_copy(update=update)).folder != first

    monkeypatch.setattr(prepare_module, "_build", None)  # would fail if called
    assert not changed(seq_len=99)
    assert not changed(sources=(config.sources[0].model_copy(update={"weight": 3.0}),))
    monkeypatch.undo()
    assert changed(holdout_every=5)
    assert changed(on_bad_record="skip")
    assert changed(tokenizer=data_config(tmp_path, path, tokenizer={"kind": "bpe", "vocab_size": 260}).tokenizer)
    write_jsonl(path, [*TEXTS, "one more"])
    assert changed()


def test_tokenizer_file_is_known_by_content(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    keys = []
    for name, tokenizer in (("x", Tokenizer.byte()), ("y", Tokenizer.byte()), ("z", Tokenizer.train_bpe(TEXTS, 258))):
        tokenizer.save(tmp_path / f"{name}.json")
        file = {"kind": "file", "path": str(tmp_path / f"{name}.json")}
        data = prepared(data_config(tmp_path, path, tokenizer=file))
        assert data.tokenizer.fingerprint == tokenizer.fingerprint
        keys.append(data.folder)
    assert keys[0] == keys[1] != keys[2]


def test_bpe_is_trained_on_the_training_split_only(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["ab ab ab", "ab ab", "ab", "zqzqzq zqzqzq zqzqzq"])
    config = data_config(tmp_path, path, tokenizer={"kind": "bpe", "vocab_size": 258})
    assert len(prepared(config).tokenizer.encode("zq")) == 2
    assert len(prepared(config).tokenizer.encode("ab")) == 1


def test_interrupted_preparation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = data_config(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module, "_check_source", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepared(config)
    assert folders(tmp_path) == []
    monkeypatch.undo()
    assert prepared(config).train[0].num_documents == 8


def test_two_preparations_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = data_config(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS))
    build = prepare_module._build

    def build_while_another_finishes(*arguments: Any) -> None:
        monkeypatch.undo()
        prepared(config)
        build(*arguments)

    monkeypatch.setattr(prepare_module, "_build", build_while_another_finishes)
    data = prepared(config)
    assert folders(tmp_path) == [data.folder.name]


def test_only_old_leftovers_are_removed(tmp_path: Path) -> None:
    config = data_config(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS))
    for name, age_s in (("data-x.1.tmp", 2 * 24 * 3600), ("data-x.2.tmp", 60)):
        (tmp_path / "cache" / name).mkdir(parents=True)
        os.utime(tmp_path / "cache" / name, (time.time() - age_s,) * 2)
    data = prepared(config)
    assert folders(tmp_path) == sorted([data.folder.name, "data-x.2.tmp"])


@pytest.mark.parametrize("name", ["meta.json", "tokenizer.json", "0/train/tokens.bin", "0/validation/meta.json"])
def test_damage_is_found(name: str, tmp_path: Path) -> None:
    config = data_config(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS))
    path = prepared(config).folder / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(MoestroError, match="Delete that folder"):
        prepared(config)


def test_exchanged_tokenizer_is_found(tmp_path: Path) -> None:
    config = data_config(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS))
    Tokenizer.train_bpe(TEXTS, 258).save(prepared(config).folder / "tokenizer.json")
    with pytest.raises(MoestroError, match="not the one the tokens were made with"):
        prepared(config)


def test_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(MoestroError, match=r"Set data\.cache_dir elsewhere"):
        prepared(data_config(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS)))


def test_groups_do_not_change_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    whole = prepared(data_config(tmp_path, path))
    monkeypatch.setattr(prepare_module, "_ENCODE_CHARS", 20)
    grouped = prepared(data_config(tmp_path, path, cache_dir=str(tmp_path / "other")))
    assert whole.train[0].tokens.tolist() == grouped.train[0].tokens.tolist()
    assert TrainStream(grouped, data_config(tmp_path, path), seed=0).num_sequences > 0
