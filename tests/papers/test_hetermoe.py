"""HeterMoE: checks that can fail, and (slow) the whole row."""

import pytest

from papers import hetermoe
from papers.result import PaperResult


def test_checks_hold_and_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = (hetermoe.check_offloads, hetermoe.check_utilisation, hetermoe.check_gain, hetermoe.check_overlap)
    assert [check().verdict for check in (*checks, hetermoe.check_sizes)] == ["holds"] * 5
    monkeypatch.setattr(hetermoe, "EXAMPLE", hetermoe.Mixed(3.0, 3.1, 3.2, 1, 1, 6))
    assert "holds" not in [check().verdict for check in checks[:1]]
    monkeypatch.setattr(hetermoe, "WIDTH", 4)
    assert hetermoe.check_sizes().verdict == "does not hold"


def test_speeds_are_compared() -> None:
    right = dict(hetermoe.SPEEDS)
    assert hetermoe.check_speeds(right).verdict == "holds"
    assert hetermoe.check_speeds(dict.fromkeys(right, (9.0, 1.0))).verdict == "does not hold"


@pytest.mark.slow
def test_the_row() -> None:
    found = hetermoe.run(lambda *_: None)
    assert isinstance(found, PaperResult)
    assert sum(check.verdict == "holds" for check in found.checks) >= 6
