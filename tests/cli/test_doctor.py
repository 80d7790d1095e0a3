"""`moestro doctor`: what it prints, writes, and exits with."""

import json
from pathlib import Path

import pytest

from cli.helpers import moestro
from moestro.doctor import devices, run

GOOD = {"device": "cpu", "problems": [], "usable": ["fp32"], "unusable": []}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the seconds of the process that touches the devices, and of watching the CPUs."""
    found = devices.Inventory("cpu", 1, "A CPU [x]", {"torch": "2.13.0"}, GOOD)
    monkeypatch.setattr(run.devices, "take_inventory", lambda answer_s, probe: found)
    monkeypatch.setattr(run.processes, "cpu_load_check", lambda root, limits: run.skipped("cpu load", "a test"))
    monkeypatch.setattr(run.devices, "accelerators_on_bus", lambda root: 0)


def test_this_machine(tmp_path: Path) -> None:
    """With its real probe. Whatever its state, the verdict and the exit status agree, and every check has a name."""
    outcome = moestro("doctor", "--folder", str(tmp_path), "--json")
    data = json.loads(outcome.out)
    assert outcome.code == data["exit_code"] == {"fit": 0, "unfit": 3, "undecided": 4}[data["verdict"]]
    checks = {check["name"]: check for check in data["nodes"][0]["checks"]}
    assert {"devices", "memory", "open files", "nics", "kernel log", "disk", "mounts", "versions"} <= set(checks)
    assert checks["devices"]["status"] == "passed", checks["devices"]
    assert checks["disk"]["status"] == "passed", checks["disk"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
class TestOutput:
    def test_unfit_node(self, tmp_path: Path) -> None:
        report = tmp_path / "new" / "report.json"
        outcome = moestro("doctor", "--folder", "/sys", "--expect-devices", "8", "--write", str(report))
        assert outcome.code == 3
        assert "✗" in outcome.out
        assert "A CPU [x]" in outcome.out  # not taken for mark-up
        assert "cannot write at /sys" in outcome.out
        assert "→ give this user the right to write there" in outcome.out
        assert outcome.out.rstrip().splitlines()[-1].startswith("unfit: devices, disk")
        assert json.loads(report.read_text())["failing"][0]["reasons"][0].startswith("devices: torch finds no acceler")
        assert [path.name for path in report.parent.iterdir()] == ["report.json"]

    def test_fit_node(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(run, "_system_checks", lambda *_: {})
        outcome = moestro("doctor", "--folder", str(tmp_path))
        assert outcome.code == 0
        assert outcome.out.rstrip().splitlines()[-1].startswith("fit (2 checks")

    def test_report_that_cannot_be_written_does_not_hide_the_verdict(self) -> None:
        outcome = moestro("doctor", "--folder", "/sys", "--write", "/sys/report.json")
        assert outcome.code == 3
        assert "error: the report was not written" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tier", "3"), "tier"),
        (("--expect-nics", "-1"), "expect-nics"),
        (("--profile", "/no/such/profile"), "no profile at /no/such/profile"),
        (("--write", "/tmp"), "--write /tmp is a folder"),
        (("--folder", "/tmp", "extra"), "extra"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], said: str) -> None:
    outcome = moestro("doctor", *arguments)
    assert outcome.code == 2
    assert said in outcome.err
