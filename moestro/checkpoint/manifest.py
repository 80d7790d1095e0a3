"""The manifest that closes a checkpoint: size and CRC of every file, and what the checkpoint is."""

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from moestro.parallel.comm import Group, rank_in, size_of
from moestro.parallel.ranks import together

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
READABLE = (1, 2)  # 1: one process, one box a tensor, no world_size

FileEntry = dict[str, int]  # bytes, crc32


class StepFigures(NamedTuple):
    """What the guards remember of a step."""

    step: int
    loss: float
    grad_norm: float


@dataclass(frozen=True)
class Progress:
    """How far a run has come. Batches, learning rate and routing noise follow from the step and the seed; whether a
    step is passed over follows from `skipped` and `recent`."""

    step: int  # optimizer steps done or passed over
    tokens: int  # predicted tokens seen
    train_time_s: float
    skipped: tuple[int, ...] = ()  # steps that are to be passed over, of those done and of those to come
    recent: tuple[StepFigures, ...] = ()

    @classmethod
    def of(cls, tree: dict[str, Any]) -> Self:
        """From a manifest. Raises TypeError for what cannot be one."""
        recent = tuple(StepFigures(*figures) for figures in tree.get("recent", ()))
        return cls(**tree | {"skipped": tuple(tree.get("skipped", ())), "recent": recent})


def write_manifest(folder: Path, progress: Progress, world_size: int, files: dict[str, FileEntry]) -> None:
    """Write and flush the manifest of a folder whose files are flushed already."""
    manifest = {
        "format_version": FORMAT_VERSION,
        "progress": asdict(progress),
        "world_size": world_size,
        "files": dict(sorted(files.items())),
    }
    manifest["crc32"] = _manifest_crc(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    sync(folder / MANIFEST)
    sync(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest as it is written.

    Raises:
        ValueError, OSError, KeyError, TypeError or AttributeError: it is not there or not sound.
    """
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    if manifest["format_version"] not in READABLE:
        raise ValueError(f"format version {manifest['format_version']}, this program reads {READABLE}")
    if manifest["crc32"] != _manifest_crc(manifest):
        raise ValueError("wrong checksum")
    return manifest


def progress_of(folder: Path) -> Progress:
    return Progress.of(read_manifest(folder)["progress"])


def problem(folder: Path, group: Group = None) -> str | None:
    """Why a checkpoint cannot be trusted, or None. The ranks check a part of the files each and agree."""
    found = together(group, lambda: next(problems(folder, rank_in(group), size_of(group)), None))
    bad = [p for p in found if p is not None]
    return min(bad)[2] if bad else None


def problems(folder: Path, first: int = 0, step: int = 1) -> Iterator[tuple[int, str, str]]:
    """(number, file, what is wrong with it) of each bad file among every step-th, the manifest before all others."""
    try:
        files = [(name, entry["bytes"], entry["crc32"]) for name, entry in read_manifest(folder)["files"].items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        yield -1, MANIFEST, f"unreadable {MANIFEST}: {error}"
        return
    for number in range(first, len(files), step):
        name, size, crc = files[number]
        path = folder / name
        try:
            if not path.is_file():
                yield number, name, f"{name} is missing"
            elif path.stat().st_size != size:
                yield number, name, f"{name} has {path.stat().st_size} bytes instead of {size}"
            elif crc32(path) != crc:
                yield number, name, f"{name} has a wrong checksum"
        except OSError as error:
            yield number, name, f"{name} cannot be read: {error.strerror}"


def settle(folder: Path, files: dict[str, FileEntry]) -> None:
    """Flush what was just written to disk and read it back.

    Raises:
        OSError: it is not what was written.
    """
    for name, entry in files.items():
        sync(folder / name)  # DCP flushes a table of contents before the last of it has left its buffer
        if crc32(folder / name) != entry["crc32"]:
            raise OSError(f"{name} reads back differently from what was written")


def crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _manifest_crc(manifest: dict[str, Any]) -> int:
    content = {key: value for key, value in manifest.items() if key != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
