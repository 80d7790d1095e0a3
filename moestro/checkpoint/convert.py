"""A checkpoint into another number of files of the same format, and what all that rewrites one needs."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from moestro.checkpoint.manifest import problem, progress_of, read_manifest, sync, write_manifest
from moestro.checkpoint.read import read_box, read_metadata, tensors_in
from moestro.checkpoint.write import Piece, finish, plan, write
from moestro.errors import MoestroError

Advance = Callable[[int], None]  # is told of bytes done


def total_bytes(checkpoint: Path, prefix: str = "") -> int:
    """Bytes of the tensors whose names begin with `prefix`."""
    return sum(piece.bytes for piece in wholes(read_metadata(checkpoint)) if piece.name.startswith(prefix))


def reshape(source: Path, destination: Path, files: int, advance: Advance) -> None:
    """Write the checkpoint again in `files` files of about the same size, one box in memory at a time.

    Raises:
        MoestroError: the source is damaged, or the destination is there.
    """
    metadata = sound_source(source)

    def data(piece: Piece) -> Tensor:
        advance(piece.bytes)
        return read_box(source, metadata, piece.name, piece.start, piece.size)

    pieces = wholes(metadata)
    plans, contents = plan([piece.name for piece in pieces], [pieces] * files)
    with new_folder(destination) as folder:
        written = [write(folder, part, data) for part in plans]
        ranks = read_manifest(source).get("world_size", 1)
        write_manifest(folder, progress_of(source), ranks, finish(folder, contents, written))


def sound_source(source: Path) -> Metadata:
    """A checkpoint's table of contents, once its files are verified.

    Raises:
        MoestroError: one is damaged.
    """
    damage = problem(source)
    if damage is not None:
        raise MoestroError(f"checkpoint {source} is damaged: {damage}")
    return read_metadata(source)


def wholes(metadata: Metadata) -> list[Piece]:
    return [
        Piece(name, tuple(stored.size), stored.properties.dtype, (0,) * len(stored.size), tuple(stored.size))
        for name, stored in tensors_in(metadata).items()
    ]


def packed(pieces: list[Piece], limit: int) -> list[list[Piece]]:
    """Consecutive pieces up to `limit` bytes together; a larger one has a list to itself."""
    packs: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if packs[-1] and size + piece.bytes > limit:
            packs.append([])
            size = 0
        packs[-1].append(piece)
        size += piece.bytes
    return packs


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when that is done and goes if it fails."""
    if destination.exists():
        raise MoestroError(f"{destination} is there already; choose another name or remove it")
    temporary = destination.parent / f".{destination.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        sync(temporary)
        temporary.rename(destination)
        sync(destination.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
