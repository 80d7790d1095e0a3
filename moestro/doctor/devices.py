"""Tier 1, the devices: each has to answer, in a process of its own and in time."""

import json
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moestro.doctor.checks import Check, Found, failed, passed, warned
from moestro.doctor.commands import Answer, ask
from moestro.doctor.limits import Limits

PROBE = (sys.executable, "-m", "moestro.doctor.probe")
IMPORT_S = 45.0  # that Python may take to load torch before a device is touched: long on a cold network file system
# One quiet thread: the probes of all devices run at once.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
REPLACE = "drain the node; reset the device or restart the node, and replace the device if it comes back"


@dataclass(frozen=True)
class Inventory:
    """The devices that torch sees. count is 0 when it could not be asked; problem then says why."""

    type: str = "cpu"
    count: int = 0
    name: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    examined: dict[str, Any] | None = None  # the CPU's examination, made with the list
    problem: str = ""
    seconds: float = 0.0


def take_inventory(answer_s: float, probe: Sequence[str] = PROBE) -> Inventory:
    """Ask torch which devices are here, in a process of its own."""
    answer = ask(probe, IMPORT_S + answer_s, ENVIRONMENT)
    found, problem = _understand(answer)
    if problem:
        return Inventory(problem=problem, seconds=answer.seconds)
    return Inventory(**found, seconds=answer.seconds)


def devices_check(found: Inventory, expected: int | None, other: str = "", on_bus: int = 0) -> Check:
    """Whether the devices are those expected.

    expected: how many; None when nobody said. other: the device of the reference profile, if it is another one.
    on_bus: the accelerators that the PCI bus has, whatever torch sees: only used when nothing is expected.
    """
    if found.problem:
        mend = "run `python -c 'import torch; print(torch.accelerator.device_count())'` and look into the kernel log"
        return failed("devices", f"torch cannot list the devices: {found.problem}", mend)
    figures = {"value": found.count, "limit": expected, "unit": "devices", "seconds": round(found.seconds, 3)}
    here = found.name if found.type == "cpu" else f"{found.count} x {found.name}"
    mend = "load the driver, and install the build of torch for the device"
    if other:
        return failed("devices", f"{here}; the profile was measured on {other}", f"{mend}; or give another", **figures)
    if expected is None and found.type == "cpu" and on_bus:
        reason = f"{on_bus} accelerators on the PCI bus, but torch finds none"
        return failed("devices", reason, f"{mend}; on purpose? then --expect-devices 1 says CPU only", **figures)
    if expected is None or found.count == expected:
        return passed("devices", here, **figures)
    if found.count > expected:
        hint = "give the number the node should have, or limit the visible ones (CUDA_VISIBLE_DEVICES, …)"
        return warned("devices", f"{here}; {expected} expected", hint, **figures)
    if found.type == "cpu":
        return failed("devices", f"torch finds no accelerator, {expected} expected", mend, **figures)
    lost = "look for the lost device with lspci and in the kernel log; see that no *_VISIBLE_DEVICES hides it; restart"
    return failed("devices", f"{found.count} of {expected} devices answer ({found.name})", lost, **figures)


def accelerators_on_bus(root: Path) -> int:
    """PCI devices of the classes of data-centre accelerators: 3D controllers without a display, and processing ones."""
    count = 0
    for path in (root / "sys/bus/pci/devices").glob("*/class"):
        try:
            count += path.read_text(encoding="ascii").startswith(("0x0302", "0x1200"))
        except OSError:
            continue
    return count


def device_check(device: str, limits: Limits, probe: Sequence[str] = PROBE) -> Found:
    """Examine one accelerator in a process: allocation, memory read-back, and a product in every usable dtype."""
    answer = ask((*probe, device), IMPORT_S + limits.device_answer_s, ENVIRONMENT)
    examined, problem = _understand(answer)
    if problem:
        return failed(device, problem, REPLACE, value=round(answer.seconds, 1), limit=limits.device_answer_s, unit="s")
    return examined_check(examined, limits)


def examined_check(examined: dict[str, Any], limits: Limits) -> Check:
    """The finding of one device's examination (the answer of probe.examine)."""
    name = str(examined["device"])
    if examined["problems"]:
        return failed(name, "; ".join(examined["problems"]), REPLACE)
    reason = (
        f"{limits.allocate_mib} MiB written and read, {limits.gemm_size}² products exact in "
        f"{', '.join(examined['usable'])}"
    )
    if examined["unusable"]:
        reason += f" (not usable: {', '.join(examined['unusable'])})"
    return passed(name, reason)


def _understand(answer: Answer) -> tuple[dict[str, Any], str]:
    """The probe's JSON, or else what went wrong with it."""
    stages = re.findall(r"^stage: (.+)$", answer.err, re.MULTILINE)
    at = stages[-1] if stages else "loading torch"
    if answer.how in ("hung", "stuck") or answer.code == -signal.SIGALRM:
        cannot = ", and not even SIGKILL ends it" if answer.how == "stuck" else ""
        return {}, f"no answer in {answer.seconds:.0f} s: it hangs at {at}{cannot}"
    if answer.how == "missing":
        return {}, f"the probe did not start: {answer.err}"
    try:
        found = json.loads(answer.out.splitlines()[-1])
    except (json.JSONDecodeError, IndexError):
        found = None
    if answer.code == 0 and isinstance(found, dict):
        return found, ""
    lines = [line for line in answer.err.splitlines() if line and not line.startswith("stage: ")]
    said = f": {lines[-1].strip()}" if lines else ""
    how = f"was killed by signal {-answer.code}" if answer.code < 0 else f"ended with status {answer.code}"
    return {}, f"its process {how} at {at}{said}"
