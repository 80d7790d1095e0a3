"""Saving while training goes on."""

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from moestro.checkpoint.manifest import Progress
from moestro.checkpoint.store import save_checkpoint
from moestro.errors import MoestroError
from moestro.parallel.comm import Group
from moestro.parallel.logical import Chunk, LogicalTensor


@dataclass(frozen=True)
class Saved:
    """How a save in the background went."""

    progress: Progress
    path: Path | None  # None: it failed
    error: MoestroError | None
    copy_s: float  # how long training waited for the copy
    write_s: float  # in the background


class AsyncSaver:
    """Copies the tensors to host memory, then writes, verifies and renames in a thread, one save at a time.

    The thread has a gloo group of its own, so its collectives never meet those of training. Host memory for the copy of
    this rank's tensors is kept from save to save. The interpreter does not end before the thread has.
    """

    def __init__(self, group: Group) -> None:
        """Every rank of the default process group must call it: creating a group is collective."""
        self._group = None if group is None else dist.new_group(dist.get_process_group_ranks(group), backend="gloo")
        self._host: dict[str, LogicalTensor] = {}
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None
        self._defect: BaseException | None = None

    def save(self, folder: Path, tensors: dict[str, LogicalTensor], progress: Progress, keep: int) -> Saved | None:
        """Begin a save like `save_checkpoint`; every rank of the group calls it. Returns how the one before went.

        The tensors may be changed as soon as it returns.
        """
        before = self.wait()
        start = time.perf_counter()
        self._copy(tensors)
        copy_s = time.perf_counter() - start
        arguments = (folder, progress, keep, copy_s)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
        self._thread.start()
        return before

    def poll(self) -> Saved | None:
        """How the save in the background went, if it has ended and was not told of before."""
        return self.wait() if self._thread is not None and not self._thread.is_alive() else None

    def wait(self) -> Saved | None:
        """Wait for the save in the background, if there is one, and tell how it went; the same on every rank."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        if self._defect is not None:
            defect, self._defect = self._defect, None
            raise defect
        saved, self._saved = self._saved, None
        return saved

    def _write(self, folder: Path, progress: Progress, keep: int, copy_s: float) -> None:
        start = time.perf_counter()
        path: Path | None = None
        error: MoestroError | None = None
        try:
            path = save_checkpoint(folder, self._host, progress, keep, self._group)
        except MoestroError as failed:
            error = failed
        except BaseException as defect:  # not for the user to mend: raised where training waits for the save
            self._defect = defect
            return
        self._saved = Saved(progress, path, error, copy_s, time.perf_counter() - start)

    def _copy(self, tensors: dict[str, LogicalTensor]) -> None:
        if _boxes(tensors) != _boxes(self._host):
            self._host = {name: _host_memory(tensor) for name, tensor in tensors.items()}
        devices = set()
        for name, tensor in tensors.items():
            for live, copy in zip(tensor.chunks, self._host[name].chunks, strict=True):
                copy.tensor.copy_(live.tensor.detach(), non_blocking=True)
                devices.add(live.tensor.device)
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)


def _boxes(tensors: dict[str, LogicalTensor]) -> dict[str, object]:
    return {n: (t.shape, [(c.start, c.tensor.shape, c.tensor.dtype) for c in t.chunks]) for n, t in tensors.items()}


def _host_memory(tensor: LogicalTensor) -> LogicalTensor:
    """Pinned beside an accelerator, so that the copy runs at the speed of the bus."""
    chunks = []
    for chunk in tensor.chunks:
        pinned = chunk.tensor.device.type != "cpu"
        copy = torch.empty(chunk.tensor.shape, dtype=chunk.tensor.dtype, pin_memory=pinned)
        chunks.append(Chunk(chunk.start, copy))
    return LogicalTensor(tensor.shape, chunks)
