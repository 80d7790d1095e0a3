"""DLRM model: each check holds, and does not with a planted error."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from moestro.hardware.curves.transfer import fit_transfer
from moestro.predict import timeline
from moestro.predict.timeline import NO_HOST, Op
from papers import dlrm_perf_model as model


class TestHost:
    def test_holds(self) -> None:
        ratios = model.host_ratios()
        assert model.check_host_counts(ratios).verdict == "holds"
        assert len(ratios) == 3

    def test_not_where_the_host_costs_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model, "HOST", NO_HOST)
        assert model.check_host_counts(model.host_ratios()).verdict == "holds in part"

    def test_not_where_it_always_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model, "HOST", model.HOST._replace(t4_s=1.0))
        assert model.check_host_counts(model.host_ratios()).verdict == "holds in part"


class TestWalk:
    def test_holds(self) -> None:
        assert model.check_walk().verdict == "holds"

    def test_a_walk_that_ignores_needs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = timeline.walk

        def walk(classes: Sequence[timeline.RankClass]) -> tuple[timeline.Timeline, ...]:
            return real([replace(c, ops=[op._replace(needs=()) for op in c.ops]) for c in classes])

        monkeypatch.setattr(model, "walk", walk)
        assert model.check_walk().verdict == "holds in part"

    def test_a_walk_whose_host_never_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def alone(ops: Sequence[Op]) -> timeline.Timeline:
            return timeline.walk([timeline.RankClass("", [op._replace(blocks=False) for op in ops])])[0]

        monkeypatch.setattr(model, "alone", alone)
        wrong = [name for name, (ours, right) in model.hand_cases().items() if ours != right]
        assert wrong == ["blocking copy"]


class TestCurve:
    def test_holds(self) -> None:
        assert model.check_curve(model.fitted_curves()).verdict == "holds"

    def test_not_with_a_form_that_has_no_peak(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model, "fit_transfer", lambda x, y, forms: fit_transfer(x, y, forms=("alpha_beta",)))
        assert model.check_curve(model.fitted_curves()).verdict == "does not hold"


class TestWorkloads:
    def test_holds(self) -> None:
        assert model.check_workloads().verdict == "holds"

    def test_a_table_too_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = model.counted_by_hand
        monkeypatch.setattr(
            model, "counted_by_hand", lambda shape, batch: real(replace(shape, tables=shape.tables + 1), batch)
        )
        assert model.check_workloads().verdict == "does not hold"


@pytest.mark.slow
def test_whole_row() -> None:
    result = model.run(lambda done, total, what: None)
    assert [check.verdict for check in result.checks] == ["holds"] * 4
    assert len(result.figures) == 18
