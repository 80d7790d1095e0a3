"""Checkpoints into other files: as many as wanted of the same format, or safetensors with the weights alone."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from moestro.checkpoint.manifest import problem, progress_of, read_manifest, sync, write_manifest
from moestro.checkpoint.read import read_box, read_metadata, tensors_in
from moestro.checkpoint.write import Piece, finish, plan, write
from moestro.errors import MoestroError

Advance = Callable[[int], None]  # is told of bytes done


def total_bytes(checkpoint: Path, prefix: str = "") -> int:
    """Bytes of the tensors whose names begin with `prefix`."""
    return sum(piece.bytes for piece in _wholes(read_metadata(checkpoint)) if piece.name.startswith(prefix))


def reshape(source: Path, destination: Path, files: int, advance: Advance) -> None:
    """Write the checkpoint again in `files` files of about the same size, one box in memory at a time.

    Raises:
        MoestroError: the source is damaged, or the destination is there.
    """
    metadata = _sound_source(source)

    def data(piece: Piece) -> Tensor:
        advance(piece.bytes)
        return read_box(source, metadata, piece.name, piece.start, piece.size)

    pieces = _wholes(metadata)
    plans, contents = plan([piece.name for piece in pieces], [pieces] * files)
    with _new_folder(destination) as folder:
        written = [write(folder, part, data) for part in plans]
        ranks = read_manifest(source).get("world_size", 1)
        write_manifest(folder, progress_of(source), ranks, finish(folder, contents, written))


def export(source: Path, destination: Path, max_shard_bytes: int, advance: Advance) -> list[Path]:
    """Write the model's tensors as safetensors without the prefix `model.`, one file in memory at a time.

    A model beyond max_shard_bytes makes several files and model.safetensors.index.json, as Hugging Face lays them out.
    The run's config.toml and tokenizer.json are copied beside them. Returns the files.

    Raises:
        MoestroError: the source is damaged, or the destination is there.
    """
    metadata = _sound_source(source)
    shards = _shards([p for p in _wholes(metadata) if p.name.startswith("model.")], max_shard_bytes)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    with _new_folder(destination) as folder:
        where = {}
        for file, shard in zip(names, shards, strict=True):
            tensors = {}
            for piece in shard:
                name = piece.name.removeprefix("model.")
                tensors[name] = read_box(source, metadata, piece.name, piece.start, piece.size)
                where[name] = file
                advance(piece.bytes)
            save_file(tensors, folder / file, metadata={"format": "pt"})
            sync(folder / file)
        if len(shards) > 1:
            size = sum(piece.bytes for shard in shards for piece in shard)
            index = {"metadata": {"total_size": size}, "weight_map": where}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        for name in ("config.toml", "tokenizer.json"):
            if (source.parent.parent / name).is_file():
                shutil.copy(source.parent.parent / name, folder / name)
    return sorted(destination.iterdir())


def _sound_source(source: Path) -> Metadata:
    damage = problem(source)
    if damage is not None:
        raise MoestroError(f"checkpoint {source} is damaged: {damage}")
    return read_metadata(source)


def _wholes(metadata: Metadata) -> list[Piece]:
    return [
        Piece(name, tuple(stored.size), stored.properties.dtype, (0,) * len(stored.size), tuple(stored.size))
        for name, stored in tensors_in(metadata).items()
    ]


def _shards(pieces: list[Piece], limit: int) -> list[list[Piece]]:
    """Consecutive tensors up to `limit` bytes a shard; a larger tensor has one to itself."""
    shards: list[list[Piece]] = [[]]
    for piece in pieces:
        if shards[-1] and sum(p.bytes for p in shards[-1]) + piece.bytes > limit:
            shards.append([])
        shards[-1].append(piece)
    return shards


@contextmanager
def _new_folder(destination: Path) -> Iterator[Path]:
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
