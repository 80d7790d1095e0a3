"""Safetensors files, read and written one tensor (or one element of its first axis) at a time.

The format: eight bytes with the length of a JSON header, little-endian; the header, which maps each tensor's name to
its type, shape and place; the bytes of all tensors, without gaps. Not by the library of that name, because its reader
maps files, whose pages then count as memory in use, and its writer wants all tensors of a file at once.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moestro.checkpoint.manifest import sync
from moestro.errors import MoestroError

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)
SCALES = "_scale_inv"  # of a weight in fp8: one fp32 factor for each block of FP8_BLOCK × FP8_BLOCK (DeepSeek-V3)
FP8_BLOCK = 128
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Place:
    """Where a tensor lies."""

    file: Path
    offset: int  # of its first byte
    dtype: torch.dtype
    shape: tuple[int, ...]


class Weights:
    """All tensors of a folder. Weights in fp8 with block scales are seen as what they stand for, in bf16."""

    def __init__(self, folder: Path) -> None:
        """Read the headers.

        Raises:
            MoestroError: a file is missing, damaged or of a type that is not known.
        """
        self._places: dict[str, Place] = {}
        for file in _files(folder):
            for key, place in _read_header(file):
                if key in self._places:
                    raise MoestroError(f"{file} and {self._places[key].file.name} both hold {key}")
                self._places[key] = place
        self._check_index(folder)

    def keys(self) -> set[str]:
        """Names of the tensors, without those of block scales."""
        return {key for key in self._places if self._base(key) is None}

    def shape(self, key: str) -> tuple[int, ...]:
        return self._places[key].shape

    def dtype(self, key: str) -> torch.dtype:
        found = self._places[key].dtype
        return torch.bfloat16 if found == torch.float8_e4m3fn and key + SCALES in self._places else found

    def read(self, key: str, row: int | None = None) -> Tensor:
        """The tensor, or one element of its first axis."""
        tensor = _read(self._places[key], row)
        scales = self._places.get(key + SCALES)
        if tensor.dtype != torch.float8_e4m3fn or scales is None:
            return tensor
        return _times_blocks(tensor, _read(scales, row), key)

    def _base(self, key: str) -> str | None:
        base = key.removesuffix(SCALES)
        return base if base != key and base in self._places else None

    def _check_index(self, folder: Path) -> None:
        if not (folder / INDEX).is_file():
            return
        for key, file in _index(folder).items():
            if key not in self._places or self._places[key].file.name != file:
                raise MoestroError(f"{folder / file} lacks {key}, which {INDEX} says it holds; fetch the file again")


def _times_blocks(weight: Tensor, scales: Tensor, key: str) -> Tensor:
    """weight [rows, columns] in fp8 times the factor of each block, in bf16."""
    rows, columns = weight.shape
    if tuple(scales.shape) != (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)):
        raise MoestroError(f"{key}{SCALES} is {list(scales.shape)}, not one factor per {FP8_BLOCK} × {FP8_BLOCK} block")
    wide = scales.repeat_interleave(FP8_BLOCK, 0)[:rows].repeat_interleave(FP8_BLOCK, 1)[:, :columns]
    return (weight.float() * wide).to(torch.bfloat16)


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        files = [folder / name for name in sorted(set(_index(folder).values()))]
    else:
        files = [folder / "model.safetensors"]
        if not files[0].is_file():
            raise MoestroError(
                f"{folder} holds neither model.safetensors nor {INDEX}; only safetensors are read, not .bin files"
            )
    for file in files:
        if not file.is_file():
            raise MoestroError(f"{file} is missing; fetch all files that {INDEX} names")
    return files


def _index(folder: Path) -> dict[str, str]:
    try:
        found = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {str(key): Path(str(file)).name for key, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MoestroError(f"{folder / INDEX} is damaged: {error}") from error


def _read_header(file: Path) -> Iterator[tuple[str, Place]]:
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > size - 8:
                raise ValueError("its header is longer than the file")
            entries = json.loads(stream.read(length))
        entries.pop("__metadata__", None)
        tensors = [(key, *_checked(entry)) for key, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MoestroError(f"{file} is damaged: {error}; fetch it again") from error
    start = 8 + length
    if start + sum(last - first for *_, first, last in tensors) != size:
        raise MoestroError(
            f"{file} is damaged: it is {size} bytes long, which is not what its header says; fetch it again"
        )
    for key, type_name, shape, first, _ in tensors:
        if type_name not in DTYPES:
            known = ", ".join(DTYPES)
            raise MoestroError(f"{key} in {file} has the type {type_name}, which is not read; known are {known}")
        yield key, Place(file, start + first, DTYPES[type_name], shape)


def _checked(entry: dict[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    """Type, shape, first byte and the one after the last."""
    type_name, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
    first, last = (int(n) for n in entry["data_offsets"])
    if type_name in DTYPES and last - first != math.prod(shape) * DTYPES[type_name].itemsize:
        raise ValueError(f"{list(shape)} of {type_name} do not take {last - first} bytes")
    return type_name, shape, first, last


def _read(place: Place, row: int | None) -> Tensor:
    shape, offset = place.shape, place.offset
    if row is not None:
        shape = shape[1:]
        offset += row * math.prod(shape) * place.dtype.itemsize
    # Read, not mapped: what is mapped counts as memory in use for as long as the system pleases.
    data = torch.empty(math.prod(shape) * place.dtype.itemsize, dtype=torch.uint8)
    with place.file.open("rb", buffering=0) as stream:
        stream.seek(offset)
        view, done = data.numpy().data, 0
        while done < len(view):
            count = stream.readinto(view[done:])
            if not count:
                raise MoestroError(f"{place.file} ended while it was read")
            done += count
    return data.view(place.dtype).view(shape)


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written: its values in row-major order, in any number of pieces."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(file: Path, tensors: Sequence[NewTensor], values: Iterable[Tensor]) -> None:
    """Write and flush a file. `values`: those of all tensors, in their order and types, as they come."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        header[tensor.key] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.bytes],
        }
        end += tensor.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for value in values:
            stream.write(value.contiguous().view(-1).view(torch.uint8).numpy().data)
        written = stream.tell() - 8 - len(text)
    if written != end:
        with suppress(OSError):
            file.unlink()
        raise ValueError(f"{file} got {written} bytes of tensors, not {end}")
    sync(file)


def shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def write_index(folder: Path, shards: Sequence[Sequence[NewTensor]]) -> None:
    """The table of which file holds which tensor, if there are several files."""
    if len(shards) == 1:
        return
    named = list(zip(shard_names(len(shards)), shards, strict=True))
    index = {
        "metadata": {"total_size": sum(tensor.bytes for shard in shards for tensor in shard)},
        "weight_map": {tensor.key: file for file, shard in named for tensor in shard},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1))
