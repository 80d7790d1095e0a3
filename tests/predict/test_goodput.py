"""Goodput: the exact expectation against simulation, special cases and published figures."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import MoestroError
from moestro.predict.goodput import (
    Reliability,
    TwoLevel,
    best_interval,
    best_two_level,
    expected_time,
    first_order_waste,
    goodput,
    job_mtbf,
    simulate,
    simulate_two_level,
    two_level_time,
    young_interval,
)

HOUR = 3600.0
BAD = Reliability(mtbf_s=100, checkpoint_s=20, restart_s=10)


def test_the_exact_form_in_a_setting_worked_out_by_hand() -> None:
    # M = 100, C = 20, R = 10, τ = 60: 2.257 times the useful time.
    assert expected_time(1.0, 60, BAD) == pytest.approx(2.2574, abs=1e-4)
    assert young_interval(BAD) == pytest.approx(63.2, abs=0.1)
    assert best_interval(BAD) == pytest.approx(50.7, abs=0.1)


@pytest.mark.parametrize("share", [0.001, 0.02, 0.05, 0.2])
def test_simulation_agrees_within_two_percent(share: float) -> None:
    faults = Reliability(100, 100 * share, 15)
    interval = best_interval(faults)
    work = 400 * interval
    mean, error = simulate(work, interval, faults, runs=120, seed=3)
    assert mean == pytest.approx(expected_time(work, interval, faults), rel=0.02)
    assert error < 0.02 * mean


@given(st.floats(0.0005, 3.0), st.floats(0.0, 0.5))
def test_no_interval_beats_the_best(share: float, restart: float) -> None:
    faults = Reliability(1000, 1000 * share, 1000 * restart)
    best = best_interval(faults)
    least = expected_time(1.0, best, faults)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert expected_time(1.0, best * factor, faults) >= least * (1 - 1e-12)


def test_young_is_the_limit_of_short_checkpoints_and_first_order_waste_fails_with_long_ones() -> None:
    short = Reliability(1e6, 1.0, 0.0)
    assert best_interval(short) == pytest.approx(young_interval(short), rel=1e-3)
    waste = 1 - goodput(best_interval(short), short)
    assert first_order_waste(best_interval(short), short) == pytest.approx(waste, rel=0.01)
    exact = expected_time(1.0, 60, BAD) - 1
    assert first_order_waste(60, BAD) < 0.7 * exact


@pytest.mark.parametrize(
    ("mtbf_h", "recovery_h", "published"), [(24, 2.5, 88.0), (24, 1 / 6, 97.8), (80, 2.5, 96.0), (80, 1 / 6, 99.0)]
)
def test_goodputs_of_sigma(mtbf_h: float, recovery_h: float, published: float) -> None:
    faults = Reliability(mtbf_h * HOUR, 10.0, recovery_h * HOUR)
    assert 100 * goodput(best_interval(faults), faults) == pytest.approx(published, abs=1.0)


def test_a_job_fails_more_often_the_more_devices_it_has() -> None:
    assert job_mtbf(1e6, 1000) == 1000.0


def test_one_level_is_a_case_of_two() -> None:
    never = TwoLevel(1e15, 100, 0, 20, 0, 10)
    assert two_level_time(6000, 60, 1, never) == pytest.approx(expected_time(6000, 60, BAD), rel=1e-6)
    soft_only = TwoLevel(100, 1e15, 20, 0, 10, 0)
    assert two_level_time(6000, 60, 7, soft_only) == pytest.approx(expected_time(6000, 60, BAD), rel=1e-6)


@pytest.mark.parametrize(("interval", "every"), [(40.0, 5), (20.0, 1), (90.0, 12)])
def test_two_levels_against_simulation(interval: float, every: int) -> None:
    faults = TwoLevel(300, 1500, 3, 20, 8, 40)
    work = interval * every * 20
    mean, error = simulate_two_level(work, interval, every, faults, runs=150, seed=1)
    exact = two_level_time(work, interval, every, faults)
    assert abs(mean - exact) < max(4 * error, 0.02 * exact)
    assert mean == pytest.approx(exact, rel=0.05)


def test_copies_in_memory_pay_when_most_faults_are_soft() -> None:
    faults = TwoLevel(300, 3000, 1, 30, 5, 60)
    interval, every = best_two_level(faults)
    one_level = Reliability(1 / (1 / 300 + 1 / 3000), 30, 60)
    assert every > 1
    assert two_level_time(1.0, interval, every, faults) < expected_time(1.0, best_interval(one_level), one_level)


def test_hopeless_jobs_take_for_ever_and_bad_figures_are_refused() -> None:
    assert expected_time(1.0, 1e6, Reliability(1.0, 0, 0)) == math.inf
    assert goodput(1e6, Reliability(1.0, 0, 0)) == 0.0
    for make in (lambda: Reliability(0, 1, 1), lambda: Reliability(1, -1, 0), lambda: TwoLevel(1, 0, 1, 1, 1, 1)):
        with pytest.raises(MoestroError):
            make()
    with pytest.raises(MoestroError, match="interval"):
        expected_time(1.0, 0.0, BAD)
    with pytest.raises(MoestroError, match="every"):
        two_level_time(1.0, 1.0, 0, TwoLevel(1, 1, 1, 1, 1, 1))
