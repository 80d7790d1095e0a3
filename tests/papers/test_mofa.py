"""MoFa: quick checks hold and can fail, the flip on layouts made up, and (slow) the whole row."""

from collections.abc import Callable

import pytest

from moestro.config.plan import Plan
from moestro.predict.goodput import Reliability, best_interval, expected_time, goodput
from papers import mofa, mofa_flip
from papers.mofa_flip import Choice, check_flip, layouts

DEVICE_MTBF_S = mofa.ANCHOR_MTBF_S * mofa.GPUS


class TestClosedForm:
    def test_holds(self) -> None:
        differences = mofa.exact_against_simulation(runs=40)
        assert len(differences) == 15
        assert mofa.check_exact(differences).verdict == "holds"

    def test_a_formula_without_restarts_that_fail(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def wrong(work_s: float, interval_s: float, faults: Reliability) -> float:
            bare = Reliability(faults.mtbf_s, faults.checkpoint_s, 0.0)
            return expected_time(work_s, interval_s, bare) * (1 + faults.restart_s / faults.mtbf_s)

        monkeypatch.setattr(mofa, "expected_time", wrong)
        assert mofa.check_exact(mofa.exact_against_simulation(runs=40)).verdict == "holds in part"

    def test_first_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        check = mofa.check_first_order()
        assert check.verdict == "holds in part"
        assert "66% off at 0.2" in check.ours
        monkeypatch.setattr(mofa, "READERS_WASTE", {0.05: mofa.first_order_error(0.05)[0], 0.2: 0.66})
        assert mofa.check_first_order().verdict == "holds"

    def test_first_order_waste_by_hand(self) -> None:
        """C/M 0.2, R/M 0.1, τ 50.7: 2.2406 times the useful time, and 0.748 of waste to first order."""
        waste, whole = mofa.first_order_error(0.2)
        assert waste == pytest.approx(1.2406 / 0.748 - 1, abs=2e-3)
        assert whole == pytest.approx(2.2406 / 1.748 - 1, abs=2e-3)


class TestInterval:
    def test_chosen_is_near_the_simulated_best(self) -> None:
        excess = {0.2: mofa.over_simulated_best(0.2, work=20_000)}
        assert mofa.check_interval(excess).verdict == "holds"

    def test_a_bad_choice_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mofa, "best_interval", lambda faults: 2.0 * best_interval(faults))
        excess = {0.2: mofa.over_simulated_best(0.2, work=10_000)}
        assert excess[0.2] > 0.02
        assert mofa.check_interval(excess).verdict != "holds"

    def test_two_levels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert mofa.check_two_levels().verdict == "holds"
        right: Callable[..., float] = mofa.two_level_time
        monkeypatch.setattr(mofa, "two_level_time", lambda *given: 1.05 * right(*given))
        assert mofa.check_two_levels().verdict == "holds in part"


class TestAnchors:
    def test_intervals_agree_and_recoveries_do_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        check = mofa.check_anchors()
        assert check.verdict == "holds in part"
        assert "every 3.09 h" in check.ours
        assert "2.78 h" in check.note
        monkeypatch.setattr(mofa, "ANCHOR_RESTART_S", 60.0)
        assert mofa.check_anchors().verdict == "holds"
        monkeypatch.setattr(mofa, "ANCHOR_RESTART_S", 68 * 60.0)
        monkeypatch.setattr(mofa, "ANCHOR_MTBF_S", 24 * 3600.0)
        assert mofa.check_anchors().verdict == "does not hold"

    def test_longest_restart(self) -> None:
        restart_s = mofa.longest_restart(10_000.0, 0.9)
        faults = Reliability(10_000.0, mofa.STALL_S, restart_s)
        assert goodput(best_interval(faults), faults) == pytest.approx(0.9)


def choice(devices: int, step_s: float) -> Choice:
    return Choice(Plan(pp=8, dp=devices // 8, ep=64), step_s)


class TestFlip:
    def test_failures_turn_the_order_round(self) -> None:
        doubled = [choice(8192, 1.0), choice(16384, 0.5)]
        check = check_flip([choice(8192, 1.0), choice(16384, 0.95)], doubled, DEVICE_MTBF_S, 4080.0, 5.0)
        assert check.verdict == "holds"
        assert check.ours == "16,384 devices have the shortest step, 8,192 finish first"
        assert "shortest step is of 16,384 devices, and 16,384 finish first" in check.note

    def test_no_flip_where_more_devices_pay(self) -> None:
        found = [choice(8192, 1.0), choice(16384, 0.5)]
        assert check_flip(found, found, DEVICE_MTBF_S, 4080.0, 5.0).verdict == "holds in part"

    def test_useful_step_by_hand(self) -> None:
        faults = Reliability(mofa.ANCHOR_MTBF_S, 5.0, 4080.0)
        exact = expected_time(1.0, best_interval(faults), faults)
        assert choice(16384, 2.0).useful_step_s(DEVICE_MTBF_S, 5.0, 4080.0) == pytest.approx(2 * exact)

    def test_layouts_fit_the_devices(self) -> None:
        work = mofa_flip.workload()
        plans = list(layouts(work, 8192))
        assert len(plans) >= 6
        for plan in plans:
            assert plan.world_size == 8192
            assert work.global_batch_size % plan.dp == 0
            assert plan.vpp == 1 or plan.micro_batches(work) % plan.pp == 0
        assert 3 < mofa_flip.checkpoint_s(work) < 6


@pytest.mark.slow
def test_whole_paper() -> None:
    checks = mofa.run(lambda done, total, what: None).checks
    verdicts = ["holds", "holds in part", "holds", "holds", "holds", "holds in part"]
    assert [check.verdict for check in checks] == verdicts
