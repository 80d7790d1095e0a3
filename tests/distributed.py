"""Runs a function on several gloo ranks.

The ranks are forks of one process that a test worker starts at its first need and keeps: interpreter and torch, some
five seconds, are paid once and not for every test. Never forks of pytest itself, whose threads would not survive.
"""

import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple


class _Job(NamedTuple):
    function: Callable[..., Any]
    world_size: int
    args: tuple[Any, ...]
    limit_s: float
    environment: dict[str, str]
    folder: str


class _Server:
    """The process that forks the ranks, one job after the other."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self.jobs, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def run(self, job: _Job) -> str:
        """The first complaint of a rank, or the empty string."""
        self.jobs.send(job)
        if not self.jobs.poll(job.limit_s + 60):
            return "did not end"
        try:
            complaint: str = self.jobs.recv()
        except EOFError:
            return "the process that forks the ranks ended"
        return complaint


_server: _Server | None = None


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 240) -> None:
    """Call `function(rank, *args)` on `world_size` ranks with a default gloo group, in processes of their own.

    `function` must be importable (a module's top level). The ranks see this process's environment and working folder.

    Raises:
        AssertionError: with the traceback of the first rank that failed, or that the time is up.
    """
    global _server
    if _server is None or not _server.process.is_alive():
        _server = _Server()
    complaint = _server.run(_Job(function, world_size, args, timeout_s, dict(os.environ), os.getcwd()))
    if complaint:
        if complaint in ("did not end", "the process that forks the ranks ended"):
            _server.process.kill()
            _server = None
        raise AssertionError(f"{function.__name__} on {world_size} ranks: {complaint}")


def _serve(jobs: Connection) -> None:
    # Paid here, once for all ranks: what they would import at their first backward, checkpoint or FSDP unit.
    import sympy  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.pipelining

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            return
        with tempfile.TemporaryDirectory() as complaints:
            jobs.send(_run(job, Path(complaints)))


def _run(job: _Job, complaints: Path) -> str:
    from moestro.parallel.launch import free_port

    port, children = free_port(), dict[int, int]()
    for rank in range(job.world_size):
        child = os.fork()
        if child == 0:
            _rank(job, rank, port, complaints)
        children[child] = rank
    deadline = time.monotonic() + job.limit_s
    failed, late = False, ""
    while children:
        done, status = os.waitpid(-1, os.WNOHANG)
        if done:
            children.pop(done)
            failed = failed or status != 0
        elif failed or time.monotonic() > deadline:
            if not failed:
                late = f"ranks {sorted(children.values())} still run after {job.limit_s:g} s"
            for child in children:
                os.kill(child, signal.SIGKILL)
            failed = True
            time.sleep(0.05)
        else:
            time.sleep(0.005)
    texts = sorted(complaints.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return late or (texts[0].read_text() if texts else "a rank died without a word" if failed else "")


def _rank(job: _Job, rank: int, port: int, complaints: Path) -> None:
    import torch.distributed as dist

    code = 0
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        warnings.simplefilter("ignore")
        os.chdir(job.folder)
        os.environ.clear()
        os.environ |= job.environment
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.world_size), "LOCAL_RANK": str(rank)}
        dist.init_process_group(
            "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=job.world_size, timeout=timedelta(seconds=180)
        )
        job.function(rank, *job.args)
        dist.barrier()
    except BaseException:
        (complaints / str(rank)).write_text(f"rank {rank} of {job.world_size}:\n{traceback.format_exc()}")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
