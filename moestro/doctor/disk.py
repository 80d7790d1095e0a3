"""Tier 1, the disk: room, a file written through to it, and mounts that have become read-only."""

import errno
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from moestro.doctor.checks import GIB, Check, failed, passed, warned
from moestro.doctor.limits import Limits

WRITE_BYTES = 4 * 2**20
KEPT_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs")  # written to unless something is wrong


def disk_check(folder: Path, limits: Limits) -> Check:
    """Free space where runs are written, and a file of 4 MiB written, synced, read back and removed."""
    place = folder.resolve()
    if not place.is_dir():
        return failed("disk", f"there is no folder {place}", "mount its file system, or give another --folder")
    try:
        written_s = write_through(place)
    except OSError as error:
        return _cannot_write(place, error)
    stat, free = os.statvfs(place), shutil.disk_usage(place).free / GIB
    figures = {"value": round(free, 2), "limit": limits.disk_free_gib, "unit": "GiB"}
    reason = f"{free:,.1f} GiB free at {place}, 4 MiB written through in {written_s * 1e3:,.0f} ms"
    if free < limits.disk_free_gib:
        short = f"{free:,.2g} GiB free at {place}; {limits.disk_free_gib:g} GiB needed for runs and checkpoints"
        return failed("disk", short, "remove old runs and caches, or give another --folder", **figures)
    if stat.f_files and stat.f_favail < 1000:
        return failed("disk", f"{stat.f_favail:,} more files fit at {place}", "remove files: it is out of inodes")
    return passed("disk", reason, **figures)


def write_through(folder: Path) -> float:
    """Seconds to write and sync a file of random bytes in `folder`, which is removed whatever happens.

    Raises:
        OSError: what the file system answered; errno EIO also when the bytes read back differ.
    """
    path, data = folder / f".moestro-doctor-{os.getpid()}", os.urandom(WRITE_BYTES)
    start = time.monotonic()
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        written_s = time.monotonic() - start
        if path.read_bytes() != data:
            raise OSError(errno.EIO, "what was written reads back differently")
    finally:
        with suppress(OSError):
            path.unlink()
    return written_s


def _cannot_write(place: Path, error: OSError) -> Check:
    remedies = {
        errno.ENOSPC: "the disk is full: remove old runs and caches, or give another --folder",
        errno.EDQUOT: "the quota is used up: remove old runs, or ask for more",
        errno.EFBIG: "raise the limit on the size of files: ulimit -f unlimited",
        errno.EROFS: "mounted read-only, perhaps after an error: see the kernel log; check and remount it",
        errno.EACCES: "give this user the right to write there, or give another --folder",
        errno.EPERM: "give this user the right to write there, or give another --folder",
        errno.EIO: "the disk or its file system is sick: see the kernel log",
    }
    mend = remedies.get(error.errno or 0, "see that its file system is mounted and healthy, or give another --folder")
    return failed("disk", f"cannot write at {place}: {error.strerror or error}", mend)


def mounts_check(mounts: str, folder: Path) -> Check:
    """Local file systems mounted read-only, from the text of /proc/mounts: Linux does that after a disk error.

    The one that holds `folder` fails the node, others are warned of.
    """
    table = [line.split() for line in mounts.splitlines() if len(line.split()) >= 4]
    points = [(Path(_plain(fields[1])), fields) for fields in table]
    place = folder.resolve()
    holding = max((p for p, _ in points if place.is_relative_to(p)), key=lambda p: len(p.parts), default=None)
    latest = dict(points)  # a later mount covers an earlier one
    read_only = [point for point, fields in latest.items() if "ro" in fields[3].split(",")]
    mend = "see the kernel log for the error that caused it; check the file system and remount it"
    if holding in read_only:
        return failed("mounts", f"{holding}, which holds {place}, is mounted read-only", mend)
    sick = [
        str(p)
        for p in read_only
        if latest[p][2] in KEPT_FILE_SYSTEMS and latest[p][0].startswith("/dev/") and p.is_dir()
    ]
    if sick:
        return warned("mounts", f"mounted read-only: {', '.join(sorted(sick))}", mend)
    return passed("mounts", f"{place} is mounted for writing")


def _plain(text: str) -> str:
    """A mount point as /proc/mounts writes it, with its spaces back."""
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
