"""Tier 1, other work on the node: processes on the accelerators, and processes that use up the CPUs."""

import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moestro.doctor.checks import Check, failed, passed, skipped, warned
from moestro.doctor.commands import Answer, ask
from moestro.doctor.limits import Limits
from moestro.hardware.topology import usable_cores

# The management tools of the vendors, by torch's device type: the question that all of them answer quickly.
TOOLS: dict[str, tuple[tuple[str, ...], ...]] = {
    "cuda": (("nvidia-smi", "-L"), ("amd-smi", "list"), ("rocm-smi", "--showid")),
    "xpu": (("xpu-smi", "discovery"),),
    "hpu": (("hl-smi", "-L"),),
    "npu": (("npu-smi", "info"),),
}
WATCH_S = 0.5  # of the CPUs


@dataclass(frozen=True)
class Process:
    pid: int
    name: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}{', ' + self.note if self.note else ''})"


def tool_check(device_type: str, limits: Limits, run: Callable[..., Answer] = ask) -> Check:
    """Whether the vendor's management tool answers in time: a driver that hangs is often met there first."""
    tools = TOOLS.get(device_type, ())
    if not tools:
        return skipped("management tool", "none for a CPU" if device_type == "cpu" else f"none known for {device_type}")
    present = [command for command in tools if shutil.which(command[0])]
    if not present:
        names = ", ".join(command[0] for command in tools)
        return warned("management tool", f"none of {names} is here", "install the one of the driver")
    answer = run(present[0], limits.tool_answer_s)
    tool, limit = " ".join(present[0]), limits.tool_answer_s
    if answer.how in ("hung", "stuck"):
        mend = "the driver hangs: look into the kernel log, restart the node"
        return failed("management tool", f"{tool} gives no answer in {limit:g} s", mend, limit=limit, unit="s")
    if not answer.good:
        said = (answer.err or answer.out).strip().splitlines()
        return failed("management tool", f"{tool} fails: {said[-1] if said else answer.code}", "reload the driver")
    seconds = round(answer.seconds, 2)
    return passed("management tool", f"{tool} answers in {seconds:g} s", value=seconds, limit=limit, unit="s")


def parse_nvidia_processes(text: str) -> list[Process]:
    """The rows of `nvidia-smi --query-compute-apps=pid,process_name,used_memory --format=csv,noheader`."""
    rows = [re.split(r",\s*", line.strip()) for line in text.splitlines()]
    return [Process(int(row[0]), Path(row[1]).name, row[2]) for row in rows if len(row) >= 3 and row[0].isdecimal()]


def amd_processes(root: Path) -> list[Process] | None:
    """The processes that the AMD compute driver serves, from /sys; None without that driver."""
    folder = root / "sys/class/kfd/kfd/proc"
    if not folder.is_dir():
        return None
    pids = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    return [Process(pid, _stat(root, pid)[0] or "unknown") for pid in pids]


def accelerator_processes(root: Path, limits: Limits, run: Callable[..., Answer] = ask) -> list[Process] | None:
    """Everybody's processes on the accelerators of this node; None when nobody can be asked."""
    found = amd_processes(root)
    if found is not None:
        return found
    if not shutil.which("nvidia-smi"):
        return None
    command = ("nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader")
    answer = run(command, limits.tool_answer_s)
    return parse_nvidia_processes(answer.out) if answer.good else None


def foreign_check(found: list[Process] | None, ours: set[int]) -> Check:
    """Nobody else may be on the accelerators: they would take memory and time from the job."""
    if found is None:
        return skipped("foreign processes", "no tool lists the processes on these devices")
    foreign = [process for process in found if process.pid not in ours]
    if not foreign:
        return passed("foreign processes", "none on the accelerators")
    names = ", ".join(str(process) for process in foreign[:4]) + (", …" if len(foreign) > 4 else "")
    mend = "end them if their job is over (kill PID), or wait"
    return failed(
        "foreign processes", f"{len(foreign)} on the accelerators: {names}", mend, value=len(foreign), limit=0
    )


def cpu_load_check(root: Path, limits: Limits, watch_s: float = WATCH_S) -> Check:
    """Processes that use the CPUs beside us, watched for a moment."""
    ours, tick = our_processes(root), os.sysconf("SC_CLK_TCK")
    before, start = _cpu_ticks(root), time.monotonic()
    time.sleep(watch_s)
    after, seconds = _cpu_ticks(root), time.monotonic() - start
    used = {pid: (after[pid] - ticks) / tick / seconds for pid, ticks in before.items() if pid in after}
    return hogs_check({pid: cores for pid, cores in used.items() if pid not in ours}, root, limits)


def hogs_check(cores_used: dict[int, float], root: Path, limits: Limits) -> Check:
    """The verdict on the CPUs that each foreign process uses."""
    here = usable_cores()
    total = sum(cores_used.values())
    figures = {"value": round(total, 2), "limit": limits.load_share * here, "unit": "cores"}
    by_use = sorted(cores_used, key=lambda pid: -cores_used[pid])
    hogs = [pid for pid in by_use if cores_used[pid] > limits.hog_cores]
    if total > limits.load_share * here:
        hogs = hogs or by_use[:2]
    if not hogs:
        return passed("cpu load", f"others use {total:.1f} of {here} cores", **figures)
    names = ", ".join(str(Process(pid, _stat(root, pid)[0], f"{cores_used[pid]:.1f} cores")) for pid in hogs[:4])
    mend = "end them or wait: they slow the ranks and spoil what is measured"
    return warned("cpu load", f"others use {total:.1f} of {here} cores: {names}", mend, **figures)


def our_processes(root: Path) -> set[int]:
    """This process, its ancestors and its descendants."""
    parents = {pid: _stat(root, pid)[1] for pid in _pids(root)}
    ours, pid = {os.getpid()}, os.getppid()
    while pid > 1:
        ours.add(pid)
        pid = parents.get(pid, 0)
    down = {os.getpid()}
    while down:
        down = {pid for pid, parent in parents.items() if parent in down}
        ours |= down
    return ours


def _pids(root: Path) -> list[int]:
    return [int(name) for name in os.listdir(root / "proc") if name.isdecimal()]


def _stat(root: Path, pid: int) -> tuple[str, int, int]:
    """(name, parent, ticks of CPU) of a process from /proc; ("", 0, 0) when it is gone."""
    try:
        text = (root / "proc" / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0, 0
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, int(fields[1]), int(fields[11]) + int(fields[12])


def _cpu_ticks(root: Path) -> dict[int, int]:
    return {pid: _stat(root, pid)[2] for pid in _pids(root)}
