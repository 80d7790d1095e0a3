"""Timing single operations so that the machine's own unrest shows.

One timing of a short operation covers many calls, so that the clock's resolution does not count. Every case is timed in
several rounds that go through all cases, so that a machine which slows down over a minute widens the spread of each
case instead of bending the last ones.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from moestro.hardware.device import synchronize
from moestro.hardware.profile import Sample, Value

Clock = Callable[[], float]
Progress = Callable[[int, int, str], None]  # visits done, visits in all, what comes next

SHORTEST_S = 50e-6  # of one timing; shorter operations are called several times in it
SHORTEST_ACCELERATOR_S = 500e-6  # there the first launch of a timing finds an idle device, and must not count
TICKS = 100  # of the clock that one timing covers at least
MOST_CALLS = 2**17  # of one timing
MOST_TIMINGS = 200  # of one case in one round
FURTHER_ROUNDS = 3  # for cases whose spread is too wide
TOO_COARSE = "the clock shows no time passing"


@dataclass(frozen=True)
class Case:
    """An operation to time.

    op, case: as in `hardware.profile`. flops, bytes_moved: of one call, or None where it makes no sense.
    prepare: allocates operands and, where the operation lets it, outputs; returns the call to time. It is called once a
    round, so that the operands of one case only are in memory at a time.
    """

    op: str
    case: Mapping[str, Value]
    flops: float | None
    bytes_moved: float | None
    prepare: Callable[[], Callable[[], object]]

    @property
    def label(self) -> str:
        return " ".join([self.op, *(f"{key}={value}" for key, value in self.case.items())])


class MeasureResult(NamedTuple):
    """samples: of the cases that ran, in their order. notes: what was left out, and why."""

    samples: list[Sample]
    notes: list[str]


@dataclass
class _Record:
    """What is known of one case so far."""

    case: Case
    timings: list[float] = field(default_factory=list)  # seconds of one call
    problem: str = ""

    def spread(self) -> float:
        low, median, high = np.percentile(self.timings, (10, 50, 90))
        return float((high - low) / median)

    def sample(self, spread_limit: float) -> Sample:
        low, median, high = (float(t) for t in np.percentile(self.timings, (10, 50, 90)))
        return Sample(
            op=self.case.op,
            case=dict(self.case.case),
            median_s=median,
            low_s=low,
            high_s=high,
            repeats=len(self.timings),
            noisy=self.spread() > spread_limit,
            flops=self.case.flops,
            bytes_moved=self.case.bytes_moved,
        )


def measure_cases(
    cases: Sequence[Case],
    device: torch.device,
    *,
    seconds_per_case: float,
    rounds: int = 3,
    spread_limit: float = 0.25,
    clock: Clock = time.perf_counter,
    progress: Progress | None = None,
    deadline: float | None = None,
) -> MeasureResult:
    """Time every case `rounds` times over; those that stay restless get further rounds, then are marked noisy.

    Args:
        seconds_per_case: of timing one case, all rounds together. Preparing it and a first call in each round come on
            top; a case is timed at least once a round, however long it takes.
        spread_limit: (p90 - p10) / median above which a case is timed again, up to FURTHER_ROUNDS more rounds.
        clock: seconds; on an accelerator the device's own events time the calls where it has them.
        progress: told before each visit to a case.
        deadline: of `clock`. After it nothing more is started: cases with a timing keep it, the others are left out.
    A case that raises is left out with its reason: a dtype that the device lacks, memory that it does not have.

    Calls follow each other on the same operands: those that fit into a cache are read from there.
    """
    records = [_Record(case) for case in cases]
    timer = _timer(device, clock)
    shortest_s = max(SHORTEST_S if device.type == "cpu" else SHORTEST_ACCELERATOR_S, TICKS * _resolution(clock))
    done = 0
    for number in range(rounds + FURTHER_ROUNDS):
        todo = [r for r in records if not r.problem and (number < rounds or r.spread() > spread_limit)]
        total = done + len(todo) * max(rounds - number, 1)
        for record in todo:
            if deadline is not None and clock() >= deadline:
                return _result(records, spread_limit)
            if progress is not None:
                progress(done, total, record.case.label)
            _visit(record, device, timer, clock, seconds_per_case / rounds, shortest_s)
            done += 1
            if record.problem and device.type != "cpu":
                torch.accelerator.empty_cache()  # it may have been memory; here its operands are gone
    if progress is not None:
        progress(done, done, "")
    return _result(records, spread_limit)


def _result(records: Sequence[_Record], spread_limit: float) -> MeasureResult:
    notes = [f"left out: {record.case.label}: {record.problem}" for record in records if record.problem]
    late = [record for record in records if not record.problem and not record.timings]
    if late:
        more = f" and {len(late) - 1} more" if len(late) > 1 else ""
        notes.append(f"left out, as time was up: {late[0].case.label}{more}")
    return MeasureResult([r.sample(spread_limit) for r in records if r.timings and not r.problem], notes)


def _visit(
    record: _Record,
    device: torch.device,
    timer: Callable[[Callable[[], object], int], float],
    clock: Clock,
    seconds: float,
    shortest_s: float,
) -> None:
    """One round of one case: its timings are added to the record, or the reason why there are none."""
    try:
        call = record.case.prepare()
        call()  # touches the memory and lets libraries choose their kernels
        synchronize(device)
        start, calls = clock(), 1
        while (elapsed := timer(call, calls)) < shortest_s and calls < MOST_CALLS:
            growth = 1.2 * shortest_s / elapsed if elapsed > 0 else math.inf
            calls = min(calls * max(2, math.ceil(min(growth, 10))), MOST_CALLS)
        if elapsed <= 0:
            record.problem = TOO_COARSE
            return
        timings = [elapsed / calls]
        while clock() - start < seconds and len(timings) < MOST_TIMINGS:
            timings.append(timer(call, calls) / calls)
    except Exception as error:  # whatever one operation does, the others are still worth measuring
        record.problem = _reason(error)
        return
    record.timings += timings


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _resolution(clock: Clock) -> float:
    """The smallest step of the clock, or 0 for one that does not move by itself."""
    before = clock()
    for _ in range(100_000):
        now = clock()
        if now > before:
            return now - before
    return 0.0


def _timer(device: torch.device, clock: Clock) -> Callable[[Callable[[], object], int], float]:
    """A function that makes `calls` calls and returns the seconds that they took on `device`."""

    def by_clock(call: Callable[[], object], calls: int) -> float:
        start = clock()
        for _ in range(calls):
            call()
        synchronize(device)
        return clock() - start

    def by_events(call: Callable[[], object], calls: int) -> float:
        first, last = (torch.Event(device=device, enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(calls):
            call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    if device.type == "cpu":
        return by_clock
    try:
        by_events(lambda: None, 1)
    except (RuntimeError, NotImplementedError, AttributeError):
        return by_clock
    return by_events
