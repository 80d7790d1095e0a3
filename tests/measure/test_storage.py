"""Storage: what is measured, what is refused, and that nothing is left."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import MoestroError
from moestro.measure import storage
from moestro.measure.storage import (
    PAGE,
    SAMPLE_BYTES,
    TOKEN_BYTES,
    StorageResult,
    measure_storage,
    pages_touched,
    resident_pages,
    sample_starts,
)

FILE_BYTES = 2**21


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StorageResult]:
    folder = tmp_path_factory.mktemp("storage")
    return folder, measure_storage(folder, True, file_bytes=FILE_BYTES, limit_s=0.4)


def test_every_kind_of_access_is_measured(measured: tuple[Path, StorageResult]) -> None:
    folder, result = measured
    ops = [sample.op for sample in result.samples]
    assert ops[:4] == ["storage_write", "storage_read", "storage_random_read", "storage_random_read"]
    assert [sample.case.get("depth") for sample in result.samples[2:4]] == [1, 16]
    write, read, random, _ = result.samples[:4]
    assert write.case == read.case == {"bytes": FILE_BYTES, "block_bytes": 2**20}
    assert (write.bytes_moved, random.bytes_moved) == (FILE_BYTES, 4096)
    for sample in result.samples:
        assert sample.repeats == 1 or sample.low_s <= sample.median_s <= sample.high_s  # type: ignore[operator]
        assert 1e3 < sample.bytes_per_s < 1e12  # type: ignore[operator]
    assert list(folder.iterdir()) == []


def test_a_single_pass_has_no_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MOST_PASSES", 1)
    for sample in measure_storage(tmp_path, True, file_bytes=FILE_BYTES).samples:
        assert (sample.repeats, sample.spread) == (1, None)


def test_the_scatter_factor_is_that_of_the_model(measured: tuple[Path, StorageResult]) -> None:
    _, result = measured
    if not result.scatter:  # a file system in memory: see below
        assert "stays in memory" in result.notes[0]
        pytest.skip("the page cache cannot be dropped here")
    random, normal = result.scatter
    assert (random.advice, normal.advice) == ("random", "normal")
    assert random.pages_read == random.pages_needed  # no page but those that hold a sample
    assert random.sigma == pytest.approx(random.model_sigma, rel=0.1)
    assert normal.sigma >= random.sigma  # reading ahead brings more
    sample = result.samples[4]
    assert sample.bytes_moved == pytest.approx(random.sigma * sample.number("bytes"))
    assert str(random) == result.notes[0]


def test_a_file_that_stays_in_memory_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_drop", lambda file: None)
    result = measure_storage(tmp_path, True, file_bytes=FILE_BYTES, limit_s=0.1)
    assert result.scatter == ()
    assert result.notes[0].startswith(f"100% of a file at {tmp_path} stays in memory")
    assert "storage_scatter" not in [sample.op for sample in result.samples]


def test_a_full_disk_says_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda folder: usage._replace(free=10 * 2**20))
    with pytest.raises(MoestroError, match=r"needs 128 MiB at .*, where 10 MiB are free; make room"):
        measure_storage(tmp_path, True)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_fills_up_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    real = os.pwrite

    def filling(file: int, block: Any, offset: int) -> int:
        if offset >= 2**20:
            raise OSError(code, os.strerror(code))
        return real(file, block, offset)

    monkeypatch.setattr(storage.os, "pwrite", filling)
    with pytest.raises(MoestroError, match=r"measuring storage needs 66 MiB"):
        measure_storage(tmp_path, True, file_bytes=FILE_BYTES)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Path]] = []

    def interrupted(file: int) -> None:
        seen.append(list(tmp_path.iterdir()))
        raise KeyboardInterrupt

    monkeypatch.setattr(storage.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_storage(tmp_path, True, file_bytes=FILE_BYTES)
    assert seen == [[]]  # the file has no name even while it is written: kill -9 leaves nothing either


def test_short_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(storage.os, "pwrite", lambda file, block, offset: real(file, block[:300_000], offset))
    with storage._nameless_file(tmp_path) as file:
        storage._write_all(file, bytes(2**20), 0)
        assert os.fstat(file).st_size == 2**20


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(MoestroError, match=r"cannot measure storage at .*/nowhere: No such file"):
        measure_storage(tmp_path / "nowhere", True)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(MoestroError, match=r"cannot write at .*/file: Not a directory"):
        measure_storage(file, True)
    with pytest.raises(MoestroError, match="a file of 1048576 bytes or more, not 1000"):
        measure_storage(tmp_path, True, file_bytes=1000)


def test_resident_pages(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10 * PAGE))
    with path.open("r+b") as file:
        assert resident_pages(file.fileno(), 10 * PAGE) == 10


@settings(deadline=None)
@given(size=st.integers(2**20, 2**28))
def test_samples_lie_inside_the_file_and_share_no_page(size: int) -> None:
    starts = sample_starts(size)
    assert len(starts) >= 1
    assert (starts % TOKEN_BYTES == 0).all()
    assert starts.min() >= 0
    assert starts.max() + SAMPLE_BYTES <= size
    pages = [np.arange(start // PAGE, (start + SAMPLE_BYTES - 1) // PAGE + 1) for start in starts[:200].tolist()]
    together = np.concatenate(pages)
    assert len(np.unique(together)) == len(together) == pages_touched(starts[:200])


def test_pages_touched() -> None:
    assert pages_touched(np.array([0])) == SAMPLE_BYTES // PAGE
    assert pages_touched(np.array([TOKEN_BYTES])) == SAMPLE_BYTES // PAGE + 1
    assert pages_touched(np.array([], dtype=int)) == 0
