"""Documents with images, sounds and the like, and documents of ready-made token ids: as records, and in shards.

A record's text holds `<NAME>` where an item of the encoder NAME stands, and "media" lists the items' files in that
order: .npy arrays of [patches, input_size]. In a shard every item is a run of as many placeholder tokens as its encoder
makes vectors, and its patches are kept beside the tokens.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from moestro.config import EncoderConfig
from moestro.errors import MoestroError


@dataclass(frozen=True)
class Item:
    encoder: int  # its number in ModelConfig.encoders
    path: Path


# Records


def media_in(
    record: dict[str, Any], text: str, folder: Path, encoders: Sequence[EncoderConfig]
) -> tuple[tuple[str, ...], tuple[Item, ...]]:
    """The texts between a record's items, one more than these, and the items; files are relative to `folder`.

    Raises:
        ValueError: files and placeholders do not match, or a file is not what its encoder takes.
    """
    numbers = {encoder.name: i for i, encoder in enumerate(encoders)}
    parts = re.split(f"<({'|'.join(numbers)})>", text)
    texts, names = parts[::2], parts[1::2]
    files = record.get("media", [])
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise ValueError("'media' is not a list of file names")
    if len(files) != len(names):
        raise ValueError(f"the text has {len(names)} placeholders, but 'media' lists {len(files)} files")
    items = tuple(Item(numbers[name], folder / file) for name, file in zip(names, files, strict=True))
    for item in items:
        _open_item(item.path, encoders[item.encoder])
    return tuple(texts), items


def ids_in(record: dict[str, Any]) -> NDArray[np.uint32]:
    """A record's "tokens", [tokens].

    Raises:
        ValueError: they are not a list of integers from 0.
    """
    ids = record.get("tokens")
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        raise ValueError("'tokens' is not a list of token ids")
    if min(ids) < 0 or max(ids) >= 2**31:
        raise ValueError(f"token id {min(ids) if min(ids) < 0 else max(ids)} is out of range")
    return np.array(ids, dtype=np.uint32)


def _open_item(path: Path, encoder: EncoderConfig) -> NDArray[Any]:
    """The array of an item, mapped: only its header has been read."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ValueError(f"cannot read {path} as an .npy array: {reason}") from error
    least = encoder.max_patches if encoder.shape == "grid" else 1
    fits = isinstance(array, np.ndarray) and array.ndim == 2 and array.shape[1] == encoder.input_size
    if not fits or not least <= array.shape[0] <= encoder.max_patches:
        shape = list(getattr(array, "shape", ()))
        count = str(encoder.max_patches) if least > 1 or encoder.max_patches == 1 else f"1 to {encoder.max_patches}"
        raise ValueError(f"{path} is {shape}; the encoder '{encoder.name}' takes [{count}, {encoder.input_size}]")
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{path} holds values of type {array.dtype}, not numbers")
    return array


def load_item(item: Item, encoders: Sequence[EncoderConfig]) -> NDArray[np.float32]:
    """[patches, input_size].

    Raises:
        MoestroError: the file has changed since it was looked at, or holds NaN or infinity.
    """
    try:
        array = np.asarray(_open_item(item.path, encoders[item.encoder]), dtype=np.float32)
    except ValueError as error:
        raise MoestroError(str(error)) from error
    if not np.isfinite(array).all():
        raise MoestroError(f"{item.path} holds NaN or infinity; mend the file or leave its record out")
    return array


# Shards


@dataclass(frozen=True)
class ShardMedia:
    """The items of a shard's documents."""

    first_id: int  # the token that keeps a place for a vector of encoder 0; those of the others follow
    names: list[str]  # of the encoders
    num_tokens: NDArray[np.int64]  # [encoders] that an item takes
    max_patches: NDArray[np.int64]  # [encoders]
    # [items, 4] in the order of their tokens: the first one's place in Shard.tokens, the encoder, and where in its
    # patches the item begins and ends.
    items: NDArray[np.int64]
    patches: list[NDArray[np.float32]]  # of each encoder [patches of all items, input_size], memory-mapped

    @classmethod
    def open(cls, folder: Path, meta: dict[str, Any]) -> Self:
        """Raises ValueError or OSError if something is missing or altered."""
        items = np.load(folder / "items.npy")
        if zlib.crc32(items.tobytes()) != meta["items_crc32"]:
            raise ValueError("items.npy was altered")
        patches: list[NDArray[np.float32]] = []
        for encoder, count in zip(meta["encoders"], meta["patches"], strict=True):
            path, size = folder / _file(encoder["name"]), encoder["input_size"]
            if path.stat().st_size != 4 * count * size:
                raise ValueError(f"{path.name} has {path.stat().st_size} bytes, expected {4 * count * size}")
            mapped = np.memmap(path, dtype=np.float32, mode="r") if count else np.empty(0, dtype=np.float32)
            patches.append(np.asarray(mapped).reshape(count, size))
        num_tokens, max_patches = (
            np.array([e[key] for e in meta["encoders"]], dtype=np.int64) for key in ("num_tokens", "max_patches")
        )
        names = [encoder["name"] for encoder in meta["encoders"]]
        return cls(meta["first_id"], names, num_tokens, max_patches, items, patches)

    @property
    def num_placeholders(self) -> int:
        return int(self.num_tokens[self.items[:, 1]].sum())

    @property
    def bytes(self) -> int:
        return sum(patches.nbytes for patches in self.patches)

    def checksums(self) -> list[int]:
        """Of each encoder's patches, which are all read for it."""
        return [zlib.crc32(patches.data) for patches in self.patches]

    def between(self, start: int, stop: int) -> list[tuple[int, NDArray[np.float32]]]:
        """Encoder and patches of the items whose first tokens lie in Shard.tokens[start:stop]."""
        first, last = np.searchsorted(self.items[:, 0], [start, stop])
        return [(encoder, self.patches[encoder][a:b]) for _, encoder, a, b in self.items[first:last].tolist()]

    def kinds(self, offsets: NDArray[np.int64]) -> list[tuple[str, ...]]:
        """The modalities that occur together in a document, each once; a text alone is ()."""
        held = np.zeros((len(offsets) - 1, len(self.names)), dtype=bool)
        held[np.searchsorted(offsets, self.items[:, 0], side="right") - 1, self.items[:, 1]] = True
        return [tuple(np.array(self.names)[row].tolist()) for row in np.unique(held, axis=0)]


class MediaWriter:
    """Writes what `ShardMedia` reads; only 32 bytes an item stay in memory."""

    def __init__(self, folder: Path, encoders: Sequence[EncoderConfig], first_id: int) -> None:
        self._folder, self._encoders, self._first_id = folder, encoders, first_id
        self._files: list[BinaryIO] = [(folder / _file(encoder.name)).open("wb") for encoder in encoders]
        self._items: list[tuple[int, int, int, int]] = []
        self._counts, self._crcs = [0] * len(encoders), [0] * len(encoders)

    def placeholders(self, item: Item) -> NDArray[np.uint32]:
        """The tokens that keep the item's place."""
        return np.full(self._encoders[item.encoder].num_tokens, self._first_id + item.encoder, dtype=np.uint32)

    def add(self, item: Item, token: int) -> None:
        """token: the place in Shard.tokens of its first placeholder."""
        patches = load_item(item, self._encoders)
        data = patches.tobytes()
        self._files[item.encoder].write(data)
        self._crcs[item.encoder] = zlib.crc32(data, self._crcs[item.encoder])
        first = self._counts[item.encoder]
        self._counts[item.encoder] += len(patches)
        self._items.append((token, item.encoder, first, first + len(patches)))

    def close(self) -> None:
        for file in self._files:
            file.close()

    def finish(self) -> dict[str, Any]:
        """Close, and return what `ShardMedia.open` wants to know."""
        self.close()
        items = np.array(self._items, dtype=np.int64).reshape(-1, 4)
        np.save(self._folder / "items.npy", items)
        keys = ("name", "input_size", "num_tokens", "max_patches")
        return {
            "first_id": self._first_id,
            "encoders": [{key: getattr(encoder, key) for key in keys} for encoder in self._encoders],
            "patches": self._counts,
            "patches_crc32": self._crcs,
            "items_crc32": zlib.crc32(items.tobytes()),
        }


def _file(name: str) -> str:
    return f"patches-{name}.bin"
