"""Tier 1, the kernel log: what went wrong with the hardware in the last minutes, by name."""

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moestro.doctor.checks import Check, Found, failed, passed, skipped, warned
from moestro.doctor.commands import ask
from moestro.doctor.limits import Limits

RECORD_BYTES = 8192  # more than the kernel's longest record


@dataclass(frozen=True)
class Fault:
    """One kind of fault. fatal: a node that shows it is unfit; otherwise it is a warning."""

    name: str
    pattern: re.Pattern[str]
    fatal: bool
    remedy: str


def _fault(name: str, fatal: bool, pattern: str, remedy: str) -> Fault:
    return Fault(name, re.compile(pattern, re.IGNORECASE), fatal, remedy)


_REPLACE = "drain the node, reset or replace the device"
_MEMORY = "drain the node, test its memory and replace the module"
_DISK = "drain the node, check the disk (smartctl) and replace it"
# Xid codes that an application causes (13 engine exception, 31 page fault, 43 stopped, 45 cleaned up), and 63, a row of
# memory remapped in time. All other codes point at the device, its memory, its links or its driver.
_HARMLESS_XID = r"(?:13|31|43|45|63)\b"

# The first that matches a line counts.
FAULTS = (
    _fault("Xid", False, rf"NVRM: Xid .*?\): {_HARMLESS_XID}", "an earlier job crashed on this device; watch it"),
    _fault("Xid", True, r"NVRM: Xid", f"{_REPLACE}; NVIDIA's Xid catalogue explains the code"),
    _fault("device lost", True, r"GPU has fallen off the bus|NVRM: .*RmInitAdapter failed", _REPLACE),
    _fault("NVLink or fabric", True, r"nvidia-nvswitch\S*: SXid.*(?:fatal|error)", f"{_REPLACE} or its switch"),
    _fault(
        "amdgpu reset",
        True,
        r"amdgpu.*(?:GPU reset|ring \S+ timeout|GPU hang|fatal error|RAS (?:poison|uncorr)|no longer responding)",
        _REPLACE,
    ),
    _fault(
        "correctable ECC", False, r"(?<!un)correct(?:ed|able) (?:ecc|memory|hardware|error\b)|EDAC .*\bCE\b", _MEMORY
    ),
    _fault(
        "uncorrectable ECC",
        True,
        r"uncorrect(?:ed|able) (?:double|ecc|memory|hardware)|ecc\b.*(?:uncorrect|double.bit)|double.bit ecc|"
        r"EDAC .*\bUE\b",
        _MEMORY,
    ),
    _fault(
        "machine check",
        True,
        r"\[Hardware Error\].*(?:uncorrected|deferred|fatal|recoverable|Machine Check Exception)",
        _MEMORY,
    ),
    _fault(
        "machine check",
        False,
        r"\[Hardware Error\]",
        "a corrected one, it seems; drain the node and test its memory if it returns",
    ),
    _fault("PCIe", True, r"PCIe Bus Error: severity=Uncorrect|AER: .*(?:uncorrect|fatal)", f"{_REPLACE}; reseat it"),
    _fault(
        "disk",
        True,
        r"I/O error,? (?:dev|on device)|Buffer I/O error|EXT4-fs error|XFS .*(?:corruption|shutdown)|nvme\S*: "
        r"(?:I/O .*timeout|controller is down)|Remounting filesystem read-only",
        _DISK,
    ),
    _fault(
        "link down", False, r"link (?:is )?(?:down|not ready)\b|port \d+ link (?:is )?down|Lost carrier", "see nics"
    ),
    _fault("out of memory", False, r"Out of memory: Kill|oom-kill:|invoked oom-killer", "see memory"),
    _fault("hung task", False, r"blocked for more than \d+ seconds", "look for a dead file system or driver"),
    _fault("throttling", False, r"clock throttled|above threshold.*throttl", "see to the cooling and the power limit"),
)


def kernel_log_check(root: Path, limits: Limits) -> Found:
    """Scan the last minutes of the kernel log."""
    lines = read_kernel_log(root, limits)
    if lines is None:
        allow = "run as root, or allow it: sysctl kernel.dmesg_restrict=0, or the group systemd-journal"
        return skipped("kernel log", "may not be read by this user (or this container)", allow)
    return judge_lines(lines, limits.kernel_log_minutes)


def judge_lines(lines: Iterable[str], minutes: float) -> Found:
    """One finding for each kind of fault in `lines`, with its latest line; or one that all is quiet."""
    latest, counts = dict[Fault, str](), dict[Fault, int]()
    scanned = 0
    for line in lines:
        scanned += 1
        fault = next((fault for fault in FAULTS if fault.pattern.search(line)), None)
        if fault:
            latest[fault], counts[fault] = line.strip(), counts.get(fault, 0) + 1
    if not latest:
        return passed("kernel log", f"{scanned:,} lines of the last {minutes:g} min, none of a fault")
    checks = list[Check]()
    for fault, line in latest.items():
        times = f" ({counts[fault]} times)" if counts[fault] > 1 else ""
        reason = f"{fault.name}{times}: {line[:160]}"
        checks.append((failed if fault.fatal else warned)("kernel log", reason, fault.remedy))
    return checks


def read_kernel_log(root: Path, limits: Limits) -> list[str] | None:
    """Lines of the last `kernel_log_minutes`, from /dev/kmsg or else the journal; None when neither may be read."""
    since_s = time.monotonic() - 60 * limits.kernel_log_minutes
    try:
        return recent_records(_records(root / "dev/kmsg"), since_s)
    except OSError:
        minutes = f"-{limits.kernel_log_minutes:g}min"
        command = ("journalctl", "--dmesg", "--quiet", "--no-pager", "--output=cat", f"--since={minutes}")
        answer = ask(command, limits.tool_answer_s)
        return answer.out.splitlines() if answer.good and answer.out else None


def recent_records(records: Iterable[str], since_s: float) -> list[str]:
    """Messages of /dev/kmsg records "priority,sequence,microseconds,flags;message", from `since_s` after the start."""
    lines = []
    for record in records:
        head, _, message = record.partition(";")
        fields = head.split(",")
        if len(fields) >= 3 and fields[2].isdecimal() and int(fields[2]) / 1e6 >= since_s:
            lines.append(message.split("\n", 1)[0])
    return lines


def _records(path: Path) -> list[str]:
    """All records that the kernel keeps. Each read gives one; a plain file (of a test) is one record a line."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    pieces = list[bytes]()
    try:
        while True:
            try:
                piece = os.read(descriptor, RECORD_BYTES)
            except BlockingIOError:  # no more for now
                break
            except BrokenPipeError:  # a record was overwritten before it was read; the next one is there
                continue
            if not piece:
                break
            pieces.append(piece)
    finally:
        os.close(descriptor)
    return b"".join(pieces).decode("utf-8", "replace").splitlines()
