"""Measuring a machine as a whole: order, time, failures of single sections. The sections are fakes, but for one run."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from report.profiles import sample

from moestro.errors import MoestroError
from moestro.hardware.profile import Machine, load_profile, save_profile
from moestro.measure import machine
from moestro.measure.machine import default_ranks, describe_machine, measure_machine
from moestro.measure.sections import SECTIONS, section_of
from moestro.measure.timing import Case
from moestro.report.profile_page import write_samples_folder

CASES: dict[str, dict[str, int | str]] = {
    "gemm": {"m": 8, "n": 8, "k": 8, "dtype": "fp32"},
    "copy": {"bytes": 8},
    "attention": {
        "batch": 1, "seq": 8, "heads": 1, "kv_heads": 1, "head_dim": 8, "dtype": "fp32", "causal": 1, "phase": "fwd",
    },
    "swiglu": {"tokens": 8, "width": 8, "dtype": "fp32"},
}  # fmt: skip


def _case(op: str) -> Case:
    return Case(op, CASES[op], None, 8.0, lambda: lambda: None)


class Fakes:
    """Sections that take no time; `calls` holds (what, seconds that it was given) in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float | None]] = []

    def cases(self, section: str, op: str) -> Callable[..., list[Case]]:
        def build(device: torch.device, quick: bool) -> list[Case]:
            self.calls.append((section, None))
            return [_case(op)]

        return build

    def host(self, device: torch.device, quick: bool) -> list[Any]:
        self.calls.append(("host", None))
        return [sample("host_launch", 1e-6, what="add")]

    def storage(self, folder: Path, quick: bool, *, limit_s: float) -> Any:
        self.calls.append(("storage", limit_s))
        return SimpleNamespace(
            samples=(sample("storage_write", 1.0, bytes=1, block_bytes=1),),
            notes=("it is a ramdisk", "σ 1.3"),
            scatter=("σ 1.3",),
        )

    def collectives(self, ranks: int, quick: bool, *, plan: Any, limit_s: float) -> Any:
        self.calls.append(("collectives" if plan.ops else "pairs", limit_s))
        samples = [sample("ring", 1e-3, bytes=8, ranks=ranks)] if plan.ops else []
        if plan.pair_bytes:
            samples.append(sample("send_recv", 1e-3, bytes=8, ranks=2, pair="0-1"))
        return SimpleNamespace(samples=tuple(samples), findings=("rank 1 is slow",), notes=())

    def together(self, processes: int, cores: int, limit_s: float) -> list[Any]:
        return [sample("copy", 1e-3, bytes=8, processes=processes)]

    def steps(self, processes: int) -> list[Any]:
        case = {"preset": "mixtral-tiny", "batch": 4, "what": "host", "processes": processes}
        return [sample("train_step", 1e-3, **case)]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    fakes = Fakes()
    ops = {"gemm": "gemm", "memory": "copy", "attention": "attention", "elementwise": "swiglu"}
    monkeypatch.setattr(machine, "_CASES", {name: fakes.cases(name, op) for name, op in ops.items()})
    monkeypatch.setattr(machine, "measure_host", fakes.host)
    monkeypatch.setattr(machine, "measure_storage", fakes.storage)
    monkeypatch.setattr(machine, "collective_profile", fakes.collectives)
    monkeypatch.setattr(machine, "measure_together", fakes.together)
    monkeypatch.setattr(machine, "measure_steps", fakes.steps)
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    monkeypatch.setattr(machine, "ENOUGH_S", 0.003)
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    return fakes


def _measure(folder: Path, **options: Any) -> Any:
    return measure_machine(**{"quick": True, "device": "cpu", "ranks": 2, "folder": folder, **options})


def test_every_section_runs_once_and_in_order(fakes: Fakes, tmp_path: Path) -> None:
    profile = _measure(tmp_path)
    assert [name for name, _ in fakes.calls] == [*SECTIONS[:-1]]  # pairs come with the collectives
    assert [section_of(s) for s in profile.samples] == list(SECTIONS)
    assert profile.mode == "quick"
    assert profile.machine.device_type == "cpu"
    assert "storage: it is a ramdisk" in profile.notes
    assert not any("σ" in note for note in profile.notes)  # which the samples hold
    assert "collectives: rank 1 is slow" in profile.notes
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path) == profile


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        ({"ranks": 2}, [2, 1, 2]),
        ({"ranks": 4}, [2, 1, 2]),  # of two cores
        ({"ranks": 1}, [1]),
        ({"ranks": None}, []),  # quickly, and nobody asked
        ({"ranks": 2, "skip": ["collectives"]}, []),
    ],
)
def test_processes_at_once(fakes: Fakes, tmp_path: Path, options: dict[str, Any], processes: list[int]) -> None:
    """Operations in as many as there are cores, then a training step on one and on as many."""
    profile = _measure(tmp_path, **options)
    assert [s.case["processes"] for s in profile.at_once] == processes
    assert not any("processes" in s.case for s in profile.samples)


@pytest.mark.parametrize("skipped", SECTIONS)
def test_a_skipped_section_is_not_measured(fakes: Fakes, tmp_path: Path, skipped: str) -> None:
    profile = _measure(tmp_path, skip=[skipped])
    assert {section_of(s) for s in profile.samples} == set(SECTIONS) - {skipped}
    assert f"skipped on request: {skipped}" in profile.notes


def test_collectives_and_pairs_skipped_together_start_no_ranks(fakes: Fakes, tmp_path: Path) -> None:
    _measure(tmp_path, skip=["collectives", "pairs"])
    assert not {"collectives", "pairs"} & {name for name, _ in fakes.calls}


@pytest.mark.parametrize("section", ["attention", "host", "storage", "collectives"])
def test_a_section_that_fails_is_noted_and_the_others_go_on(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("traceback\nno such kernel")

    if section == "attention":
        monkeypatch.setitem(machine._CASES, "attention", fail)
    else:
        name = {"host": "measure_host", "storage": "measure_storage", "collectives": "collective_profile"}[section]
        monkeypatch.setattr(machine, name, fail)
    profile = _measure(tmp_path)
    lost = {section, "pairs"} if section == "collectives" else {section}
    assert {section_of(s) for s in profile.samples} == set(SECTIONS) - lost
    assert f"{section}: no such kernel" in profile.notes


def test_ctrl_c_is_not_swallowed(fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "measure_host", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _measure(tmp_path)


def test_sections_for_which_no_time_is_left_are_named(fakes: Fakes, tmp_path: Path) -> None:
    started = time.perf_counter() - 0.5 * machine.QUICK_S
    profile = _measure(tmp_path, started=started, skip=["gemm", "memory", "attention", "elementwise"])
    assert "host: left out, as the time was up" not in profile.notes  # fakes take none, so all is left to the others
    with pytest.raises(MoestroError, match=r"nothing could be measured: .*host: left out, as the time was up"):
        _measure(
            tmp_path, started=time.perf_counter() - machine.QUICK_S, skip=["gemm", "memory", "attention", "elementwise"]
        )


def test_unused_time_goes_to_later_sections_and_never_beyond_the_limit(fakes: Fakes, tmp_path: Path) -> None:
    _measure(tmp_path)
    given = dict(fakes.calls)
    own_s = machine._SHARES["collectives"]  # of quick measuring, in seconds
    assert given["collectives"] == pytest.approx(machine.MOST * own_s)  # the last could have all that is left
    assert given["storage"] is not None
    assert given["storage"] < given["collectives"] < machine.QUICK_S


def test_a_busy_machine_makes_the_profile_suspect(
    fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    profile = _measure(tmp_path)
    assert profile.notes[0].startswith("suspect: the load average was 99.00")
    assert profile.machine.load_average == 99


def test_more_ranks_than_cores_are_allowed_and_noted(fakes: Fakes, tmp_path: Path) -> None:
    profile = _measure(tmp_path, ranks=4096)
    assert any("4096 ranks share" in note for note in profile.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "at least one rank, not 0"),
        ({"skip": ["storag"]}, "no section 'storag' to skip. Did you mean 'storage'"),
        ({"skip": SECTIONS}, "nothing is left to measure"),
        ({"device": "cuda:77"}, "not usable here"),
    ],
)
def test_bad_input_is_answered_before_measuring(
    fakes: Fakes, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(MoestroError, match=message):
        _measure(tmp_path, **options)
    assert not fakes.calls


def test_collectives_of_devices_come_from_a_command_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = machine.usual_plan(8, True, torch.device("cuda"))
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        commands.append(command)
        out = Path(next(part for part in command if part.startswith("--out=")).removeprefix("--out="))
        if len(commands) == 1:
            write_samples_folder([sample("ring", 1e-3, bytes=8, ranks=8)], ["rank 3 is slow"], out)
        return SimpleNamespace(returncode=2, stderr="error: 8 ranks on this machine, but 1 cuda devices")

    monkeypatch.setattr(machine.subprocess, "run", run)
    samples, notes = machine.collectives_of_devices(8, torch.device("cuda"), plan, 15)
    assert ([s.op for s in samples], notes) == (["ring"], ["rank 3 is slow"])
    assert {"--nproc=8", "--device=cuda", "--limit=15", "--groups=8", f"--pair-bytes={plan.pair_bytes}"} <= set(
        commands[0]
    )
    with pytest.raises(RuntimeError, match="1 cuda devices"):
        machine.collectives_of_devices(8, torch.device("cuda"), plan, 15)


def test_devices_that_hang_are_an_error_that_a_section_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: Any, timeout: float, **__: Any) -> Any:
        raise machine.subprocess.TimeoutExpired("moestro", timeout)

    monkeypatch.setattr(machine.subprocess, "run", hang)
    with pytest.raises(RuntimeError, match="no answer within 75 s"):
        machine.collectives_of_devices(8, torch.device("cuda"), machine.usual_plan(8, True, torch.device("cuda")), 15)


def test_ranks_by_default() -> None:
    cpu = Machine(device_name="", device_type="cpu", cores=8)
    assert default_ranks(cpu, quick=True) == 2
    assert default_ranks(cpu, quick=False) == 4
    assert default_ranks(cpu.model_copy(update={"cores": 1}), quick=True) == 1
    assert default_ranks(Machine(device_name="", device_type="cuda", num_devices=8, cores=1), quick=True) == 8


def test_a_machine_says_what_changes_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SECRET_TOKEN", "x")
    found = describe_machine(torch.device("cpu"))
    assert found.environment["NCCL_DEBUG"] == "INFO"
    assert "SECRET_TOKEN" not in found.environment
    assert found.versions["torch"] == torch.__version__
    assert found.cores
    assert found.memory_bytes
    assert found.memory_bytes > 1e8


def test_a_real_section_end_to_end(tmp_path: Path) -> None:
    profile = _measure(tmp_path, skip=[name for name in SECTIONS if name != "host"])
    assert {section_of(s) for s in profile.samples} == {"host"}
    assert all(s.median_s < 1 for s in profile.samples)
    assert not list(tmp_path.iterdir())
