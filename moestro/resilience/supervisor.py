"""Keeps a run going: starts its ranks, watches them, and starts them again from the last good checkpoint."""

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from moestro.config import Config
from moestro.config.supervise import SuperviseConfig
from moestro.errors import MoestroError
from moestro.parallel.launch import Ranks, run_watched
from moestro.resilience.elastic import Crew, Verdict
from moestro.resilience.goodput import ATTEMPTS
from moestro.resilience.nodes import Nodes
from moestro.resilience.policy import End, Restarts, what_ended
from moestro.resilience.stacks import dump_stacks
from moestro.resilience.watchdog import Hang, Patience, Watchdog, process_states
from moestro.train.heartbeat import STEP, WATCHED, Beat, read_beat, read_words, status_of
from moestro.train.incidents import Incident, complete, record
from moestro.train.phases import resolve_stretches


@dataclass
class Attempt:
    """One start of the ranks, and how it went. started, ended, moved: seconds of the wall clock, as it was when the
    supervisor began."""

    number: int
    ranks: int
    started: float
    ended: float = 0.0
    first_step: int | None = None  # the one it began after
    last_step: int = 0
    moved: float | None = None  # when a step was last finished
    slow: dict[int, float] = field(default_factory=dict)
    end: str = ""  # what ended it, one of incidents.Signal, or "done"


def supervise(config: Config, arguments: Sequence[str], ranks: int, say: Callable[[str], None]) -> int:
    """Train as `config` says on so many ranks of this machine, to the end; returns the exit status.

    arguments: of `moestro` for each rank.

    Raises:
        MoestroError: the folder holds a run that is not to be continued, or one that is watched over already.
    """
    command = [sys.executable, "-m", "moestro", *arguments]
    folder = Path(config.run.dir) / config.run.name
    if config.run.resume == "never" and (folder / "config.toml").exists():
        raise MoestroError(f"{folder} already holds a run; continue it with run.resume=auto or choose another run.name")
    again = [*command, "run.resume=auto"]
    watched = Supervisor(
        command, again, ranks, folder, config.supervise, say, lambda n: resolve_stretches(config, n),
        alike=has_alike_ranks(config, ranks),
    )  # fmt: skip
    return watched.run()


def has_alike_ranks(config: Config, ranks: int) -> bool:
    """Whether all have the same work: no stages of a pipeline, no experts of their own."""
    layouts = [stretch.layout for stretch in resolve_stretches(config, ranks)]
    return all(layout.pp == 1 and layout.ep == 1 for layout in layouts)


class Supervisor:
    """Of one run, on this machine.

    command: what each rank runs; the first attempt and all later ones, which `again` gives. folder: the run's. layout:
    raises MoestroError for a number of ranks that the run does not allow. examine: why a node is unfit, or None.
    speaks: whether ranks are sure to tell where they are; a command that does not is only watched by its end.
    """

    def __init__(
        self,
        command: Sequence[str],
        again: Sequence[str],
        ranks: int,
        folder: Path,
        settings: SuperviseConfig,
        say: Callable[[str], None],
        layout: Callable[[int], object],
        examine: Callable[[str], str | None] | None = None,
        speaks: bool = True,
        alike: bool = True,
    ) -> None:
        self.command, self.again, self.folder = command, again, folder
        self.settings, self.say, self.speaks = settings, say, speaks
        self.attempts: list[Attempt] = []
        self._patience = Patience(
            settings.hang_factor, settings.hang_floor_s, settings.long_s, settings.silent_s, settings.slow_factor, alike
        )  # fmt: skip
        self._restarts = Restarts(settings)
        self._epoch = time.time() - time.monotonic()
        self._open: tuple[Incident, float] | None = None  # whose downtime is not known yet, and since when
        self._grow: str | None = None  # a node that takes part from the next start
        _make(folder)
        nodes = Nodes(folder / "nodes.jsonl")
        self._crew = Crew(ranks, os.uname().nodename, settings, nodes, layout, examine or _doctor(folder))

    def run(self) -> int:
        """Until the run is done or cannot go on; the exit status."""
        with self._held():
            unfit = self._crew.join()
            if unfit is not None:
                record(self.folder, Incident("unfit_node", "stop", 0, {"what": unfit}, node=os.uname().nodename))
                self.say(f"supervisor: {unfit}")
                return 1
            while True:
                attempt, ended, end = self._attempt()
                if self._grow is not None and not ended.stopped_by_user and end.signal is None and ended.status():
                    self._grow = None
                    continue
                if ended.stopped_by_user or end.signal is None:
                    return ended.status()
                verdict = self._answer(attempt, end)
                if verdict.action == "stop":
                    if end.signal != "user_error":  # the rank has said it
                        self.say(f"supervisor: stopped: {verdict.why}; see {self.folder / 'audit.jsonl'}")
                    return ended.status() or 1
                time.sleep(self._restarts.pause_s())

    def _attempt(self) -> tuple[Attempt, Ranks, End]:
        number, ranks, watched = len(self.attempts), self._crew.ranks, self.folder / "watch"
        shutil.rmtree(watched, ignore_errors=True)
        attempt = Attempt(number, ranks, self._now())
        self.attempts.append(attempt)
        dog = Watchdog(ranks, self._patience, time.monotonic())
        hangs: list[Hang] = []

        def watch(running: Ranks) -> None:
            beats, now = [read_beat(watched, rank) for rank in range(ranks)], time.monotonic()
            if not self.speaks and not any(beats):
                return
            hang = dog.look(beats, process_states(running.pids), now)
            self._follow(attempt, dog, beats)
            self._show(attempt, watched, beats)
            if running.is_ending:  # a rank that is gone tells nothing, and the others wait for it: no hang
                return
            if hang is not None and not hangs:
                stacks = dump_stacks(watched, running.pids, self.folder / "stacks", number)
                hangs.append(Hang(hang.rank, hang.waited_s, hang.evidence | {"stacks": stacks}))
                running.kill()
            elif self._grow is None and attempt.moved is not None:
                self._look_for_nodes(attempt, running)

        command = self.again if number else self.command
        # Where restarts are counted by a launcher, groups of one attempt never meet those of another.
        more = {WATCHED: str(watched), "TORCHELASTIC_RESTART_COUNT": str(number)}
        ended = run_watched(command, ranks, watch, **more)
        attempt.ended = self._now()
        beats = [read_beat(watched, rank) for rank in range(ranks)]  # as they were at the end
        dog.look(beats, {}, time.monotonic())
        self._follow(attempt, dog, beats)
        words = {rank: told for rank in range(ranks) if (told := read_words(watched, rank)) is not None}
        end = what_ended(hangs[0] if hangs else None, ended.first_failure(), words)
        attempt.end = end.signal or "done"
        _append(self.folder / ATTEMPTS, json.dumps(asdict(attempt)))
        return attempt, ended, end

    def _answer(self, attempt: Attempt, end: End) -> Verdict:
        """Decide what to do after a fault, and note it."""
        now = time.monotonic()
        lived_s = None if self.speaks or attempt.moved is not None else attempt.ended - attempt.started
        self._restarts.ended(-1 if attempt.moved is None else attempt.last_step, lived_s)
        node = self._crew.name_of(end.rank)
        stop = self._restarts.reason_to_stop(end, now)
        verdict = Verdict("stop", stop) if stop is not None else self._crew.after(end, now)
        evidence = end.evidence | {"attempt": attempt.number, "ranks": attempt.ranks}
        if verdict.why:
            evidence["why"] = verdict.why
        action = "restart" if verdict.action == "shrink" else verdict.action
        incident = Incident(end.signal or "exit", action, attempt.last_step, evidence, end.rank, node)
        if end.category != "numeric":  # which the rank has noted itself
            record(self.folder, incident)
        since = attempt.moved or attempt.started
        if self._open is not None:  # training had not gone on since the fault before
            complete(self.folder, self._open[0], attempt.ended - self._open[1])
            since = attempt.ended
        self._open = incident, since
        who = f"rank {end.rank}" if end.rank is not None else "the run"
        if action != "stop":
            self.say(f"supervisor: {who}: {end.signal} after step {attempt.last_step} ({end.text}); {verdict.action}")
        if verdict.unfit:
            record(self.folder, Incident("unfit_node", "cordon", attempt.last_step, {"why": verdict.why}, node=node))
        if verdict.action == "shrink":
            left = {"why": verdict.why, "ranks": self._crew.ranks}
            record(self.folder, Incident("node_lost", "shrink", attempt.last_step, left, node=node))
        if verdict.why and action != "stop":
            self.say(f"supervisor: {verdict.why}")
        return verdict

    def _follow(self, attempt: Attempt, dog: Watchdog, beats: Sequence[Beat | None]) -> None:
        """Note how far it got, and what is odd though it goes on."""
        for rank, jump_s in dog.jumps.items():
            self._flag(Incident("clock_jump", "flag", dog.step, {"jump_s": round(jump_s, 1)}, rank))
        if any(beat is None for beat in beats):
            return
        if attempt.first_step is None and all(beat is not None and beat.phase in STEP for beat in beats):
            attempt.first_step = dog.step
            self._goes_on(attempt)
        if dog.step > attempt.last_step:
            attempt.last_step, attempt.moved = dog.step, self._now()
            if attempt.first_step is None:
                attempt.first_step = dog.step - 1  # steps shorter than a look
                self._goes_on(attempt)
        for rank, ratio in dog.slow_ranks().items():
            if rank not in attempt.slow:
                attempt.slow[rank] = ratio
                evidence = {"own_time_over_others": round(ratio, 2), "beats": len(dog.own_s[rank])}
                self._flag(Incident("slow_rank", "flag", dog.step, evidence, rank))

    def _flag(self, incident: Incident) -> None:
        node = self._crew.name_of(incident.rank)
        record(self.folder, Incident(**asdict(incident) | {"node": node}))
        figures = ", ".join(f"{key} {value}" for key, value in incident.evidence.items())
        self.say(f"supervisor: rank {incident.rank}: {incident.signal} at step {incident.step} ({figures})")

    def _goes_on(self, attempt: Attempt) -> None:
        if self._open is not None:
            incident, since = self._open
            downtime_s = self._now() - since
            complete(self.folder, incident, downtime_s)
            self._open = None
            ranks = f"{attempt.ranks} rank" + "s" * (attempt.ranks > 1)
            self.say(f"supervisor: goes on after step {attempt.first_step} on {ranks}; {downtime_s:.1f} s were lost")

    def _look_for_nodes(self, attempt: Attempt, running: Ranks) -> None:
        """Let a node that was left out and is fit again take part: the ranks save, and start again with its own."""
        self._grow = self._crew.returning(time.monotonic())
        if self._grow is None:
            return
        incident = Incident("node_back", "grow", attempt.last_step, {"ranks": self._crew.ranks}, node=self._grow)
        record(self.folder, incident)
        self._open = incident, self._now()
        self.say(f"supervisor: node {self._grow} is back; the run is saved and goes on with {self._crew.ranks} ranks")
        running.ask()

    def _show(self, attempt: Attempt, watched: Path, beats: Sequence[Beat | None]) -> None:
        """One line for the progress bar of rank 0, which has the terminal."""
        ages = [time.time() - beat.wall for beat in beats if beat is not None]
        faults = sum(one.end not in ("", "done") for one in self.attempts)
        slow = f", slow rank {', '.join(map(str, attempt.slow))}" if attempt.slow else ""
        oldest = f"{max(ages, default=0.0):.0f} s" if len(ages) == attempt.ranks else "not all"
        line = f"start {attempt.number + 1}, {faults} fault{'s' * (faults != 1)}, beats {oldest}{slow}"
        if watched.is_dir():
            status_of(watched).write_text(line)

    def _now(self) -> float:
        return self._epoch + time.monotonic()

    @contextmanager
    def _held(self) -> Iterator[None]:
        """One supervisor a run: a second one would remove what the ranks of the first tell."""
        with (self.folder / ".supervisor.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise MoestroError(f"another supervisor watches over {self.folder}; wait for it or stop it") from error
            yield


def _doctor(folder: Path) -> Callable[[str], str | None]:
    """Tier 1 of `moestro doctor`, of this machine."""

    def examine(node: str) -> str | None:
        from moestro.doctor.run import Request, examine_node

        failed = examine_node(Request(1, folder)).having("failed")
        return "; ".join(f"{check.name}: {check.reason}" for check in failed) or None

    return examine


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MoestroError(f"cannot make the run's folder {folder}: {error.strerror}") from error


def _append(path: Path, line: str) -> None:
    """In one write. A full disk is no reason to stop: the line is for the report only."""
    try:
        with path.open("ab", buffering=0) as file:
            file.write(f"{line}\n".encode())
    except OSError as error:
        sys.stderr.write(f"supervisor: cannot write {path}: {error.strerror}\n")
