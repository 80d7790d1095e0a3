"""Where a rank is, for whoever watches over it: a small file that a thread rewrites twice a second.

Only under a supervisor, which says so in the environment. The step itself only sets a few attributes, so that a rank
which hangs inside a collective still tells which one, and one that tells nothing at all has been stopped, or is held
by code that does not let go of the interpreter.
"""

import faulthandler
import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TextIO

import torch.distributed as dist

WATCHED = "MOESTRO_WATCHED"  # in the environment: the folder in which ranks tell where they are
BEAT_S = 0.5
SIZE = 4096  # of the file: one page, so that it is written whole

Phase = Literal["start", "data", "passes", "reduce", "update", "log", "evaluate", "checkpoint", "end"]


@dataclass(frozen=True)
class Beat:
    """step: finished ones. phase_s: time in this phase so far. collectives: of each process group, those entered.

    own_s: seconds of the last step in which this rank computed, and did not wait for others; None: not known yet.
    wall, monotonic: the clocks of the node when this was written.
    """

    rank: int
    pid: int
    step: int
    phase: Phase
    phase_s: float
    step_s: float | None
    own_s: float | None
    wall: float
    monotonic: float
    collectives: dict[str, int] = field(default_factory=dict)


class Heartbeat:
    """As a context; `at` may be called in any case, and costs next to nothing."""

    def __init__(self, rank: int) -> None:
        folder = os.environ.get(WATCHED)
        self._folder = None if folder is None else Path(folder)
        self._rank, self._step, self._since = rank, 0, time.monotonic()
        self._phase: Phase = "start"
        self._step_s: float | None = None
        self._own_s: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._stacks: TextIO | None = None

    def __enter__(self) -> Self:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._stacks = stacks_of(self._folder, self._rank).open("a")
            faulthandler.register(signal.SIGUSR1, self._stacks, all_threads=True)
            self._thread = threading.Thread(target=self._beat, args=(beat_of(self._folder, self._rank),), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.at("end")
        if self._thread is not None and self._stacks is not None:
            self._stop.set()
            self._thread.join(2 * BEAT_S)
            faulthandler.unregister(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asked too late: no reason to die
            self._stacks.close()

    def at(self, phase: Phase, step: int | None = None) -> None:
        """A phase begins. step: finished ones, where that changes."""
        self._phase, self._since = phase, time.monotonic()
        if step is not None:
            self._step = step

    def took(self, step_s: float, own_s: float | None = None) -> None:
        """How long the last step was, and how much of it this rank computed."""
        self._step_s, self._own_s = step_s, own_s

    def _beat(self, path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            while True:
                last = self._stop.is_set()
                now = time.monotonic()
                beat = Beat(
                    self._rank, os.getpid(), self._step, self._phase, now - self._since,
                    self._step_s, self._own_s, time.time(), now, _entered(),
                )  # fmt: skip
                with suppress(OSError):  # a full disk is no reason to stop
                    os.pwrite(file, json.dumps(asdict(beat)).encode().ljust(SIZE), 0)
                if last:
                    return
                self._stop.wait(BEAT_S)
        finally:
            os.close(file)


def is_watched() -> bool:
    """Whether this process is one that a supervisor started."""
    return WATCHED in os.environ


def beat_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def stacks_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.stacks.txt"


def read_beat(folder: Path, rank: int) -> Beat | None:
    """The last one of a rank; None: there is none yet, or it is being written."""
    try:
        tree: dict[str, Any] = json.loads(beat_of(folder, rank).read_bytes())
        return Beat(**tree)
    except (OSError, ValueError, TypeError):
        return None


def _entered() -> dict[str, int]:
    """Of each of this rank's process groups, how many collectives it has entered, where the back-end counts them."""
    found: dict[str, int] = {}
    with suppress(RuntimeError, AttributeError):  # no group, or one that is going
        for group, name in list(dist.distributed_c10d._world.pg_names.items()):
            with suppress(RuntimeError):
                found[str(name)] = int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    return found
