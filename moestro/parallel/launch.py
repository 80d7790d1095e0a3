"""Starts the ranks of a run on this machine, and sees to it that they end together.

Rank 0 has the terminal; what the others print is kept, and shown for those that failed on their own.
"""

import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from moestro.parallel.process import LIFELINE, LOST_A_PEER

# When a rank has failed the others notice by themselves; one that does not is asked after this long, and killed after
# as long again.
GRACE_S = 5.0
KEPT_LINES = 400
WATCH_S = 0.5


def launch(nproc: int, argv: Sequence[str]) -> int:
    """Run `moestro ARGV` on `nproc` ranks; returns the exit status: that of the rank that failed first, or 0."""
    return run([sys.executable, "-m", "moestro", *argv], nproc)


def run(command: Sequence[str], nproc: int) -> int:
    """Run `command` in `nproc` processes with the environment of torchrun; returns the exit status."""
    return run_watched(command, nproc).status()


def run_watched(
    command: Sequence[str], nproc: int, watch: Callable[["Ranks"], None] | None = None, **more: str
) -> "Ranks":
    """The same, with the ranks as they ended. watch: called every WATCH_S while they run; it may `kill` them. more:
    variables of the environment."""
    ranks = Ranks(watch, more)
    with ranks.signals_forwarded():
        try:
            ranks.start(command, nproc)
            ranks.wait()
        finally:
            ranks.end()
    ranks.show_failures()
    return ranks


class Ranks:
    """The processes of one start."""

    def __init__(self, watch: Callable[["Ranks"], None] | None, more: Mapping[str, str]) -> None:
        self._watch, self._more = watch, more
        self._processes: list[subprocess.Popen[bytes]] = []
        self._output: list[deque[bytes]] = []  # the last lines of each rank but the first
        self._readers: list[threading.Thread] = []
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()  # rank, exit code
        self._codes: dict[int, int] = {}  # in the order in which the ranks ended; -n: killed by signal n
        self._asked: int | None = None  # the user's signal
        self._forwarded: set[int] = set()  # the ranks that have it
        self._crashed: set[int] = set()  # the ranks killed by a signal that is none of ours
        self._interfered = False  # whether a signal of ours is on its way
        self._lifeline = -1

    @contextmanager
    def signals_forwarded(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM go to every rank, once; a second Ctrl-C kills."""
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def start(self, command: Sequence[str], nproc: int) -> None:
        shared = _environment(nproc) | dict(self._more)
        end, self._lifeline = os.pipe()
        for rank in range(nproc):
            if self._asked is not None:
                break
            process = subprocess.Popen(
                command,
                env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), LIFELINE: str(end)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank else None,
                stderr=subprocess.STDOUT if rank else None,
                pass_fds=(end,),
                start_new_session=True,  # a terminal's Ctrl-C reaches its whole session: only this process forwards it
            )
            self._processes.append(process)
            self._output.append(deque(maxlen=KEPT_LINES))
            if process.stdout is not None:
                self._readers.append(_in_background(self._output[rank].extend, process.stdout))
            _in_background(self._await, rank, process)
            self._forward()
        os.close(end)

    def wait(self) -> None:
        """Return when all ranks have ended, which they have to do soon after one of them failed."""
        deadline, steps = None, [signal.SIGTERM, signal.SIGKILL]
        while len(self._codes) < len(self._processes):
            try:
                left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                if self._watch is not None:
                    left_s = WATCH_S if left_s is None else min(left_s, WATCH_S)
                rank, code = self._ended.get(timeout=left_s)
            except queue.Empty:
                if self._watch is not None:
                    self._watch(self)
                if deadline is None or time.monotonic() < deadline:
                    continue
                self._send_all(steps.pop(0))
                deadline = time.monotonic() + GRACE_S if steps else None
                continue
            self._codes[rank] = code
            if code < 0 and not self._interfered:
                self._crashed.add(rank)
            if code != 0 and deadline is None and len(steps) == 2:
                deadline = time.monotonic() + GRACE_S

    def end(self) -> None:
        self._send_all(signal.SIGKILL)
        os.close(self._lifeline)

    def ask(self) -> None:
        """To stop after the step that each is in, and to save."""
        self._interfered = True
        for process in self._processes:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.terminate()

    def kill(self) -> None:
        """At once: a rank that hangs does not hear SIGTERM."""
        self._send_all(signal.SIGKILL)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in enumerate(self._processes)}

    @property
    def is_ending(self) -> bool:
        """Whether one has failed, so that the others have to end soon."""
        return any(self._codes.values())

    @property
    def stopped_by_user(self) -> bool:
        return self._asked is not None

    def first_failure(self) -> tuple[int, int] | None:
        """Rank and exit status (negative: by a signal) of the first that failed by itself, if any did."""
        failures = [(rank, code) for rank, code in self._codes.items() if code]
        own = [one for one in failures if one[1] != LOST_A_PEER and (one[1] > 0 or one[0] in self._crashed)]
        return next(iter(own or failures), None)

    def status(self) -> int:
        """The exit status of the first rank that failed by itself; 130 if it was stopped by the user's signal."""
        failures = [code for code in self._codes.values() if code]
        code = next((code for code in failures if code != LOST_A_PEER), 1 if failures else 0)
        if self._asked is not None and (code < 0 or not self._codes):
            return 130
        return code if code >= 0 else 128 - code

    def show_failures(self) -> None:
        """What the ranks without a terminal said when they failed, unless rank 0 failed in the same way."""
        for reader in self._readers:
            reader.join(1.0)  # a child that a rank left behind may hold its output open
        shown: set[bytes] = set()
        for rank, code in self._codes.items():
            if rank > 0 and code != 0 and (code in (2, LOST_A_PEER) or code != self._codes.get(0)):
                lines = _complaint(list(self._output[rank]), rank in self._crashed)
                if lines and lines[-1] not in shown:
                    shown.add(lines[-1])
                    for line in lines:
                        sys.stderr.write(f"rank {rank}: {line.decode(errors='replace').rstrip()}\n")
            if rank in self._crashed:
                sys.stderr.write(f"error: rank {rank} was killed by {signal.Signals(-code).name}\n")
        if self._asked is not None and any(code < 0 for code in self._codes.values()):
            sys.stderr.write("interrupted\n")

    def _await(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._ended.put((rank, process.wait()))

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._asked is None:
            self._asked = number
            self._forward()
        elif number == signal.SIGINT:
            self._send_all(signal.SIGKILL)

    def _forward(self) -> None:
        for rank, process in enumerate(self._processes):
            if self._asked is not None and rank not in self._forwarded:
                self._interfered = True
                self._forwarded.add(rank)
                process.send_signal(self._asked)

    def _send_all(self, number: int) -> None:
        """To the ranks that still run, and to the children of each."""
        for process in self._processes:
            if process.returncode is None:
                self._interfered = True
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)


def _environment(nproc: int) -> dict[str, str]:
    """torchrun's variables that all ranks share, and no more threads than cores: those, or spinning ones, slow all."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // nproc))),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }


def free_port() -> int:
    """A port of this machine that nobody listens at.

    Below those that systems hand out by themselves: one of these could be another program's a moment later, and all
    ranks but the first would wait there for an answer.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)  # a seeded one would give all the same
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _complaint(lines: list[bytes], crashed: bool) -> list[bytes]:
    """The error at the end of a rank's output; of a rank that crashed, which cannot say, the last lines whatever."""
    lines = [re.sub(rb"^\[rank\d+\]: ", b"", line) for line in lines]  # torch marks a traceback so
    for i, line in enumerate(lines):
        if line.startswith((b"error: ", b"Traceback ")):
            return lines[i:]
    return lines[-20:] if crashed else []


def _in_background(function: Callable[..., object], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread
