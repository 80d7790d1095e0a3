"""Who a process is among the ranks, and the life of the default group: joined, left together, failed together."""

import contextlib
import faulthandler
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moestro.cli import main as command_line
from moestro.errors import MoestroError
from moestro.parallel import process
from moestro.parallel.launch import free_port
from moestro.parallel.process import Rank, connected, first_host, meeting_point, prints, this_rank
from moestro.train import interrupt

ROOT = Path(__file__).parents[2]
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_JOB_NODELIST": "gpu[01-04]",
}


@pytest.fixture
def setenv(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    for name in (*NAMES, *STEP):
        monkeypatch.delenv(name, raising=False)
    return lambda values: [monkeypatch.setenv(name, value) for name, value in values.items()] and None


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


class TestThisRank:
    @pytest.mark.parametrize(
        ("env", "expected"),
        [
            ({}, Rank()),
            (TORCHRUN, Rank(5, 8, 1, 4)),
            ({**STEP, **TORCHRUN}, Rank(5, 8, 1, 4)),  # torchrun started by srun
            (STEP, Rank(9, 16, 1, 8, is_slurm=True)),
            ({**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, Rank()),
            ({"SLURM_NTASKS": "16", "SLURM_JOB_ID": "1"}, Rank()),  # a shell of salloc
            ({"SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, Rank()),  # a batch script without srun
            ({"WORLD_SIZE": "4"}, Rank()),
        ],
    )
    def test_is_what_the_launcher_says(self, env: dict[str, str], expected: Rank, setenv: Any) -> None:
        setenv(env)
        assert this_rank() == expected
        assert process.world_size() == expected.world_size

    @pytest.mark.parametrize(
        ("env", "message"),
        [
            ({**TORCHRUN, "RANK": "one"}, "RANK should be a number, but is one"),
            ({**TORCHRUN, "RANK": "8"}, "says rank 8 of 8"),
            ({**TORCHRUN, "WORLD_SIZE": "0"}, "says rank 5 of 0"),
            ({name: value for name, value in STEP.items() if name != "SLURM_PROCID"}, "SLURM_PROCID .* not set"),
        ],
    )
    def test_refuses_nonsense(self, env: dict[str, str], message: str, setenv: Any) -> None:
        setenv(env)
        with pytest.raises(MoestroError, match=message):
            this_rank()
        assert prints(MoestroError())  # somebody has to

    def test_rank_0_prints_what_all_meet(self, setenv: Any) -> None:
        setenv(TORCHRUN)
        assert not prints(MoestroError())
        assert prints(process.RankError())
        setenv({"RANK": "0"})
        assert prints(MoestroError())


class TestMeetingPoint:
    @pytest.mark.parametrize(
        ("nodes", "first"),
        [
            ("login", "login"),
            ("node[03-05,7],gpu1", "node03"),
            ("node[7,03-05]", "node7"),
            ("a1,node[03-05]", "a1"),
            ("rack[2-3]n[08,10]-ib,x", "rack2n08-ib"),
            ("", ""),
        ],
    )
    def test_first_host(self, nodes: str, first: str) -> None:
        assert first_host(nodes) == first

    def test_under_slurm(self, setenv: Any) -> None:
        setenv(STEP)
        host, port = meeting_point(this_rank())
        assert (host, 10_000 <= port < 30_000) == ("gpu03", True)  # of the step's nodes, not the job's
        assert meeting_point(this_rank()) == (host, port)
        setenv({"SLURM_STEP_ID": "1"})
        assert meeting_point(this_rank())[1] != port
        setenv({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"})
        assert meeting_point(this_rank()) == ("10.0.0.1", 29501)

    def test_has_to_be_known(self, setenv: Any) -> None:
        setenv(TORCHRUN)
        with pytest.raises(MoestroError, match="MASTER_ADDR is not set"):
            meeting_point(this_rank())
        setenv({"MASTER_ADDR": "a"})
        with pytest.raises(MoestroError, match="MASTER_PORT should be a number"):
            meeting_point(this_rank())


class TestOwnDevice:
    @pytest.mark.parametrize(
        ("me", "count", "index"),
        [
            (Rank(5, 8, 1, 4), 4, 1),
            (Rank(5, 8, 1, 4, is_slurm=True), 8, 1),
            (Rank(5, 8, 1, 4, is_slurm=True), 1, 0),  # srun --gpus-per-task
        ],
    )
    def test_has_the_local_number(self, me: Rank, count: int, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[int] = []
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", made.append)
        assert process._own_device(torch.device("cuda"), me) == torch.device("cuda", index)
        assert made == [index]

    @pytest.mark.parametrize("me", [Rank(0, 4, 0, 4), Rank(3, 4, 3, 1)])
    def test_has_to_be_there(self, me: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        with pytest.raises(MoestroError, match="4 ranks on this machine, but 2 cuda devices; start 2"):
            process._own_device(torch.device("cuda"), me)


class TestStopRequest:
    def test_a_launchers_echo_of_ctrl_c_does_not_interrupt(self, setenv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        setenv(TORCHRUN)
        with interrupt.StopRequest() as stop:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert stop.requested == "SIGINT"
            monkeypatch.setattr(stop, "_first_s", time.monotonic() - interrupt.ECHO_S)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)

    def test_one_process_hears_no_echo(self, setenv: Any) -> None:
        setenv({})
        with interrupt.StopRequest():
            signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)


def scenario(rank: int, name: str) -> None:
    """What a rank does in the test of the same name."""
    if name == "before":
        raise MoestroError("all alike")
    with connected(torch.device("cpu"), 3) as device:
        x = torch.ones(1, device=device)
        dist.all_reduce(x)
        assert x.item() == 3
        if name.startswith("alike") and rank == 0:
            time.sleep(0.3)  # the others meet it before rank 0, and leave it to say
        if name == "alike":
            raise MoestroError("all alike")
        if name == "alike_bug":
            raise ValueError("all alike")
        if name == "one" and rank == 1:
            raise MoestroError("only one")
        if name == "one_bug" and rank == 1:
            raise ValueError("only one")
        if name == "host" and rank == 0:
            raise OSError("only the host")
        if name == "killed" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "interrupted" and rank == 1:
            raise KeyboardInterrupt
        if name == "pending":
            if rank == 1:
                work = dist.all_reduce(x, async_op=True)
                raise MoestroError(f"left this behind: {work.is_completed()}")
            time.sleep(3.0)
        if name == "late" and rank == 1:
            time.sleep(1.0)
            Path("late").touch()
        if name not in ("good", "late"):
            dist.all_reduce(x)
    if name == "late":
        assert Path("late").exists()  # none leaves before the others are done
    with connected(torch.device("cpu"), 3):  # and again
        dist.barrier()


SCENARIOS = (
    "good before alike alike_bug one one_bug host killed interrupted pending late attempt0 attempt1".split()  # noqa: SIM905
)


def scenarios() -> None:
    """Runs all scenarios, three forks each, and prints {name: [[status, stderr, seconds] of each rank]} as JSON."""
    torch.set_num_threads(1)
    process.CLOSE_S = 0.5
    agent_port = free_port()
    agent = os.fork()
    if agent == 0:  # torchrun's store; by itself, because the ranks are forks and would inherit its thread's locks
        _store = dist.TCPStore("127.0.0.1", agent_port, is_master=True, wait_for_workers=False)
        signal.pause()
    done = {}
    for name in SCENARIOS:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3"}
        if name.startswith("attempt"):
            os.environ |= {
                "MASTER_PORT": str(agent_port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": name[-1],
            }
        start, children = time.monotonic(), []
        for rank in range(3):
            child = os.fork()
            if child == 0:
                _child(rank, name)
            children.append(child)
        ended = {}
        while len(ended) < 3:
            child, status = os.wait()
            assert child != agent
            rank = children.index(child)
            ended[rank] = (
                os.waitstatus_to_exitcode(status),
                Path(f"{name}{rank}").read_text(),
                time.monotonic() - start,
            )
        done[name] = [ended[rank] for rank in range(3)]
    os.kill(agent, signal.SIGKILL)
    print(json.dumps(done))


def _child(rank: int, name: str) -> None:
    """One rank, with `moestro`'s way of printing errors; ends as the interpreter would."""
    os.environ["RANK"] = str(rank)
    file = os.open(f"{name}{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 2)
    faulthandler.dump_traceback_later(40, exit=True)  # a rank that hangs says where, and the others lose a peer
    kind = "killed" if name == "attempt0" else "good" if name == "attempt1" else name
    command_line.app = lambda obj: scenario(rank, kind)  # type: ignore[assignment]
    sys.argv = ["moestro"]
    code: Any = 0
    try:
        command_line.main()
    except SystemExit as exit:
        code = exit.code
    except BaseException as error:
        sys.stderr.write(f"Traceback: {error!r}\n")
        code = 1
    sys.stderr.flush()
    os._exit(code)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str, float]]]:
    script = f"import sys; sys.path[:0] = {sys.path}; from parallel.test_process import scenarios; scenarios()"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        cwd=tmp_path_factory.mktemp("scenarios"), env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as parent:  # fmt: skip
        try:
            out, err = parent.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(parent.pid, signal.SIGKILL)
            raise
    assert parent.returncode == 0, err
    return dict(json.loads(out))


class TestConnected:
    @pytest.mark.parametrize("name", ["good", "late"])
    def test_ranks_leave_together_and_may_come_back(self, name: str, outcome: dict[str, Any]) -> None:
        assert [rank[:2] for rank in outcome[name]] == [[0, ""]] * 3

    @pytest.mark.parametrize(
        ("name", "statuses", "speaker", "said"),
        [
            ("before", [2, 2, 2], 0, "error: all alike\n"),
            ("alike", [2, 2, 2], 0, "error: all alike\n"),
            ("alike_bug", [1, 3, 3], 0, "Traceback: ValueError('all alike')\n"),
            ("one", [2, 2, 2], 1, "error: only one\n"),
            ("one_bug", [3, 1, 3], 1, "Traceback: ValueError('only one')\n"),
            ("host", [2, 2, 2], 0, "error: only the host\n"),
            ("interrupted", [130, 130, 130], 0, "interrupted\n"),
            ("pending", [2, 2, 2], 1, "error: left this behind: False\n"),
        ],
    )
    def test_an_error_is_said_once_and_ends_all(
        self, name: str, statuses: list[int], speaker: int, said: str, outcome: dict[str, Any]
    ) -> None:
        assert [rank[0] for rank in outcome[name]] == statuses
        assert [rank[1] for rank in outcome[name]] == [said if rank == speaker else "" for rank in range(3)]

    def test_a_pending_collective_does_not_hold_the_rank_that_failed(self, outcome: dict[str, Any]) -> None:
        first, second, third = (rank[2] for rank in outcome["pending"])
        assert second < min(first, third) - 1.0  # which come back to the group only then

    @pytest.mark.parametrize("name", ["killed", "attempt0"])
    def test_a_killed_rank_ends_all(self, name: str, outcome: dict[str, Any]) -> None:
        assert outcome[name][1][0] == -signal.SIGKILL
        left = [outcome[name][rank] for rank in (0, 2)]
        assert [rank[0] for rank in left] == [process.LOST_A_PEER] * 2
        said = [rank[1] for rank in left if rank[1]]
        assert len(said) == 1
        assert re.fullmatch(r"error: lost another rank \(Connection \w+ by peer\); it crashed or was killed\n", said[0])

    def test_a_restart_does_not_read_what_dead_ranks_left(self, outcome: dict[str, Any]) -> None:
        assert [rank[:2] for rank in outcome["attempt1"]] == [[0, ""]] * 3

    def test_one_process_needs_no_group(self) -> None:
        with connected(torch.device("cpu"), 1) as device:
            assert not dist.is_initialized()
            assert device == torch.device("cpu")

    def test_refuses_another_number_of_ranks(self, setenv: Any) -> None:
        setenv({})
        with (
            pytest.raises(MoestroError, match="2 ranks are wanted, but 1 are running"),
            connected(torch.device("cpu"), 2),
        ):
            pass

    def test_says_where_the_ranks_could_not_meet(self, setenv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.socket() as taken, contextlib.ExitStack() as stack:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            setenv({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
            stack.enter_context(pytest.raises(process.RankError, match=f"could not meet at 127.0.0.1:{port}"))
            stack.enter_context(connected(torch.device("cpu"), 2))


SRUN = """#!{python}
# Stands in for srun: two tasks on one node, started by forks; the command is replaced by `task`.
import sys
sys.path[:0] = {path}
from parallel.test_process import srun
srun(sys.argv[1:])
"""


def srun(arguments: list[str]) -> None:
    options = [argument for argument in arguments if argument.startswith("--")]
    assert "--kill-on-bad-exit=1" in options
    assert arguments[len(options) :] == ["moestro", "train", "sotu-tiny", "run.resume=auto", "parallel.fsdp=8"], (
        arguments
    )
    for name in NAMES:
        os.environ.pop(name, None)
    shown = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2"}
    os.environ |= {**shown, "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": "2"}
    for task in range(2):
        if os.fork() == 0:
            os.environ |= {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}
            with connected(torch.device("cpu"), process.world_size()):
                x = torch.tensor(task + 1)
                dist.all_reduce(x)
                os.write(1, f"task {task} of {this_rank().local_world_size}: {x.item()}\n".encode())
            os._exit(0)
    assert [os.wait()[1] for _ in range(2)] == [0, 0]


class TestBatchScript:
    FILE = ROOT / "examples" / "train.sbatch"

    def test_starts_a_group_of_its_tasks(self, tmp_path: Path) -> None:
        fake = tmp_path / "srun"
        fake.write_text(SRUN.format(python=sys.executable, path=sys.path))
        fake.chmod(0o755)
        done = subprocess.run(
            ["bash", self.FILE, "sotu-tiny", "run.resume=auto", "parallel.fsdp=8"],
            capture_output=True, text=True, timeout=120,
            env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == ["task 0 of 2: 3", "task 1 of 2: 3"]

    def test_is_valid_and_asks_for_a_task_per_gpu(self) -> None:
        assert subprocess.run(["bash", "-n", self.FILE]).returncode == 0
        asked = dict(
            line.split()[1].removeprefix("--").partition("=")[::2]
            for line in self.FILE.read_text().splitlines()
            if line.startswith("#SBATCH --")
        )
        assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("2", "8", "8")
