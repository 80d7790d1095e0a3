"""EMO: the saving by the published figures, checks that can fail, and (slow) the whole row."""

import pytest

from papers import emo
from papers.emo import EXPERTS, Held


def steps(ratio: float, logarithmic: bool = False) -> dict[int, float]:
    return dict(zip(EXPERTS, emo.between(ratio, logarithmic), strict=True))


class TestSaving:
    def test_by_hand(self) -> None:
        assert emo.saving([1, 1, 1, 1, 1]) == pytest.approx(0)
        assert emo.saving([0, 0, 0, 0, 1]) == pytest.approx(1 - 0.286 / 0.999)
        assert emo.saving(emo.between(1.08, True)) == pytest.approx(0.033, abs=0.001)
        assert emo.saving(emo.between(1.08, False)) == pytest.approx(0.042, abs=0.001)

    def test_step_times_between(self) -> None:
        assert emo.between(1.4, True) == pytest.approx([1, 1.1, 1.2, 1.3, 1.4])
        assert emo.between(1.4, False)[3] == pytest.approx(1 + 0.4 * 56 / 120)

    @pytest.mark.parametrize("logarithmic", [True, False])
    @pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
    def test_needed_ratio_saves_as_much(self, share: float, logarithmic: bool) -> None:
        assert emo.saving(emo.between(emo.needed_ratio(share, logarithmic), logarithmic)) == pytest.approx(share)


class TestChecks:
    def test_published_saving(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert emo.check_published_saving().verdict == "arithmetic does not close"
        monkeypatch.setattr(emo, "RATIO", 1.22)
        assert emo.check_published_saving().verdict == "holds"
        monkeypatch.setattr(emo, "RATIO", 1.72)
        assert emo.check_published_saving().verdict == "does not hold"

    def test_ratio(self) -> None:
        assert emo.check_ratio(steps(1.05), [1.0, 1.1]).verdict == "holds"
        assert emo.check_ratio(steps(1.2), [1.0, 1.1]).verdict == "does not hold"
        assert emo.check_ratio(steps(0.9), [1.0, 1.1]).verdict == "does not hold"

    def test_predicted_saving(self) -> None:
        assert emo.check_predicted_saving(steps(1.25)).verdict == "holds"
        assert emo.check_predicted_saving(steps(1.08)).verdict == "does not hold"
        assert emo.check_predicted_saving(steps(0.9)).ours.startswith("+")

    def test_fewer_devices(self) -> None:
        even = {(e, d): 32 / d for e in EXPERTS for d in emo.FEWER}
        assert emo.check_fewer_devices(even).verdict == "does not hold"
        cheap = {(e, d): s * (1 if e == 128 else 0.7 if d == 8 else 1) for (e, d), s in even.items()}
        check = emo.check_fewer_devices(cheap)
        assert check.verdict == "holds"
        assert "8 for 64, " in check.ours

    def test_sizes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert emo.check_sizes().verdict == "holds"
        monkeypatch.setattr(emo, "STEPS", 120_000)
        assert emo.check_sizes().verdict == "holds in part"

    def test_quality(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert emo.check_quality().verdict == "holds in part"
        monkeypatch.setattr(emo, "MMLU", (57.4, 50.0))
        assert emo.check_quality().verdict == "does not hold"

    def test_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first, last = Held(6.375 * 10 + 9 * 8, 10, 8), Held(6.375 * 20 + 9 * 128, 20, 128)
        monkeypatch.setattr(emo, "held", {8: first, 128: last}.__getitem__)
        assert emo.check_memory().verdict == "holds"
        monkeypatch.setattr(emo, "held", {8: Held(last.bytes, 10, 8), 128: last}.__getitem__)
        assert emo.check_memory().verdict == "holds in part"


@pytest.mark.slow
def test_whole_row() -> None:
    result = emo.run(lambda done, total, what: None)
    assert result.checks[0].verdict == "arithmetic does not close"
    assert result.checks[5].verdict == "holds"
    assert len(result.figures) == len(EXPERTS)
