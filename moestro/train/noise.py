"""Noise of the host that makes steps of many ranks late: garbage collection at odd times, a full page cache.

A step takes as long as its slowest rank. Pauses that each rank takes at a time of its own therefore add up over ranks;
taken together they cost as much as on one rank (SIGMA, arXiv 2512.13488, which names both sources).
"""

import ctypes
import gc
import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from moestro.data.prepare import PreparedData


class QuietHost:
    """As a context: Python collects garbage every so many steps, on all ranks at the same ones, and not between.

    gc_every: steps; None leaves the collector as it is. drop: also give back, at the same steps, the page cache that
    the text of `data` takes, which else grows until the kernel reclaims it in the middle of a step.
    """

    def __init__(self, gc_every: int | None, drop: bool, data: Iterable[PreparedData]) -> None:
        self._gc_every, self._was_enabled = gc_every, gc.isenabled()
        shards = [shard for prepared in data for shard in (*prepared.train, *prepared.validation)] if drop else []
        self._tokens = {shard.folder / "tokens.bin": shard.tokens for shard in shards}

    def __enter__(self) -> Self:
        if self._gc_every is not None:
            gc.collect()
            gc.freeze()  # what is there now stays; later collections need not walk through it
            gc.disable()
        self._drop()
        return self

    def __exit__(self, *_: object) -> None:
        if self._gc_every is not None:
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()

    def after(self, step: int) -> None:
        """After a step, counted from 1."""
        if self._gc_every is not None and step % self._gc_every == 0:
            gc.collect()
            self._drop()

    def _drop(self) -> None:
        for path, tokens in self._tokens.items():
            mapped = getattr(tokens.base, "_mmap", None)
            if isinstance(mapped, mmap.mmap):  # mapped pages are in use, and are not given back
                mapped.madvise(mmap.MADV_DONTNEED)
            drop_page_cache(path)


def drop_page_cache(path: Path) -> None:
    """Ask the kernel to forget its copy of a file, or of the files in a folder, that is on disk. Advice only; nothing
    is lost, and what does not exist is passed over."""
    for file in path.iterdir() if path.is_dir() else [path]:
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError:
            continue
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_bytes(path: Path) -> int:
    """How much of a file the page cache holds; Linux.

    Raises:
        OSError: the file cannot be mapped, or the kernel does not tell.
    """
    size = path.stat().st_size
    if size == 0:
        return 0
    pages = -(-size // mmap.PAGESIZE)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as m,
    ):
        here = (ctypes.c_ubyte * pages)()
        libc = ctypes.CDLL(None, use_errno=True)
        pointer = ctypes.c_char.from_buffer(m)
        failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(pointer)), ctypes.c_size_t(size), here)
        del pointer
        if failed:
            raise OSError(ctypes.get_errno(), "mincore")
    return sum(page & 1 for page in here) * mmap.PAGESIZE
