"""The supervisor over ranks that are real processes but only pretend to train; at the end over ones that do."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from moestro.config.supervise import SuperviseConfig
from moestro.errors import MoestroError
from moestro.parallel import launch
from moestro.resilience import stacks
from moestro.resilience.goodput import attempts_of
from moestro.resilience.nodes import Nodes
from moestro.resilience.supervisor import Supervisor
from moestro.train.incidents import Incident, incidents

# A rank of ten steps that goes on where the one before was, and waits for all others after each. `fault` is called
# before each step.
RANK = """
import json, os, signal, sys, time
from pathlib import Path
folder, rank = Path(os.environ["MOESTRO_WATCHED"]), int(os.environ["RANK"])
attempt, ranks = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["WORLD_SIZE"])
folder.mkdir(exist_ok=True)
EARLY
saved = folder.parent / "saved"

def stop(number, frame):
    if rank == 0:
        saved.write_text(str(step))
    sys.exit(130)

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)

def beat(step, entered=0, wall=0.0):
    tree = dict(rank=rank, pid=os.getpid(), step=step, phase="passes", phase_s=0.0, step_s=0.1, own_s=None,
                wall=time.time() + wall, monotonic=time.monotonic(), collectives={"0": entered})
    path = folder / f"rank-{rank}.json"
    (new := path.with_suffix(f".{rank}")).write_text(json.dumps(tree))
    new.rename(path)

def others_are_at(step):
    for other in range(ranks):
        path = folder / f"rank-{other}.json"
        if not path.exists() or json.loads(path.read_text())["step"] < step:
            return False
    return True

def words(signal_name):
    tree = dict(rank=rank, signal=signal_name, step=step, text="its text")
    (folder / f"rank-{rank}.last.json").write_text(json.dumps(tree))

def fault(step):
FAULT

step = int(saved.read_text()) if saved.exists() else 0
while step < 10:
    beat(step, step)
    fault(step)
    time.sleep(0.05)
    beat(step + 1, step + 1)
    while not others_are_at(step + 1):
        beat(step + 1, step + 1)
        time.sleep(0.01)
    step += 1
    if rank == 0 and step % 2 == 0:
        saved.write_text(str(step))
beat(step, step)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "WATCH_S", 0.02)
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    monkeypatch.setattr(stacks, "DUMP_S", 0.0)


class Run:
    """One supervised pretence: its exit status, what was said and what was noted."""

    def __init__(
        self, folder: Path, fault: str, ranks: int = 2, speaks: bool = True, early: str = "", **settings: Any
    ) -> None:
        script = folder / "rank.py"
        script.write_text(
            RANK.replace("EARLY", early).replace("FAULT", "\n".join(f"    {line}" for line in fault.splitlines()))
        )
        limits = {"backoff_s": 0.01, "hang_floor_s": 1.0, "silent_s": 1.0, "ranks_per_node": 1, **settings}
        self.said: list[str] = []
        self.folder = folder / "run"
        supervisor = Supervisor(
            [sys.executable, str(script)], [sys.executable, str(script)], ranks, self.folder,
            SuperviseConfig.model_validate(limits), self.said.append, lambda ranks: None, speaks=speaks,
        )  # fmt: skip
        self.status = supervisor.run()
        self.incidents: list[Incident] = incidents(self.folder)
        self.attempts = attempts_of(self.folder)

    @property
    def seen(self) -> list[tuple[str, str, int | None]]:
        return [(one.signal, one.action, one.rank) for one in self.incidents]


def test_nothing_happens(tmp_path: Path) -> None:
    run = Run(tmp_path, "pass")
    assert (run.status, run.incidents, run.said) == (0, [], [])
    assert [(one.last_step, one.end) for one in run.attempts] == [(10, "done")]


def test_a_rank_is_killed(tmp_path: Path) -> None:
    run = Run(tmp_path, "if attempt == 0 and rank == 1 and step == 5: os.kill(os.getpid(), 9)")
    assert (run.status, run.seen) == (0, [("killed", "restart", 1)])
    (incident,) = run.incidents
    assert incident.step in (4, 5)
    assert incident.downtime_s is not None
    assert 0 < incident.downtime_s < 10
    assert incident.node is not None
    assert incident.node.endswith(":1")
    assert [one.end for one in run.attempts] == ["killed", "done"]
    assert run.attempts[1].first_step in (4, 5)
    assert any("goes on after step" in line and "on 2 ranks" in line for line in run.said)


def test_a_rank_is_stopped(tmp_path: Path) -> None:
    run = Run(tmp_path, "if attempt == 0 and rank == 0 and step == 5: os.kill(os.getpid(), signal.SIGSTOP)")
    assert (run.status, run.seen) == (0, [("hang", "restart", 0)])
    assert run.incidents[0].evidence["stopped"]


def test_a_rank_that_is_gone_does_not_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers take longer to notice than a rank may be silent."""
    monkeypatch.setattr(launch, "GRACE_S", 1.0)
    run = Run(tmp_path, "if attempt == 0 and rank == 1 and step == 5: os.kill(os.getpid(), 9)", silent_s=0.4)
    assert (run.status, run.seen) == (0, [("killed", "restart", 1)])


def test_a_rank_does_not_enter_a_collective(tmp_path: Path) -> None:
    fault = """if attempt == 0 and step == 5:
    while True:
        time.sleep(0.05)
        beat(step, 5 if rank == 1 else 6)"""
    run = Run(tmp_path, fault)
    assert (run.status, run.seen) == (0, [("hang", "restart", 1)])
    assert run.incidents[0].evidence["entered_fewer"] == 1


def test_a_mistake_is_not_tried_again(tmp_path: Path) -> None:
    run = Run(tmp_path, "if rank == 1: sys.exit(2)")
    assert (run.status, len(run.attempts)) == (2, 1)
    assert run.seen == [("user_error", "stop", 1)]


def test_what_a_rank_says_goes_before_its_status(tmp_path: Path) -> None:
    run = Run(tmp_path, 'if attempt == 0 and rank == 0 and step == 3:\n    words("disk_full")\n    sys.exit(2)')
    assert (run.status, run.seen) == (0, [("disk_full", "restart", 0)])
    assert run.incidents[0].evidence["error"] == "its text"


def test_a_loop_ends_with_a_clear_line(tmp_path: Path) -> None:
    run = Run(tmp_path, "if step == 3 and rank == 0: sys.exit(1)", max_without_progress=2)
    assert run.status == 1
    assert [one.action for one in run.incidents] == ["restart", "restart", "stop"]
    assert "stopped: 3 attempts in a row ended at step 3 without a new step" in run.said[-1]
    assert "exit status 1: an error in the program" in run.said[-1]


def test_faults_before_training_goes_on_share_the_time(tmp_path: Path) -> None:
    """The second attempt dies before a rank tells anything: both lines have their own part of the time down."""
    script = "if attempt == 0 and step == 3 and rank: sys.exit(1)"
    run = Run(tmp_path, script, backoff_s=0.2, early="if attempt == 1: time.sleep(0.3); sys.exit(1)")
    first, second = run.incidents
    assert first.downtime_s is not None
    assert second.downtime_s is not None
    begin, end = run.attempts[0].moved, run.attempts[2].started
    assert begin is not None
    assert first.downtime_s > 0.4
    assert first.downtime_s + second.downtime_s > end - begin - 0.05


def test_a_node_is_left_out_and_comes_back(tmp_path: Path) -> None:
    fault = "if ranks == 2 and attempt < 2 and rank == 1 and step >= 2 + attempt: os.kill(os.getpid(), 9)"
    run = Run(tmp_path, fault + "\nif ranks == 1: time.sleep(0.1)", elastic=True, back_after_s=0.2)
    assert run.status == 0
    assert run.seen == [
        ("killed", "restart", 1), ("killed", "restart", 1), ("node_lost", "shrink", None), ("node_back", "grow", None),
    ]  # fmt: skip
    assert [one.ranks for one in run.attempts] == [2, 2, 1, 2]
    assert all(one.downtime_s is not None for one in run.incidents if one.signal != "node_lost")
    assert len(Nodes(run.folder / "nodes.jsonl").hosts("available")) == 2
    third, fourth = run.attempts[2:]
    assert fourth.first_step is not None
    assert fourth.first_step >= third.last_step - 1  # the ranks saved before they ended: nothing was lost


def test_ctrl_c_stops_the_ranks_in_order(tmp_path: Path) -> None:
    timer = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    run = Run(tmp_path, "time.sleep(0.3)")
    timer.join()
    assert (run.status, run.incidents) == (130, [])
    assert (run.folder / "saved").exists()


def test_a_clock_that_jumps(tmp_path: Path) -> None:
    run = Run(tmp_path, "if rank == 1 and step >= 5: beat(step, wall=3600.0)")
    assert run.status == 0
    assert run.seen[0] == ("clock_jump", "flag", 1)
    assert run.incidents[0].evidence["jump_s"] == 3600.0


def test_a_command_that_tells_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, "sys.exit(0 if attempt else 7)", speaks=False)
    assert (run.status, [one[:2] for one in run.seen]) == (0, [("exit", "restart")])


def test_one_supervisor_a_run(tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".supervisor.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(MoestroError, match="another supervisor watches over"):
            Run(tmp_path, "pass")


def train(folder: Path, name: str, *overrides: str) -> "subprocess.Popen[str]":
    from tests.train.helpers import tree

    config = folder / "tiny.toml"
    if not config.exists():
        import tomli_w

        config.write_text(tomli_w.dumps(tree(folder, {"train": {"steps": 200, "checkpoint_every": 20}})))
    command = [sys.executable, "-m", "moestro", "train", str(config), "--nproc", "2", f"run.name={name}", *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def until_step(folder: Path, step: int, limit_s: float = 120.0) -> int:
    """The step that rank 1 has told of, once it is at least that."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            beat = json.loads((folder / "watch" / "rank-1.json").read_text())
            if beat["step"] >= step:
                return int(beat["pid"])
        except (OSError, ValueError):
            pass
        time.sleep(0.1)
    raise AssertionError(f"no step {step} within {limit_s} s")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds an undisturbed run, runs/calm."""
    folder = tmp_path_factory.mktemp("trained")
    assert train(folder, "calm").wait(240) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_training_ends_with_the_same_weights(calm: Path, number: signal.Signals) -> None:
    from tests.train.helpers import records

    name = f"tried-{number}"
    watched = train(calm, name, "run.supervise=true", "supervise.silent_s=3", "supervise.backoff_s=0.1")
    folder = calm / "runs" / name
    os.kill(until_step(folder, 50), number)
    output, _ = watched.communicate(timeout=240)
    assert watched.returncode == 0, output
    (incident,) = incidents(folder)
    expected = "killed" if number == signal.SIGKILL else "hang"
    assert (incident.signal, incident.action, incident.rank) == (expected, "restart", 1)
    losses = [{one["step"]: one["loss"] for one in records(calm / "runs" / one_of)} for one_of in ("calm", name)]
    assert losses[0] == losses[1]
    first, second = (calm / "runs" / one_of / "checkpoints" / "step_00000200" for one_of in ("calm", name))
    files = [path.name for path in first.glob("*.distcp")]
    assert files
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in files)
