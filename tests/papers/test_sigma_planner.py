"""SIGMA's pruned tuning: what the verdict hangs on."""

import pytest

from papers import sigma_planner
from papers.sigma_planner import Tuned, check_tuning, tuned

SMALL = Tuned({(1, 8): 1.0, (1, 4): 1.04, (2, 8): 1.06}, 100)


@pytest.mark.parametrize(
    ("small", "large", "verdict"),
    [
        (SMALL, Tuned({(1, 4): 1.0, (1, 8): 1.1}, 10), "holds"),
        (SMALL, Tuned({(2, 8): 1.0, (1, 8): 1.1}, 10), "holds in part"),
        (Tuned({(2, 8): 1.0, (1, 8): 1.2}, 9), Tuned({(1, 8): 1.0}, 10), "does not hold"),
    ],
)
def test_the_verdict_hangs_on_both_searches(small: Tuned, large: Tuned, verdict: str) -> None:
    assert check_tuning(small, large).verdict == verdict


@pytest.mark.slow
def test_pairs_come_fastest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"micro_batch_size": (4,), "recompute": ("none",), "vpp": (1,), "ep": (4, 8, 16)}
    monkeypatch.setattr(sigma_planner, "SPACE", {**sigma_planner.SPACE, **few})
    found = tuned(16, 12, 256, (1,))
    assert found.best == sigma_planner.WON
    assert list(found.step_s.values()) == sorted(found.step_s.values())
    assert found.near(0.0) == [found.best]
