"""Other people's processes, and the vendor's tool, from recorded answers."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from doctor.helpers import ACCELERATOR, CPU, write
from moestro.doctor import processes
from moestro.doctor.commands import Answer
from moestro.doctor.processes import Process
from moestro.hardware.topology import usable_cores

NVIDIA = """2391, /usr/bin/python3, 71234 MiB
2392, /opt/my app/train, 512 MiB
[Not Found], [Not Found], 3 MiB
"""


def stat(pid: int, parent: int, name: str = "python", ticks: int = 0) -> dict[str, str]:
    return {f"proc/{pid}/stat": f"{pid} ({name}) R {parent} 1 1 0 -1 0 0 0 0 0 {ticks} {ticks} 0 0 20"}


def test_rows_of_nvidia_smi() -> None:
    assert processes.parse_nvidia_processes(NVIDIA) == [
        Process(2391, "python3", "71234 MiB"), Process(2392, "train", "512 MiB"),
    ]  # fmt: skip
    assert processes.parse_nvidia_processes("\n") == []
    assert processes.parse_nvidia_processes("No running processes found") == []


def test_a_foreign_process_on_an_accelerator_fails_by_name() -> None:
    found = processes.parse_nvidia_processes(NVIDIA)
    check = processes.foreign_check(found, {2392, os.getpid()})
    assert (check.name, check.status, check.value) == ("foreign processes", "failed", 1)
    assert "python3 (pid 2391, 71234 MiB)" in check.reason
    assert "train" not in check.reason
    assert processes.foreign_check(found, {2391, 2392}).status == "passed"
    assert processes.foreign_check(None, set()).status == "skipped"


def test_processes_of_the_amd_driver(tmp_path: Path) -> None:
    assert processes.amd_processes(tmp_path) is None
    root = write(tmp_path, {"sys/class/kfd/kfd/proc/77/pasid": "1", **stat(77, 1, "train (x) y")})
    assert processes.accelerator_processes(root, ACCELERATOR) == [Process(77, "train (x) y")]


def test_no_tool_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.shutil, "which", lambda name: None)
    assert processes.accelerator_processes(tmp_path, ACCELERATOR) is None
    monkeypatch.setattr(processes.shutil, "which", lambda name: name)
    assert processes.accelerator_processes(tmp_path, ACCELERATOR, lambda *_: Answer("hung")) is None
    said = processes.accelerator_processes(tmp_path, ACCELERATOR, lambda *_: Answer("ended", 0, NVIDIA))
    assert said is not None
    assert [process.pid for process in said] == [2391, 2392]


def test_ours_are_this_process_its_ancestors_and_its_descendants(tmp_path: Path) -> None:
    me, parent = os.getpid(), os.getppid()
    tree = {**stat(1, 0), **stat(parent, 10**7), **stat(10**7, 1), **stat(me, parent)}
    tree |= {**stat(10**7 + 1, me), **stat(10**7 + 2, 10**7 + 1), **stat(10**7 + 3, 10**7)}
    assert processes.our_processes(write(tmp_path, tree)) == {me, parent, 10**7, 10**7 + 1, 10**7 + 2}


def test_those_who_use_the_cpus_are_named(tmp_path: Path) -> None:
    root = write(tmp_path, {**stat(5, 1, "spinner"), **stat(6, 1, "idler")})
    check = processes.hogs_check({5: 1.5, 6: 0.1}, root, CPU)
    assert (check.name, check.status, check.value) == ("cpu load", "warned", 1.6)
    assert "spinner (pid 5, 1.5 cores)" in check.reason
    assert "idler" not in check.reason
    assert processes.hogs_check({6: 0.1}, root, CPU).status == "passed"
    many = processes.hogs_check(dict.fromkeys(range(7, 7 + 4 * usable_cores()), 0.1) | {6: 0.2}, root, CPU)
    assert many.status == "warned"  # none uses much, but all together do
    assert "idler (pid 6, 0.2 cores)" in many.reason
    assert processes.hogs_check({}, root, CPU).status == "passed"


def test_cpu_time_is_counted_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path, {**stat(os.getpid(), 1), **stat(5, 1, "spinner"), **stat(6, 1)})
    now = iter([100.0, 100.5])
    monkeypatch.setattr(processes.time, "monotonic", lambda: next(now))

    def sleep(seconds: float) -> None:
        write(root, {**stat(os.getpid(), 1, ticks=10**4), **stat(5, 1, "spinner", ticks=os.sysconf("SC_CLK_TCK"))})
        (root / "proc/6/stat").unlink()  # it ended meanwhile

    monkeypatch.setattr(processes.time, "sleep", sleep)
    check = processes.cpu_load_check(root, CPU)
    assert check.value == pytest.approx(4.0)  # a second each of user and system time, in half a second; ours left out
    assert "spinner (pid 5, 4.0 cores)" in check.reason


class TestTool:
    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(processes.shutil, "which", lambda name: name if name == "nvidia-smi" else None)

    @pytest.mark.parametrize(
        ("answer", "status", "said"),
        [
            (Answer("ended", 0, "GPU 0: …", seconds=0.7), "passed", "answers in 0.7 s"),
            (Answer("hung", seconds=5), "failed", "no answer in 5 s"),
            (Answer("stuck", seconds=7), "failed", "no answer in 5 s"),
            (Answer("ended", 9, "", "x\nDriver/library version mismatch\n"), "failed", "version mismatch"),
            (Answer("ended", 9), "failed", "fails: 9"),
        ],
    )
    def test_answers(self, answer: Answer, status: str, said: str) -> None:
        run: Callable[..., Answer] = lambda command, limit_s: answer  # noqa: E731
        check = processes.tool_check("cuda", ACCELERATOR, run)
        assert (check.name, check.status) == ("management tool", status)
        assert said in check.reason

    def test_not_installed_or_none_needed(self) -> None:
        assert processes.tool_check("xpu", ACCELERATOR).status == "warned"
        assert processes.tool_check("cpu", CPU).status == "skipped"
        assert processes.tool_check("mps", CPU).status == "skipped"
