"""SIGMA: checks that can fail, ranks that collect garbage, and (slow) the whole row."""

import pytest

from papers import sigma
from papers.sigma import StandIn


class TestFailures:
    def test_goodput(self) -> None:
        exact = {case: sigma.of(*case) for case in sigma.CASES}
        assert sigma.check_goodput(exact).verdict == "holds"
        assert sigma.check_goodput(dict.fromkeys(exact, 0.5)).verdict == "holds in part"

    def test_simulated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sigma, "JOBS", 30)
        assert sigma.simulated_goodput(24, 2.5) == pytest.approx(sigma.of(24, 2.5), abs=0.02)

    def test_recovery(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert sigma.check_recovery().verdict == "holds"
        # Recoveries that fell to four fifths only are worth less than failures that fell to three tenths.
        monkeypatch.setattr(sigma, "CASES", {(24, 2.5): 0, (24, 2.0): 0, (80, 2.5): 0, (80, 2.0): 0})
        assert sigma.check_recovery().verdict == "holds in part"

    def test_scaling(self, monkeypatch: pytest.MonkeyPatch) -> None:
        check = sigma.check_scaling()
        assert check.verdict == "does not hold"
        assert "3.35 h" in check.ours
        monkeypatch.setattr(sigma, "MEDIAN_HOURS", 3.2)
        assert sigma.check_scaling().verdict == "holds"

    def test_utilisation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        check = sigma.check_utilisation()
        assert check.verdict == "holds"
        assert "14.5 minutes" in check.ours
        monkeypatch.setattr(sigma, "UTILISATION", 0.99)
        assert sigma.check_utilisation().verdict == "holds in part"


class TestCollection:
    @pytest.fixture(autouse=True)
    def short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sigma, "STEPS", 40)

    @pytest.mark.parametrize("ranks", [1, 4])
    def test_at_once_costs_one_pause_a_period(self, ranks: int) -> None:
        assert sigma.collected(ranks, at_once=True) == pytest.approx(40 / (40 + 2 * sigma.PAUSE_S))

    def test_apart_costs_a_pause_for_each_step_in_which_somebody_collects(self) -> None:
        lost = 40 / sigma.collected(4, at_once=False) - 40
        steps = lost / sigma.PAUSE_S
        assert steps == pytest.approx(round(steps))
        assert 2 < steps <= 8

    def test_check(self) -> None:
        found = {(4, False): 0.9, (4, True): 0.97, (sigma.MANY, False): 0.7, (sigma.MANY, True): 0.97}
        assert sigma.check_collection(found).verdict == "holds"
        assert sigma.check_collection({**found, (4, True): 0.9}).verdict == "holds in part"


def test_utilisation_of_an_unknown_shape_is_not_claimed() -> None:
    assert sigma.check_mfu(StandIn(0.2108, fits=False)).verdict == "not reproducible here"


@pytest.mark.slow
def test_whole_paper() -> None:
    verdicts = [check.verdict for check in sigma.run(lambda done, total, what: None).checks]
    assert verdicts == ["holds", "holds", "does not hold", "holds", "holds", "not reproducible here"]
