"""Documents out of one file: text, JSON lines and Parquet, with every bad record named or counted."""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
from numpy.typing import NDArray

from moestro.config import EncoderConfig, SourceConfig
from moestro.data.media import Item, ids_in, media_in
from moestro.data.turns import Turn, turns_in
from moestro.errors import MissingDataError, MoestroError

EXTENSIONS = (".txt", ".jsonl", ".parquet", ".txt.gz", ".jsonl.gz")
_GZIP_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)
_PARQUET_ROWS_PER_READ = 256


@dataclass(frozen=True)
class Document:
    """One text, and how far into its source it ends (in the unit of `Source.total`: bytes on disk, or rows)."""

    text: str
    position: float
    turns: tuple[Turn, ...] = ()  # of which the text is made, if it is a record of turns
    media: tuple[Item, ...] = ()  # that stand between `texts`, of which the text is made
    texts: tuple[str, ...] = ()
    ids: NDArray[np.uint32] | None = None  # [tokens], in place of a text

    @property
    def segments(self) -> list[str]:
        """The text in the parts that are tokenized one by one."""
        if self.turns:
            return [segment for turn in self.turns for segment in turn.segments]
        return [] if self.ids is not None else list(self.texts) if self.media else [self.text]


@dataclass
class BadRecords:
    """What to do with records that cannot be used: stop at the first, or count them by reason and go on."""

    policy: Literal["error", "skip"]
    counts: Counter[str] = field(default_factory=Counter)

    def report(self, where: str, reason: str, detail: str = "") -> None:
        """Raise (policy "error") or count. `where` names the file and the line or row."""
        if self.policy == "error":
            raise MoestroError(
                f"{where}: {reason}{f' ({detail})' if detail else ''}. "
                'Mend the record, or leave such records out with data.on_bad_record="skip"'
            )
        self.counts[reason] += 1


class _BadText(Exception):
    """A record that holds no usable text; the arguments are the reason and a detail."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


def read_file(
    path: Path, source: SourceConfig, bad: BadRecords, encoders: Sequence[EncoderConfig] = ()
) -> Iterator[Document]:
    """Documents of one file in order; `Document.position` counts bytes of the file on disk.

    A .txt file is one document, without its outer whitespace. The texts of JSON lines and Parquet are kept as they are.

    Raises:
        MoestroError: an unreadable file, and bad records under the policy "error".
    """
    name = path.name.lower()
    try:
        if name.endswith((".jsonl", ".jsonl.gz")):
            yield from _read_json_lines(path, source, bad, encoders)
        elif source.format != "text":
            raise MoestroError(f'{path}: format = "{source.format}" is read from .jsonl and .jsonl.gz files only')
        elif name.endswith(".parquet"):
            yield from _read_parquet(path, source.text_key, bad)
        else:
            yield from _read_text(path, bad)
    except OSError as error:
        raise MissingDataError(f"cannot read {path}: {error.strerror or error}") from error


def check_text(value: object, text_key: str) -> str:
    """Return `value` if it is text that can be stored as UTF-8 and is not blank; raise the reason otherwise."""
    if not isinstance(value, str):
        raise _BadText("text is not a string", f"'{text_key}' is {type(value).__name__}")
    if not value.strip():
        raise _BadText("empty document")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON's \ud800 escapes make surrogates that no UTF-8 text can hold
        raise _BadText("text is not valid Unicode", "a lone surrogate") from error
    return value


def check_record(value: object, text_key: str, where: str, bad: BadRecords) -> str | None:
    """The text of a record, or None when it was bad and skipped."""
    try:
        return check_text(value, text_key)
    except _BadText as error:
        bad.report(where, error.reason, error.detail)
        return None


def _read_text(path: Path, bad: BadRecords) -> Iterator[Document]:
    try:
        with _open(path) as (stream, _):
            text = stream.read().decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        # No line in the file is trustworthy, but the offset's line is where an editor will show it.
        line = error.object.count(b"\n", 0, error.start) + 1
        bad.report(f"{path}, line {line}", "not valid UTF-8", f"byte {error.start}")
        return
    except _GZIP_ERRORS as error:
        bad.report(str(path), "corrupt or truncated gzip", str(error))
        return
    if not text:
        bad.report(str(path), "empty document")
        return
    yield Document(text, path.stat().st_size)


def _read_json_lines(
    path: Path, source: SourceConfig, bad: BadRecords, encoders: Sequence[EncoderConfig]
) -> Iterator[Document]:
    number = 0
    try:
        with _open(path) as (stream, raw):
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                try:
                    document = _document(_parse_json_line(line), source, path.parent, encoders)
                except _BadText as error:
                    bad.report(f"{path}, line {number}", error.reason, error.detail)
                else:
                    yield replace(document, position=raw.tell())
    except _GZIP_ERRORS as error:
        bad.report(f"{path}, after line {number}", "corrupt or truncated gzip", str(error))


def _parse_json_line(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _BadText("not valid UTF-8", f"byte {error.start} of the line") from error
    except (ValueError, RecursionError) as error:
        raise _BadText("not valid JSON", str(error)) from error
    if not isinstance(record, dict):
        raise _BadText("not a JSON object", f"it is {type(record).__name__}")
    return record


def _document(
    record: dict[str, Any], source: SourceConfig, folder: Path, encoders: Sequence[EncoderConfig]
) -> Document:
    """What a record holds; media files are relative to `folder`."""
    key = source.text_key
    try:
        if source.format == "turns":
            turns = turns_in(record)
            return Document(check_text("".join(Document("", 0, turns).segments), "turns"), 0, turns)
        if source.format == "tokens":
            return Document("", 0, ids=ids_in(record))
        if key not in record:
            keys = ", ".join(list(record)[:8]) or "none"
            raise _BadText(f"no key '{key}'", f"its keys: {keys}; the source's text_key chooses another")
        text = check_text(record[key], key)
        if source.format == "text":
            return Document(text, 0)
        texts, items = media_in(record, text, folder, encoders)
        return Document(check_text("".join(texts), key), 0, media=items, texts=texts)
    except ValueError as error:
        raise _BadText(f"not a record of {source.format}", str(error)) from error


def _read_parquet(path: Path, text_key: str, bad: BadRecords) -> Iterator[Document]:
    pyarrow, parquet = _import_pyarrow()
    row = 0
    try:
        with parquet.ParquetFile(path) as table:
            columns = table.schema_arrow.names
            if text_key not in columns:
                detail = f"its columns: {', '.join(columns[:8])}; the source's text_key chooses another"
                bad.report(str(path), f"no column '{text_key}'", detail)
                return
            bytes_per_row = path.stat().st_size / max(1, table.metadata.num_rows)
            for batch in table.iter_batches(_PARQUET_ROWS_PER_READ, columns=[text_key]):
                for value in batch.column(0):
                    row += 1
                    text = check_record(_parquet_value(value), text_key, f"{path}, row {row}", bad)
                    if text is not None:
                        yield Document(text, row * bytes_per_row)
    except (pyarrow.ArrowException, OSError) as error:  # pyarrow reports corrupt pages as OSError
        first_line = str(error).partition("\n")[0]
        bad.report(f"{path}, after row {row}", "corrupt or truncated Parquet", first_line)


def _parquet_value(scalar: Any) -> object:
    """The Python value of an Arrow scalar; bytes that are not UTF-8 stay bytes, which `check_text` refuses."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return scalar.as_buffer().to_pybytes()


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MoestroError("reading .parquet files needs pyarrow: pip install 'moestro[parquet]'") from error
    return pyarrow, pyarrow.parquet


class _open:
    """Open a file, through gzip when it ends in .gz, as (stream of text bytes, raw file for its position)."""

    def __init__(self, path: Path) -> None:
        self._raw: BinaryIO = path.open("rb")
        compressed = path.name.lower().endswith(".gz")
        self._stream = cast(BinaryIO, gzip.GzipFile(fileobj=self._raw)) if compressed else self._raw

    def __enter__(self) -> tuple[BinaryIO, BinaryIO]:
        return self._stream, self._raw

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._raw.close()
