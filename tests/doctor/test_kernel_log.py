"""Faults in the kernel log, by name, and lines that only look like some."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doctor.helpers import CPU, one, write
from moestro.doctor import kernel_log
from moestro.doctor.commands import Answer

FATAL = {
    "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.": "Xid",
    "NVRM: Xid (PCI:0000:3b:00): 48, pid=2391, An uncorrectable double bit error (DBE) has been detected": "Xid",
    "NVRM: Xid (PCI:0000:86:00): 136, pid=1, name=x": "Xid",
    "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up": "NVLink or fabric",
    "amdgpu 0000:05:00.0: amdgpu: GPU reset begin!": "amdgpu reset",
    "[drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring sdma0 timeout, signaled seq=1": "amdgpu reset",
    "EDAC MC0: 1 UE memory read error on CPU_SrcID#0": "uncorrectable ECC",
    "amdgpu 0000:05:00.0: amdgpu: 1 uncorrectable hardware errors detected in umc block": "uncorrectable ECC",
    "mce: [Hardware Error]: CPU 2: Machine Check Exception: 5 Bank 4: be00000000800400": "machine check",
    "{1}[Hardware Error]: event severity: recoverable": "machine check",
    "pcieport 0000:00:01.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer": "PCIe",
    "blk_update_request: I/O error, dev nvme0n1, sector 2048 op 0x0:(READ)": "disk",
    "EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2": "disk",
    "nvme nvme1: controller is down; will reset: CSTS=0xffffffff": "disk",
}
WARNING = {
    "NVRM: Xid (PCI:0000:3b:00): 31, pid=2391, name=python, MMU Fault": "Xid",
    "EDAC MC0: 3 CE memory scrubbing error on CPU_SrcID#0": "correctable ECC",
    "amdgpu 0000:05:00.0: amdgpu: 2 correctable hardware errors detected in umc block": "correctable ECC",
    "[Hardware Error]: Corrected error, no action required.": "correctable ECC",
    "mce: [Hardware Error]: Machine check events logged": "machine check",
    "Out of memory: Killed process 812 (python) total-vm:1kB": "out of memory",
    "mlx5_core 0000:17:00.0 ens1f0: Link down": "link down",
    "INFO: task python:812 blocked for more than 120 seconds.": "hung task",
    "CPU3: Core temperature above threshold, cpu clock throttled (total events = 9)": "throttling",
}
QUIET = (
    "mce: CPU supports 20 MCE banks",
    "EDAC MC: Ver: 3.0.0",
    "amdgpu 0000:05:00.0: amdgpu: SMU is initialized successfully!",
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",
    "EXT4-fs (vda): mounted filesystem r/w without journal",
    "mlx5_core 0000:17:00.0 ens1f0: Link up",
    "RAS: Correctable Errors collector initialized.",
    "pcieport 0000:00:01.0: AER: enabled with IRQ 24",
    "Memory cgroup out of reach",
)


@pytest.mark.parametrize(("line", "name"), FATAL.items())
def test_faults_that_make_a_node_unfit(line: str, name: str) -> None:
    (check,) = kernel_log.judge_lines([*QUIET, line], 15)  # type: ignore[misc]
    assert (check.name, check.status) == ("kernel log", "failed")
    assert check.reason.startswith(f"{name}: ")
    assert line[:40] in check.reason
    assert check.remedy


@pytest.mark.parametrize(("line", "name"), WARNING.items())
def test_faults_that_are_worth_a_warning(line: str, name: str) -> None:
    (check,) = kernel_log.judge_lines([line, *QUIET], 15)  # type: ignore[misc]
    assert check.status == "warned"
    assert check.reason.startswith(f"{name}: ")


@pytest.mark.parametrize("line", QUIET)
def test_ordinary_lines(line: str) -> None:
    assert one(kernel_log.judge_lines([line], 15)).status == "passed"


def test_one_finding_for_each_kind_with_its_number_and_its_latest_line() -> None:
    lines = [*FATAL, *FATAL, *WARNING]
    checks = kernel_log.judge_lines(lines, 15)
    assert isinstance(checks, list)
    names = {(check.status, check.reason.split(":")[0].split(" (")[0]) for check in checks}
    assert names == {("failed", name) for name in FATAL.values()} | {("warned", name) for name in WARNING.values()}
    xid = next(check for check in checks if check.status == "failed" and check.reason.startswith("Xid"))
    assert "(6 times)" in xid.reason
    assert "136" in xid.reason


@given(st.lists(st.integers(0, 10**6)), st.integers(0, 10**6))
def test_only_recent_records_count(times_s: list[int], since_s: int) -> None:
    records = [f"6,{i},{second * 10**6},-;line {second}" for i, second in enumerate(times_s)]
    records += [" SUBSYSTEM=pci", "nonsense", "6,1,x,-;no time"]
    recent = kernel_log.recent_records(records, since_s)
    assert recent == [f"line {second}" for second in times_s if second >= since_s]


def test_reads_records_of_the_last_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log.time, "monotonic", lambda: 10_000.0)
    old, new = 10_000 - 16 * 60, 10_000 - 14 * 60
    text = f"4,1,{old}000000,-;NVRM: Xid (PCI:0): 79, old\n6,2,{new}000000,-;NVRM: Xid (PCI:0): 79, new\n"
    (check,) = kernel_log.kernel_log_check(write(tmp_path, {"dev/kmsg": text}), CPU)  # type: ignore[misc]
    assert "new" in check.reason


def test_without_the_right_to_read_it_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "ask", lambda command, limit_s: Answer("missing"))
    check = one(kernel_log.kernel_log_check(tmp_path, CPU))
    assert (check.name, check.status) == ("kernel log", "skipped")
    assert "dmesg_restrict" in check.remedy


def test_the_journal_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def journal(command: tuple[str, ...], limit_s: float) -> Answer:
        asked.append(command)
        return Answer("ended", 0, "usb 1-1: new device\nBuffer I/O error on dev sda1\n")

    monkeypatch.setattr(kernel_log, "ask", journal)
    (check,) = kernel_log.kernel_log_check(tmp_path, CPU)  # type: ignore[misc]
    assert check.reason.startswith("disk: ")
    assert "--since=-15min" in asked[0]
