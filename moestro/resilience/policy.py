"""What ended the ranks, and whether they may start again: decided from statuses, last words and counts alone."""

import signal
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moestro.config.supervise import SuperviseConfig
from moestro.resilience.taxonomy import FAULTS, Category, Reaction, exit_of
from moestro.resilience.watchdog import Hang
from moestro.train.heartbeat import LastWords
from moestro.train.incidents import Signal

HOUR_S = 3600.0


@dataclass(frozen=True)
class End:
    """Of one start of the ranks. signal: None if nothing was wrong. rank: the one it began with, if that is known."""

    signal: Signal | None
    category: Category
    reaction: Reaction
    evidence: dict[str, Any] = field(default_factory=dict)
    rank: int | None = None

    @property
    def text(self) -> str:
        what = self.evidence.get("error") or self.evidence.get("what")
        if what is None:
            return self.signal or "done"
        return f"exit status {self.evidence['status']}: {what}" if self.signal == "exit" else str(what)


def what_ended(hang: Hang | None, failed: tuple[int, int] | None, words: Mapping[int, LastWords]) -> End:
    """hang: what the watchdog saw, if that ended it. failed: rank and exit status (negative: by a signal) of the first
    that failed by itself; None: none did. words: what ranks said before they ended, by rank.

    A rank's own words go before its exit status, which says less; a rank that only lost another is never the cause.
    """
    if hang is not None:
        return End("hang", FAULTS["hang"].category, "retry", hang.evidence, hang.rank)
    if failed is None:
        done = exit_of(0)
        return End(None, done.category, done.reaction)
    rank, status = failed
    meaning = exit_of(status)
    shown = signal.Signals(-status).name if status < 0 else status
    told = words.get(rank)
    if told is None and status > 0 and words:  # a rank that ends because of another takes its status
        told = words[min(words)]
    if told is not None and meaning.signal is not None:
        fault = FAULTS[told.signal]
        evidence = {"status": shown, "error": told.text}
        return End(told.signal, fault.category, reaction_to(told.signal), evidence, told.rank)
    return End(meaning.signal, meaning.category, meaning.reaction, {"status": shown, "what": meaning.what}, rank)


def reaction_to(seen: Signal) -> Reaction:
    """Of an incident that ended a rank: start again where the table of faults has that among its answers."""
    answers = FAULTS[seen].answers
    return "never" if answers[0] == "stop" or "restart" not in answers else "retry"


class Restarts:
    """Counts them. Times are monotonic seconds."""

    def __init__(self, settings: SuperviseConfig) -> None:
        self._settings = settings
        self._when: deque[float] = deque()
        self.count = 0  # those that count against the limits
        self.without_progress = 0
        self.best = -1  # the highest step that was ever finished

    def ended(self, step: int, lived_s: float | None) -> None:
        """An attempt got as far as `step`. lived_s: how long it ran, of a command that tells no steps."""
        better = step > self.best if lived_s is None else lived_s > max(self._settings.backoff_most_s, 1.0)
        self.best = max(self.best, step)
        self.without_progress = 1 if better else self.without_progress + 1

    def reason_to_stop(self, end: End, now: float) -> str | None:
        """Why the ranks must not start again; None: they may, and it is counted."""
        limits = self._settings
        if end.reaction == "never":
            return f"{end.signal} ({end.text}) is not mended by starting again"
        if end.evidence.get("status") == 2 and self.best < 0:  # a file that was never there is a mistake, too
            return f"{end.signal} before the first step ({end.text})"
        if self.without_progress > limits.max_without_progress:
            at = f"at step {self.best} " if self.best >= 0 else ""
            return (
                f"{self.without_progress} attempts in a row ended {at}without a new step "
                f"(supervise.max_without_progress = {limits.max_without_progress}), the last by {end.signal}: "
                f"{end.text}"
            )
        if end.reaction == "always":
            return None
        while self._when and now - self._when[0] > HOUR_S:
            self._when.popleft()
        for used, limit, name in (
            (self.count, limits.max_restarts, "max_restarts"),
            (len(self._when), limits.max_restarts_per_hour, "max_restarts_per_hour"),
        ):
            if used >= limit:
                return f"supervise.{name} = {limit} is used up; the last ended by {end.signal}: {end.text}"
        self.count += 1
        self._when.append(now)
        return None

    def pause_s(self) -> float:
        """Before the next start: doubled with each that brought no progress."""
        doubled = self._settings.backoff_s * 2.0 ** min(60, max(0, self.without_progress - 1))
        return min(doubled, self._settings.backoff_most_s)
