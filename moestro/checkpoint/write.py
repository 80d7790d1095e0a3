"""Writing the files of a checkpoint in the format of torch.distributed.checkpoint (DCP), and who writes what.

DCP keeps, for every tensor, a list of boxes and where each lies. A checkpoint can be read with
`torch.distributed.checkpoint.load`; ours is in read.py.
"""

import io
import math
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from moestro.checkpoint.manifest import FileEntry, settle
from moestro.parallel.logical import LogicalTensor, tiles

SMALLEST_PIECE = 1 << 18  # bytes; a box that several ranks hold is not cut into smaller ones


@dataclass(frozen=True)
class Piece:
    """A box of a tensor, to be written by one rank."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """What a rank has written."""

    files: dict[str, FileEntry]
    results: list[WriteResult]  # where each piece lies, for the table of contents


def pieces_of(tensors: dict[str, LogicalTensor]) -> list[Piece]:
    """What this rank holds."""
    return [
        Piece(name, tensor.shape, chunk.tensor.dtype, chunk.start, tuple(chunk.tensor.shape))
        for name, tensor in tensors.items()
        for chunk in tensor.chunks
        if chunk.tensor.numel()
    ]


def share_out(held: list[list[Piece]]) -> list[list[Piece]]:
    """Who writes what, given what each rank holds: every box once, and about the same number of bytes each.

    Boxes that several ranks hold are cut into pieces, small against a rank's share, which go to the holders with the
    least to write, large ones first.
    """
    holders: dict[Piece, list[int]] = {}
    for rank, pieces in enumerate(held):
        for piece in pieces:
            holders.setdefault(piece, []).append(rank)
    share = sum(piece.bytes for piece in holders) // len(held)
    shares: list[list[Piece]] = [[] for _ in held]
    loads = [0] * len(held)
    shared: list[tuple[Piece, list[int]]] = []
    for piece, ranks in holders.items():
        if len(ranks) == 1:
            shares[ranks[0]].append(piece)
            loads[ranks[0]] += piece.bytes
        else:
            shared += [(part, ranks) for part in _cut(piece, max(SMALLEST_PIECE, share // 16))]
    for part, ranks in sorted(shared, key=lambda item: -item[0].bytes):
        rank = min(ranks, key=loads.__getitem__)
        shares[rank].append(part)
        loads[rank] += part.bytes
    return shares


def _cut(piece: Piece, limit: int) -> Iterator[Piece]:
    """Pieces of about `limit` bytes, cut along the first axis that is long enough, else along the longest."""
    count = -(-piece.bytes // limit)
    if count <= 1:
        yield piece
        return
    long = [axis for axis, n in enumerate(piece.size) if n >= count]
    axis = long[0] if long else max(range(len(piece.size)), key=piece.size.__getitem__)
    length = piece.size[axis]
    count = min(count, length)
    ends = [length * i // count for i in range(count + 1)]
    for first, last in pairwise(ends):
        start = (*piece.start[:axis], piece.start[axis] + first, *piece.start[axis + 1 :])
        size = (*piece.size[:axis], last - first, *piece.size[axis + 1 :])
        yield Piece(piece.name, piece.shape, piece.dtype, start, size)


def plan(names: list[str], held: list[list[Piece]]) -> tuple[list[SavePlan], Metadata]:
    """What each rank is to write, and the table of contents, from what each holds of the tensors of these names.

    Raises:
        ValueError: the ranks do not hold the whole of a tensor, once.
    """
    shares = share_out(held)
    plans = [SavePlan([_write_item(piece) for piece in share]) for share in shares]
    return FileSystemWriter("").prepare_global_plan(plans), _metadata(names, shares)


def write(folder: Path, plan: SavePlan, data: Callable[[Piece], Tensor]) -> Written:
    """Write, flush and read back the files of one rank; `data` gives the values of a piece."""
    with _writing(folder) as (writer, checksums):
        results = writer.write_data(plan, _Values(data)).value()  # type: ignore[arg-type]  # has what is asked of it
    settle(folder, checksums.files)
    return Written(checksums.files, results)


def finish(folder: Path, metadata: Metadata, written: list[Written]) -> dict[str, FileEntry]:
    """Write the table of contents; return the size and CRC of all files."""
    with _writing(folder) as (writer, checksums):
        writer.finish(metadata, [part.results for part in written])
    settle(folder, checksums.files)
    return {name: entry for files in (checksums.files, *(p.files for p in written)) for name, entry in files.items()}


class _Values:
    """What DCP's writer asks a planner for."""

    def __init__(self, data: Callable[[Piece], Tensor]) -> None:
        self._data = data

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._data(_piece(write_item))


def _metadata(names: list[str], shares: list[list[Piece]]) -> Metadata:
    """DCP's table of contents.

    Raises:
        ValueError: the pieces of a tensor are not the whole of it.
    """
    by_name: dict[str, list[Piece]] = {name: [] for name in names}
    for piece in (piece for share in shares for piece in share):
        by_name[piece.name].append(piece)
    contents: dict[str, Any] = {}
    for name, pieces in by_name.items():
        kinds = {(piece.shape, piece.dtype) for piece in pieces}
        if len(kinds) != 1 or not tiles(pieces[0].shape, [(p.start, p.size) for p in pieces]):
            raise ValueError(f"{name}: the ranks' boxes are not the whole tensor, once")
        shape, dtype = kinds.pop()
        chunks = [ChunkStorageMetadata(torch.Size(p.start), torch.Size(p.size)) for p in pieces]
        contents[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)
    return Metadata(contents, planner_data={name: _path(name) for name in contents})


def _path(name: str) -> tuple[str, ...]:
    """Where DCP's own tools put a tensor when they make nested dictionaries."""
    if name.startswith("optimizer.state."):
        parameter, key = name.removeprefix("optimizer.state.").rsplit(".", 1)
        return "optimizer", "state", parameter, key
    return tuple(name.split(".", 1))


def _write_item(piece: Piece) -> WriteItem:
    box = ChunkStorageMetadata(torch.Size(piece.start), torch.Size(piece.size))
    data = TensorWriteData(box, TensorProperties(piece.dtype), torch.Size(piece.shape))
    return WriteItem(MetadataIndex(piece.name, piece.start), WriteItemType.SHARD, tensor_data=data)


def _piece(item: WriteItem) -> Piece:
    data = item.tensor_data
    assert data is not None
    start, size = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    return Piece(item.index.fqn, tuple(data.size), data.properties.dtype, start, size)


def value_of(tensors: dict[str, LogicalTensor], piece: Piece) -> Tensor:
    """The piece, out of the chunk that holds it."""
    for chunk in tensors[piece.name].chunks:
        first = [s - c for s, c in zip(piece.start, chunk.start, strict=True)]
        inside = zip(first, piece.size, chunk.tensor.shape, strict=True)
        if all(f >= 0 and f + n <= m for f, n, m in inside):
            # Row-major in the file whatever it is here: that is what read.py counts on.
            return chunk.tensor[tuple(slice(f, f + n) for f, n in zip(first, piece.size, strict=True))].contiguous()
    raise KeyError(piece)


@contextmanager
def _writing(folder: Path) -> Iterator[tuple[FileSystemWriter, "_Checksums"]]:
    """DCP's writer, with checksums on the way. The disk's errors come out as they are, not as what became of them."""
    writer, checksums = FileSystemWriter(folder), _Checksums()
    writer.fs = checksums
    try:
        yield writer, checksums
    except (Exception, CheckpointException):
        if checksums.error is not None:
            raise checksums.error from None
        raise


class _Checksums(FileSystem):
    """Notes size and CRC of each file on its way to the disk."""

    def __init__(self) -> None:
        self.files: dict[str, FileEntry] = {}
        self.error: OSError | None = None

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as stream:
            counting = _Counting(stream)
            try:
                yield counting  # type: ignore[misc]  # has what DCP uses of a stream
            finally:
                self.error = self.error or counting.error
        self.files[Path(path).name] = {"bytes": counting.bytes, "crc32": counting.crc}

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.files[Path(new_path).name] = self.files.pop(Path(path).name)


class _Counting:
    def __init__(self, stream: Any) -> None:
        self._stream, self.bytes, self.crc = stream, 0, 0
        self.error: OSError | None = None
        self.tell, self.flush, self.fileno, self.close = stream.tell, stream.flush, stream.fileno, stream.close

    def write(self, data: Any) -> int:
        self.crc = zlib.crc32(data, self.crc)
        self.bytes += memoryview(data).nbytes
        try:
            written: int = self._stream.write(data)
        except OSError as error:  # torch.save makes a RuntimeError of it
            self.error = error
            raise
        return written
