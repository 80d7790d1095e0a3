"""Full, read-only, lying and missing disks."""

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from doctor.helpers import CPU
from moestro.doctor import disk


def test_good_disk_is_left_as_it_was(tmp_path: Path) -> None:
    check = disk.disk_check(tmp_path, CPU)
    assert check.status == "passed"
    assert "GiB free" in check.reason
    assert list(tmp_path.iterdir()) == []


def test_missing_folder(tmp_path: Path) -> None:
    check = disk.disk_check(tmp_path / "gone", CPU)
    assert check.status == "failed"
    assert "there is no folder" in check.reason


def test_read_only_folder() -> None:
    check = disk.disk_check(Path("/sys"), CPU)  # not even root may make a file there
    assert (check.name, check.status) == ("disk", "failed")
    assert "cannot write at /sys" in check.reason
    assert check.remedy


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "tiny"
    folder.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run([mount, "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True)
    if not done or done.returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_full_disk(tiny_disk: Path) -> None:
    check = disk.disk_check(tiny_disk, CPU)
    assert (check.name, check.status) == ("disk", "failed")
    assert "No space left" in check.reason
    assert "the disk is full" in check.remedy
    assert list(tiny_disk.iterdir()) == []


def test_full_disk_where_the_sync_finds_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk.os, "fsync", fsync)
    assert "the disk is full" in disk.disk_check(tmp_path, CPU).remedy
    assert list(tmp_path.iterdir()) == []


def test_limit_on_the_size_of_files(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        check = disk.disk_check(tmp_path, CPU)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert check.status == "failed"
    assert "ulimit -f" in check.remedy
    assert list(tmp_path.iterdir()) == []


def test_disk_that_reads_back_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"\0" * disk.WRITE_BYTES)
    check = disk.disk_check(tmp_path, CPU)
    assert check.status == "failed"
    assert "reads back differently" in check.reason


def test_nearly_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(2**40, 2**40, 2**29))
    check = disk.disk_check(tmp_path, CPU)
    assert (check.status, check.value, check.limit) == ("failed", 0.5, 1.0)


MOUNTS = """/dev/sda1 / ext4 rw,relatime 0 0
proc /proc proc rw 0 0
/dev/sdb1 {data} xfs {how} 0 0
/dev/loop0 /snap/core squashfs ro,nodev 0 0
server:/home {home} nfs4 rw 0 0
"""


class TestMounts:
    def mounts(self, folder: Path, how: str) -> str:
        for name in ("my data", "home"):
            (folder / name).mkdir(exist_ok=True)
        return MOUNTS.format(data=str(folder / "my data").replace(" ", "\\040"), how=how, home=folder / "home")

    def test_all_well(self, tmp_path: Path) -> None:
        assert disk.mounts_check(self.mounts(tmp_path, "rw"), tmp_path / "home").status == "passed"

    def test_the_one_that_holds_the_runs_fails(self, tmp_path: Path) -> None:
        check = disk.mounts_check(self.mounts(tmp_path, "ro,relatime"), tmp_path / "my data" / "runs")
        assert (check.name, check.status) == ("mounts", "failed")
        assert "my data" in check.reason

    def test_another_is_a_warning_and_images_are_meant_to_be(self, tmp_path: Path) -> None:
        check = disk.mounts_check(self.mounts(tmp_path, "ro"), tmp_path / "home")
        assert check.status == "warned"
        assert "my data" in check.reason
        assert "snap" not in check.reason

    def test_a_later_mount_covers_an_earlier_one(self, tmp_path: Path) -> None:
        text = f"/dev/sda {tmp_path} ext4 ro 0 0\n/dev/sdb {tmp_path} ext4 rw 0 0\n"
        assert disk.mounts_check(text, tmp_path).status == "passed"
