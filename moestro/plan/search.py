"""Finds the best plans of a space: all of them in closed form, the best few again pass by pass."""

import heapq
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from multiprocessing import get_context

import numpy as np

from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.plan.evaluate import Batch, Evaluator
from moestro.plan.frame import Floats
from moestro.plan.space import Family, Space, plan_of
from moestro.predict.predict import device_bytes, predict_step
from moestro.predict.target import Target
from moestro.predict.words import Prediction

PARALLEL_FROM = 400  # families, from which several processes are worth their start
MIB = 2.0**20
ORPHAN_S = 1.0  # after which a process sees that its parent is gone


@dataclass(frozen=True)
class Candidate:
    """A plan by the closed form: seconds of a step, bytes that the fullest device needs and holds."""

    step_s: float
    needed_bytes: float
    total_bytes: float
    plan: Plan


@dataclass
class Tally:
    """What a search went through."""

    families: int = 0
    skipped: int = 0  # families that a rule left out
    plans: int = 0
    too_big: int = 0  # plans that do not fit in memory

    def add(self, other: "Tally") -> None:
        self.families += other.families
        self.skipped += other.skipped
        self.plans += other.plans
        self.too_big += other.too_big


@dataclass
class Found:
    """best: by step time, those that fit. front: those with less memory than all faster ones, without those that a rule
    left out. faster: the fastest of those that do not fit. least: the plan that needs least memory. exact: the best few
    again, simulated; the first is the choice."""

    best: list[Candidate] = field(default_factory=list)
    front: list[Candidate] = field(default_factory=list)
    faster: Candidate | None = None
    least: Candidate | None = None
    exact: list[tuple[Plan, Prediction]] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)


def search(
    workload: Workload, target: Target, devices: int, space: Space, keep: int = 20, exact: int = 8, workers: int = 1
) -> Found:
    """The plans with the shortest steps of those that fit in memory.

    keep: how many by the closed form; exact: how many of these are simulated.

    Raises:
        MoestroError: no plan fits the workload and the devices, or none fits in memory; it says what comes nearest.
    """
    if target.host_computes or target.parts:
        found = _one_by_one(workload, target, devices, space, keep)
    else:
        families = list(space.families(workload))
        if workers > 1 and len(families) >= PARALLEL_FROM:
            found = _in_processes(workload, target, devices, space, keep, families, workers)
        else:
            found = sweep(workload, target, devices, space, keep, families)
    _check(found, target, devices)
    simulated = [(one.plan, predict_step(workload, one.plan, target, exact=True)) for one in found.best[:exact]]
    found.exact = sorted(simulated, key=lambda pair: pair[1].step_s.value)
    return found


def sweep(
    workload: Workload, target: Target, devices: int, space: Space, keep: int, families: Iterable[Family]
) -> Found:
    """Families one after the other, in this process.

    One rule leaves families out: where all plans of a family fit without recomputing, those that recompute more can
    only be slower.
    """
    there = device_bytes(target, devices)
    limit = np.inf if there is None else there
    evaluator, found = Evaluator(workload, target, devices), _Best(keep, target)
    roomy: set[Family] = set()
    for family in sorted(families, key=lambda family: (family.recompute != "none", family.expert_recompute)):
        lean = family._replace(recompute="none", expert_recompute=False)
        if family != lean and lean in roomy:
            found.tally.families += 1
            found.tally.skipped += 1
            continue
        batches = evaluator.batches(family, space)
        if family == lean and all((batch.total_bytes <= limit).all() for batch in batches):
            roomy.add(lean)
        for batch in batches:
            found.add(batch, limit)
        found.tally.families += 1
    return found.result()


class _Best:
    """Keeps the fastest that fit, the front of time and memory, and the fastest that do not fit."""

    def __init__(self, keep: int, target: Target) -> None:
        self.keep, self.node = keep, target.place.node_size
        self.tally = Tally()
        self._order = count()
        self._fit: list[tuple[float, int, Candidate]] = []
        self._big: list[tuple[float, int, Candidate]] = []
        self._least: Candidate | None = None
        self._front: list[Candidate] = []

    def add(self, batch: Batch, limit: float) -> None:
        fit = batch.total_bytes <= limit
        self.tally.plans += batch.step_s.size
        self.tally.too_big += int((~fit).sum())
        self._push(self._fit, batch, np.where(fit, batch.step_s, np.inf), self.keep)
        if not fit.all():
            self._push(self._big, batch, np.where(fit, np.inf, batch.step_s), 1)
        index = int(batch.total_bytes.argmin())
        if self._least is None or batch.total_bytes.ravel()[index] < self._least.total_bytes:
            self._least = self._candidate(batch, index)
        self._extend(batch, fit)

    def _push(self, heap: list[tuple[float, int, Candidate]], batch: Batch, step_s: Floats, keep: int) -> None:
        """A heap of the `keep` shortest, the longest of them first."""
        flat = step_s.ravel()
        for index in np.argsort(flat, kind="stable")[:keep]:
            seconds = float(flat[index])
            if not np.isfinite(seconds) or (len(heap) == keep and seconds >= -heap[0][0]):
                return
            entry = (-seconds, -next(self._order), self._candidate(batch, int(index)))
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
        known = [(one.step_s, one.total_bytes) for one in self._front]
        added = [
            self._candidate(batch, int(own[i]))
            for i in new
            if not any(s <= times[i] and b <= sizes[i] * MIB for s, b in known)
        ]
        if added:
            self._front = front_of([*self._front, *added])

    def _candidate(self, batch: Batch, index: int) -> Candidate:
        row, column = divmod(index, len(batch.variants))
        plan = plan_of(batch.family, batch.pipelines[row], batch.variants[column], self.node)
        step, needed, total = (a[row, column] for a in (batch.step_s, batch.needed_bytes, batch.total_bytes))
        return Candidate(float(step), float(needed), float(total), plan)

    def result(self) -> Found:
        best = [one for *_, one in sorted(self._fit, reverse=True)]
        return Found(best, self._front, self._big[0][2] if self._big else None, self._least, tally=self.tally)


def front_of(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those for which no other is as fast with as little memory, the fastest first."""
    front: list[Candidate] = []
    for one in sorted(candidates, key=lambda c: (c.step_s, c.total_bytes)):
        if not front or one.total_bytes < front[-1].total_bytes:
            front.append(one)
    return front


def _in_processes(
    workload: Workload, target: Target, devices: int, space: Space, keep: int, families: list[Family], workers: int
) -> Found:
    """Families that differ in recomputation only stay together, as the rule that leaves some out needs."""
    groups: dict[Family, list[Family]] = {}
    for family in families:
        groups.setdefault(family._replace(recompute="none", expert_recompute=False), []).append(family)
    parts: list[list[Family]] = [[] for _ in range(workers)]
    for number, group in enumerate(groups.values()):
        parts[number % workers] += group
    context = get_context("fork")
    with ProcessPoolExecutor(workers, context, initializer=_end_with, initargs=(os.getpid(),)) as pool:
        found = list(pool.map(partial(sweep, workload, target, devices, space, keep), parts))
    whole = Found()
    for part in found:
        whole.best += part.best
        whole.front += part.front
        whole.tally.add(part.tally)
    best = sorted(whole.best, key=lambda one: one.step_s)[:keep]
    faster = _least([part.faster for part in found], lambda one: one.step_s)
    least = _least([part.least for part in found], lambda one: one.total_bytes)
    return replace(whole, best=best, front=front_of(whole.front), faster=faster, least=least)


def _end_with(parent: int) -> None:
    """End this process soon after its parent, which may have been killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _least(found: Iterable[Candidate | None], key: Callable[[Candidate], float]) -> Candidate | None:
    return min((one for one in found if one is not None), key=key, default=None)


def _one_by_one(workload: Workload, target: Target, devices: int, space: Space, keep: int) -> Found:
    """By `predict_step`: a CPU, whose host computes, and unlike devices have no closed form over arrays."""
    found, tally = [], Tally()
    there = device_bytes(target, devices)
    for family in space.families(workload):
        tally.families += 1
        for pipeline in space.pipelines(family, workload, devices):
            for variant in space.variants(family, pipeline.dp):
                plan = plan_of(family, pipeline, variant, target.place.node_size)
                got = predict_step(workload, plan, target)
                tally.plans += 1
                found.append(Candidate(got.step_s.value, got.memory.needed, got.memory.total, plan))
    fit = [one for one in found if there is None or one.total_bytes <= there]
    tally.too_big = len(found) - len(fit)
    faster = _least((one for one in found if one not in fit), lambda one: one.step_s)
    least = _least(found, lambda one: one.total_bytes)
    return Found(sorted(fit, key=lambda one: one.step_s)[:keep], front_of(fit), faster, least, tally=tally)


def _check(found: Found, target: Target, devices: int) -> None:
    if found.best:
        return
    if not found.tally.plans:
        raise MoestroError(
            f"no plan of the search uses {devices} devices: their number must divide into pp · dp · cp · tp, and the "
            "batch into dp · micro-batches; change train.global_batch_size or --devices, or fix fewer of plan.*"
        )
    there = device_bytes(target, devices) or 0.0
    assert found.least is not None
    raise MoestroError(
        f"none of {found.tally.plans:,} plans fits: a device has {there / 1e9:.1f} GB, and the smallest plan needs "
        f"{found.least.total_bytes / 1e9:.1f} GB; take more devices, or another device"
    )


def default_workers() -> int:
    """Processes to search with."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
