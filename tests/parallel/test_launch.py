"""Ranks started on this machine: what they are told, what is shown of them, and how they end together."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from train.helpers import config

from moestro.config import to_toml
from moestro.parallel import launch

# A rank without torch: it notes its pid, then runs the snippet of the test.
RANK = """
import os, signal, sys, time
from pathlib import Path
from moestro.parallel import process
process.end_with_launcher()
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
def note(name, text):
    (folder / f".{name}").write_text(str(text))
    (folder / f".{name}").rename(folder / name)
def wait_for(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)
def wait_for_end(other):
    wait_for(f"pid{other}")
    while True:
        try:
            os.kill(int((folder / f"pid{other}").read_text()), 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
note(f"pid{rank}", os.getpid())
"""
LAUNCHER = """
import sys
from moestro.parallel import launch
launch.GRACE_S = float(sys.argv[1])
sys.exit(launch.run(sys.argv[3:], int(sys.argv[2])))
"""


@dataclass(frozen=True)
class Ended:
    status: int
    out: str
    err: str


def start(folder: Path, snippet: str, nproc: int = 2, grace_s: float = 5.0, **env: str) -> "subprocess.Popen[str]":
    """The launcher, in a session of its own, as a shell would give it one."""
    worker = [sys.executable, "-c", RANK + snippet, str(folder)]
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(grace_s), str(nproc), *worker],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={"PATH": os.environ["PATH"], **env},
    )  # fmt: skip


def finish(launcher: "subprocess.Popen[str]") -> Ended:
    """Ranks that the test leaves asleep sleep for longer than this waits."""
    out, err = launcher.communicate(timeout=50)
    return Ended(launcher.returncode, out, err)


def run(folder: Path, snippet: str, nproc: int = 2, grace_s: float = 5.0, **env: str) -> Ended:
    return finish(start(folder, snippet, nproc, grace_s, **env))


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "time is up"
        time.sleep(0.02)


def wait_for(folder: Path, *names: str) -> None:
    wait(lambda: all((folder / name).exists() for name in names))


def running(folder: Path) -> list[int]:
    """The ranks' processes that still run; one that has ended and that nobody has waited for does not."""
    pids = [path.read_text() for path in folder.glob("pid*")]
    states = subprocess.run(["ps", "-o", "pid=,stat=", "-p", ",".join(pids)], capture_output=True, text=True)
    return [int(line.split()[0]) for line in states.stdout.splitlines() if "Z" not in line.split()[1]]


class TestEnvironment:
    SNIPPET = 'import json; note(f"env{rank}", json.dumps(dict(os.environ))); print("here is", rank)'

    def test_is_that_of_torchrun(self, tmp_path: Path) -> None:
        ended = run(tmp_path, self.SNIPPET, nproc=3)
        assert (ended.status, ended.out, ended.err) == (0, "here is 0\n", "")  # the others' output is not shown
        envs = [json.loads((tmp_path / f"env{rank}").read_text()) for rank in range(3)]
        assert [env["RANK"] for env in envs] == [env["LOCAL_RANK"] for env in envs] == ["0", "1", "2"]
        assert {env["MASTER_PORT"] for env in envs} == {envs[0]["MASTER_PORT"]}
        for env in envs:
            assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["MASTER_ADDR"]) == ("3", "3", "127.0.0.1")
            assert env["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
            assert env["OMP_WAIT_POLICY"] == "PASSIVE"

    def test_keeps_the_users_threads(self, tmp_path: Path) -> None:
        run(tmp_path, self.SNIPPET, OMP_NUM_THREADS="7", OMP_WAIT_POLICY="ACTIVE")
        env = json.loads((tmp_path / "env1").read_text())
        assert (env["OMP_NUM_THREADS"], env["OMP_WAIT_POLICY"]) == ("7", "ACTIVE")


class TestExitStatus:
    @pytest.mark.parametrize(
        ("snippet", "status"),
        [
            ("sys.exit(5 * rank)", 5),
            ("sys.exit(0 if rank else 5)", 5),
            ("sys.exit(2)", 2),
            # the first to fail, in time
            ("if rank == 0: wait_for_end(1)\nsys.exit(6 if rank else 4)", 6),
            # but not one that says it only follows another
            ("if rank: wait_for_end(0)\nsys.exit(2 if rank else 3)", 2),
            ("sys.exit(3)", 1),
        ],
    )
    def test_is_that_of_the_rank_that_failed(self, snippet: str, status: int, tmp_path: Path) -> None:
        assert run(tmp_path, snippet, grace_s=60).status == status  # and nobody waits for the grace to pass


class TestFailures:
    def test_an_error_of_another_rank_is_shown_without_its_other_output(self, tmp_path: Path) -> None:
        snippet = (
            'print("chatter", flush=True)\nif rank: print("error: only I\\nmend it", file=sys.stderr); sys.exit(2)'
        )
        ended = run(tmp_path, snippet)
        assert (ended.status, ended.out) == (2, "chatter\n")
        assert ended.err == "rank 1: error: only I\nrank 1: mend it\n"

    def test_a_traceback_that_all_print_is_shown_once(self, tmp_path: Path) -> None:
        ended = run(tmp_path, "raise ValueError('a bug')", nproc=3)
        assert (ended.status, ended.err.count("ValueError: a bug")) == (1, 1)

    def test_a_traceback_of_others_is_shown_once(self, tmp_path: Path) -> None:
        ended = run(tmp_path, "if rank: raise ValueError('a bug')", nproc=3)
        assert (ended.status, ended.err.count("ValueError: a bug"), ended.err.count("Traceback")) == (1, 1, 1)
        assert ended.err.startswith(("rank 1: Traceback", "rank 2: Traceback"))

    def test_the_others_may_end_by_themselves(self, tmp_path: Path) -> None:
        snippet = "if rank == 0: time.sleep(0.5); print('done')\nsys.exit(2)"
        assert run(tmp_path, snippet).out == "done\n"

    def test_a_killed_rank_takes_the_others_along(self, tmp_path: Path) -> None:
        """The first heeds SIGTERM, the third has to be killed, and so has its child."""
        snippet = """
if rank == 2:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    import subprocess
    note("pid3", subprocess.Popen(["sleep", "60"]).pid)
if rank == 1:
    wait_for("pid0", "pid2", "pid3")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
        ended = run(tmp_path, snippet, nproc=3, grace_s=0.4)
        assert (ended.status, ended.err) == (128 + signal.SIGKILL, "error: rank 1 was killed by SIGKILL\n")
        wait(lambda: running(tmp_path) == [])


COUNTING = """
counted = []
signal.signal(signal.SIGINT, lambda *_: counted.append("INT"))
signal.signal(signal.SIGTERM, lambda *_: counted.append("TERM"))
note(f"ready{rank}", "")
"""


class TestSignals:
    @pytest.mark.parametrize("name", ["INT", "TERM"])
    def test_reach_each_rank_once(self, name: str, tmp_path: Path) -> None:
        snippet = f'{COUNTING}wait_for("sent")\ntime.sleep(0.4)\nnote(f"count{{rank}}", counted)\nsys.exit(130)'
        launcher = start(tmp_path, snippet)
        wait_for(tmp_path, "ready0", "ready1")
        os.killpg(launcher.pid, signal.Signals[f"SIG{name}"])  # a terminal's Ctrl-C goes to the whole group
        (tmp_path / "sent").touch()
        assert finish(launcher).status == 130
        assert [(tmp_path / f"count{rank}").read_text() for rank in (0, 1)] == [f"['{name}']"] * 2

    def test_reach_a_rank_that_starts_meanwhile_once(self) -> None:
        class Process:
            def __init__(self) -> None:
                self.got: list[int] = []
                self.send_signal = self.got.append

        ranks = launch.Ranks(None, {})
        processes: list[Any] = [Process(), Process(), Process()]
        ranks._processes += processes[:2]
        ranks._handle(signal.SIGTERM, None)
        ranks._processes += processes[2:]
        ranks._forward()
        assert [process.got for process in processes] == [[signal.SIGTERM]] * 3

    def test_a_stop_in_order_may_take_its_time(self, tmp_path: Path) -> None:
        snippet = (
            f'{COUNTING}wait_for("sent")\ntime.sleep(1.0)\nnote(f"saved{{rank}}", "")\nsys.exit(0 if rank else 130)'
        )
        launcher = start(tmp_path, snippet, grace_s=0.2)
        wait_for(tmp_path, "ready0", "ready1")
        launcher.send_signal(signal.SIGINT)
        (tmp_path / "sent").touch()
        ended = finish(launcher)
        assert (ended.status, ended.err) == (130, "")
        assert (tmp_path / "saved0").exists()

    def test_a_second_ctrl_c_kills(self, tmp_path: Path) -> None:
        launcher = start(tmp_path, f"{COUNTING}time.sleep(60)\ntime.sleep(60)")
        wait_for(tmp_path, "ready0", "ready1")
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert launcher.poll() is None
        launcher.send_signal(signal.SIGINT)
        ended = finish(launcher)
        assert (ended.status, ended.err) == (130, "interrupted\n")
        wait(lambda: running(tmp_path) == [])

    def test_a_rank_that_heeds_no_handler_is_interrupted_too(self, tmp_path: Path) -> None:
        launcher = start(tmp_path, 'note(f"ready{rank}", "")\ntime.sleep(60)')
        wait_for(tmp_path, "ready0", "ready1")
        launcher.terminate()
        ended = finish(launcher)
        assert (ended.status, ended.err) == (130, "interrupted\n")


class TestLostLauncher:
    def end(self, folder: Path, snippet: str) -> None:
        launcher = start(folder, snippet)
        wait_for(folder, "ready0", "ready1")
        launcher.kill()
        launcher.wait()
        wait(lambda: running(folder) == [])
        launcher.communicate()

    def test_ends_its_ranks(self, tmp_path: Path) -> None:
        self.end(tmp_path, 'note(f"ready{rank}", "")\ntime.sleep(60)')

    def test_lets_them_save(self, tmp_path: Path) -> None:
        self.end(tmp_path, f'{COUNTING}\nwhile not counted: time.sleep(0.01)\nnote(f"saved{{rank}}", counted)')
        assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["['TERM']"] * 2

    def test_ends_those_that_do_not_stop(self, tmp_path: Path) -> None:
        self.end(tmp_path, f"process.ORPHAN_S = 0.2\n{COUNTING}\nwhile True: time.sleep(1)")


class TestCommand:
    """`moestro train --nproc`, as a process of its own."""

    def train(self, folder: Path, *arguments: str, **env: str) -> Ended:
        file = folder / "tiny.toml"
        file.write_text(to_toml(config(folder)), encoding="utf-8")
        script = "import sys\nfrom moestro.cli.main import main\ntry: main()\nfinally: print('torch' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", script, "train", str(file), *arguments],
            capture_output=True, text=True, timeout=60, env={**os.environ, **env},
        )  # fmt: skip
        return Ended(done.returncode, done.stdout, done.stderr)

    def test_refuses_a_bad_layout_before_any_rank_starts(self, tmp_path: Path) -> None:
        ended = self.train(tmp_path, "--nproc", "3")
        assert (ended.status, ended.out) == (2, "False\n")  # no torch
        assert ended.err == (
            "error: train.global_batch_size = 4 is not a multiple of the dp · fsdp = 3 ranks that read data\n"
        )

    def test_says_how_many_ranks_a_layout_needs(self, tmp_path: Path) -> None:
        ended = self.train(tmp_path, "parallel.tp=2")
        assert (ended.status, ended.out) == (2, "False\n")
        assert "start with --nproc 2 (or torchrun)" in ended.err

    @pytest.mark.parametrize("rank", ["0", "1"])
    def test_refuses_nproc_under_torchrun(self, rank: str, tmp_path: Path) -> None:
        ended = self.train(tmp_path, "--nproc", "2", RANK=rank, WORLD_SIZE="4")
        assert ended.status == 2
        assert ("leave --nproc out" in ended.err, ended.err.count("\n")) == ((True, 1) if rank == "0" else (False, 0))

    def test_a_mistake_that_all_ranks_meet_is_one_line(self, tmp_path: Path) -> None:
        ended = self.train(tmp_path, "--nproc", "2", "run.device=nothing")
        assert (ended.status, ended.out) == (2, "False\n")
        assert ended.err.startswith("error: run.device = 'nothing' is not usable here")
        assert ended.err.count("error") == 1
