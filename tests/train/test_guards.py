"""Verdicts on steps from numbers alone."""

import json
import math
import random
from dataclasses import asdict

import pytest

from moestro.checkpoint.manifest import Progress, StepFigures
from moestro.config.guard import GuardConfig
from moestro.train.guards import (
    LEAST_LOSS_SPREAD,
    deepest_valley,
    odd_ones,
    odd_updates,
    robust_sigmas,
    spike,
    uneven_experts,
)

DEFAULT = GuardConfig()


def falling(steps: int, seed: int, noise: float = 0.05) -> list[StepFigures]:
    """A healthy run: a power law with normal noise, and log-normal gradient norms."""
    rng = random.Random(seed)
    losses = (2 + 4 * (step + 1) ** -0.3 + rng.gauss(0, noise) for step in range(steps))
    return [StepFigures(i + 1, loss, math.exp(rng.gauss(0, 0.3))) for i, loss in enumerate(losses)]


def alarms(run: list[StepFigures], settings: GuardConfig = DEFAULT) -> list[int]:
    found = []
    for i, (step, loss, norm) in enumerate(run):
        if spike(run[max(0, i - settings.window) : i], loss, norm, settings) is not None:
            found.append(step)
    return found


class TestRobustSigmas:
    def test_is_the_standard_deviation_of_normal_numbers(self) -> None:
        rng = random.Random(0)
        values = [rng.gauss(10, 2) for _ in range(20_000)]
        assert robust_sigmas(values, 16, 1e-9) == pytest.approx(3, rel=0.05)
        assert robust_sigmas(values, 4, 1e-9) == pytest.approx(-3, rel=0.05)

    def test_outliers_among_the_history_change_little(self) -> None:
        clean = [1.0 + 0.01 * (i % 7) for i in range(100)]
        assert robust_sigmas([*clean, *[1e9] * 10], 2.0, 1e-9) > 20

    def test_a_flat_history_has_the_least_spread(self) -> None:
        assert robust_sigmas([5.0] * 10, 5.5, 0.05) == pytest.approx(10)

    @pytest.mark.parametrize("value", [math.inf, math.nan])
    def test_not_finite_is_infinitely_far(self, value: float) -> None:
        assert robust_sigmas([1.0, 2.0], value, 0.1) == math.inf


class TestSpike:
    def test_no_false_alarm_in_ten_healthy_seeds(self) -> None:
        assert [alarms(falling(500, seed)) for seed in range(10)] == [[]] * 10

    def test_two_kinds_of_text_are_no_spikes(self) -> None:
        """One step in ten has text with another mode of the loss, many deviations away."""
        run = falling(600, 0, noise=0.01)
        mixed = [f._replace(loss=f.loss + 2.0 * (i % 10 == 0)) for i, f in enumerate(run)]
        assert alarms(mixed) == []
        assert robust_sigmas([f.loss for f in mixed[472:600]], mixed[590].loss, 0.01) > 6

    def test_a_planted_spike_is_seen_at_its_step(self) -> None:
        run = falling(300, 1)
        run[200] = run[200]._replace(loss=run[200].loss + 1.0)
        assert alarms(run) == [201]
        verdict = spike(run[72:200], run[200].loss, 1.0, DEFAULT)
        assert verdict is not None
        assert (verdict.signal, verdict.roll_back) == ("loss_spike", True)
        assert verdict.evidence["sigmas"] > 6

    def test_not_before_half_the_window(self) -> None:
        history = [StepFigures(i, 2.0, 1.0) for i in range(63)]
        assert spike(history, 100.0, 1.0, DEFAULT) is None
        assert spike([*history, StepFigures(63, 2.0, 1.0)], 100.0, 1.0, DEFAULT) is not None

    def test_the_least_spread_bounds_it_from_below(self) -> None:
        history = [StepFigures(i, 2.0, 1.0) for i in range(128)]
        assert spike(history, 2.0 * (1 + 5.9 * LEAST_LOSS_SPREAD), 1.0, DEFAULT) is None
        assert spike(history, 2.0 * (1 + 6.1 * LEAST_LOSS_SPREAD), 1.0, DEFAULT) is not None

    def test_gradient_norms_are_only_noted_unless_asked(self) -> None:
        run = falling(128, 2)
        verdict = spike(run, run[-1].loss, 1e4, DEFAULT)
        assert verdict is not None
        assert (verdict.signal, verdict.roll_back) == ("grad_spike", False)
        asked = spike(run, run[-1].loss, 1e4, GuardConfig(grad_action="roll_back"))
        assert asked is not None
        assert asked.roll_back
        assert spike(run, run[-1].loss, 1e4, GuardConfig(grad_sigma=None)) is None

    def test_a_gradient_of_zero_is_no_error(self) -> None:
        assert spike([StepFigures(i, 2.0, 0.0) for i in range(128)], 2.0, 0.0, DEFAULT) is None


class TestValley:
    def test_rising_falling_and_flat_have_none(self) -> None:
        for norms in ([1.0, 2, 3, 4], [4.0, 3, 2, 1], [1.0] * 5, [1.0, 3, 1], [1.0], []):
            assert deepest_valley(norms) == (0, 0.0)

    def test_the_deepest_against_the_lower_rim(self) -> None:
        assert deepest_valley([1.0, 0.5, 2.0]) == (1, 0.5)
        layer, depth = deepest_valley([1.0, 0.9, 1.2, 0.6, 0.8, 1.1])
        assert (layer, depth) == (3, pytest.approx(1 - 0.6 / 1.1))


class TestExperts:
    def test_by_load_over_the_mean(self) -> None:
        shares = [0.0, 0.01, 0.5, *[0.49 / 13] * 13]
        assert uneven_experts(shares, DEFAULT) == ([0], [2])
        assert uneven_experts([1 / 8] * 8, DEFAULT) == ([], [])

    def test_a_perfect_balance_loss_hides_nothing(self) -> None:
        """SIGMA: with small logits E Σ f P is 1.00 whatever the load is."""
        shares = [0.0] * 5 + [1 / 91] * 91
        probabilities = [1 / 96] * 96
        assert 96 * sum(f * p for f, p in zip(shares, probabilities, strict=True)) == pytest.approx(1)
        assert uneven_experts(shares, DEFAULT)[0] == [0, 1, 2, 3, 4]


class TestOddOnes:
    def test_majority(self) -> None:
        assert odd_ones([7, 7, 7]) == []
        assert odd_ones([7, 8, 7]) == [1]
        assert odd_ones([1, 7, 7, 2, 7]) == [0, 3]

    def test_without_a_majority_all_are_named(self) -> None:
        assert odd_ones([7, 8]) == [0, 1]
        assert odd_ones([7, 7, 8, 8]) == [0, 1, 2, 3]


def test_updates_far_from_their_size() -> None:
    lrs = dict.fromkeys("abcd", 1e-3)
    assert odd_updates({"a": 1e-3, "b": 0.0, "c": 1e-1, "d": math.nan}, lrs).keys() == {"c", "d"}
    assert odd_updates({"a": 0.0}, {"a": 0.0}) == {}


def test_progress_comes_back_from_a_manifest() -> None:
    progress = Progress(5, 100, 1.5, (3, 9), (StepFigures(4, 2.25, 0.1),))
    assert Progress.of(json.loads(json.dumps(asdict(progress)))) == progress
    assert Progress.of({"step": 1, "tokens": 2, "train_time_s": 3.0}) == Progress(1, 2, 3.0)
