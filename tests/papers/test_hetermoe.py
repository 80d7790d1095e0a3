"""HeterMoE: checks that can fail, and (slow) the whole row."""

import pytest

from moestro.plan.mixed import Mixed
from moestro.plan.mixed_choice import Apart, Choice
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


def test_plans_are_compared() -> None:
    """Kinds and times as choose() gives them, once as published and once the other way round."""

    def planned(over_ep: float, attention_on: str = "a40") -> Choice:
        mixed = Mixed(1.0, 1.0, 1.0, 1, 1, 6)
        best = Apart(attention_on, "v100-sxm-16gb", mixed, 4, (0,), 1.0, 1.0, 1.0)
        return Choice((), (best,), over_ep, 1.18, 1.28, (), ())

    right = {s: dict.fromkeys(hetermoe.MODELS, planned(gain)) for s, gain in hetermoe.OVER_EP.items()}
    assert hetermoe.check_planned(right).verdict == "holds"
    slower = {s: dict.fromkeys(hetermoe.MODELS, planned(1.0)) for s in hetermoe.OVER_EP}
    assert hetermoe.check_planned(slower).verdict == "holds in part"
    swapped = {s: dict.fromkeys(hetermoe.MODELS, planned(gain, "v100")) for s, gain in hetermoe.OVER_EP.items()}
    assert hetermoe.check_planned(swapped).verdict == "holds in part"


@pytest.mark.slow
def test_the_row() -> None:
    found = hetermoe.run(lambda *_: None)
    assert isinstance(found, PaperResult)
    assert sum(check.verdict == "holds" for check in found.checks) >= 6
