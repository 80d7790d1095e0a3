"""A run's checkpoints as folders `step_00001000` in PyTorch's distributed checkpoint format.

Every rank writes its part under a temporary name; the first rank closes the folder with a manifest of the size and CRC
of every file, flushes it to disk and renames it: a folder with the final name is complete. Tensors are known by their
logical names and shapes only, so any layout on any number of ranks loads any checkpoint. Loading verifies it first.
"""

import shutil
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from moestro.checkpoint.manifest import MANIFEST as MANIFEST
from moestro.checkpoint.manifest import Progress as Progress
from moestro.checkpoint.manifest import problem, progress_of, sync, write_manifest
from moestro.checkpoint.read import read_into, read_metadata, tensors_in
from moestro.checkpoint.write import Piece, Written, finish, pieces_of, plan, value_of, write
from moestro.errors import MoestroError
from moestro.parallel.comm import Group, rank_in, size_of
from moestro.parallel.logical import LogicalTensor
from moestro.parallel.ranks import RankFailure, dealt, gathered, on_first, together


def save_checkpoint(
    folder: Path, tensors: dict[str, LogicalTensor], progress: Progress, keep: int, group: Group = None
) -> Path:
    """Write a checkpoint under `folder`, then remove all but the newest `keep`. Every rank of the group calls it.

    Raises:
        MoestroError: on every rank, if one cannot write; nothing half-written remains and older checkpoints are kept.
    """
    final = folder / f"step_{progress.step:08d}"
    temporary = folder / f".{final.name}.tmp"
    contents: list[Metadata] = []  # on the first rank

    def begin(held: list[tuple[list[str], list[Piece]]]) -> list[SavePlan | None]:
        if final.exists():
            return [None] * len(held)
        names = list(dict.fromkeys(name for there, _ in held for name in there))
        plans, metadata = plan(names, [pieces for _, pieces in held])
        contents.append(metadata)
        _clear(folder, temporary)
        return list(plans)

    def publish(written: list[Written]) -> None:
        _check_visible(temporary, written)
        write_manifest(temporary, progress, len(written), finish(temporary, contents[0], written))
        temporary.rename(final)
        sync(folder)
        _prune(folder, progress.step, keep)

    try:
        mine = dealt(group, lambda: (list(tensors), pieces_of(tensors)), begin)
        if mine is None:  # there already
            if problem(final, group) is None:
                return final
            on_first(group, lambda: shutil.rmtree(final))
            return save_checkpoint(folder, tensors, progress, keep, group)
        gathered(group, lambda: write(temporary, mine, lambda piece: value_of(tensors, piece)), publish)
    except RankFailure as failed:
        if rank_in(group) == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise _cannot_write(final, failed, size_of(group)) from failed
    return final


def load_checkpoint(path: Path, tensors: dict[str, LogicalTensor], group: Group = None) -> Progress:
    """Fill `tensors` in place from a verified checkpoint. Every rank of the group calls it, with its own boxes.

    Without `optimizer.…` among the names, the model alone is loaded.

    Raises:
        MoestroError: on every rank, if the checkpoint is damaged, or if names, shapes or types differ; then no tensor
            was touched.
    """
    damage = problem(path, group)
    if damage is not None:
        raise MoestroError(f"checkpoint {path} is damaged: {damage}. Delete it to use the one before it")
    names: set[str] = set().union(*together(group, lambda: set(tensors)))
    metadata: list[Metadata] = []

    def check() -> None:
        metadata.append(read_metadata(path))
        _check_fit(metadata[0], tensors, names)

    try:
        together(group, check)
        together(group, lambda: read_into(path, metadata[0], tensors))
    except RankFailure as failed:
        if isinstance(failed.error, _MisfitError):
            raise MoestroError(
                f"checkpoint {path} does not fit this configuration: {failed.error}. "
                "Take the settings in its run's config.toml, or start a new run.name"
            ) from failed
        raise failed.error from failed
    return progress_of(path)


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first. (Leftovers of an interrupted save have another name.)"""
    named = (p for p in folder.glob("step_*") if p.is_dir() and p.name.removeprefix("step_").isdecimal())
    return sorted(named, key=_step)


def newest_good(folder: Path, group: Group = None) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that verifies, and a line for each newer one that does not; the same on every rank."""
    damaged: list[str] = []
    for path in reversed(on_first(group, lambda: checkpoints(folder))):
        damage = problem(path, group)
        if damage is None:
            return path, damaged
        damaged.append(f"{path} is damaged ({damage}) and was passed over")
    return None, damaged


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _clear(folder: Path, temporary: Path) -> None:
    """Make the temporary folder, and remove what interrupted saves have left."""
    for leftover in folder.glob(".step_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    temporary.mkdir(parents=True)


def _check_visible(folder: Path, written: list[Written]) -> None:
    for rank, part in enumerate(written):
        for name, entry in part.files.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != entry["bytes"]:
                raise MoestroError(
                    f"{path}, written by rank {rank}, cannot be seen from the first rank; set run.dir to a folder "
                    "that all nodes share"
                )


def _prune(folder: Path, step: int, keep: int) -> None:
    # Later steps can only be damaged leftovers that a resume passed over; they must not push this one out.
    past = [path for path in checkpoints(folder) if _step(path) <= step]
    try:
        for old in set(checkpoints(folder)) - set(past[-keep:]):
            shutil.rmtree(old)
    except OSError as error:
        raise MoestroError(f"step {step} is saved, but an older checkpoint cannot be removed: {error}") from error


def _cannot_write(final: Path, failed: RankFailure, ranks: int) -> BaseException:
    """What a failed save raises: a MoestroError if the disk is to blame, else the error itself."""
    error = failed.error
    if not isinstance(error, OSError) and "No space left" not in str(error):
        return error
    where = f"rank {failed.rank}: " if ranks > 1 else ""
    return MoestroError(
        f"cannot write checkpoint {final}: {where}{getattr(error, 'strerror', None) or error}. "
        "Free some space and run again with run.resume=auto"
    )


class _MisfitError(Exception):
    """The checkpoint is good, so the configuration must differ."""


def _check_fit(metadata: Metadata, tensors: dict[str, LogicalTensor], names: set[str]) -> None:
    """Compare what is stored with this rank's tensors and with the names on all ranks."""
    stored = tensors_in(metadata)
    kinds = ("model.", "optimizer.state.") if any(n.startswith("optimizer.") for n in names) else ("model.",)
    missing = sorted(names - stored.keys())
    surplus = sorted(name for name in stored.keys() - names if name.startswith(kinds))
    has_optimizer = [any(name.startswith("optimizer.") for name in side) for side in (names, stored)]
    if has_optimizer == [True, False]:
        raise MoestroError(
            "the checkpoint holds no optimizer state, as one of an imported model; train on from it under another "
            "run.name with run.init_from"
        )
    for found, text in ((missing, "it does not hold"), (surplus, "it also holds")):
        if found:
            raise _MisfitError(f"{text} {found[0]}" + (f" and {len(found) - 1} more" if len(found) > 1 else ""))
    for name, tensor in tensors.items():
        there = stored[name]
        if tuple(there.size) != tensor.shape:
            raise _MisfitError(f"{name} is {list(there.size)} there and {list(tensor.shape)} here")
        for chunk in tensor.chunks:
            dtype = there.properties.dtype
            if torch.promote_types(dtype, chunk.tensor.dtype) != chunk.tensor.dtype:
                raise _MisfitError(f"{name} is {dtype} there and would lose digits in {chunk.tensor.dtype} here")
