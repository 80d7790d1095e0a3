"""Reading any box of any tensor of a checkpoint: overlaps are copied straight from the mapped files.

DCP's own reader loads every stored box that a wanted one touches as a whole, which is the product of the cuts too much
when, say, each rank wants a part of merged experts.
"""

import io
import math
import mmap
import struct
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from moestro.parallel.logical import Chunk, LogicalTensor


@dataclass(frozen=True)
class _Copy:
    """An overlap of a stored box and a wanted one."""

    record: Any  # where in its file the stored box lies: offset and length of a torch.save
    dtype: torch.dtype
    size: torch.Size  # of the stored box
    item: ReadItem  # where the overlap lies in both
    target: Tensor  # the wanted box


def read_metadata(folder: Path) -> Metadata:
    """DCP's table of contents."""
    return FileSystemReader(folder).read_metadata()


def tensors_in(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """The tensors by name. (Format 1 also holds settings of the optimizers, which nothing reads.)"""
    found = metadata.state_dict_metadata.items()
    return {name: stored for name, stored in found if isinstance(stored, TensorStorageMetadata)}


def read_box(folder: Path, metadata: Metadata, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    stored = metadata.state_dict_metadata[name]
    assert isinstance(stored, TensorStorageMetadata)
    tensor = torch.empty(size, dtype=stored.properties.dtype)
    read_into(folder, metadata, {name: LogicalTensor(tuple(stored.size), [Chunk(start, tensor)])})
    return tensor


def read_into(folder: Path, metadata: Metadata, tensors: dict[str, LogicalTensor]) -> None:
    """Fill the tensors' chunks in place.

    Raises:
        ValueError: the checkpoint does not hold every element of a chunk.
    """
    by_file: dict[str, list[_Copy]] = defaultdict(list)
    for name, tensor in tensors.items():
        for copy in _copies(name, tensor, metadata):
            by_file[copy.record.relative_path].append(copy)
    for file, copies in by_file.items():
        with (folder / file).open("rb") as stream:
            for copy in sorted(copies, key=lambda c: c.record.offset):
                overlap = _stored(stream, copy)[_slices(copy.item.storage_offsets, copy.item.lengths)]
                copy.target[_slices(copy.item.dest_offsets, copy.item.lengths)].copy_(overlap)


def _stored(stream: IO[bytes], copy: _Copy) -> Tensor:
    """The stored box in mapped memory; row-major, because write.py sees to it."""
    record, count = map_record(stream, copy.record), math.prod(copy.size)
    first = _first_byte(record, count * copy.dtype.itemsize)
    return torch.frombuffer(record.memory, dtype=copy.dtype, count=count, offset=first).view(copy.size)


def _copies(name: str, tensor: LogicalTensor, metadata: Metadata) -> Iterator[_Copy]:
    """What to copy from where; never less than the whole of each chunk."""
    there = metadata.state_dict_metadata[name]
    assert isinstance(there, TensorStorageMetadata)
    sizes = {chunk.offsets: chunk.sizes for chunk in there.chunks}
    for chunk in tensor.chunks:
        box = ChunkStorageMetadata(torch.Size(chunk.start), chunk.tensor.shape)
        items = create_read_items_for_chunk_list(name, there, [box])
        if sum(math.prod(item.lengths) for item in items) != chunk.tensor.numel():
            raise ValueError(f"{name} is incomplete in the checkpoint")
        for item in items:
            record, start = metadata.storage_data[item.storage_index], item.storage_index.offset
            assert start is not None
            yield _Copy(record, there.properties.dtype, sizes[start], item, chunk.tensor.detach())


def _slices(start: torch.Size, size: torch.Size) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))


def _first_byte(record: "MappedRecord", expected_bytes: int) -> int:
    """Where in the record's memory the elements begin: torch.save makes an archive and does not compress it."""
    with zipfile.ZipFile(record) as archive:
        data = next(r for r in archive.infolist() if r.filename.endswith("/data/0"))
    if data.file_size != expected_bytes or data.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{data.filename} holds {data.file_size} bytes instead of {expected_bytes}")
    header = record.offset + data.header_offset
    name_bytes, extra_bytes = struct.unpack("<HH", record.memory[header + 26 : header + 30])
    return header + 30 + int(name_bytes) + int(extra_bytes)


def map_record(stream: IO[bytes], record: Any) -> "MappedRecord":
    """The part of an open file that DCP's `record` says; what of it is not looked at is not read."""
    skipped = record.offset % mmap.ALLOCATIONGRANULARITY
    # A private mapping, which torch takes for writable; nothing is written to it.
    memory = mmap.mmap(
        stream.fileno(), record.length + skipped, access=mmap.ACCESS_COPY, offset=record.offset - skipped
    )
    return MappedRecord(memory, skipped)


class MappedRecord(io.RawIOBase):
    """Mapped memory from `offset` on, as a file."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self.memory, self.offset = memory, offset
        self._length, self._at = len(memory) - offset, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = self._length if size is None or size < 0 else min(self._at + size, self._length)
        data = self.memory[self.offset + self._at : self.offset + end]
        self._at = max(self._at, end)
        return data
