"""Token shards: one memory-mapped file of token ids and the documents' places in it."""

import json
import os
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from moestro.config import EncoderConfig
from moestro.data.media import Item, MediaWriter, ShardMedia
from moestro.errors import DamagedDataError, MissingDataError, MoestroError

FORMAT_VERSION = 1
# Below this size the tokens' checksum is verified at every open (tens of milliseconds); above it only the size is,
# and `Shard.verify` reads everything.
VERIFY_ON_OPEN_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Shard:
    """Documents as token ids, each followed by end of text.

    `tokens` begins with one extra end of text, so that the token before any position exists: the inputs that predict
    `tokens[a:b]` are always `tokens[a - 1 : b - 1]`.
    """

    folder: Path
    tokens: NDArray[np.unsignedinteger[Any]]  # [1 + tokens], memory-mapped
    offsets: NDArray[
        np.int64
    ]  # [documents + 1]; document d is tokens[offsets[d] : offsets[d + 1]], end of text included
    bytes: NDArray[np.int64]  # [documents], UTF-8 bytes of each text
    meta: dict[str, Any]
    turns: NDArray[np.int64] | None = None  # [turns, 1 + segments], see `ShardWriter.add`
    media: ShardMedia | None = None

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Map a shard and check that it is whole.

        Raises:
            MoestroError: a missing, truncated or altered file.
        """
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            if meta["format_version"] != FORMAT_VERSION:
                raise ValueError(f"format version {meta['format_version']}, expected {FORMAT_VERSION}")
            offsets, document_bytes = np.load(folder / "offsets.npy"), np.load(folder / "bytes.npy")
            tokens_path = folder / "tokens.bin"
            if (size_bytes := tokens_path.stat().st_size) != meta["tokens_bytes"]:
                raise ValueError(f"tokens.bin has {size_bytes} bytes, expected {meta['tokens_bytes']}")
            if _crc(offsets, document_bytes) != meta["index_crc32"]:
                raise ValueError("offsets.npy or bytes.npy was altered")
            turns = None
            if "turns_crc32" in meta and _crc(turns := np.load(folder / "turns.npy")) != meta["turns_crc32"]:
                raise ValueError("turns.npy was altered")
            tokens = np.asarray(np.memmap(tokens_path, dtype=meta["dtype"], mode="r"))
            media = ShardMedia.open(folder, meta["media"]) if "media" in meta else None
            shard = cls(folder, tokens, offsets, document_bytes, meta, turns, media)
            if size_bytes + (media.bytes if media is not None else 0) <= VERIFY_ON_OPEN_BYTES:
                shard.verify()
        except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
            raise broken(folder, error) from error
        return shard

    def verify(self) -> None:
        """Read all tokens and patches and compare their checksums."""
        if _crc(self.tokens) != self.meta["tokens_crc32"]:
            raise broken(self.folder, "tokens.bin was altered")
        if self.media is not None and self.media.checksums() != self.meta["media"]["patches_crc32"]:
            raise broken(self.folder, "the patches of media were altered")

    @property
    def checksum(self) -> int | list[int]:
        """Of the tokens, and of the media among them if there are any."""
        tokens: int = self.meta["tokens_crc32"]
        return tokens if self.media is None else [tokens, *self.meta["media"]["patches_crc32"]]

    @property
    def num_documents(self) -> int:
        return len(self.bytes)

    @property
    def num_tokens(self) -> int:
        """Tokens to be predicted: those of the texts and one end of text for each document."""
        return int(self.offsets[-1] - self.offsets[0])

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        """[documents], tokens of each document with its end of text."""
        return np.diff(self.offsets)

    def document(self, index: int) -> NDArray[np.unsignedinteger[Any]]:
        """Token ids of one document, without the end of text."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1] - 1]


class ShardWriter:
    """Write a shard document by document; only 16 bytes per document stay in memory. Use as a context manager.

    meta.json is written last, and only after a clean exit: a folder without it is not a shard.
    """

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eot_id: int,
        meta: dict[str, Any],
        encoders: Sequence[EncoderConfig] = (),
    ) -> None:
        """encoders: of the items that documents may hold; their placeholders are numbered from vocab_size."""
        self._folder = folder
        self._dtype = np.dtype(np.uint16 if vocab_size + len(encoders) <= 2**16 else np.uint32)
        self._meta = meta
        self._offsets = array("q", [1])
        self._bytes = array("q")
        self._turns: list[tuple[int, ...]] = []
        self._crc = 0
        self._eot = np.array([eot_id], dtype=self._dtype)
        folder.mkdir(parents=True)
        self._media = MediaWriter(folder, encoders, vocab_size) if encoders else None
        self._file = (folder / "tokens.bin").open("wb")
        self._write(self._eot)

    @property
    def num_documents(self) -> int:
        return len(self._bytes)

    def add(self, tokens: NDArray[Any], text_bytes: int, turns: Sequence[tuple[int, ...]] = ()) -> None:
        """Append one document: its token ids [tokens], without end of text, and the size of its text.

        turns: of a record of turns, the tokens of each turn's segments; they become rows behind the document's number.
        """
        self._turns += [(self.num_documents, *lengths) for lengths in turns]
        self._write(tokens.astype(self._dtype, copy=False))
        self._write(self._eot)
        self._offsets.append(self._offsets[-1] + len(tokens) + 1)
        self._bytes.append(text_bytes)

    def add_media(self, texts: Sequence[NDArray[Any]], items: Sequence[Item], text_bytes: int) -> None:
        """Append a document of `items` between `texts`, of which there is one more."""
        assert self._media is not None
        parts, place = [texts[0]], self._offsets[-1] + len(texts[0])
        for item, text in zip(items, texts[1:], strict=True):
            run = self._media.placeholders(item)
            self._media.add(item, place)
            parts += [run, text]
            place += len(run) + len(text)
        self.add(np.concatenate(parts), text_bytes)

    def leave_out(self) -> None:
        """Append a document without any token, which keeps the numbers of those that follow."""
        self._offsets.append(self._offsets[-1])
        self._bytes.append(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._file.close()
        if kind is None:
            self._finish()
        elif self._media is not None:
            self._media.close()

    def _write(self, tokens: NDArray[Any]) -> None:
        data = tokens.tobytes()
        self._crc = zlib.crc32(data, self._crc)
        self._file.write(data)

    def _finish(self) -> None:
        offsets = np.array(self._offsets, dtype=np.int64)
        document_bytes = np.array(self._bytes, dtype=np.int64)
        np.save(self._folder / "offsets.npy", offsets)
        np.save(self._folder / "bytes.npy", document_bytes)
        meta = self._meta | {
            "format_version": FORMAT_VERSION,
            "dtype": self._dtype.name,
            "documents": len(document_bytes),
            "tokens": int(offsets[-1]) - 1,
            "text_bytes": int(document_bytes.sum()),
            "tokens_bytes": int(offsets[-1]) * self._dtype.itemsize,
            "tokens_crc32": self._crc,
            "index_crc32": _crc(offsets, document_bytes),
        }
        if self._media is not None:
            meta["media"] = self._media.finish()
        if self._turns:
            turns = np.array(self._turns, dtype=np.int64)
            np.save(self._folder / "turns.npy", turns)
            meta["turns_crc32"] = _crc(turns)
        write_json(self._folder / "meta.json", meta)


def write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def broken(folder: Path, cause: object) -> MoestroError:
    """The error for prepared data that cannot be trusted, or is gone in part."""
    kind = MissingDataError if isinstance(cause, FileNotFoundError) else DamagedDataError
    return kind(f"prepared data in {folder} is incomplete or damaged: {cause}. Delete that folder and run again")


def _crc(*arrays: NDArray[Any]) -> int:
    crc = 0
    for item in arrays:
        crc = zlib.crc32(item.view(np.uint8).data, crc)
    return crc
