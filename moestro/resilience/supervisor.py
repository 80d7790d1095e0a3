"""Keeps a run going: starts its ranks, watches them, and starts them again from the last good checkpoint."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from moestro.config import Config
from moestro.config.supervise import SuperviseConfig
from moestro.errors import MoestroError
from moestro.parallel.launch import Ranks, run_watched
from moestro.resilience.taxonomy import exit_of
from moestro.resilience.watchdog import Hang, Patience, Watchdog, process_states
from moestro.train.heartbeat import WATCHED, Beat, read_beat, stacks_of
from moestro.train.incidents import Action, Incident, Signal, record
from moestro.train.phases import resolve_stretches

DUMP_S = 1.0  # that ranks have to write their stacks
SHOWN_FRAMES = 3  # of a stack, in the evidence


@dataclass
class Attempt:
    """One start of the ranks, and how it went. started, ended: monotonic seconds."""

    number: int
    ranks: int
    started: float
    ended: float = 0.0
    first_step: int | None = None
    last_step: int = 0
    moved: float = 0.0  # when a step was last finished
    hang: Hang | None = None
    slow: dict[int, float] = field(default_factory=dict)


def supervise(config: Config, arguments: Sequence[str], ranks: int, say: Callable[[str], None]) -> int:
    """Train as `config` says on so many ranks of this machine, to the end; returns the exit status.

    arguments: of `moestro` for each rank.
    """
    command = [sys.executable, "-m", "moestro", *arguments]
    folder = Path(config.run.dir) / config.run.name
    again = [*command, "run.resume=auto"]
    return Supervisor(command, again, ranks, folder, config.supervise, say, partial(_fewer, config)).run()


def _fewer(config: Config, most: int) -> int | None:
    """The most ranks that the run's layout and batch allow."""
    for ranks in range(most, 0, -1):
        with suppress(MoestroError):
            resolve_stretches(config, ranks)
            return ranks
    return None


class Supervisor:
    """Of one run, on this machine.

    command: what each rank runs; the first attempt and all later ones, which `again` gives. folder: the run's.
    fewer: of a number of ranks the next smaller one that the run allows; None: there is none.
    """

    def __init__(
        self,
        command: Sequence[str],
        again: Sequence[str],
        ranks: int,
        folder: Path,
        settings: SuperviseConfig,
        say: Callable[[str], None],
        fewer: Callable[[int], int | None] = lambda ranks: None,
        fit: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.command, self.again, self.all_ranks, self.folder = command, again, ranks, folder
        self.settings, self.say, self.fewer, self.fit = settings, say, fewer, fit
        self.attempts: list[Attempt] = []
        self._without_progress = 0
        self._best = -1  # the highest step that any attempt finished
        self._lost: dict[int, list[float]] = {}  # by rank, when it ended an attempt

    def run(self) -> int:
        """Until the run is done or cannot go on; the exit status."""
        ranks = self.all_ranks
        while True:
            attempt, ended = self._attempt(ranks)
            status = ended.status()
            if ended.stopped_by_user or (attempt.hang is None and exit_of(status).reaction == "never"):
                self._note_user_error(attempt, status)
                return status
            incident, rank = self._incident(attempt, ended)
            better = attempt.last_step > self._best
            self._best = max(self._best, attempt.last_step)
            self._without_progress = 1 if better else self._without_progress + 1
            stop = self._reason_to_stop()
            if stop is not None:
                self._record(incident, "stop", attempt, rank)
                self.say(f"supervisor: {stop}; see {self.folder / 'audit.jsonl'}")
                return status or 1
            ranks = self._next_ranks(ranks, rank, attempt)
            self._record(incident, "restart" if ranks == attempt.ranks else "shrink", attempt, rank)
            self._pause(attempt)

    def _attempt(self, ranks: int) -> tuple[Attempt, Ranks]:
        number, watched = len(self.attempts), self.folder / "watch"
        shutil.rmtree(watched, ignore_errors=True)
        attempt = Attempt(number, ranks, time.monotonic())
        self.attempts.append(attempt)
        patience = Patience(
            self.settings.hang_factor, self.settings.hang_floor_s, self.settings.long_s, self.settings.silent_s,
            self.settings.slow_factor,
        )  # fmt: skip
        dog = Watchdog(ranks, patience, attempt.started)

        def watch(running: Ranks) -> None:
            beats, now = [read_beat(watched, rank) for rank in range(ranks)], time.monotonic()
            hang = dog.look(beats, process_states(running.pids), now)
            self._follow(attempt, dog, beats, now)
            if hang is not None and attempt.hang is None:
                attempt.hang = self._with_stacks(hang, watched, running)
                running.kill()

        command = self.again if number else self.command
        # Where restarts are counted by a launcher, groups of one attempt never meet those of another.
        more = {WATCHED: str(watched), "TORCHELASTIC_RESTART_COUNT": str(number)}
        ended = run_watched(command, ranks, watch, **more)
        attempt.ended = time.monotonic()
        return attempt, ended

    def _follow(self, attempt: Attempt, dog: Watchdog, beats: Sequence[Beat | None], now: float) -> None:
        """Note how far it got, and say it when training goes on after a fault."""
        if any(beat is None for beat in beats):
            return
        if attempt.first_step is None and any(beat.phase != "start" for beat in beats if beat is not None):
            attempt.first_step = dog.step
        if dog.step > attempt.last_step:
            attempt.last_step, attempt.moved = dog.step, now
        for rank, ratio in dog.slow_ranks().items():
            if rank not in attempt.slow:
                attempt.slow[rank] = ratio
                evidence = {"own_time_over_others": round(ratio, 2), "steps": len(dog.own_s[rank])}
                record(self.folder, Incident("slow_rank", "flag", dog.step, evidence, rank, os.uname().nodename))
                self.say(f"supervisor: rank {rank} computes {ratio:.2f} times as long as the others")

    def _with_stacks(self, hang: Hang, watched: Path, running: Ranks) -> Hang:
        """Ask all ranks where they are. One that was stopped cannot answer."""
        for pid in running.pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(DUMP_S)
        stacks = {rank: _innermost(stacks_of(watched, rank)) for rank in running.pids}
        kept = self.folder / "stacks"
        kept.mkdir(exist_ok=True)
        for rank in running.pids:
            with suppress(OSError):
                shutil.copyfile(stacks_of(watched, rank), kept / f"attempt-{len(self.attempts) - 1}-rank-{rank}.txt")
        told = {f"rank {rank}": lines for rank, lines in stacks.items() if lines}
        return Hang(hang.rank, hang.waited_s, hang.evidence | {"stacks": told})

    def _incident(self, attempt: Attempt, ended: Ranks) -> tuple[tuple[Signal, dict[str, object]], int | None]:
        """What ended the attempt, with its evidence, and the rank it began with."""
        if attempt.hang is not None:
            return ("hang", attempt.hang.evidence), attempt.hang.rank
        rank, code = ended.first_failure() or (None, 1)
        meaning = exit_of(code)
        shown = signal.Signals(-code).name if code < 0 else code
        return (meaning.signal or "exit", {"status": shown, "what": meaning.what}), rank

    def _reason_to_stop(self) -> str | None:
        if len(self.attempts) > self.settings.max_restarts:
            return f"{self.settings.max_restarts} restarts (supervise.max_restarts) are used up"
        if self._without_progress > self.settings.max_without_progress:
            return f"{self._without_progress} attempts ended without a new step, so another would not help"
        unfit = self.fit()
        return None if unfit is None else f"this node is unfit ({unfit})"

    def _next_ranks(self, ranks: int, rank: int | None, attempt: Attempt) -> int:
        """As many again, unless the same rank's node is lost for good and the run may go on with fewer."""
        if not self.settings.elastic or rank is None:
            return ranks
        per_node = self.settings.ranks_per_node or 1
        ends = self._lost.setdefault(rank // per_node, [])
        ends.append(attempt.ended)
        recent = [end for end in ends if attempt.ended - end <= self.settings.lost_within_s]
        if len(recent) < 2:
            return ranks
        ends.clear()
        return self.fewer(ranks - per_node) or ranks

    def _record(
        self, what: tuple[Signal, dict[str, object]], action: Action, attempt: Attempt, rank: int | None
    ) -> None:
        lost = time.monotonic() - (attempt.moved or attempt.started)
        evidence = what[1] | {"attempt": attempt.number, "ranks": attempt.ranks}
        node = os.uname().nodename
        record(self.folder, Incident(what[0], action, attempt.last_step, evidence, rank, node, round(lost, 2)))
        who = f"rank {rank}" if rank is not None else "the run"
        self.say(f"supervisor: {who}: {what[0]} after step {attempt.last_step}; {action}")

    def _note_user_error(self, attempt: Attempt, status: int) -> None:
        if exit_of(status).signal == "user_error" and self.folder.is_dir():
            record(self.folder, Incident("user_error", "stop", attempt.last_step, {"status": status}))

    def _pause(self, attempt: Attempt) -> None:
        doubled = self.settings.backoff_s * 2 ** max(0, self._without_progress - 1)
        time.sleep(min(doubled, self.settings.backoff_most_s))


def _innermost(path: Path) -> list[str]:
    """The innermost frames of the main thread in a dump of faulthandler, which writes that thread last."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    starts = [i for i, line in enumerate(lines) if line.startswith(("Thread ", "Current thread "))]
    frames = [line.strip() for line in lines[starts[-1] + 1 :] if line.strip().startswith("File ")] if starts else []
    return frames[:SHOWN_FRAMES]
