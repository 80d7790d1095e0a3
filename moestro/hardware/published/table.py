"""Reads a CSV of public figures, packed or not."""

import csv
import io
import lzma
from collections.abc import Sequence
from pathlib import Path

from moestro.errors import MoestroError


def read_table(path: Path, required: Sequence[str], what: str) -> list[dict[str, str]]:
    """The rows by column, values stripped, missing ones empty. A file whose name ends in .xz is unpacked.

    what: the rows are, for messages.

    Raises:
        MoestroError: no such file, not a CSV file, or a column of `required` is missing.
    """
    try:
        raw = path.read_bytes()
        text = (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise MoestroError(f"cannot read {path}: no file of {what} there") from error
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise MoestroError(f"cannot read {path}: not a CSV file ({error})") from error
    reader = csv.DictReader(io.StringIO(text))
    missing = [column for column in required if column not in (reader.fieldnames or ())]
    if missing:
        raise MoestroError(f"{path} has no column {', '.join(missing)}; it needs {', '.join(required)}")
    return [{key: (value or "").strip() for key, value in row.items() if isinstance(key, str)} for row in reader]
