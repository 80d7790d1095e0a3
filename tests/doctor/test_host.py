"""Memory, limits, shared memory, CPU settings and clock: each fault is told by name."""

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from doctor.helpers import ACCELERATOR, CPU, one, write
from moestro.doctor import host

GIB_KB = 2**20
MEMINFO = f"MemTotal:       {64 * GIB_KB} kB\nMemFree: 1 kB\nMemAvailable:   {40 * GIB_KB} kB\n"


class TestMemory:
    def test_enough_and_too_little(self, tmp_path: Path) -> None:
        root = write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"})
        check = host.memory_check(root, ACCELERATOR)
        assert (check.status, check.value, check.limit) == ("passed", 40.0, 32.0)
        write(root, {"proc/meminfo": MEMINFO.replace(str(40 * GIB_KB), str(31 * GIB_KB))})
        check = host.memory_check(root, ACCELERATOR)
        assert check.status == "failed"
        assert "31.0 GiB available of 64.0; 32 GiB needed" in check.reason

    @pytest.mark.parametrize(
        ("cgroup", "files"),
        [
            ("0::/job/step\n", {"job/memory.max": 8, "job/memory.current": 7.5, "job/step/memory.current": 1}),
            # Version 1, in a container: the path is the host's, only the root is there.
            ("9:name=systemd:/\n4:memory:/docker/abc\n0::/\n", {
                "memory/memory.limit_in_bytes": 8, "memory/memory.usage_in_bytes": 7.5,
            }),
        ],
        ids=["v2, limit of a parent", "v1"],
    )  # fmt: skip
    def test_room_of_the_control_group(self, tmp_path: Path, cgroup: str, files: dict[str, float]) -> None:
        root = write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup})
        write(root, {f"sys/fs/cgroup/{name}": f"{int(gib * 2**30)}\n" for name, gib in files.items()})
        check = host.memory_check(root, CPU)
        assert (check.status, check.value) == ("failed", 0.5)
        assert "0.5 GiB left of the control group's 8.0" in check.reason

    def test_no_limit_is_no_limit(self, tmp_path: Path) -> None:
        root = write(tmp_path, {"proc/self/cgroup": "4:memory:/a\n0::/\n"})
        unlimited = {"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory.max": "max"}
        write(root, {f"sys/fs/cgroup/{name}": text for name, text in unlimited.items()})
        write(root, {"sys/fs/cgroup/memory/memory.usage_in_bytes": "5", "sys/fs/cgroup/memory.current": "5"})
        assert host.cgroup_room(root) is None

    def test_unreadable_is_skipped(self, tmp_path: Path) -> None:
        assert host.memory_check(tmp_path, CPU).status == "skipped"


@pytest.fixture
def soft_limit() -> Iterator[object]:
    before = {what: resource.getrlimit(what) for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)}
    yield lambda what, soft: resource.setrlimit(what, (soft, before[what][1]))
    for what, limits in before.items():
        resource.setrlimit(what, limits)


class TestLimits:
    def test_low_number_of_open_files(self, soft_limit) -> None:  # type: ignore[no-untyped-def]
        assert host.limits_checks(CPU)[0].status == "passed"
        soft_limit(resource.RLIMIT_NOFILE, 512)
        files = host.limits_checks(CPU)[0]
        assert (files.name, files.status, files.value) == ("open files", "failed", 512)
        assert "ulimit -n 1024" in files.remedy

    def test_low_locked_memory_matters_to_accelerators_only(self, soft_limit) -> None:  # type: ignore[no-untyped-def]
        soft_limit(resource.RLIMIT_MEMLOCK, 64 * 1024)
        check = host.locked_memory_check(ACCELERATOR)
        assert (check.name, check.status) == ("locked memory", "failed")
        assert "32 GiB needed for RDMA" in check.reason
        assert host.locked_memory_check(CPU).status == "passed"

    def test_unlimited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        checks = [*host.limits_checks(ACCELERATOR), host.locked_memory_check(ACCELERATOR)]
        assert [(check.status, check.reason) for check in checks] == [("passed", "unlimited")] * 3


class TestSharedMemory:
    def test_small_for_an_accelerator(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Stat:
            f_frsize, f_blocks, f_bavail = 4096, 64 * 256, 64 * 256

        (tmp_path / "dev/shm").mkdir(parents=True)
        monkeypatch.setattr(host.os, "statvfs", lambda folder: Stat)
        check = host.shared_memory_check(tmp_path, ACCELERATOR)
        assert (check.status, check.value) == ("failed", 64.0)
        assert host.shared_memory_check(tmp_path, CPU).status == "passed"
        Stat.f_bavail = 256
        assert host.shared_memory_check(tmp_path, CPU).status == "warned"

    def test_absent(self, tmp_path: Path) -> None:
        assert host.shared_memory_check(tmp_path, CPU).status == "skipped"


class TestCpu:
    def test_hygiene(self, tmp_path: Path) -> None:
        assert host.cpu_check(tmp_path, accelerators=True).status == "passed"
        governor = "sys/devices/system/cpu/cpu{}/cpufreq/scaling_governor"
        files = {governor.format(0): "performance\n", governor.format(1): "powersave\n"}
        root = write(tmp_path, {**files, "proc/sys/kernel/numa_balancing": "1\n"})
        check = host.cpu_check(root, accelerators=True)
        assert check.status == "warned"
        assert check.reason == "frequency governor powersave; automatic NUMA balancing is on"
        assert "NUMA" not in host.cpu_check(root, accelerators=False).reason

    @pytest.mark.parametrize(
        ("files", "quota"),
        [
            ({"cpu.max": "50000 100000\n"}, 0.5),
            ({"jobs/7/cpu.max": "max 100000\n", "jobs/cpu.max": "50000 100000\n"}, 0.5),
            ({"cpu.max": "max 100000\n"}, None),
            ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
            ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
            ({}, None),
        ],
    )
    def test_quota(self, tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
        root = write(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
        write(root, {"proc/self/cgroup": "4:cpu:/\n0::/jobs/7\n"})
        check = host.cpu_check(root, accelerators=False)
        assert check.status == ("passed" if quota is None else "warned")
        assert quota is None or f"a quota of {quota:g} CPUs" in check.reason


class TestClock:
    def test_unsynchronised(self) -> None:
        check = one(host.clock_check((0x2040, 16.0), CPU))
        assert (check.name, check.status) == ("clock", "warned")
        assert "not synchronised" in check.reason

    def test_synchronised_well_and_badly(self) -> None:
        assert host.clock_check((0x2001, 0.004), CPU).status == "passed"
        assert "off by 1.5 s" in host.clock_check((0x2001, 1.5), CPU).reason
        assert host.clock_check(None, CPU).status == "skipped"

    def test_this_kernel_answers(self) -> None:
        state = host.read_clock()
        assert state is None or 0 <= state[1] < 1e6
