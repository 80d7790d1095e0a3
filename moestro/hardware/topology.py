"""What this machine is made of, as the system tells it: processors, accelerators and their links, NICs, limits, disks.

Nothing is measured here, and nothing guessed: what the system does not say is None, "unknown" or left out.
"""

import os
import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from moestro.hardware.links import LinkKind, amd_links, nvidia_links

SMI_LIMIT_S = 10.0
NO_LIMIT_BYTES = 2**60  # cgroup 1 writes a number near 2⁶³ for "no limit"
IPOIB = "32"  # the type of a network interface that is the face of an InfiniBand port

OutputOf = Callable[[Sequence[str]], str | None]


@dataclass(frozen=True)
class Cpu:
    name: str
    sockets: int | None
    cores: int | None
    threads: int | None
    numa_nodes: int | None


@dataclass(frozen=True)
class Nic:
    """name: of an interface, or device/port. kind: "infiniband" (RoCE too), "ethernet" or "virtual"."""

    name: str
    kind: str
    state: str
    is_up: bool
    gbit: float | None  # as negotiated

    def __str__(self) -> str:
        rate = "unknown rate" if self.gbit is None else f"{self.gbit:g} Gbit/s"
        return f"{self.name} {self.kind}, {rate}, {self.state}"


@dataclass(frozen=True)
class Disk:
    name: str
    model: str
    bytes: int
    rotational: bool


@dataclass(frozen=True)
class Limits:
    """Of this process's control group; None: none."""

    cpus: float | None
    memory_bytes: int | None


@dataclass(frozen=True)
class Topology:
    """link: how the accelerators reach each other, in the words of hardware.devices.Topology, "none" for fewer than
    two, or "unknown"; link_evidence says by what."""

    cpu: Cpu
    limits: Limits
    accelerators: tuple[str, ...]
    link: LinkKind
    link_evidence: str
    nics: tuple[Nic, ...]
    disks: tuple[Disk, ...]


def discover(
    root: Path = Path("/"), *, accelerators: Sequence[str] | None = None, output_of: OutputOf | None = None
) -> Topology:
    """Read the machine under `root`. accelerators: their names; None asks torch. output_of: runs a command and returns
    what it prints, or None."""
    names = tuple(accelerator_names() if accelerators is None else accelerators)
    link, evidence = find_link(names, output_of or command_output)
    return Topology(_cpu(root), control_group_limits(root), names, link, evidence, find_nics(root), _disks(root))


def accelerator_names() -> list[str]:
    import torch

    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    if kind is not None and kind.type == "cuda":  # ROCm answers here too
        return [torch.cuda.get_device_name(i) for i in range(count)]
    return [str(kind)] * count


def find_link(accelerators: Sequence[str], output_of: OutputOf) -> tuple[LinkKind, str]:
    """The kind of the links among the accelerators, and how it is known."""
    if len(accelerators) < 2:
        return "none", f"{len(accelerators)} accelerators"
    for command, read in ((("nvidia-smi", "topo", "-m"), nvidia_links), (("rocm-smi", "--showtopo"), amd_links)):
        text = output_of(command)
        if text is not None:
            kind, evidence = read(text)
            return kind, f"{' '.join(command)}: {evidence}"
    return "unknown", "neither nvidia-smi nor rocm-smi answers"


def command_output(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def find_nics(root: Path = Path("/")) -> tuple[Nic, ...]:
    """InfiniBand and RoCE ports, and physical network interfaces; virtual ones where there is nothing else."""
    ports = [_port(port) for port in sorted(root.glob("sys/class/infiniband/*/ports/*"))]
    interfaces = [
        _interface(folder)
        for folder in sorted(root.glob("sys/class/net/*"))
        if folder.name != "lo" and _text(folder / "type") != IPOIB
    ]
    physical = [*ports, *(nic for nic in interfaces if nic.kind != "virtual")]
    return tuple(physical or (nic for nic in interfaces if nic.is_up))


def _port(folder: Path) -> Nic:
    state = _text(folder / "state").partition(": ")[2]  # "4: ACTIVE"
    link = _text(folder / "phys_state").partition(": ")[2]  # "5: LinkUp"
    rate = re.match(r"[\d.]+", _text(folder / "rate"))  # "400 Gb/sec (4X NDR)"
    return Nic(
        name=f"{folder.parent.parent.name}/{folder.name}",
        kind="infiniband",
        state=", ".join(part for part in (state, link) if part) or "unknown",
        is_up=state == "ACTIVE" and link in ("LinkUp", ""),
        gbit=float(rate[0]) if rate else None,
    )


def _interface(folder: Path) -> Nic:
    state = _text(folder / "operstate") or "unknown"
    mbit = _number(folder / "speed")  # -1, or unreadable, where it is not known
    return Nic(
        name=folder.name,
        kind="ethernet" if (folder / "device").exists() else "virtual",
        state=state,
        is_up=state == "up",
        gbit=mbit / 1000 if mbit is not None and mbit > 0 else None,
    )


def _cpu(root: Path) -> Cpu:
    folders = sorted(root.glob("sys/devices/system/cpu/cpu[0-9]*/topology"))
    sockets = {_text(folder / "physical_package_id") for folder in folders}
    cores = {_text(folder / "core_cpus_list") or _text(folder / "thread_siblings_list") for folder in folders}
    nodes = list(root.glob("sys/devices/system/node/node[0-9]*"))
    name = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return Cpu(
        name[1] if name else "", len(sockets) or None, len(cores) or None, len(folders) or None, len(nodes) or None
    )


def usable_cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def driver_version(root: Path = Path("/")) -> str:
    """Of NVIDIA's or AMD's kernel module; empty without either."""
    nvidia = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)", _text(root / "proc/driver/nvidia/version"))
    return nvidia[1] if nvidia else _text(root / "sys/module/amdgpu/version")


def control_group_limits(root: Path = Path("/")) -> Limits:
    """The narrowest of the control group and those above it, by version 1 or 2."""
    cpus, memory = list[float](), list[int]()
    groups = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines() if line.count(":") >= 2]
    for _, controllers, name in groups or [["0", "", "/"]]:
        base = root / "sys/fs/cgroup" / controllers.removeprefix("name=")
        for folder in _upwards(base, name):
            if controllers == "":
                quota, _, period = _text(folder / "cpu.max").partition(" ")  # "150000 100000", or "max 100000"
                if quota.isdecimal() and period.isdecimal():
                    cpus.append(int(quota) / int(period))
            else:
                quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
                if quota_us is not None and period_us and quota_us > 0:
                    cpus.append(quota_us / period_us)
            limit = _number(folder / ("memory.max" if controllers == "" else "memory.limit_in_bytes"))
            if limit is not None and limit < NO_LIMIT_BYTES:
                memory.append(limit)
    return Limits(min(cpus, default=None), min(memory, default=None))


def _upwards(base: Path, name: str) -> list[Path]:
    """The folder of a control group and of all above it. A container may see only the upper ones."""
    folder = base / name.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(base))]


def _disks(root: Path) -> tuple[Disk, ...]:
    """Block devices that have hardware, or a virtual machine's, behind them."""
    return tuple(
        Disk(
            name=folder.name,
            model=_text(folder / "device/model"),
            bytes=(_number(folder / "size") or 0) * 512,  # in sectors, whatever the disk's own size
            rotational=_text(folder / "queue/rotational") == "1",
        )
        for folder in sorted(root.glob("sys/block/*"))
        if (folder / "device").exists()
    )


def _text(path: Path) -> str:
    """Without the spaces around it; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else None
