"""One node examined: what is cheap and may hang first, each within its time; what is slow only on sound devices."""

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from moestro.doctor import devices, disk, host, kernel_log, nics, performance, processes
from moestro.doctor.checks import Check, Found, NodeReport, failed, run_bounded, skipped
from moestro.doctor.commands import kill_running
from moestro.doctor.floors import plan_work
from moestro.doctor.limits import Limits, limits_of
from moestro.doctor.versions import host_versions, versions_check
from moestro.hardware.catalog import find_device
from moestro.hardware.profile import MachineProfile
from moestro.hardware.topology import usable_cores

Progress = Callable[[str], object]  # told what is being done

SYSTEM_S = 15.0  # for the checks of the host, which run at once; a management tool has 5 s of its own
DEVICES_S = 10.0  # on top of what a device has: starting and ending the process that examines it
TIER_2_S = 2 * performance.LIMIT_S + 10.0
CPU_RANKS = 2


@dataclass(frozen=True)
class Request:
    """What to examine. profile: the reference of this kind of node. Expected numbers go before those of the profile.

    root: the root of the file system, and probe: the command that touches a device; tests hand in others.
    """

    tier: int = 1
    folder: Path = Path()
    profile: MachineProfile | None = None
    expect_devices: int | None = None
    expect_nics: int | None = None
    root: Path = Path("/")
    probe: Sequence[str] = devices.PROBE


def examine_node(request: Request, progress: Progress = lambda what: None, rank: int = 0) -> NodeReport:
    """All checks of this node, in the order of the table in docs/doctor.md. Raises nothing but interruptions."""
    start, started_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    try:
        progress("devices")
        found = devices.take_inventory(limits_of("accelerator").device_answer_s, request.probe)
        limits = limits_of(found.type)
        checks = [_count_devices(request, found)]
        progress("host")
        system = run_bounded(_system_checks(request, found, limits), SYSTEM_S)
        progress(f"{found.count} devices, each in a process")
        checks += [*_device_checks(request, found, limits), *system]
        rates: dict[str, float] = {}
        if request.tier == 2:
            progress("rates")
            second = _second_tier(request, found, limits, checks)
            checks += second
            rates = {check.name: check.value for check in second if check.value and check.unit.endswith("/s")}
    finally:  # of an interruption, which the threads of the checks do not see
        kill_running()
    return NodeReport(
        node=platform.node() or "this node",
        rank=rank,
        device=found.name,
        tier=request.tier,
        started_at=started_at,
        seconds=round(time.monotonic() - start, 2),
        checks=tuple(checks),
        versions=host_versions(request.root, found.versions),
        rates=rates,
    )


def _count_devices(request: Request, found: devices.Inventory) -> Check:
    expected, other = request.expect_devices, ""
    if request.profile is not None:
        machine = request.profile.machine
        expected = machine.num_devices if expected is None else expected
        device, reference = find_device(found.name), machine.device_name.split(", ")[0]
        known = device.id if device and machine.device_id else found.name
        if machine.device_type != found.type or known not in (machine.device_id, reference):
            other = reference
    return devices.devices_check(found, expected, other, devices.accelerators_on_bus(request.root))


def _system_checks(request: Request, found: devices.Inventory, limits: Limits) -> dict[str, Callable[[], Found]]:
    root, machine = request.root, request.profile.machine if request.profile else None
    accelerators = found.type != "cpu"
    tool = partial(processes.tool_check, found.type, limits)
    here = partial(host_versions, root, found.versions)
    checks: dict[str, Callable[[], Found]] = {
        "memory": partial(host.memory_check, root, limits),
        "locked memory": partial(host.locked_memory_check, limits),
        "shared memory": partial(host.shared_memory_check, root, limits),
        "limits": partial(host.limits_checks, limits),
        "nics": lambda: nics.nics_check(
            nics.ports(root), request.expect_nics, nics.expected_names(machine.nics) if machine else ()
        ),
        "kernel log": partial(kernel_log.kernel_log_check, root, limits),
        "management tool": tool,
        "foreign processes": lambda: processes.foreign_check(
            processes.accelerator_processes(root, limits), processes.our_processes(root)
        ),
        "cpu load": partial(processes.cpu_load_check, root, limits),
        "cpu settings": partial(host.cpu_check, root, accelerators),
        "clock": lambda: host.clock_check(host.read_clock(), limits),
        "disk": partial(disk.disk_check, request.folder, limits),
        "mounts": lambda: disk.mounts_check((root / "proc/mounts").read_text(encoding="utf-8"), request.folder),
        "versions": lambda: versions_check(here(), machine.versions if machine else None),
    }
    if not accelerators:
        del checks["management tool"], checks["foreign processes"]  # there is nothing that they could look at
    return checks


def _device_checks(request: Request, found: devices.Inventory, limits: Limits) -> list[Check]:
    if found.examined is not None:
        return [devices.examined_check(found.examined, limits)]
    each = {
        f"{found.type}:{i}": partial(devices.device_check, f"{found.type}:{i}", limits, request.probe)
        for i in range(found.count)
    }
    return run_bounded(each, devices.IMPORT_S + limits.device_answer_s + DEVICES_S)


def _second_tier(request: Request, found: devices.Inventory, limits: Limits, first: list[Check]) -> list[Check]:
    sick = [check.name for check in first if check.status == "failed" and _is_device(check.name, found)]
    if sick or not found.count:
        reason = f"not measured: {', '.join(sick) or 'no device'} did not pass"
        return [skipped(name, reason) for name in ("gemm", "memory rate", "all_reduce", "slow rank")]
    ranks = found.count if found.type != "cpu" else min(CPU_RANKS, usable_cores())
    busy = any(check.name == "cpu load" and check.status == "warned" for check in first)
    work = plan_work(found.type, ranks, limits, request.profile, find_device(found.name))

    def measure() -> Found:
        try:
            return performance.judge(work, limits, *performance.measure_node(work), busy=busy)
        except RuntimeError as error:  # with the traceback of a rank that failed, or that the time was up
            lines = str(error).strip().splitlines()
            return failed("rates", f"measuring failed: {lines[-1].strip()}", "see the kernel log; run with --tier 1")

    return run_bounded({"rates": measure}, TIER_2_S)


def _is_device(name: str, found: devices.Inventory) -> bool:
    return name == "devices" or name.partition(":")[0] == found.type
