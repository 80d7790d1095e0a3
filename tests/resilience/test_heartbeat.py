"""What a rank tells about itself, and the process beside ranks that another launcher started."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from moestro.config.load import parse_supervise
from moestro.errors import MoestroError
from moestro.resilience import beside, stacks
from moestro.resilience.beside import Watch, look_beside
from moestro.resilience.watchdog import Patience, Watchdog
from moestro.train import heartbeat
from moestro.train.heartbeat import WATCHED, Beat, Heartbeat, beat_of, read_beat
from moestro.train.incidents import incidents


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(WATCHED, str(tmp_path / "watch"))
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.05)
    return tmp_path / "watch"


def _wait(seconds: float) -> None:
    """By its name a wait for other ranks."""
    time.sleep(seconds)


def compute(seconds: float) -> None:
    time.sleep(seconds)


def told(folder: Path, **wanted: object) -> Beat:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        beat = read_beat(folder, 3)
        if beat is not None and all(getattr(beat, key) == value for key, value in wanted.items()):
            return beat
        time.sleep(0.01)
    raise AssertionError(f"never told {wanted}; last {read_beat(folder, 3)}")


def test_it_tells_where_it_is(watched: Path) -> None:
    with Heartbeat(3) as pulse:
        assert told(watched, phase="start").step == 0
        pulse.at("passes", 7)
        beat = told(watched, phase="passes", step=7)
        assert (beat.rank, beat.pid, beat.own_s) == (3, os.getpid(), None)
        assert told(watched, phase="passes").monotonic > 0
    assert told(watched, phase="end").step == 7  # the last word, after the block


def test_it_goes_on_while_the_main_thread_waits(watched: Path) -> None:
    with Heartbeat(3) as pulse:
        pulse.at("passes")
        first = told(watched, phase="passes")
        time.sleep(0.3)
        later = read_beat(watched, 3)
    assert later is not None
    assert later.monotonic > first.monotonic
    assert later.phase_s > 0.2


def test_nothing_is_written_when_nobody_watches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WATCHED, raising=False)
    with Heartbeat(3) as pulse:
        pulse.at("passes", 1)
        pulse.took(1.0)
        assert pulse._thread is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("waits_show", [True, False])
def test_own_time_leaves_waits_out(watched: Path, waits_show: bool) -> None:
    with Heartbeat(3, waits_show) as pulse:
        pulse.at("passes")
        compute(0.3)
        _wait(0.6)
        pulse.took(0.9)
        pulse.at("log", 1)
        time.sleep(0.2)  # not of a step
    own_s = told(watched, phase="end", step_s=0.9).own_s
    if waits_show:
        assert own_s is not None
        assert 0.2 < own_s < 0.7
    else:
        assert own_s is None


def test_a_stack_is_written_on_a_signal(watched: Path) -> None:
    with Heartbeat(3):
        told(watched, phase="start")
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.05)
        frames = stacks.innermost(heartbeat.stacks_of(watched, 3))
        assert any("test_heartbeat.py" in frame for frame in frames)
    os.kill(os.getpid(), signal.SIGUSR1)  # asked too late: no reason to die


def test_ranks_with_different_work_are_held_against_their_past() -> None:
    def beats(step: int, own: tuple[float, float]) -> list[Beat | None]:
        return [Beat(r, r, step, "passes", 0.0, 1.0, own[r], float(step), float(step)) for r in range(2)]

    dog = Watchdog(2, Patience(alike=False), 0.0)
    for step in range(1, 51):
        dog.look(beats(step, (1.0, 2.0)), {}, float(step))
    assert dog.slow_ranks() == {}  # a stage with twice the layers
    for step in range(51, 101):
        dog.look(beats(step, (1.5, 2.0)), {}, float(step))
    assert dog.slow_ranks() == {0: 1.5}


def test_beside_a_launcher_it_kills_the_rank_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "LOOK_S", 0.02)
    monkeypatch.setattr(stacks, "DUMP_S", 0.0)
    (tmp_path / "watch").mkdir()
    sleepers = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    try:
        stop, began = threading.Event(), time.time() + 1e6
        for rank, entered in ((0, 5), (1, 4)):
            beat = Beat(rank, sleepers[rank].pid, 7, "passes", 0.0, 1.0, None, began, began, {"0": entered})
            beat_of(tmp_path / "watch", rank).write_text(json.dumps(asdict(beat)))
        patience = Patience(hang_floor_s=0.2, long_s=0.2, silent_s=60.0)
        look_beside(Watch(str(tmp_path), 2, 0, 2, 1, patience), stop)
        assert sleepers[1].wait(10) == -signal.SIGKILL
        assert sleepers[0].poll() is None
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
    (seen,) = incidents(tmp_path)
    assert (seen.signal, seen.action, seen.rank, seen.step) == ("hang", "restart", 1, 7)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("max_restart=3", "no setting 'max_restart'. Did you mean 'max_restarts'"),
        ("max_restarts=-1", "supervise.max_restarts: Input should be greater than or equal to 0, got -1"),
        ("max_restarts", "is not an override"),
    ],
)
def test_settings_of_any_other_command(setting: str, message: str) -> None:
    with pytest.raises(MoestroError, match=message):
        parse_supervise([setting])
    assert parse_supervise(["supervise.backoff_s=2", "doctor=true"]).backoff_s == 2
