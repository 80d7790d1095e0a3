"""A run's checkpoints as folders `step_00001000` in PyTorch's distributed checkpoint format.

A checkpoint is written under a temporary name, closed by a manifest with the size and CRC of every file, flushed to
disk and then renamed: a folder with the final name is complete. Loading verifies it against its manifest first.
"""

import json
import os
import shutil
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from moestro.errors import MoestroError

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Progress:
    """How far a run has come. Batches, learning rate and routing noise follow from the step and the seed."""

    step: int  # optimizer steps done
    tokens: int  # predicted tokens seen
    train_time_s: float


def save_checkpoint(
    folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], progress: Progress, keep: int
) -> Path:
    """Write a checkpoint under `folder`, then remove all but the newest `keep`.

    Raises:
        MoestroError: the disk is full or not writable; nothing half-written remains and older checkpoints are kept.
    """
    final = folder / f"step_{progress.step:08d}"
    if final.exists():
        if _problem(final) is None:
            return final
        shutil.rmtree(final)
    temporary = folder / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        model_state, optimizer_state = _state(model, optimizers)
        with _one_process():
            dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=temporary, no_dist=True)
        _write_manifest(temporary, progress)
        temporary.rename(final)
        _sync(folder)
    except (Exception, CheckpointException) as error:  # DCP's own wraps the cause and is a BaseException
        shutil.rmtree(temporary, ignore_errors=True)
        reason = _root_cause(error)
        if isinstance(reason, OSError) or "No space left" in str(error):
            raise MoestroError(
                f"cannot write checkpoint {final}: {getattr(reason, 'strerror', None) or reason}. "
                "Free some space and run again with run.resume=auto"
            ) from error
        raise
    # Later steps can only be damaged leftovers that a resume passed over; they must not push this one out.
    past = [p for p in checkpoints(folder) if _step(p) <= progress.step]
    for old in set(checkpoints(folder)) - set(past[-keep:]):
        shutil.rmtree(old)
    return final


def load_checkpoint(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Progress:
    """Fill `model` and `optimizers` in place from a verified checkpoint. An empty list loads the model alone."""
    problem = _problem(path)
    if problem is not None:
        raise MoestroError(f"checkpoint {path} is damaged: {problem}. Delete it to use the one before it")
    # The checkpoint's learning rate and weight decay must not overrule the configuration's.
    settings = [{k: v for k, v in g.items() if k != "params"} for o in optimizers for g in o.param_groups]
    model_state, optimizer_state = _state(model, optimizers)
    state: dict[str, Any] = {"model": model_state}
    if optimizers:
        state["optimizer"] = optimizer_state
    try:
        _check_keys(path, state)
        with _one_process():
            dcp.load(state, checkpoint_id=path, no_dist=True)
    except (Exception, CheckpointException) as error:  # the files are good, so the configuration must differ
        raise MoestroError(
            f"checkpoint {path} does not fit this configuration: {_root_cause(error)}. "
            "Continue with the settings in the run's config.toml, or start a new run.name"
        ) from error
    set_state_dict(model, optimizers, model_state_dict=state["model"], optim_state_dict=state.get("optimizer", {}))
    for group, kept in zip((g for o in optimizers for g in o.param_groups), settings, strict=True):
        group.update(kept)
    return Progress(**json.loads((path / MANIFEST).read_text())["progress"])


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first. (Leftovers of an interrupted save have another name.)"""
    named = (p for p in folder.glob("step_*") if p.is_dir() and p.name.removeprefix("step_").isdecimal())
    return sorted(named, key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def newest_good(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and a line for each newer one that does not."""
    damaged: list[str] = []
    for path in reversed(checkpoints(folder)):
        problem = _problem(path)
        if problem is None:
            return path, damaged
        damaged.append(f"{path} is damaged ({problem}) and was passed over")
    return None, damaged


@contextmanager
def _one_process() -> Iterator[None]:
    """Silence torch's remark that there is no process group: here that is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _write_manifest(folder: Path, progress: Progress) -> None:
    files = {}
    for path in _files(folder):
        _sync(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "crc32": _crc32(path)}
    manifest = {"format_version": FORMAT_VERSION, "progress": asdict(progress), "files": files}
    manifest["crc32"] = _manifest_crc(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    _sync(folder / MANIFEST)
    _sync(folder)


def _problem(folder: Path) -> str | None:
    """Why a checkpoint cannot be trusted, or None."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format_version"] != FORMAT_VERSION:
            return f"format version {manifest['format_version']}, this program reads {FORMAT_VERSION}"
        if manifest["crc32"] != _manifest_crc(manifest):
            return f"{MANIFEST} has a wrong checksum"
        for name, expected in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["bytes"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['bytes']}"
            if _crc32(path) != expected["crc32"]:
                return f"{name} has a wrong checksum"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"unreadable {MANIFEST}: {error}"
    return None


def _manifest_crc(manifest: dict[str, Any]) -> int:
    content = {key: value for key, value in manifest.items() if key != "crc32"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _state(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[dict[str, Any], Any]:
    """State dictionaries; moments not there yet are allocated, for which torch takes a step that must not count."""
    fresh = [optimizer for optimizer in optimizers if not optimizer.state]
    get_state_dict(model, optimizers)
    for optimizer in fresh:
        for values in optimizer.state.values():
            if "step" in values:
                values["step"].zero_()
    return get_state_dict(model, optimizers)


def _check_keys(path: Path, state: dict[str, Any]) -> None:
    """DCP loads what is asked for and passes over the rest in silence."""
    held = {k for k in FileSystemReader(path).read_metadata().state_dict_metadata if k.startswith("model.")}
    extra = sorted(held - {f"model.{name}" for name in state["model"]})
    if extra:
        raise ValueError(f"it also holds {extra[0]}" + (f" and {len(extra) - 1} more" if len(extra) > 1 else ""))


def _files(folder: Path) -> Iterator[Path]:
    return (p for p in sorted(folder.rglob("*")) if p.is_file())


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _root_cause(error: BaseException) -> BaseException:
    failures = getattr(error, "failures", None)  # CheckpointException: rank → (exception, traceback)
    if failures:
        return _root_cause(next(iter(failures.values()))[0])
    return _root_cause(error.__cause__) if error.__cause__ is not None else error
