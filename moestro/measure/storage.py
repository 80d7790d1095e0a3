"""What storage gives: bandwidth, random reads per second, and how many pages a scattered sample costs.

All is done in a file that has no name: nothing is left, whatever happens. Reads are of storage, not of memory: the file
is dropped from the page cache before each pass. (What a device, or the host of a virtual disk, caches stays hidden.)
"""

import ctypes
import errno
import mmap
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moestro.errors import MoestroError
from moestro.hardware.profile import Sample, Value
from moestro.hardware.storage import PAGE_BYTES, scatter_factor

BLOCK_BYTES = 2**20  # of sequential reads and writes
DEPTHS = (1, 16)  # random reads under way at once
BATCH = 256  # of them in one timing
SAMPLE_TOKENS, TOKEN_BYTES = 4096, 4  # ZAYA1's sequences
SAMPLE_BYTES = SAMPLE_TOKENS * TOKEN_BYTES
PAGE = mmap.PAGESIZE  # of this machine's memory, in bytes
SPREAD_LIMIT = 0.25
RESIDENT_LIMIT = 0.05  # share of the file in the page cache above which it has not been dropped
SPARE_BYTES = 64 * 2**20  # to leave free on the disk

MOST_PASSES = 50


@dataclass(frozen=True)
class Scatter:
    """Samples of SAMPLE_BYTES read in shuffled order through a memory map.

    advice: "random" (the kernel reads what is touched) or "normal" (it reads ahead, as for any file that is mapped).
    pages_needed: that hold a byte of some sample. pages_read: that were in the page cache afterwards. waits: page
    faults that had to wait for storage.
    """

    advice: str
    samples: int
    pages_needed: int
    pages_read: int
    waits: int

    @property
    def sigma(self) -> float:
        """Bytes of pages read for each byte of data: σ of `StorageDemand`."""
        return self.pages_read * PAGE / (self.samples * SAMPLE_BYTES)

    @property
    def model_sigma(self) -> float:
        """What `scatter_factor` says of samples that start anywhere in a page: one page more than their bytes fill."""
        return scatter_factor(1.0, SAMPLE_TOKENS, TOKEN_BYTES, PAGE)

    def __str__(self) -> str:
        return (
            f"scatter factor {self.sigma:.2f} with {self.advice} access advised (model {self.model_sigma:.2f}): "
            f"{self.samples} samples of {SAMPLE_BYTES} bytes read {self.pages_read} pages in {self.waits} waits"
        )


@dataclass(frozen=True)
class StorageResult:
    """samples: storage_write and storage_read (a pass over the file), storage_random_read (one block, with "depth" of
    them under way) and storage_scatter (one sample of tokens; bytes_moved ÷ bytes is the scatter factor)."""

    samples: tuple[Sample, ...]
    scatter: tuple[Scatter, ...]
    notes: tuple[str, ...]


def measure_storage(
    folder: Path, quick: bool, *, file_bytes: int | None = None, limit_s: float | None = None
) -> StorageResult:
    """Measure the storage that `folder` is on. Quick: a file of 64 MiB and about 4 s; full: 1 GiB and about 30 s.

    limit_s: for all, about; a pass that has begun is finished, so that slow storage takes longer.

    Raises:
        MoestroError: no such folder, not allowed to write there, or too little space.
    """
    size = file_bytes or (2**26 if quick else 2**30)
    size -= size % BLOCK_BYTES
    if size < BLOCK_BYTES:
        raise MoestroError(f"storage is measured with a file of {BLOCK_BYTES} bytes or more, not {file_bytes}")
    share_s = (limit_s or (3.5 if quick else 30.0)) / 4
    _check_space(folder, size)
    with _nameless_file(folder) as file:
        samples = [_writes(file, size, folder, share_s)]
        _drop(file)
        kept = resident_pages(file, size) * PAGE / size
        samples.append(_reads(file, size, share_s))
        samples += [_random_reads(file, size, depth, share_s / len(DEPTHS)) for depth in DEPTHS]
        if kept > RESIDENT_LIMIT:
            note = (
                f"{kept:.0%} of a file at {folder} stays in memory though it should be dropped: reads are of memory, "
                "not of storage, and the scatter factor is not measured"
            )
            return StorageResult(tuple(samples), (), (note,))
        scattered = [_scatter(file, size, advice, share_s / 2) for advice in ("random", "normal")]
    found = tuple(scatter for scatter, _ in scattered)
    samples += [sample for _, sample in scattered]
    return StorageResult(tuple(samples), found, tuple(map(str, found)))


def _check_space(folder: Path, size: int) -> None:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise MoestroError(
            f"cannot measure storage at {folder}: {error.strerror}; name a folder that is there"
        ) from error
    if free < size + SPARE_BYTES:
        raise _full(folder, size, free)


def _full(folder: Path, size: int, free: int) -> MoestroError:
    return MoestroError(
        f"measuring storage needs {(size + SPARE_BYTES) / 2**20:.0f} MiB at {folder}, where {free / 2**20:.0f} MiB are "
        "free; make room or name another folder"
    )


@contextmanager
def _nameless_file(folder: Path) -> Iterator[int]:
    """A descriptor of a file whose name is gone already: it ends with the process, however that ends."""
    try:
        file, name = tempfile.mkstemp(prefix=".moestro-storage-", dir=folder)
        os.unlink(name)
    except OSError as error:
        raise MoestroError(f"cannot write at {folder}: {error.strerror}; name another folder") from error
    try:
        yield file
    finally:
        os.close(file)


def _passes(share_s: float) -> Iterator[None]:
    """At least one, and more while the time lasts."""
    end = time.monotonic() + share_s
    for number in range(MOST_PASSES):
        if number and time.monotonic() > end:
            return
        yield


def _writes(file: int, size: int, folder: Path, share_s: float) -> Sample:
    """Each pass writes anew, as a checkpoint does, and ends when all is on the disk."""
    block = np.random.default_rng(0).bytes(BLOCK_BYTES)  # that no file system can compress
    times_s = []
    for _ in _passes(share_s):
        os.ftruncate(file, 0)
        begin = time.perf_counter()
        try:
            for offset in range(0, size, BLOCK_BYTES):
                _write_all(file, block, offset)
            os.fsync(file)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise _full(folder, size, shutil.disk_usage(folder).free) from error
            raise
        times_s.append(time.perf_counter() - begin)
    return _sample("storage_write", {"bytes": size, "block_bytes": BLOCK_BYTES}, times_s, size)


def _write_all(file: int, block: bytes, offset: int) -> None:
    view = memoryview(block)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _reads(file: int, size: int, share_s: float) -> Sample:
    times_s = []
    for _ in _passes(share_s):
        _drop(file)
        begin = time.perf_counter()
        for offset in range(0, size, BLOCK_BYTES):
            os.pread(file, BLOCK_BYTES, offset)
        times_s.append(time.perf_counter() - begin)
    return _sample("storage_read", {"bytes": size, "block_bytes": BLOCK_BYTES}, times_s, size)


def _random_reads(file: int, size: int, depth: int, share_s: float) -> Sample:
    """Of one block each, `depth` under way at once."""
    rng = np.random.default_rng(depth)
    blocks = size // PAGE_BYTES

    def read(offsets: list[int]) -> None:
        for offset in offsets:
            os.pread(file, PAGE_BYTES, offset)

    times_s = []
    with ThreadPoolExecutor(depth) as threads:
        for _ in _passes(share_s):
            _drop(file)
            _advise(file, "POSIX_FADV_RANDOM")
            offsets = (rng.choice(blocks, min(BATCH, blocks), replace=False) * PAGE_BYTES).tolist()
            begin = time.perf_counter()
            list(threads.map(read, [offsets[i::depth] for i in range(depth)]))
            times_s.append((time.perf_counter() - begin) / len(offsets))
    _advise(file, "POSIX_FADV_NORMAL")
    case: dict[str, Value] = {"bytes": size, "block_bytes": PAGE_BYTES, "depth": depth}
    return _sample("storage_random_read", case, times_s, PAGE_BYTES)


def _scatter(file: int, size: int, advice: str, share_s: float) -> tuple[Scatter, Sample]:
    """The middle one of several passes, and the time of one sample."""
    starts = sample_starts(size)
    found, times_s = [], []
    for _ in _passes(share_s):
        _drop(file)
        begin = time.perf_counter()
        done, waits = _touch(file, size, starts, advice, share_s / 3)  # so that slow storage has several passes too
        times_s.append((time.perf_counter() - begin) / done)
        found.append(Scatter(advice, done, pages_touched(starts[:done]), resident_pages(file, size), waits))
    middle = sorted(found, key=lambda one: one.sigma)[len(found) // 2]
    case: dict[str, Value] = {"bytes": SAMPLE_BYTES, "block_bytes": SAMPLE_BYTES, "advice": advice}
    return middle, _sample("storage_scatter", case, times_s, middle.sigma * SAMPLE_BYTES)


def _touch(file: int, size: int, starts: np.ndarray, advice: str, limit_s: float) -> tuple[int, int]:
    """Read samples through a fresh map until the time is over; returns how many, and the page faults that waited."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    end = time.monotonic() + limit_s
    done = 0
    with mmap.mmap(file, size, prot=mmap.PROT_READ) as mapped:
        mapped.madvise(mmap.MADV_RANDOM if advice == "random" else mmap.MADV_NORMAL)
        tokens = np.frombuffer(mapped, dtype=np.uint32)
        for start in (starts // TOKEN_BYTES).tolist():
            tokens[start : start + SAMPLE_TOKENS].max()
            done += 1
            if time.monotonic() > end:
                break
        del tokens  # a map in use cannot be closed
    return done, resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before


def sample_starts(size: int) -> np.ndarray:
    """Where samples begin, in bytes: a random sixteenth of a file, shuffled, each at any token of its first page.

    No two share a page, as in a large file where the chosen samples lie far apart.
    """
    rng = np.random.default_rng(1)
    slot_bytes = SAMPLE_BYTES + PAGE
    slots = rng.permutation(size // slot_bytes)[: max(1, size // slot_bytes // 16)]
    starts: np.ndarray = slots * slot_bytes + rng.integers(0, PAGE // TOKEN_BYTES, len(slots)) * TOKEN_BYTES
    return starts


def pages_touched(starts: np.ndarray) -> int:
    return int(((starts + SAMPLE_BYTES - 1) // PAGE - starts // PAGE + 1).sum())


def _advise(file: int, advice: str) -> None:
    if hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(file, 0, 0, getattr(os, advice))


def _drop(file: int) -> None:
    _advise(file, "POSIX_FADV_DONTNEED")


def resident_pages(file: int, size: int) -> int:
    """Pages of the file that are in the page cache (mincore)."""
    with mmap.mmap(file, size) as mapped:
        pages = np.zeros(-(-size // PAGE), dtype=np.uint8)
        view = np.frombuffer(mapped, dtype=np.uint8)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
        )
        del view
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return int((pages & 1).sum())


def _sample(op: str, case: dict[str, Value], times_s: list[float], moved: float) -> Sample:
    low, median, high = np.quantile(times_s, (0.1, 0.5, 0.9)).tolist()
    has_spread = len(times_s) > 1
    return Sample(
        op=op,
        case=case,
        median_s=median,
        low_s=low if has_spread else None,
        high_s=high if has_spread else None,
        repeats=len(times_s),
        noisy=(high - low) / median > SPREAD_LIMIT,
        bytes_moved=moved,
    )
