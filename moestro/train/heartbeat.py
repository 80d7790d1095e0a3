"""Where a rank is, for whoever watches over it: a small file that a thread rewrites twice a second.

Only under a supervisor, which says so in the environment. The step itself only sets a few attributes, so that a rank
which hangs inside a collective still tells which one, and one that tells nothing at all has been stopped, or is held
by code that does not let go of the interpreter.

The same thread looks twenty times a second where the main one is. Time in which it waits inside a collective belongs to
other ranks; what is left of a step is the rank's own, and that grows on a rank which is slow or is stopped for a while.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TextIO, get_args

from moestro.train.incidents import Signal

WATCHED = "MOESTRO_WATCHED"  # in the environment: the folder in which ranks tell where they are
BEAT_S = 0.5
SIZE = 4096  # of the file: one page, so that it is written whole
LOOK_S = 0.05  # between two looks at the main thread
# Whose innermost frame lies here waits for other ranks: PyTorch's collectives, and what does nothing but call them.
WAITS = ("/torch/distributed/", "/moestro/parallel/comm.py", "/moestro/parallel/transport.py")
WAITING = ("_around", "_wait")  # functions elsewhere that only wait: parallel/ring.py, optim/matrix_exchange.py

Phase = Literal["start", "data", "passes", "reduce", "update", "log", "evaluate", "checkpoint", "end"]
STEP: tuple[Phase, ...] = ("data", "passes", "reduce", "update")


@dataclass(frozen=True)
class Beat:
    """step: finished ones. phase_s: time in this phase so far. collectives: of each process group, those entered.

    own_s: seconds of a step in which this rank did not wait for others, the mean of those since the last beat that had
    new ones; None: not known yet, or not to be known. wall, monotonic: the clocks of the node when this was written.
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


@dataclass(frozen=True)
class LastWords:
    """Of a rank that ended by an error."""

    rank: int
    signal: Signal
    step: int
    text: str


class Heartbeat:
    """As a context; `at` may be called in any case, and costs next to nothing.

    waits_show: whether the main thread itself waits in collectives, as on a CPU. On an accelerator they wait in its
    queue, where own and others' time cannot be told apart from here.
    """

    def __init__(self, rank: int, waits_show: bool = True) -> None:
        self._folder = watched_folder()
        self._waits_show = waits_show
        self._main = threading.get_ident()
        # Own time since the start, and (steps, own time) at the end of the last step and of the last one told.
        self._own_total_s, self._own_step, self._own_told = 0.0, (0, 0.0), (0, 0.0)
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

    @property
    def step(self) -> int:
        return self._step

    def took(self, step_s: float) -> None:
        """A step is done, and was so long."""
        self._step_s = step_s
        self._own_step = self._own_step[0] + 1, self._own_total_s

    def _beat(self, path: Path) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            while True:
                last = self._stop.is_set()
                self._take_own()
                now = time.monotonic()
                beat = Beat(
                    self._rank, os.getpid(), self._step, self._phase, now - self._since,
                    self._step_s, self._own_s, time.time(), now, _entered(),
                )  # fmt: skip
                with suppress(OSError):  # a full disk is no reason to stop
                    os.pwrite(file, json.dumps(asdict(beat)).encode().ljust(SIZE), 0)
                if last:
                    return
                self._look_until(now + BEAT_S)
        finally:
            os.close(file)

    def _look_until(self, end: float) -> None:
        """Add up the time that is this rank's own. A look that comes late, because this process was stopped or got no
        core, counts as own whatever is seen."""
        before = time.monotonic()
        while before < end and not self._stop.wait(LOOK_S):
            now = time.monotonic()
            if self._waits_show and self._phase in STEP:
                waited = min(now - before, LOOK_S) if self._is_waiting() else 0.0
                self._own_total_s += now - before - waited
            before = now

    def _is_waiting(self) -> bool:
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return False
        code = frame.f_code
        return code.co_name in WAITING or any(part in code.co_filename for part in WAITS)

    def _take_own(self) -> None:
        done, (told_step, told_total) = self._own_step, self._own_told
        step, total = done
        if self._waits_show and step > told_step:
            self._own_s, self._own_told = (total - told_total) / (step - told_step), done


def is_watched() -> bool:
    """Whether this process is one that a supervisor started."""
    return WATCHED in os.environ


def watched_folder() -> Path | None:
    """Where this process should tell how it is; None: nobody asks."""
    folder = os.environ.get(WATCHED)
    return None if folder is None else Path(folder)


def beat_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def stacks_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.stacks.txt"


def status_of(folder: Path) -> Path:
    """Where the supervisor writes one line about itself, for the terminal, which rank 0 has."""
    return folder / "status.txt"


def read_beat(folder: Path, rank: int) -> Beat | None:
    """The last one of a rank; None: there is none yet, or it is being written."""
    try:
        tree: dict[str, Any] = json.loads(beat_of(folder, rank).read_bytes())
        return Beat(**tree)
    except (OSError, ValueError, TypeError):
        return None


def words_of(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.last.json"


def read_words(folder: Path, rank: int) -> LastWords | None:
    """None: it said nothing, as one that was killed."""
    try:
        tree: dict[str, Any] = json.loads(words_of(folder, rank).read_bytes())
        return LastWords(**tree) if tree["signal"] in get_args(Signal) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _entered() -> dict[str, int]:
    """Of each of this rank's process groups, how many collectives it has entered, where the back-end counts them."""
    found: dict[str, int] = {}
    dist: Any = sys.modules.get("torch.distributed")  # imported by whoever makes a group; the supervisor does not
    with suppress(RuntimeError, AttributeError):  # no group, or one that is going
        for group, name in list(dist.distributed_c10d._world.pg_names.items()):
            with suppress(RuntimeError):
                found[str(name)] = int(group._get_sequence_number_for_group())
    return found
