"""Maya: checks that can fail, on made-up results; what is cheap is run as it is."""

import pytest

from moestro.config.plan import Plan
from moestro.predict.oracle import Split
from papers import maya, maya_search
from papers.maya import HeldBytes, Traced
from papers.maya_search import Point


def _splits(error: float, left: float) -> dict[str, Split]:
    return {name: Split(1.0, (1 + error, 1 + error / 2, 1 + left, 1 + left)) for name in ("a", "b", "c")}


class TestMeasured:
    def test_fidelity(self) -> None:
        verdicts = [maya.check_fidelity(_splits(error, 0), 0.1).verdict for error in (0.04, -0.1, 0.2)]
        assert verdicts == ["holds", "holds in part", "does not hold"]

    def test_oracle(self) -> None:
        assert maya.check_oracle(_splits(0.5, -0.04)).verdict == "holds"
        assert maya.check_oracle(_splits(0.0, 0.06)).verdict == "does not hold"

    def test_memory(self) -> None:
        right, wrong = HeldBytes(102, 100), HeldBytes(90, 100)
        verdicts = [maya.check_memory(held).verdict for held in ({"a": right}, {"a": right, "b": wrong}, {"b": wrong})]
        assert verdicts == ["holds", "holds in part", "does not hold"]


class TestSimulated:
    def test_ranks(self) -> None:
        assert maya.check_ranks(Traced(2, 2, 8, (1.0, 1.0))).verdict == "holds"
        assert maya.check_ranks(Traced(2, 2, 8, (1.0, 1.01))).verdict == "holds in part"
        assert maya.check_ranks(Traced(8, 2, 8, (1.0, 1.01))).verdict == "does not hold"

    def test_semantics(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert maya.check_semantics().verdict == "holds"
        cases = maya.semantic_cases()
        monkeypatch.setattr(maya, "semantic_cases", lambda: {**cases, "late": (5.0, 6.0)})
        found = maya.check_semantics()
        assert found.verdict == "does not hold"
        assert found.note.startswith("Wrong: late.")

    def test_routing(self) -> None:
        even, skewed = [4.0, 4.0], [6.0, 2.0]
        assert maya.check_routing({"balanced": even, "power law": skewed}).verdict == "holds"
        assert maya.check_routing({"balanced": skewed, "power law": even}).verdict == "does not hold"


def _point(closed_s: float, exact_s: float, fits: bool = True, **plan: object) -> Point:
    return Point(Plan.model_validate(plan), closed_s, exact_s, fits)


class TestSearch:
    def test_the_space(self) -> None:
        plans = maya_search.space()
        assert len(plans) == len(set(plans)) == 192
        assert {plan.world_size for plan in plans} == {maya_search.DEVICES}

    def test_regret(self) -> None:
        near = [_point(i, i) for i in range(1, 21)]
        assert maya_search.check_search(near).verdict == "holds"
        misled = [_point(21 - i, i) for i in range(1, 21)]
        assert maya_search.check_search(misled).verdict == "does not hold"
        assert "0.00%" in maya_search.check_search([_point(0.5, 0.1, fits=False), *near]).ours

    def test_rules(self) -> None:
        """Each prunes its neighbour, and is wrong where that fits, or is faster."""
        slow = [_point(1, 1, zero=0), _point(1, 2, zero=1)]
        assert maya_search.check_rules(slow).verdict == "holds"
        fast = [_point(1, 2, zero=0), _point(1, 1, zero=1)]
        found = maya_search.check_rules(fast)
        assert found.verdict == "holds in part"
        assert "1 of 1 wrong, by 50.0% at most" in found.note
        assert "pruned by 1" in found.note

    @pytest.mark.parametrize(
        ("number", "known", "pruned"),
        [
            (0, {"recompute": "block"}, {"recompute": "none"}),
            (1, {"sequence_parallel": True}, {"sequence_parallel": False}),
        ],
    )
    def test_rules_of_memory(self, number: int, known: dict[str, object], pruned: dict[str, object]) -> None:
        for fits in (False, True):
            found = [_point(1, 1, False, **known), _point(1, 1, fits, **pruned)]
            assert bool(maya_search.rules(found)[number].wrong) is fits

    def test_more_micro_batches(self) -> None:
        found = [_point(1, 2, micro_batch_size=4), _point(1, 1, micro_batch_size=2), _point(1, 3, micro_batch_size=1)]
        rule = maya_search.rules(found)[3]
        assert len(rule.pairs) == 3
        assert rule.wrong == [0.5]
