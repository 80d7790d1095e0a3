"""Tier 1, the host: memory, limits of the shell, shared memory, CPU settings, and the clock.

Each function is a check. `root` is the root of the file system, so that a test can hand in another.
"""

import ctypes
import os
import resource
from pathlib import Path

from moestro.doctor.checks import GIB, Check, failed, passed, skipped, warned
from moestro.doctor.limits import Limits
from moestro.hardware.topology import control_group_limits, usable_cores

MIB = 2**20
UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)


def memory_check(root: Path, limits: Limits) -> Check:
    """Memory that a job may still take: what is available, or the room below a limit of our control groups."""
    meminfo = dict(line.split(":", 1) for line in _text(root / "proc/meminfo").splitlines() if ":" in line)
    if "MemAvailable" not in meminfo:
        return skipped("memory", "/proc/meminfo cannot be read")
    total, available = (int(meminfo[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    reason = f"{available / GIB:.1f} GiB available of {total / GIB:.1f}"
    room = cgroup_room(root)
    if room is not None and room[0] < available:
        available = room[0]
        reason = f"{available / GIB:.1f} GiB left of the control group's {room[1] / GIB:.1f}"
    figures = {"value": round(available / GIB, 2), "limit": limits.memory_available_gib, "unit": "GiB"}
    if available >= limits.memory_available_gib * GIB:
        return passed("memory", reason, **figures)
    mend = "end what fills the memory (see foreign processes), or raise the memory limit of the job"
    return failed("memory", f"{reason}; {limits.memory_available_gib:g} GiB needed", mend, **figures)


def cgroup_room(root: Path) -> tuple[int, int] | None:
    """(bytes left, limit) of the tightest memory limit on this process, of either version; None without one."""
    rooms = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        if controllers and "memory" not in controllers.split(","):
            continue
        limit_name, used_name = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        )
        # In a container the group's path is the host's, and only the mount's root is there to be read.
        folders = [base / path.lstrip("/"), *(base / path.lstrip("/")).parents]
        for folder in folders[: folders.index(base) + 1]:
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None and limit < 2**60:  # larger: version 1 says "no limit" so
                rooms.append((max(0, limit - used), limit))
    return min(rooms, default=None)


def locked_memory_check(limits: Limits) -> Check:
    """RDMA pins what it sends: with a low limit the first collective between nodes fails."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / MIB:,.0f} MiB"
    figures = {"limit": limits.locked_memory_gib, "unit": "GiB"}
    if soft != resource.RLIM_INFINITY:
        figures["value"] = soft / GIB
    if soft == resource.RLIM_INFINITY or soft >= limits.locked_memory_gib * GIB:
        return passed("locked memory", text, **figures)
    mend = "ulimit -l unlimited (limits.conf, LimitMEMLOCK of the service, or --ulimit memlock=-1 of the container)"
    return failed("locked memory", f"{text}; {limits.locked_memory_gib:g} GiB needed for RDMA", mend, **figures)


def _count_check(name: str, what: int, needed: int, mend: str) -> Check:
    soft, hard = resource.getrlimit(what)
    if soft == resource.RLIM_INFINITY:
        return passed(name, "unlimited", limit=needed)
    figures = {"value": soft, "limit": needed}
    if soft >= needed:
        return passed(name, f"up to {soft:,}", **figures)
    most = "unlimited" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    return failed(name, f"up to {soft:,} only; {needed:,} needed", f"{mend} (hard limit: {most})", **figures)


def limits_checks(limits: Limits) -> list[Check]:
    """Open files (sockets between ranks, shards of data) and processes (ranks, readers, threads)."""
    files = _count_check("open files", resource.RLIMIT_NOFILE, limits.open_files, f"ulimit -n {limits.open_files}")
    processes = _count_check("processes", resource.RLIMIT_NPROC, limits.processes, f"ulimit -u {limits.processes}")
    return [files, processes]


def shared_memory_check(root: Path, limits: Limits) -> Check:
    """/dev/shm, through which ranks of a node and readers of data exchange tensors."""
    folder = root / "dev/shm"
    if not folder.is_dir():
        return skipped("shared memory", "there is no /dev/shm")
    stat = os.statvfs(folder)
    size, free = stat.f_blocks * stat.f_frsize / MIB, stat.f_bavail * stat.f_frsize / MIB
    reason = f"{free:,.0f} MiB free of {size:,.0f} in /dev/shm"
    figures = {"value": round(size, 1), "limit": limits.shared_memory_mib, "unit": "MiB"}
    if size < limits.shared_memory_mib:
        mend = "--shm-size or --ipc=host of the container; mount -o remount,size=… /dev/shm"
        return failed("shared memory", f"{reason}; {limits.shared_memory_mib:g} MiB needed", mend, **figures)
    if free < size / 10:
        return warned("shared memory", f"{reason}: almost full", "remove what ended jobs left in /dev/shm", **figures)
    return passed("shared memory", reason, **figures)


def cpu_check(root: Path, accelerators: bool) -> Check:
    """Settings that cost speed, not correctness: frequency governor, NUMA balancing, a CPU quota below the cores."""
    problems, remedies = list[str](), list[str]()
    governors = {_text(path).strip() for path in root.glob("sys/devices/system/cpu/cpu*/cpufreq/scaling_governor")}
    if slow := sorted(governors - {"performance", ""}):
        problems.append(f"frequency governor {', '.join(slow)}")
        remedies.append("cpupower frequency-set -g performance")
    if accelerators and _number(root / "proc/sys/kernel/numa_balancing"):
        problems.append("automatic NUMA balancing is on")
        remedies.append("sysctl kernel.numa_balancing=0")
    here, quota = usable_cores(), control_group_limits(root).cpus
    if quota is not None and quota < here:
        problems.append(f"a quota of {quota:g} CPUs, but {here} are visible")
        remedies.append(f"OMP_NUM_THREADS={max(1, int(quota))}, or pin the job to cores instead of a quota")
    if problems:
        return warned("cpu settings", "; ".join(problems), "; ".join(remedies))
    return passed("cpu settings", f"{here} cores, nothing that slows them")


class _Timex(ctypes.Structure):
    """struct timex of adjtimex(2): its first members, and room for the rest."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    ]


def read_clock() -> tuple[int, float] | None:
    """(status bits, greatest error in seconds) of the kernel's clock; None where there is no such call."""
    state = _Timex()
    try:
        code = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state))
    except (OSError, AttributeError):
        return None
    return None if code < 0 else (state.status, state.maxerror / 1e6)


def clock_check(state: tuple[int, float] | None, limits: Limits) -> Check:
    """Whether a time service keeps the clock, from the kernel's own record (read_clock). Skew is measured apart."""
    if state is None:
        return skipped("clock", "the kernel does not say how its clock is kept")
    status, error_s = state
    mend = "start chronyd, ntpd or systemd-timesyncd (in a virtual machine the host may keep the clock unseen)"
    if status & UNSYNCHRONISED:
        return warned("clock", "not synchronised: no time service keeps it", mend)
    figures = {"value": round(error_s, 6), "limit": limits.clock_skew_s, "unit": "s"}
    if error_s > limits.clock_skew_s:
        return warned("clock", f"may be off by {error_s:.2g} s", mend, **figures)
    return passed("clock", f"synchronised, off by {error_s * 1e3:.2g} ms at most", **figures)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.lstrip("-").isdecimal() else None
