"""Whether the ranks of a run get on, and if not, which of them holds the others up. Numbers in, verdict out."""

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moestro.train.heartbeat import Beat

KEPT = 50  # steps and own times that a median is of
CLOCK_S = 2.0  # that a rank's wall clock may move against its monotonic one from one beat to another
# Phases that may take as long as they need, as long as their rank tells that it lives: text is prepared, a model is
# compiled, all held-out text is evaluated, a checkpoint goes to a slow disk.
LONG = ("start", "evaluate", "checkpoint", "end")


@dataclass(frozen=True)
class Patience:
    """Seconds after which to act. hang: of no progress within a step, that factor times the median step, but never
    less than the floor. long: of no progress in a phase that is none of a step. silent: of no sign of life.

    slow: a rank's own time over that of the others, in the medians of as many beats; where ranks differ in their work,
    as stages of a pipeline do, over what that ratio was in its first medians."""

    hang_factor: float = 5.0
    hang_floor_s: float = 120.0
    long_s: float = 1800.0
    silent_s: float = 30.0
    slow_factor: float = 1.2
    alike: bool = True  # whether all ranks have the same work, so that they may be compared from the beginning


@dataclass(frozen=True)
class Hang:
    """rank: that the others wait for; None: it cannot be told. waited_s: since anything moved."""

    rank: int | None
    waited_s: float
    evidence: dict[str, Any] = field(default_factory=dict)


class Watchdog:
    """Looks at the beats of all ranks again and again. Times are of the watcher's own monotonic clock, seconds."""

    def __init__(self, ranks: int, patience: Patience, now: float) -> None:
        self._ranks, self._patience = ranks, patience
        self._place: list[tuple[Any, ...] | None] = [None] * ranks
        self._moved, self._heard = [now] * ranks, [now] * ranks
        self._last: list[float | None] = [None] * ranks  # monotonic time in the last beat
        self._stepped: tuple[int, float] | None = None
        self.steps_s: deque[float] = deque(maxlen=KEPT)
        self.own_s: list[deque[float]] = [deque(maxlen=KEPT) for _ in range(ranks)]
        self._own_step = [0] * ranks
        self._usual: list[float] = []  # of each rank, its first ratio to the others, where those are not alike
        self.step = 0  # the last that all ranks have finished
        self._clock: list[float | None] = [None] * ranks  # wall minus monotonic time, as each rank last told
        self.jumps: dict[int, float] = {}  # by rank, how far its wall clock jumped at the last look, seconds

    def look(self, beats: Sequence[Beat | None], states: Mapping[int, str], now: float) -> Hang | None:
        """beats: the newest of each rank. states: of each process as /proc has it ("T": stopped), as far as known."""
        for rank, beat in enumerate(beats):
            if beat is None:
                continue
            if beat.monotonic != self._last[rank]:
                self._last[rank], self._heard[rank] = beat.monotonic, now
            place = beat.step, beat.phase, tuple(beat.collectives.values())
            if place != self._place[rank]:
                self._place[rank], self._moved[rank] = place, now
            if beat.own_s is not None and beat.step > self._own_step[rank]:
                self._own_step[rank] = beat.step
                self.own_s[rank].append(beat.own_s)
        self._count(beats, now)
        self._compare_clocks(beats)
        return self._silent(beats, states, now) or self._stuck(beats, now)

    def limit_s(self, beats: Sequence[Beat | None]) -> float:
        """How long nothing may move. A first step, which may compile, has as long as a phase outside of steps."""
        known = [beat for beat in beats if beat is not None]
        if len(known) < self._ranks or not self.steps_s or any(beat.phase in LONG for beat in known):
            return self._patience.long_s
        return max(self._patience.hang_factor * statistics.median(self.steps_s), self._patience.hang_floor_s)

    def slow_ranks(self) -> dict[int, float]:
        """Ranks whose own time of a step is above the others' by the factor, with that ratio; none until each has told
        of KEPT steps. A rank whose work differs from the others' is held against its own past instead."""
        if self._ranks < 2 or any(len(times) < KEPT for times in self.own_s):
            return {}
        medians = [statistics.median(times) for times in self.own_s]
        ratios = []
        for rank, own in enumerate(medians):
            others = statistics.median(medians[:rank] + medians[rank + 1 :])
            ratios.append(own / others if others > 0 else 1.0)
        if not self._usual:
            self._usual = [1.0] * self._ranks if self._patience.alike else [max(ratio, 1e-9) for ratio in ratios]
        past = zip(ratios, self._usual, strict=True)
        found = {rank: ratio / usual for rank, (ratio, usual) in enumerate(past)}
        return {rank: ratio for rank, ratio in found.items() if ratio > self._patience.slow_factor}

    def _count(self, beats: Sequence[Beat | None], now: float) -> None:
        if any(beat is None for beat in beats):
            return
        step = min(beat.step for beat in beats if beat is not None)
        if self._stepped is not None and step > self._stepped[0]:
            self.steps_s.append((now - self._stepped[1]) / (step - self._stepped[0]))
        if self._stepped is None or step > self._stepped[0]:
            self._stepped = step, now
        self.step = max(self.step, step)

    def _compare_clocks(self, beats: Sequence[Beat | None]) -> None:
        self.jumps = {}
        for beat in beats:
            if beat is not None:
                offset, before = beat.wall - beat.monotonic, self._clock[beat.rank]
                if before is not None and abs(offset - before) > CLOCK_S:
                    self.jumps[beat.rank] = offset - before
                self._clock[beat.rank] = offset

    def _silent(self, beats: Sequence[Beat | None], states: Mapping[int, str], now: float) -> Hang | None:
        """A rank that lives and tells nothing. One that has not begun to is still starting; one at its end leaves."""
        quiet = [
            (now - self._heard[rank], rank)
            for rank, beat in enumerate(beats)
            if beat is not None and beat.phase != "end" and now - self._heard[rank] > self._patience.silent_s
        ]
        if not quiet:
            return None
        waited, rank = max(quiet)
        state = states.get(rank, "?")
        what = f"it told nothing for {waited:.1f} s" + (", as its process is stopped" if state in "Tt" else "")
        return Hang(
            rank, waited, {"what": what, "silent_s": round(waited, 1), "state": state, "stopped": state in "Tt"}
        )

    def _stuck(self, beats: Sequence[Beat | None], now: float) -> Hang | None:
        """Nothing moves on any rank."""
        waited = now - max(self._moved)
        limit = self.limit_s(beats)
        if waited <= limit:
            return None
        rank, evidence = culprit(beats)
        what = f"nothing moved for {waited:.1f} s, {waited - limit:.1f} s longer than it may"
        figures = {"waited_s": round(waited, 1), "limit_s": round(limit, 1)}
        return Hang(rank, waited, {"what": what, **figures, **evidence})


def culprit(beats: Sequence[Beat | None]) -> tuple[int | None, dict[str, Any]]:
    """The rank that the others wait for: of a group the one that entered fewest collectives; and what tells so.

    Of groups of the same name, as each rank counts them. Ranks that never spoke come before all.
    """
    places = {f"rank {b.rank}": f"step {b.step} {b.phase}, {sum(b.collectives.values())} entered" for b in beats if b}
    missing = [rank for rank, beat in enumerate(beats) if beat is None]
    if missing:
        return missing[0], {"never_spoke": missing, "places": places}
    known = [beat for beat in beats if beat is not None]
    behind: dict[int, int] = {}
    for name in dict.fromkeys(name for beat in known for name in beat.collectives):
        counts = {beat.rank: beat.collectives[name] for beat in known if name in beat.collectives}
        most = max(counts.values())
        for rank, count in counts.items():
            behind[rank] = behind.get(rank, 0) + most - count
    worst = max(behind.values(), default=0)
    who = [rank for rank, count in behind.items() if count == worst]
    if worst > 0 and len(who) == 1:
        return who[0], {"entered_fewer": worst, "places": places}
    least = min(known, key=lambda beat: (beat.step, -beat.phase_s))
    alone = [beat.rank for beat in known if (beat.step, beat.phase) == (least.step, least.phase)]
    return (alone[0] if len(alone) == 1 else None), {"places": places}


def process_states(pids: Mapping[int, int]) -> dict[int, str]:
    """Of each rank the letter of its process in /proc ("R", "S", "T": stopped, "Z"); {} where there is no /proc."""
    found = {}
    for rank, pid in pids.items():
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        found[rank] = text.rpartition(")")[2].split()[0]
    return found
