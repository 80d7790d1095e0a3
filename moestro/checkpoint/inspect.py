"""What a checkpoint holds, and which tensors a damaged file takes with it."""

import math
import struct
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from moestro.checkpoint.manifest import MANIFEST, Progress, problems, read_manifest
from moestro.checkpoint.read import map_record, read_metadata, tensors_in
from moestro.checkpoint.store import checkpoints, newest_good
from moestro.errors import MoestroError


@dataclass(frozen=True)
class TensorEntry:
    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: int  # parts it is stored in
    bytes: int
    meaning: str | None  # of merged experts


@dataclass(frozen=True)
class Contents:
    path: str
    format_version: int
    progress: Progress
    world_size: int  # ranks that wrote it
    files: dict[str, int]  # bytes of each
    tensors: list[TensorEntry]


def find_checkpoint(path: Path) -> tuple[Path, list[str]]:
    """The checkpoint at `path`, or the newest good one of the run there, and a line for each damaged newer one.

    Raises:
        MoestroError: there is none.
    """
    if not _holds_checkpoints(path):
        return path, []
    found, damaged = newest_good(_folder(path))
    if found is None:
        raise MoestroError(f"{path} has no usable checkpoint" + (f": {damaged[0]}" if damaged else ""))
    return found, damaged


def all_checkpoints(path: Path) -> list[Path]:
    """The checkpoint at `path`, or all of the run there, oldest first.

    Raises:
        MoestroError: there is none.
    """
    found = checkpoints(_folder(path)) if _holds_checkpoints(path) else [path]
    if not found:
        raise MoestroError(f"{path} has no checkpoint yet; train longer, or wait for train.checkpoint_every")
    return found


def contents(checkpoint: Path) -> Contents:
    """What a checkpoint holds, by its manifest and table of contents; the tensors are not read.

    Raises:
        MoestroError: these two cannot be read.
    """
    try:
        manifest = read_manifest(checkpoint)
        metadata = read_metadata(checkpoint)
    except Exception as error:  # garbled pickles raise anything
        raise MoestroError(f"checkpoint {checkpoint} is damaged: {error}") from error
    tensors = [
        TensorEntry(
            name,
            tuple(stored.size),
            str(stored.properties.dtype).removeprefix("torch."),
            len(stored.chunks),
            math.prod(stored.size) * stored.properties.dtype.itemsize,
            _meaning(name, stored.size),
        )
        for name, stored in tensors_in(metadata).items()
    ]
    return Contents(
        str(checkpoint),
        manifest["format_version"],
        Progress.of(manifest["progress"]),
        manifest.get("world_size", 1),
        {name: entry["bytes"] for name, entry in manifest["files"].items()},
        tensors,
    )


def damages(checkpoint: Path) -> Iterator[str]:
    """A line for each bad file of a checkpoint, with the tensors that are lost with it where that can be told."""
    bad = list(problems(checkpoint))
    tellable = not {MANIFEST, ".metadata"} & {file for _, file, _ in bad}
    for _, file, text in bad:
        yield text + (_lost(checkpoint, read_metadata(checkpoint), file) if tellable else "")


def _lost(checkpoint: Path, metadata: Metadata, file: str) -> str:
    """The tensors whose own checksums in the file are wrong, or all of the file if none is."""
    inside: dict[str, list[Any]] = defaultdict(list)
    for index, record in metadata.storage_data.items():
        if record.relative_path == file:
            inside[index.fqn].append(record)
    wrong = sorted(name for name, records in inside.items() if not _are_sound(checkpoint / file, records))
    names = wrong or sorted(inside)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" ({'damaged' if wrong else 'it holds'}: {', '.join(names[:3])}{more})"


def _are_sound(path: Path, records: list[Any]) -> bool:
    try:
        with path.open("rb") as stream:
            for record in records:
                with zipfile.ZipFile(map_record(stream, record)) as archive:
                    if archive.testzip() is not None:
                        return False
    except (OSError, ValueError, EOFError, struct.error, zipfile.BadZipFile):
        return False
    return True


def _meaning(name: str, shape: tuple[int, ...]) -> str | None:
    if ".experts.gate_up_proj" in name and len(shape) == 4:
        experts, products, width, hidden = shape
        if products == 1:
            return f"{experts} experts without gate; [e, 0] is the up projection of expert e, {width} × {hidden}"
        return (
            f"{experts} experts; [e, 0] is the gate and [e, 1] the up projection of expert e, each {width} × {hidden}"
        )
    if ".experts.down_proj" in name and len(shape) == 3:
        experts, hidden, width = shape
        return f"{experts} experts; [e] is the down projection of expert e, {hidden} × {width}"
    return None


def _holds_checkpoints(path: Path) -> bool:
    """Whether `path` is a run or its folder of checkpoints, not a checkpoint itself."""
    if (path / MANIFEST).exists() or path.name.startswith("step_"):
        if not path.is_dir():
            raise MoestroError(f"there is no checkpoint {path}")
        return False
    if path.name == "checkpoints" or (path / "checkpoints").is_dir() or (path / "config.toml").is_file():
        return True
    if (path / "config.json").is_file():
        raise MoestroError(
            f"{path} holds no checkpoint; if it is a Hugging Face model, `moestro checkpoint import` it first"
        )
    raise MoestroError(f"{path} holds no checkpoint; give a step_… folder, or a run's folder for its newest")


def _folder(path: Path) -> Path:
    return path if path.name == "checkpoints" else path / "checkpoints"
