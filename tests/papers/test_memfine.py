"""MemFine: checks that can fail, a small layer, and (slow) the whole row."""

from dataclasses import replace

import pytest
import torch

from papers import memfine, memfine_planner
from papers.memfine import Step, Storm, StormStep, fit_affine

PEAKS = {1: 110, 2: 60, 4: 35, 8: 22, 16: 16}


class TestFit:
    def test_finds_the_form_it_was_made_of(self) -> None:
        fit = fit_affine({c: 3 + 20 / c for c in (1, 2, 4, 8)})
        assert (fit.a, fit.b, fit.residual) == pytest.approx((3, 20, 0), abs=1e-9)

    def test_published_table(self) -> None:
        fit = fit_affine(memfine.PUBLISHED)
        assert (fit.a, fit.b) == pytest.approx((0.95, 21.95), abs=0.01)


class TestChecks:
    def test_affine(self) -> None:
        curved = {c: 1000 // c**2 for c in (1, 2, 4, 8)}
        assert memfine.check_affine(PEAKS, PEAKS).verdict == "holds"
        assert memfine.check_affine(curved, PEAKS).verdict == "does not hold"
        assert memfine.check_affine(PEAKS, curved).verdict == "does not hold"

    def test_reduction(self) -> None:
        small, none = {1: 100, 2: 80, 8: 70}, {1: 100, 2: 100, 8: 100}
        assert memfine.check_reduction(PEAKS, small).verdict == "holds"
        assert memfine.check_reduction(small, PEAKS).verdict == "holds in part"
        assert memfine.check_reduction(none, PEAKS).verdict == "does not hold"
        assert memfine.check_reduction(PEAKS, none).verdict == "does not hold"

    def test_equal(self) -> None:
        plain = Step(0, 1.0, [torch.ones(2), torch.ones(3)])
        assert memfine.check_equal(plain, {1: plain, 2: plain}).verdict == "holds"
        off = replace(plain, gradients=[torch.ones(2), torch.ones(3) + 1e-5])
        assert memfine.check_equal(plain, {1: plain, 2: off}).verdict == "does not hold"
        assert memfine.check_equal(plain, {1: replace(plain, loss=1 + 1e-9), 2: plain}).verdict == "does not hold"

    def test_computed(self) -> None:
        assert memfine.check_table().verdict == "holds"
        assert memfine.check_bound().verdict == "arithmetic does not close"
        assert memfine.check_layout().verdict == "arithmetic does not close"


def storms() -> list[Storm]:
    budgets = [800, 400, 200, 100]
    steps = [StormStep("1 chunk", 1, 0, 700)]
    steps += [StormStep("auto", c, 0, b - 20) for c, b in zip(memfine.BINS, budgets, strict=True)]
    idle = [replace(step, peak=5) for step in steps]
    return [Storm(budgets, [1, 2, 4, 8], steps), Storm(budgets, [1, 1, 1, 1], idle)]


class TestStorm:
    def test_holds(self) -> None:
        assert memfine.check_budget(storms()).verdict == "holds"
        assert memfine.check_agreement(storms()).verdict == "holds"

    @pytest.mark.parametrize(
        ("step", "change"),
        [(2, {"peak": 401}), (3, {"chunks": 8}), (4, {"over_budget": 1}), (0, {"peak": 300})],
        ids=["over budget", "finer than needed", "fits nothing", "no storm"],
    )
    def test_budget_fails(self, step: int, change: dict[str, int]) -> None:
        seen = storms()
        seen[0].steps[step] = replace(seen[0].steps[step], **change)
        assert memfine.check_budget(seen).verdict == "does not hold"

    def test_ranks_disagree(self) -> None:
        seen = storms()
        seen[1].steps[2] = replace(seen[1].steps[2], chunks=1)
        assert memfine.check_agreement(seen).verdict == "does not hold"

    def test_agreement_is_no_news_where_loads_are_equal(self) -> None:
        seen = storms()
        assert memfine.check_agreement([seen[0], replace(seen[0])]).verdict == "does not hold"


@pytest.mark.parametrize("layer", [memfine.WIDE, memfine.NARROW], ids=["top-8", "top-2"])
def test_small_layer(layer: memfine.Layer) -> None:
    layer = replace(layer, tokens=1024)
    steps = {chunks: memfine.layer_step(layer, chunks) for chunks in (1, 4)}
    assert memfine.check_equal(memfine.layer_step(layer, None), steps).verdict == "holds"
    assert steps[4].peak < 0.7 * steps[1].peak


@pytest.mark.slow
def test_whole_row() -> None:
    result = memfine.run(lambda done, total, what: None)
    closing = ["holds", *["arithmetic does not close"] * 2, "not reproducible here"]
    assert [check.verdict for check in result.checks] == ["holds"] * 5 + closing
    assert len(result.figures) == 2 * len(memfine.CHUNKS) + 1 + len(memfine.BINS)


class TestPlanner:
    def test_rule_by_hand(self) -> None:
        """64 - 43 - 1 = 20 GB of room: 21.95 need two chunks, 19 one, 70 four; no room, none."""
        assert [memfine_planner.rule(43.0, 1.0, 1.0, rows) for rows in (19.0, 21.95, 70.0, 161.0)] == [1, 2, 4, None]
        assert memfine_planner.rule(64.0, 1.0, 1.0, 1.0) is None

    def test_verdicts(self) -> None:
        a, b = memfine.published_fit()
        assert memfine_planner.check_trains(a, b).verdict == "holds"
        assert memfine_planner.check_trains(a, b + 2).verdict == "holds in part"
        rule = memfine_planner.check_rule(a, b)
        assert (rule.verdict, "c = 2 and 1 with all 64 GB" in rule.ours) == ("holds in part", True)
        assert memfine_planner.check_equation(a).verdict == "holds in part"

    def test_our_planner(self) -> None:
        found = memfine_planner.check_planner(*memfine.published_fit())
        assert "the same in 72 of 82 cases" in found.ours
