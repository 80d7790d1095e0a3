"""Adapters, groups without a gradient, scores: exact numbers, and checks that can fail."""

import numpy as np
import pytest

from moestro.config.adapters import ATTENTION, adapter_params
from papers import gamer_grpo
from papers.gamer_grpo import MODEL, advantages, zero_share


class TestAdapters:
    def test_published_numbers(self) -> None:
        assert adapter_params(MODEL, 16, ATTENTION) == 4_358_144
        assert adapter_params(MODEL, 16) == 18_464_768
        check = gamer_grpo.check_adapters()
        assert check.verdict == "holds in part"
        assert "4,358,144" in check.ours
        assert "18,464,768" in check.ours

    def test_another_rank_does_not_give_the_figure(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gamer_grpo, "RANK", 8)
        assert gamer_grpo.check_adapters().verdict == "does not hold"


class TestBudget:
    def test_16_gb_hold_adapters_and_not_all_weights(self) -> None:
        assert gamer_grpo.check_budget().verdict == "holds"

    def test_a_smaller_card_is_too_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gamer_grpo, "CARD_GB", 6.0)
        assert gamer_grpo.check_budget().verdict == "holds in part"


class TestGroups:
    @pytest.mark.parametrize(
        ("accuracy", "group", "share"),
        [(0.3, 2, 0.58), (0.72, 2, 0.60), (0.9, 2, 0.82), (0.3, 8, 0.06), (0.72, 8, 0.07), (0.9, 8, 0.43)],
    )
    def test_shares(self, accuracy: float, group: int, share: float) -> None:
        assert zero_share(accuracy, group) == pytest.approx(share, abs=0.005)

    def test_advantages(self) -> None:
        found = advantages(np.array([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]]))
        assert found.tolist() == [[0, 0], [1, -1], [0, 0]]

    def test_signal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert gamer_grpo.check_signal().verdict == "does not hold"
        monkeypatch.setattr(gamer_grpo, "GROUP", 8)
        assert gamer_grpo.check_signal().verdict == "holds"

    def test_simulation_sees_a_wrong_formula(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gamer_grpo, "GROUPS", 20_000)
        assert gamer_grpo.check_signal_simulated().verdict == "holds"
        monkeypatch.setattr(gamer_grpo, "zero_share", lambda p, size: p**size)
        assert gamer_grpo.check_signal_simulated().verdict != "holds"


class TestMemoryAndScores:
    def test_logits(self) -> None:
        assert gamer_grpo.logits_bytes(4) == 4 * 278 * 151_936 * 4
        assert gamer_grpo.check_weights().verdict == "holds"
        assert "0.68 GB" in gamer_grpo.check_weights().ours

    def test_in_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = {batch: gamer_grpo.step_memory(batch) for batch in (1, 4)}
        assert memory[1].total < memory[4].total
        monkeypatch.setattr(gamer_grpo, "IN_USE", memory[4].total / 1.1)
        assert gamer_grpo.check_in_use(memory).verdict == "holds"
        monkeypatch.setattr(gamer_grpo, "IN_USE", memory[4].total * 2)
        assert gamer_grpo.check_in_use(memory).verdict == "does not hold"

    def test_scores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert gamer_grpo.check_gain().verdict == "does not hold"
        assert gamer_grpo.check_lead().verdict == "does not hold"
        monkeypatch.setattr(gamer_grpo, "BASE", 0.6)
        assert gamer_grpo.check_gain().verdict == "holds"
        assert gamer_grpo.check_lead().verdict == "holds"


@pytest.mark.slow
def test_whole_row() -> None:
    result = gamer_grpo.run(lambda done, total, what: None)
    assert result.checks[0].verdict == "holds in part"
    assert len(result.checks) == 8
