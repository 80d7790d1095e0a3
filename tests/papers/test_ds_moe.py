"""DS-MoE: the exact checks, each able to fail, the table, the verdicts on made-up runs, the record, and (slow) all."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from papers import ds_moe, ds_moe_exact, ds_moe_table
from papers.ds_moe import ALPHAS, KEPT, SEEDS, Job, Outcome, Outcomes
from papers.result import PaperResult
from papers.store import read_record


class TestExactChecks:
    @pytest.mark.parametrize(
        "check",
        [
            ds_moe_exact.check_gradient,
            ds_moe_exact.check_all_experts,
            ds_moe_exact.check_mutual_information,
            ds_moe_exact.check_heads,
        ],
    )
    def test_holds(self, check) -> None:  # type: ignore[no-untyped-def]
        assert check().verdict == "holds"

    @pytest.mark.parametrize("check", [ds_moe_exact.check_gradient, ds_moe_exact.check_all_experts])
    def test_other_experts_are_found(self, check, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
        stacked = ds_moe_exact.stacked
        monkeypatch.setattr(ds_moe_exact, "stacked", lambda layer, x: stacked(layer, x).roll(1, 1))
        assert check().verdict == "does not hold"

    def test_another_loss_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def without_evenness(logits: Tensor) -> Tensor:
            return torch.special.entr(logits.softmax(-1)).sum(1).mean()

        monkeypatch.setattr(ds_moe_exact, "mutual_information", without_evenness)
        assert ds_moe_exact.check_mutual_information().verdict == "does not hold"

    def test_another_threshold_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So some groups of heads are left out in the check."""
        config = ds_moe_exact.AttentionExpertsConfig

        def without_threshold(**settings: Any) -> Any:
            return config(**settings | {"eval_threshold": None})

        monkeypatch.setattr(ds_moe_exact, "AttentionExpertsConfig", without_threshold)
        assert ds_moe_exact.check_heads().verdict == "does not hold"

    def test_top_2_reaches_two_experts(self) -> None:
        assert ds_moe_exact.experts_reached(ds_moe_exact.layer_of("top_k")) == 2

    def test_time_is_reported_and_not_claimed(self) -> None:
        check = ds_moe_exact.check_time(tokens=8, rounds=1)
        assert check.verdict == "not reproducible here"
        assert all(f"K = {kept} " in check.ours for kept in (32, 9, 5, 3))


class TestTable:
    def test_dense_rows_close_and_the_others_do_not(self) -> None:
        assert all(abs(ds_moe_table.excess(row)) < 0.003 for row in ds_moe_table.DENSE)
        assert all(0.015 < ds_moe_table.excess(row) < 0.05 for row in (*ds_moe_table.SPARSE, *ds_moe_table.DS_MOE))
        assert ds_moe_table.check_sizes().verdict == "holds in part"

    def test_dense_row_by_hand(self) -> None:
        """Queries and outputs, keys and values of 2 heads of 64, two matrices of four times the width, norms."""
        layer = 2 * 2048**2 + 2 * 2048 * 2 * 64 + 2 * 2048 * 8192 + 2 * 2048
        assert ds_moe_table.counted(ds_moe_table.DENSE[0]).non_embedding_params == 24 * layer + 2048

    def test_training_costs_what_dense_does(self) -> None:
        check = ds_moe_table.check_cost()
        assert check.verdict == "holds"
        assert "41%/33%/29%" in check.ours

    def test_two_of_three_are_worse_than_dense(self) -> None:
        check = ds_moe_table.check_quality()
        assert check.verdict == "holds in part"
        assert "-0.5%/+4.8%/+7.0%" in check.ours


@pytest.fixture
def _few_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ds_moe, "HELD_OUT", 16)


@pytest.mark.usefixtures("_few_sequences")
class TestTraining:
    def test_use_with_all_experts_is_training(self) -> None:
        outcome = ds_moe.train(Job(seed=0, alpha=0.1), steps=1)
        assert outcome.losses[-1] == pytest.approx(math.log(ds_moe.VOCAB_SIZE), abs=0.6)
        assert 0 < outcome.used <= ds_moe.EXPERTS

    def test_the_baseline_has_no_threshold(self) -> None:
        outcome = ds_moe.train(Job(seed=0, alpha=None), steps=1)
        assert len(outcome.losses) == len(KEPT)
        assert math.isnan(outcome.used)

    def test_use_does_what_it_is_told(self) -> None:
        model = ds_moe.fresh_model(ds_moe.toy(0.1), 0)
        batch = ds_moe.HiddenClusters(ds_moe.VOCAB_SIZE, 0).batch(4, ds_moe.SEQ_LEN)
        assert [ds_moe.use(model, ds_moe.toy(0.1, kept), batch)[1] for kept in KEPT] == list(KEPT)
        assert ds_moe.use(model, ds_moe.toy(0.1, threshold=0.0), batch)[1] == 16


def made_up(factor: float, rise: float = 0.0) -> Outcomes:
    """Losses over all experts' of factor^(α's place) / K, and one rise on the way from 8 to 16 experts."""
    result: Outcomes = {}
    for seed in SEEDS:
        for place, alpha in enumerate(ALPHAS):
            losses = tuple(1 + factor**place / kept for kept in KEPT[:-1])
            result[Job(seed, alpha)] = Outcome((*losses, losses[-1] + rise), 1.1, 8 * factor**place, 1.1)
        result[Job(seed, None)] = Outcome((3.0, 2.0, 1.0, 1.0, 1.0))
    return result


class TestVerdicts:
    @pytest.mark.parametrize(("factor", "verdict"), [(0.5, "holds"), (1.0, "does not hold"), (2.0, "does not hold")])
    def test_alpha(self, factor: float, verdict: str) -> None:
        assert ds_moe.check_alpha(made_up(factor)).verdict == verdict
        assert ds_moe.check_threshold(made_up(factor)).verdict == verdict

    @pytest.mark.parametrize(("rise", "verdict"), [(0.0, "holds"), (0.004, "holds"), (0.006, "does not hold")])
    def test_monotone(self, rise: float, verdict: str) -> None:
        assert ds_moe.check_monotone(made_up(0.5, rise)).verdict == verdict

    @pytest.mark.parametrize(("factor", "verdict"), [(0.5, "holds"), (4.0, "does not hold")])
    def test_fixed(self, factor: float, verdict: str) -> None:
        assert ds_moe.check_fixed(made_up(factor)).verdict == verdict

    @pytest.mark.parametrize(("factor", "verdict"), [(0.5, "holds"), (1.0, "holds"), (2.0, "does not hold")])
    def test_price(self, factor: float, verdict: str) -> None:
        assert ds_moe.check_price(made_up(factor)).verdict == verdict

    def test_one_seed_in_three_against(self) -> None:
        outcomes = made_up(0.5)
        outcomes[Job(SEEDS[0], ALPHAS[2])] = outcomes[Job(SEEDS[0], ALPHAS[0])]
        assert ds_moe.check_threshold(outcomes).verdict == "holds in part"


def test_record_agrees_with_its_figures() -> None:
    record = read_record("ds_moe")
    assert record is not None
    figures, verdicts = record.result.figures, [check.verdict for check in record.result.checks]
    outcomes: Outcomes = {}
    for seed in SEEDS:
        for alpha in (*ALPHAS, None):
            key = f"seed={seed} " + ("top-4" if alpha is None else f"alpha={alpha:g}")
            rest = [f"loss {key} threshold", f"experts {key} threshold", f"loss {key} threshold_to_k"]
            losses = tuple(figures[f"loss {key} K={kept}"] for kept in KEPT)
            outcomes[Job(seed, alpha)] = Outcome(losses, *(figures[name] for name in rest if alpha is not None))
    checks = (
        ds_moe.check_alpha,
        ds_moe.check_threshold,
        ds_moe.check_price,
        ds_moe.check_monotone,
        ds_moe.check_fixed,
    )
    assert verdicts[:5] == [check(outcomes).verdict for check in checks]
    assert "does not hold" not in verdicts[5:]


@pytest.mark.slow
def test_reproduction() -> None:
    result: PaperResult = ds_moe.run(lambda done, total, what: None)
    assert all(math.isfinite(value) for value in result.figures.values())
    assert result.checks[0].verdict in ("holds", "holds in part")
