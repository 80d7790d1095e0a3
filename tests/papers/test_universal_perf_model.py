"""Universal model: each check holds, and does not with a planted error."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from moestro.hardware.curves.heldout import HeldOut
from moestro.predict import timeline
from papers import universal_perf_model as model


class TestLastArrival:
    def test_holds(self) -> None:
        check = model.check_last_arrival(model.slow_rank_errors(), model.moving_load_errors())
        assert check.verdict == "holds"

    def test_not_without_the_maximum(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model, "together", lambda ranks: max(model.each_alone(ranks)))
        check = model.check_last_arrival(model.slow_rank_errors(), model.moving_load_errors())
        assert check.verdict == "holds in part"

    def test_one_slow_rank(self) -> None:
        errors = model.slow_rank_errors()
        assert errors[2.0][1] == pytest.approx(1 - (1 + 0.4) / (2 + 0.4))


class TestWalk:
    def test_holds(self) -> None:
        assert model.check_hand().verdict == "holds"

    def test_not_when_everyone_walks_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def walk(classes: Sequence[timeline.RankClass]) -> tuple[timeline.Timeline, ...]:
            return tuple(timeline.walk([each])[0] for each in classes)

        monkeypatch.setattr(model, "walk", walk)
        assert model.check_hand().verdict == "holds in part"
        assert not model.names_deadlock()


class TestCurves:
    def test_recovery(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert model.check_recovery().verdict == "holds"
        real = model.fit_transfer
        monkeypatch.setattr(model, "fit_transfer", lambda x, y, forms: real(x, y, forms=("alpha_beta",)))
        assert model.check_recovery().verdict != "holds"

    def test_table(self) -> None:
        found = model.table_errors()
        assert found["alpha_beta"].median == pytest.approx(0.0761, abs=5e-4)
        assert model.check_table(found).verdict == "holds"
        assert model.check_table({**found, "alpha_beta": HeldOut(0.13, 0.3, 20)}).verdict == "holds in part"

    def test_constants(self, monkeypatch: pytest.MonkeyPatch) -> None:
        check = model.check_constants()
        assert check.verdict == "arithmetic does not close"
        assert "not so: A100-40." in check.note
        monkeypatch.setitem(model.PUBLISHED, "A100-40", replace(model.PUBLISHED["A100-40"], latency_log2=16))
        assert model.check_constants().verdict == "holds"


@pytest.mark.slow
def test_whole_row() -> None:
    result = model.run(lambda done, total, what: None)
    assert [check.verdict for check in result.checks] == ["holds"] * 4 + ["arithmetic does not close"]
    assert len(result.figures) == 8
