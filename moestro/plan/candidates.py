"""What a search keeps of all the plans that it goes through."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from moestro.config.plan import Plan, Workload
from moestro.plan.evaluate import Batch
from moestro.plan.frame import Floats
from moestro.plan.objective import MIB, Goal, Numbers, numbers_of, outcome, overrun, score
from moestro.plan.space import plan_of
from moestro.predict.target import Target
from moestro.predict.words import Prediction


@dataclass(frozen=True)
class Candidate:
    """A plan by the closed form: seconds of a step, bytes that the fullest device needs and holds. score: what the goal
    ranks by; overrun: how many times its deadline or budget the run takes."""

    step_s: float
    needed_bytes: float
    total_bytes: float
    plan: Plan
    score: float = 0.0
    overrun: float = 0.0


@dataclass
class Tally:
    """What a search went through. plans: all of the space; evaluated: of them those that no rule left out. too_big:
    plans that do not fit in memory, evaluated or not. skipped: plans by the rule (plan.rules) that left them out."""

    families: int = 0
    plans: int = 0
    evaluated: int = 0
    too_big: int = 0
    skipped: dict[str, int] = field(default_factory=dict)

    def skip(self, rule: str, plans: int) -> None:
        self.plans += plans
        self.too_big += plans * (rule == "memory")
        self.skipped[rule] = self.skipped.get(rule, 0) + plans

    def add(self, other: "Tally") -> None:
        self.families += other.families
        self.plans += other.plans
        self.evaluated += other.evaluated
        self.too_big += other.too_big
        for rule, plans in other.skipped.items():
            self.skipped[rule] = self.skipped.get(rule, 0) + plans


@dataclass
class Found:
    """best: by the goal, those that fit and keep to it. front: of those that fit, the ones with less memory than all
    faster ones. faster: the fastest of those that do not fit, where it is faster than all that fit. least: the plan
    that needs least memory, where none fits. missed: of those that fit and are late or too dear, the one that is least
    so. exact: the best few again, simulated; the first is the choice."""

    best: list[Candidate] = field(default_factory=list)
    front: list[Candidate] = field(default_factory=list)
    faster: Candidate | None = None
    least: Candidate | None = None
    missed: Candidate | None = None
    exact: list[tuple[Plan, Prediction]] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)


def weigh(workload: Workload, plan: Plan, one: Prediction, goal: Goal) -> Candidate:
    """A predicted plan by the goal."""
    numbers = numbers_of(workload, plan, one)
    got = outcome(numbers, goal, plan.world_size)
    worth, over = float(score(numbers, got, goal)), float(overrun(got, goal))
    return Candidate(one.step_s.value, one.memory.needed, one.memory.total, plan, worth, over)


class Best:
    """Keeps the best that fit, the front of time and memory, and those that only just do not fit or come too late."""

    def __init__(self, keep: int, target: Target, devices: int, goal: Goal) -> None:
        self.keep, self.node, self.devices, self.goal = keep, target.place.node_size, devices, goal
        self.tally = Tally()
        self._order = count()
        self._fit: list[tuple[float, int, Candidate]] = []
        self._big: list[tuple[float, int, Candidate]] = []
        self._missed: list[tuple[float, int, Candidate]] = []
        self.least: Candidate | None = None
        self._weights = np.zeros((0, 0)), np.zeros((0, 0))  # score and overrun of the batch at hand
        self.front: list[Candidate] = []

    @property
    def worst_score(self) -> float:
        """What a plan must score below to be among the best."""
        return -self._fit[0][0] if len(self._fit) == self.keep else np.inf

    @property
    def faster_s(self) -> float:
        """Of the fastest that does not fit."""
        return self._big[0][2].step_s if self._big else np.inf

    def add(self, batch: Batch, limit: float) -> None:
        fit = batch.total_bytes <= limit
        self.tally.plans += batch.step_s.size
        self.tally.evaluated += batch.step_s.size
        self.tally.too_big += int((~fit).sum())
        worth, over = self._weighed(batch)
        keeps = fit & (over <= 1)
        self._weights = worth, over
        self._push(self._fit, batch, np.where(keeps, worth, np.inf), self.keep)
        if not fit.all():
            self._push(self._big, batch, np.where(fit, np.inf, batch.step_s), 1)
        if not self._fit and (fit & ~keeps).any():
            self._push(self._missed, batch, np.where(fit & ~keeps, over, np.inf), 1)
        index = int(batch.total_bytes.argmin())
        if self.least is None or batch.total_bytes.ravel()[index] < self.least.total_bytes:
            self.least = self._candidate(batch, index)
        self._extend(batch, fit)

    def _weighed(self, batch: Batch) -> tuple[Floats, Floats]:
        """Score and overrun."""
        if self.goal.plain:
            return batch.step_s, np.zeros_like(batch.step_s)
        none = np.zeros_like(batch.step_s)
        numbers = Numbers(batch.step_s, batch.total_bytes, *(batch.more or (none,) * 6))
        found = outcome(numbers, self.goal, self.devices)
        return score(numbers, found, self.goal), overrun(found, self.goal)

    def _push(self, heap: list[tuple[float, int, Candidate]], batch: Batch, by: Floats, keep: int) -> None:
        """A heap of the `keep` that are least by these numbers, the largest of them first."""
        flat = by.ravel()
        for index in np.argsort(flat, kind="stable")[:keep]:
            value = float(flat[index])
            if not np.isfinite(value) or (len(heap) == keep and value >= -heap[0][0]):
                return
            entry = (-value, -next(self._order), self._candidate(batch, int(index)))
            (heapq.heappushpop if len(heap) == keep else heapq.heappush)(heap, entry)

    def _extend(self, batch: Batch, fit: "np.ndarray[tuple[int, ...], np.dtype[np.bool_]]") -> None:
        """Plans with less memory than all that are as fast, in steps of a MiB."""
        if not fit.any():
            return
        own = np.flatnonzero(fit.ravel())
        times, sizes = batch.step_s.ravel()[own], np.round(batch.total_bytes.ravel()[own] / MIB)
        order = np.lexsort((sizes, times))
        lowest = np.minimum.accumulate(sizes[order])
        new = order[np.concatenate(([True], lowest[1:] < lowest[:-1]))]
        known = [(one.step_s, one.total_bytes) for one in self.front]
        added = [
            self._candidate(batch, int(own[i]))
            for i in new
            if not any(s <= times[i] and b <= sizes[i] * MIB for s, b in known)
        ]
        if added:
            self.front = front_of([*self.front, *added])

    def _candidate(self, batch: Batch, index: int) -> Candidate:
        place = divmod(index, len(batch.variants))
        plan = plan_of(batch.family, batch.pipelines[place[0]], batch.variants[place[1]], self.node)
        step, needed, total = (float(a[place]) for a in (batch.step_s, batch.needed_bytes, batch.total_bytes))
        worth, over = (float(a[place]) for a in self._weights)
        return Candidate(step, needed, total, plan, worth, over)

    def result(self) -> Found:
        best = [one for *_, one in sorted(self._fit, reverse=True)]
        faster, missed = (heap[0][2] if heap else None for heap in (self._big, self._missed))
        return Found(best, self.front, faster, self.least, missed, tally=self.tally)


def front_of(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those for which no other is as fast with as little memory, the fastest first."""
    front: list[Candidate] = []
    for one in sorted(candidates, key=lambda c: (c.step_s, c.total_bytes)):
        if not front or one.total_bytes < front[-1].total_bytes:
            front.append(one)
    return front


def least_of(found: Iterable[Candidate | None], key: Callable[[Candidate], float]) -> Candidate | None:
    return min((one for one in found if one is not None), key=key, default=None)
