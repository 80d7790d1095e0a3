"""A whole node examined, sick in several ways at once."""

import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from doctor.helpers import by_name, gemm, profile, write
from moestro.doctor import performance, run
from moestro.doctor.floors import Work
from moestro.doctor.performance import RankResult
from moestro.doctor.run import Request, examine_node

CPU = {
    "type": "cpu", "count": 1, "name": "AMD EPYC", "versions": {"torch": "2.13.0"},
    "examined": {"device": "cpu", "problems": [], "usable": ["fp32"], "unusable": []},
}  # fmt: skip
GPUS = {"type": "cuda", "count": 2, "name": "NVIDIA H100 80GB HBM3", "versions": {"torch": "2.13.0"}}


def fake_probe(inventory: dict[str, Any], *sick: str) -> Sequence[str]:
    """Lists `inventory`; a device named in `sick` has a product that is not finite."""
    code = f"""
import json, sys
problems = lambda device: ["bf16 product: NaN"] if device in {sick!r} else []
examined = lambda device: dict(device=device, problems=problems(device), usable=["bf16"], unusable=[])
print(json.dumps(examined(sys.argv[1]) if len(sys.argv) > 1 else {inventory!r}))
"""
    return (sys.executable, "-S", "-c", code)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node in good order, on which nobody else works."""
    monkeypatch.setattr(run.processes, "cpu_load_check", lambda root, limits: run.skipped("cpu load", "a test"))
    monkeypatch.setattr(run.processes.shutil, "which", lambda name: None)
    monkeypatch.setattr(run.host, "read_clock", lambda: (0, 0.001))
    for folder in ("dev/shm", "proc"):
        (tmp_path / folder).mkdir(parents=True)
    return write(tmp_path, {
        "proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 88888888 kB\n", "dev/kmsg": "",
        "proc/mounts": "/dev/sda / ext4 rw 0 0\n",
    })  # fmt: skip


def test_good_cpu_node(root: Path, tmp_path: Path) -> None:
    stages = []
    report = examine_node(Request(folder=tmp_path, root=root, probe=fake_probe(CPU)), stages.append)
    assert [check.status for check in report.checks if check.status not in ("passed", "skipped")] == []
    assert report.verdict == "fit"
    assert (report.device, report.versions["torch"]) == ("AMD EPYC", "2.13.0")
    assert {"management tool", "foreign processes"}.isdisjoint(by_name(report))  # a CPU has none
    assert stages[:2] == ["devices", "host"]


def test_every_injected_fault_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(root, {
        "dev/kmsg": f"4,1,{10**15},-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN",
        "sys/class/kfd/kfd/proc/4242/pasid": "1",
        "proc/4242/stat": "4242 (miner) R 1 1 1 0 -1 0 0 0 0 0 1 1 0 0 20",
    })  # fmt: skip
    monkeypatch.setattr(run.host.resource, "getrlimit", lambda what: (100, 100))
    monkeypatch.setattr(run.host, "read_clock", lambda: (run.host.UNSYNCHRONISED, 16.0))
    good = profile(device_name="NVIDIA H100 80GB HBM3", device_type="cuda", num_devices=4, versions={"torch": "2.12"})
    probe = fake_probe(GPUS, "cuda:1")
    request = Request(2, Path("/sys"), good, expect_nics=8, root=root, probe=probe)
    report = examine_node(request)
    failing = {check.name for check in report.having("failed")}
    assert failing >= {
        "devices", "cuda:1", "locked memory", "open files", "processes", "nics", "kernel log", "foreign processes",
        "disk", "versions",
    }  # fmt: skip
    assert "cuda:0" not in failing
    checks = by_name(report)
    assert "2 of 4 devices" in checks["devices"].reason
    assert "miner (pid 4242)" in checks["foreign processes"].reason
    assert checks["clock"].status == "warned"
    assert checks["gemm"].status == "skipped"  # a sick device is not timed
    assert "devices, cuda:1 did not pass" in checks["gemm"].reason
    json.loads(report.model_dump_json())


def test_a_profile_of_another_device_is_refused(root: Path) -> None:
    other = profile(device_name="AMD Instinct MI300X", device_id="mi300x", device_type="cuda", num_devices=2)
    report = examine_node(Request(folder=root, profile=other, root=root, probe=fake_probe(GPUS)))
    assert "measured on AMD Instinct MI300X" in by_name(report)["devices"].reason
    same = profile(device_name="a H100 by another name", device_id="h100-sxm", device_type="cuda", num_devices=2)
    report = examine_node(Request(folder=root, profile=same, root=root, probe=fake_probe(GPUS)))
    assert by_name(report)["devices"].status == "passed"


class TestSecondTier:
    def examined(self, root: Path, monkeypatch: pytest.MonkeyPatch, measure: Any) -> Any:
        monkeypatch.setattr(performance, "measure_node", measure)
        good = profile(gemm("fp32", 256, 1e11), device_name="AMD EPYC, 2 threads")
        return examine_node(Request(2, root, good, root=root, probe=fake_probe(CPU)))

    def test_rates_against_the_profile(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def measure(work: Work) -> tuple[list[RankResult], list[RankResult]]:
            assert work.shape == (256, 256, 256)
            return [RankResult(0, 7e10, 1e10)], [RankResult(r, 3e10, 1e10, 0.1) for r in (0, 1)]

        report = self.examined(root, monkeypatch, measure)
        assert report.verdict == "unfit"
        assert [check.name for check in report.having("failed")] == ["gemm"]  # 70 of 80 GFLOP/s
        assert by_name(report)["gemm"].limit == pytest.approx(80)
        assert report.rates["gemm"] == pytest.approx(70)
        assert set(report.rates) == {"gemm", "memory rate", "all_reduce"}

    def test_a_rank_that_crashes(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def measure(work: Work) -> None:
            raise RuntimeError("on_rank on 2 ranks: Traceback\n  File\ntorch.OutOfMemoryError: CUDA out of memory\n")

        check = by_name(self.examined(root, monkeypatch, measure))["rates"]
        assert check.status == "failed"
        assert "torch.OutOfMemoryError: CUDA out of memory" in check.reason

    def test_a_fault_of_the_doctor_is_not_the_nodes(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def measure(work: Work) -> None:
            raise ZeroDivisionError

        report = self.examined(root, monkeypatch, measure)
        assert report.verdict == "undecided"
        assert by_name(report)["rates"].status == "error"


def test_a_hung_check_does_not_hold_the_others(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    monkeypatch.setattr(run, "SYSTEM_S", 0.5)
    monkeypatch.setattr(run.disk, "disk_check", lambda folder, limits: run.skipped("disk", str(end.wait(20))))
    report = examine_node(Request(folder=root, root=root, probe=fake_probe(CPU)))
    end.set()
    assert [check.name for check in report.having("failed")] == ["disk"]
    assert "no answer within 0.5 s" in by_name(report)["disk"].reason
    assert by_name(report)["mounts"].status == "passed"
