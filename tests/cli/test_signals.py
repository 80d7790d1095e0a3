"""Real processes stopped by real signals go on to the result of one that was never stopped."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from train.helpers import assert_equal_state, by_step, config, events, records, state, timeless

from moestro import report
from moestro.train import loop
from moestro.train.loop import train

from .helpers import config_file

SIGNALS = {"sigint": signal.SIGINT, "sigterm": signal.SIGTERM, "sigkill": signal.SIGKILL}
SETTINGS: dict[str, Any] = {
    "train": {"steps": 6, "checkpoint_every": 2},
    "model": {"moe": {"balance": {"bias_rule": "sign"}, "router": {"jitter": 0.05}}},
    "optim": {"name": "muon"},
}


def command(arguments: list[str]) -> None:
    """The real command, which waits after its third step until the signal has been sent."""
    step = loop._Trainer._step

    def step_and_wait(self: Any, *rest: Any) -> bool:
        went_on = step(self, *rest)
        while self.progress.step == 3 and not (self.folder.path / "signalled").exists():
            time.sleep(0.02)
        return went_on

    loop._Trainer._step = step_and_wait  # type: ignore[method-assign]
    loop.measure_gemm_flops = lambda device, dtype: 1e11
    sys.argv = ["moestro", *arguments]
    from moestro.cli.main import main

    main()


def forked(arguments: list[str], err: Path) -> None:
    """The same without the report, which takes longer than the run."""
    report.write_report = lambda run: run / "report.html"
    with err.open("w", buffering=1) as sys.stderr, Path(os.devnull).open("w") as sys.stdout:
        command(arguments)


@dataclass(frozen=True)
class Stopped:
    run: Path
    code: int | None
    err: str


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def send(name: str, run: Path, pid: int, alive: Any) -> None:
    """Send the signal once three steps are logged, then let the run go on."""
    deadline = time.monotonic() + 120
    while lines(run / "metrics.jsonl") < 3:
        assert alive(), f"{run} ended early"
        assert time.monotonic() < deadline, f"{run} does not start"
        time.sleep(0.02)
    os.kill(pid, SIGNALS[name])
    (run / "signalled").touch()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signals")


@pytest.fixture(scope="module")
def stopped(folder: Path, undisturbed: Path) -> Iterator[dict[str, Stopped]]:
    """One new process, stopped with Ctrl-C; for the other signals forks, which need not load torch again.

    The undisturbed run comes first, so that the forks find everything warm.
    """
    file, runs, done = config_file(folder, SETTINGS), folder / "runs", {}
    script = f"import sys; sys.path[:0] = {sys.path}; from cli.test_signals import command; command(sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", script, "train", file, "run.name=sigint"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as child:  # fmt: skip
        for name in ("sigterm", "sigkill"):
            arguments = ["train", file, f"run.name={name}"]
            fork = multiprocessing.get_context("fork").Process(target=forked, args=(arguments, folder / name))
            fork.start()
            assert fork.pid is not None
            send(name, runs / name, fork.pid, fork.is_alive)
            fork.join(60)
            done[name] = Stopped(runs / name, fork.exitcode, (folder / name).read_text())
            fork.kill()
        send("sigint", runs / "sigint", child.pid, lambda: child.poll() is None)
        _, err = child.communicate(timeout=60)
        done["sigint"] = Stopped(runs / "sigint", child.returncode, err)
        yield done


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    return train(config(folder, SETTINGS, {"run": {"name": "undisturbed"}})).folder


@pytest.mark.parametrize("name", ["sigint", "sigterm"])
def test_stops_in_order(name: str, stopped: dict[str, Stopped]) -> None:
    run, code, err = (getattr(stopped[name], key) for key in ("run", "code", "err"))
    assert code == 130, err
    assert "Traceback" not in err
    assert "stopped at step 3; add run.resume=auto to the same command to continue" in err
    assert [r["step"] for r in records(run)] == [1, 2, 3]
    assert state(run)["step"] == 3
    last = events(run)[-1]
    assert (last["event"], last["step"], last["signal"]) == ("interrupt", 3, name.upper())
    if name == "sigint":
        assert "</html>" in (run / "report.html").read_text(encoding="utf-8")


def test_killed_outright(stopped: dict[str, Stopped]) -> None:
    assert stopped["sigkill"].code == -signal.SIGKILL
    assert state(stopped["sigkill"].run)["step"] == 2


@pytest.mark.parametrize("name", SIGNALS)
def test_resumes_to_the_undisturbed_result(
    name: str, folder: Path, stopped: dict[str, Stopped], undisturbed: Path
) -> None:
    result = train(config(folder, SETTINGS, {"run": {"name": name, "resume": "auto"}}))
    run = stopped[name].run
    assert (result.finished, result.folder) == (True, run)
    assert by_step(run) == by_step(undisturbed)
    assert timeless(records(run, "eval")[-1]) == timeless(records(undisturbed, "eval")[-1])
    assert_equal_state(state(run), state(undisturbed))
