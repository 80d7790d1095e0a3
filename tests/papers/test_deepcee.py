"""DeepCEE: pipelines over slow links as recorded, and checks that can fail."""

from dataclasses import replace

import pytest

from papers import deepcee
from papers.deepcee import LINKS, Case

PLAIN = {0.0: 0.955, 0.5: 0.765, 1.0: 0.638, 2.0: 0.479, 4.0: 0.319}
RULE = {0.0: 0.955, 0.5: 0.842, 1.0: 0.846, 2.0: 0.842, 4.0: 0.817}


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return [Case.of(link) for link in LINKS]


class TestPipelines:
    def test_known_utilisation(self, cases: list[Case]) -> None:
        """Of an independent simulation of the same pipeline."""
        for case in cases:
            assert case.share("1F1B") == pytest.approx(PLAIN[case.link], abs=6e-4)
            assert case.share("rule") == pytest.approx(RULE[case.link], abs=6e-4)

    def test_ready_orders_keep_to_the_count(self, cases: list[Case]) -> None:
        for case in cases:
            peaks = case.results["rule"].peak_in_flight
            assert all(peak <= count for peak, count in zip(peaks, case.rule, strict=True))
        assert cases[-1].rule == (12, 9, 5, 1) == deepcee.counts(4.0)

    def test_without_links_both_are_1f1b(self, cases: list[Case]) -> None:
        first = cases[0]
        assert first.rule == first.ours == (4, 3, 2, 1)
        assert len({result.total_s for result in first.results.values()}) == 1


class TestChecks:
    def test_hold(self, cases: list[Case]) -> None:
        for check in (deepcee.check_speed, deepcee.check_rule, deepcee.check_order, deepcee.check_memory):
            assert check(cases).verdict == "holds"

    def test_a_change_of_the_links(self, cases: list[Case]) -> None:
        assert deepcee.check_change(cases).verdict == "holds"
        stuck = [replace(c, results={**c.results, "ours": c.results["1F1B"]}) for c in cases]
        assert deepcee.check_change(stuck).verdict == "holds in part"

    def test_planted_groups(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(deepcee, "DRAWS", 10)
        assert deepcee.check_groups().verdict == "holds"
        monkeypatch.setattr(deepcee, "GAP", 1.5)  # too little to tell from noise
        assert deepcee.check_groups().verdict == "does not hold"

    def test_fail(self, cases: list[Case]) -> None:
        def swapped(one: str, other: str) -> list[Case]:
            return [
                replace(case, results={**case.results, one: case.results[other], other: case.results[one]})
                for case in cases
            ]

        idle = [replace(case, results={**case.results, "rule": case.results["1F1B"]}) for case in cases]
        assert deepcee.check_speed(idle).verdict == "holds in part"
        assert deepcee.check_rule(idle).verdict == "holds in part"
        assert deepcee.check_memory(idle).verdict == "holds in part"
        assert deepcee.check_order(swapped("ours", "rule, fixed order")).verdict == "does not hold"
