"""Timing, by a clock that only moves when a test says so."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.measure.timing import FURTHER_ROUNDS, MOST_TIMINGS, TOO_COARSE, Case, measure_cases

CPU = torch.device("cpu")


class Clock:
    """Seconds, shown in steps of `tick`; reading takes `reading_s`."""

    def __init__(self, tick: float = 0.0, reading_s: float = 1e-9) -> None:
        self.now, self.tick, self.reading_s = 0.0, tick, reading_s

    def __call__(self) -> float:
        self.now += self.reading_s
        return math.floor(self.now / self.tick) * self.tick if self.tick else self.now


class Op:
    """An operation that takes seconds(number of its visit from 0, number of its call from 0), and counts both."""

    def __init__(self, clock: Clock, seconds: Callable[[int, int], float], name: str = "op") -> None:
        self.clock, self.seconds, self.name = clock, seconds, name
        self.visits, self.calls, self.log = 0, 0, list[str]()

    def case(self, flops: float | None = None, bytes_moved: float | None = None) -> Case:
        return Case(self.name, {"n": 1}, flops, bytes_moved, self.prepare)

    def prepare(self) -> Callable[[], None]:
        self.log.append(self.name)
        self.visits += 1
        return self.call

    def call(self) -> None:
        self.clock.now += self.seconds(self.visits - 1, self.calls)
        self.calls += 1


def test_a_steady_operation_is_timed_exactly_in_all_rounds() -> None:
    clock = Clock()
    op = Op(clock, lambda visit, call: 1e-3)
    (sample,), notes = measure_cases([op.case(flops=2e6, bytes_moved=4e6)], CPU, seconds_per_case=0.03, clock=clock)
    assert (sample.median_s, sample.low_s, sample.high_s) == pytest.approx((1e-3, 1e-3, 1e-3), rel=1e-4)
    assert not sample.noisy
    assert notes == []
    assert op.visits == 3
    assert sample.repeats == pytest.approx(30, abs=3)
    assert op.calls == sample.repeats + 3  # a first call in each round is not counted
    assert sample.flops_per_s == pytest.approx(2e9, rel=1e-4)
    assert sample.bytes_per_s == pytest.approx(4e9, rel=1e-4)


def test_rounds_go_through_all_cases() -> None:
    clock, order = Clock(), list[str]()
    ops = [Op(clock, lambda visit, call: 1e-3, name) for name in "abc"]
    for op in ops:
        op.log = order
    measure_cases([op.case() for op in ops], CPU, seconds_per_case=0.01, clock=clock)
    assert "".join(order) == "abc" * 3


def test_a_short_operation_is_timed_in_batches() -> None:
    clock = Clock()
    op = Op(clock, lambda visit, call: 1e-6)
    (sample,), _ = measure_cases([op.case()], CPU, seconds_per_case=0.003, clock=clock)
    assert sample.median_s == pytest.approx(1e-6, rel=1e-3)
    assert op.calls / sample.repeats >= 50  # a timing of 50 µs or more
    assert sample.repeats >= 20


def test_no_more_timings_than_tell_something() -> None:
    clock = Clock()
    (sample,), _ = measure_cases(
        [Op(clock, lambda visit, call: 1e-4).case()], CPU, seconds_per_case=10, rounds=2, clock=clock
    )
    assert sample.repeats == 2 * MOST_TIMINGS


def test_a_coarse_clock_gives_the_same_time() -> None:
    clock = Clock(tick=1e-3, reading_s=1e-7)
    op = Op(clock, lambda visit, call: 7e-5)
    (sample,), _ = measure_cases([op.case()], CPU, seconds_per_case=1.0, clock=clock)
    assert sample.median_s == pytest.approx(7e-5, rel=0.02)


def test_a_clock_that_stands_still_leaves_the_case_out() -> None:
    samples, notes = measure_cases(
        [Op(Clock(), lambda visit, call: 0.0).case()], CPU, seconds_per_case=0.01, clock=lambda: 5.0
    )
    assert samples == []
    assert len(notes) == 1
    assert TOO_COARSE in notes[0]


def test_drift_shows_in_the_spread_of_every_case() -> None:
    clock = Clock()
    ops = [Op(clock, lambda visit, call: 1e-3 * (1 + 0.5 * visit), name) for name in "ab"]
    samples, _ = measure_cases([op.case() for op in ops], CPU, seconds_per_case=0.03, clock=clock)
    assert [op.visits for op in ops] == [3 + FURTHER_ROUNDS] * 2
    for sample in samples:
        assert sample.noisy
        assert sample.low_s is not None
        assert sample.high_s is not None
        assert sample.low_s < 1.6e-3
        assert sample.high_s > 2.4e-3


def test_a_lone_spike_changes_neither_median_nor_verdict() -> None:
    clock = Clock()
    op = Op(clock, lambda visit, call: 0.05 if call == 7 else 1e-3)
    (sample,), _ = measure_cases([op.case()], CPU, seconds_per_case=0.3, clock=clock)
    assert sample.median_s == pytest.approx(1e-3, rel=1e-4)
    assert not sample.noisy
    assert op.visits == 3


def test_a_disturbed_round_is_outweighed_by_further_ones() -> None:
    clock = Clock()
    restless = Op(clock, lambda visit, call: 4e-3 if visit == 0 else 1e-3, "restless")
    steady = Op(clock, lambda visit, call: 1e-3, "steady")
    samples, _ = measure_cases([restless.case(), steady.case()], CPU, seconds_per_case=0.3, clock=clock)
    assert steady.visits == 3
    assert 3 < restless.visits < 3 + FURTHER_ROUNDS
    assert [s.noisy for s in samples] == [False, False]


def test_an_operation_that_stays_restless_is_marked_and_given_up() -> None:
    clock = Clock()
    op = Op(clock, lambda visit, call: 1e-3 if call % 2 else 2e-3)
    (sample,), _ = measure_cases([op.case()], CPU, seconds_per_case=0.03, clock=clock)
    assert sample.noisy
    assert op.visits == 3 + FURTHER_ROUNDS


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError('"addmm_impl" not implemented for this dtype\nsecond line'),
        torch.OutOfMemoryError("out of memory"),
        MemoryError(),
    ],
)
@pytest.mark.parametrize("fails_at", ["prepare", "call", "second round"])
def test_a_case_that_raises_is_left_out_with_its_reason(error: Exception, fails_at: str) -> None:
    clock = Clock()
    good = Op(clock, lambda visit, call: 1e-3, "good")

    def fail(visit: int, call: int) -> float:
        if fails_at == "call" or visit == 1:
            raise error
        return 1e-3

    bad = Op(clock, fail, "bad")

    def prepare() -> Callable[[], None]:
        if fails_at == "prepare":
            bad.visits += 1
            raise error
        return bad.prepare()

    case = Case("bad", {"n": 1}, None, None, prepare)
    samples, notes = measure_cases([case, good.case()], CPU, seconds_per_case=0.01, clock=clock)
    assert [s.op for s in samples] == ["good"]
    assert len(notes) == 1
    assert "bad n=1" in notes[0]
    assert (str(error).splitlines() or ["MemoryError"])[0] in notes[0]
    assert "second line" not in notes[0]
    assert bad.visits == (2 if fails_at == "second round" else 1)  # not tried again


def test_ctrl_c_ends_the_measurement() -> None:
    def interrupted(visit: int, call: int) -> float:
        raise KeyboardInterrupt

    clock = Clock()
    with pytest.raises(KeyboardInterrupt):
        measure_cases([Op(clock, interrupted).case()], CPU, seconds_per_case=0.01, clock=clock)


def test_nothing_starts_after_the_deadline() -> None:
    clock = Clock()
    ops = [Op(clock, lambda visit, call: 0.1, name) for name in "abcd"]
    cases = [op.case() for op in ops]
    samples, notes = measure_cases(cases, CPU, seconds_per_case=0.01, clock=clock, deadline=0.35)
    assert [s.op for s in samples] == ["a", "b"]  # each takes a first call and a timing
    assert [op.visits for op in ops] == [1, 1, 0, 0]
    assert notes == ["left out, as time was up: c n=1 and 1 more"]


def test_the_deadline_keeps_what_was_timed_before() -> None:
    clock = Clock()
    op = Op(clock, lambda visit, call: 0.1)
    (sample,), notes = measure_cases([op.case()], CPU, seconds_per_case=0.01, clock=clock, deadline=0.3)
    assert sample.repeats == 2
    assert notes == []


def test_progress_counts_up_to_the_end() -> None:
    clock, seen = Clock(), list[tuple[int, int, str]]()
    ops = [Op(clock, lambda visit, call: 1e-3, "a"), Op(clock, lambda visit, call: 1e-3 if call % 2 else 2e-3, "b")]
    measure_cases(
        [op.case() for op in ops], CPU, seconds_per_case=0.01, clock=clock, progress=lambda *now: seen.append(now)
    )
    assert [done for done, _, _ in seen] == list(range(len(seen)))
    assert all(done <= total for done, total, _ in seen)
    assert seen[0] == (0, 6, "a n=1")
    assert seen[-1][0] == seen[-1][1] == 6 + FURTHER_ROUNDS


def test_no_cases_no_samples() -> None:
    assert measure_cases([], CPU, seconds_per_case=1.0) == ([], [])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(1e-4, 1e-1), min_size=1, max_size=40))
def test_percentiles_are_of_all_timings(seconds: list[float]) -> None:
    clock, timed = Clock(), list[float]()

    def take(visit: int, call: int) -> float:
        timed.append(seconds[call % len(seconds)])
        return timed[-1]

    op = Op(clock, take)
    firsts = list[int]()

    def prepare() -> Callable[[], None]:
        firsts.append(len(timed))
        return op.prepare()

    case = Case("op", {"n": 1}, None, None, prepare)
    (sample,), _ = measure_cases([case], CPU, seconds_per_case=0.1, clock=clock)
    counted = [s for i, s in enumerate(timed) if i not in firsts]
    assert sample.repeats == len(counted)
    low, median, high = np.percentile(counted, (10, 50, 90))
    assert (sample.low_s, sample.median_s, sample.high_s) == pytest.approx((low, median, high), rel=1e-4)
    assert sample.noisy == bool((high - low) / median > 0.25)


def test_the_real_clock_gives_the_order_of_magnitude() -> None:
    a = torch.ones(64, 64)
    out = torch.empty(64, 64)
    case = Case("gemm", {"m": 64}, 2.0 * 64**3, None, lambda: lambda: torch.mm(a, a, out=out))
    (sample,), _ = measure_cases([case], CPU, seconds_per_case=0.02)
    assert 1e-7 < sample.median_s < 0.1


class DeviceEvent:
    """A device whose work takes twice the time that the host's clock shows; one that has events, or has none."""

    clock = Clock()
    times = True

    def __init__(self, device: torch.device, enable_timing: bool) -> None:
        if not self.times:
            raise RuntimeError("this device has no timing events")
        self.at = math.nan

    def record(self) -> None:
        self.at = self.clock.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "DeviceEvent") -> float:
        return 2e3 * (other.at - self.at)


@pytest.mark.parametrize(("times", "expected_s"), [(True, 2e-3), (False, 1.1e-3)])
def test_an_accelerators_own_events_time_it_where_it_has_them(
    monkeypatch: pytest.MonkeyPatch, times: bool, expected_s: float
) -> None:
    clock = Clock()
    monkeypatch.setattr(DeviceEvent, "clock", clock)
    monkeypatch.setattr(DeviceEvent, "times", times)
    monkeypatch.setattr(torch, "Event", DeviceEvent)

    def synchronize(device: torch.device) -> None:
        clock.now += 1e-4  # what the host waits for the device to be done

    monkeypatch.setattr("moestro.measure.timing.synchronize", synchronize)
    op = Op(clock, lambda visit, call: 1e-3)
    (sample,), _ = measure_cases([op.case()], torch.device("cuda"), seconds_per_case=0.02, clock=clock)
    assert sample.median_s == pytest.approx(expected_s, rel=1e-3)


def test_memory_that_a_failed_case_took_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = list[bool]()
    monkeypatch.setattr(torch, "Event", DeviceEvent)
    monkeypatch.setattr("moestro.measure.timing.synchronize", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: given_back.append(True))

    def full(visit: int, call: int) -> float:
        raise torch.OutOfMemoryError("out of memory")

    clock = Clock()
    _, notes = measure_cases([Op(clock, full).case()], torch.device("cuda"), seconds_per_case=0.01, clock=clock)
    assert notes == ["left out: op n=1: out of memory"]
    assert given_back == [True]
