"""Fine-grained MoE: the exact checks, what the verdicts say of made-up runs, the record, and (slow) everything."""

import math
from itertools import combinations

import pytest

from moestro.config import count
from papers import fine_grained_exact as exact
from papers import fine_grained_moe as fine
from papers import fine_grained_predicted as predicted
from papers.result import PaperResult
from papers.store import read_record
from papers.toys import fresh_model


class TestPredicted:
    def test_the_dispatch_pays_for_distinct_ranks(self) -> None:
        check = predicted.check_dispatch()
        assert check.verdict == "holds"
        assert "1xFLOPs-G8 5.43" in check.ours
        assert "2xFLOPs-G8 7.32" in check.ours

    def test_a_copy_for_each_expert_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layout = predicted.layout
        monkeypatch.setattr(predicted, "layout", lambda _: layout("all_to_all"))
        assert predicted.ranks_paid_for(1, 8) == pytest.approx(8)
        assert predicted.check_dispatch().verdict == "does not hold"

    def test_finer_experts_take_longer(self) -> None:
        check = predicted.check_time()
        assert check.verdict == "holds"
        assert "prefers G = 1:" in check.note


class TestExactChecks:
    @pytest.mark.parametrize(
        "check", [exact.check_sizes, exact.check_ranks, exact.check_zero_gradient, exact.check_gains]
    )
    def test_holds(self, check) -> None:  # type: ignore[no-untyped-def]
        assert check().verdict == "holds"

    def test_pieces_of_a_coarse_model(self) -> None:
        assert fine.check_split(steps=1).verdict == "holds"

    def test_a_split_without_its_factor_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        split = fine.split_model

        def wrong(state, config, granularity):  # type: ignore[no-untyped-def]
            pieces, finer = split(state, config, granularity)
            return {name: v / granularity if "down_proj" in name else v for name, v in pieces.items()}, finer

        monkeypatch.setattr(fine, "split_model", wrong)
        assert fine.check_split(steps=1).verdict == "does not hold"

    def test_the_gains_are_the_tables(self) -> None:
        assert "-2.2% and -1.3%" in exact.check_gains().ours

    def test_the_8_percent_are_flagged(self) -> None:
        assert exact.check_against_dense().verdict == "arithmetic does not close"

    def test_router_gradient_by_order(self) -> None:
        assert exact.gradient_norm(1, softmax_after=True) == 0
        assert exact.gradient_norm(1, softmax_after=False) > 0.1

    def test_a_config_that_allowed_it_would_be_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exact, "_refuses", lambda build: False)
        assert exact.check_zero_gradient().verdict == "does not hold"


class TestRanks:
    def test_closed_form(self) -> None:
        found = [round(exact.expected_ranks(*sizes), 2) for sizes in exact.VARIANTS.values()]
        assert found == [1.00, 5.43, 2.00, 7.32]

    def test_against_every_choice(self) -> None:
        """16 experts on 8 ranks, all sets of three."""
        sets = [len({expert // 2 for expert in chosen}) for chosen in combinations(range(16), 3)]
        assert exact.expected_ranks(16, 3) == pytest.approx(sum(sets) / len(sets))

    def test_a_wrong_closed_form_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exact, "expected_ranks", lambda experts, top_k: 8 * (1 - (7 / 8) ** top_k))
        assert exact.check_ranks().verdict == "does not hold"


def test_the_toy_has_equal_parameters_and_flops_but_for_the_router() -> None:
    coarse, finer = (fine.toy(g, softmax_after=False) for g in (fine.COARSE, fine.FINE))
    columns = 2 * 48 * (16 - 4)
    sizes = [sum(p.numel() for p in fresh_model(config, 0).parameters()) for config in (coarse, finer)]
    assert sizes[1] - sizes[0] == columns
    counts = [count(config, fine.SEQ_LEN) for config in (coarse, finer)]
    assert counts[1].train_flops_per_token - counts[0].train_flops_per_token == 6 * columns


class TestTraining:
    def test_starts_at_a_guess_and_repeats(self) -> None:
        job = fine.Job(seed=0, granularity=4, softmax_after=True)
        outcome = fine.train(job, steps=2)
        assert outcome.loss[0] == pytest.approx(math.log(fine.VOCAB_SIZE), abs=0.6)
        assert fine.train(job, steps=2).loss == outcome.loss
        assert outcome.cpu_s > 0

    def test_the_floor_is_below_any_loss(self) -> None:
        assert fine.noise_floor() == pytest.approx(0.36, abs=0.01)


def outcomes(coarse: float, finer: list[float]) -> fine.Outcomes:
    """Runs of a constant loss: the coarse ones all alike, the finer ones one value a pair."""
    pairs = [(after, seed) for after in fine.ORDERS for seed in fine.SEEDS]
    result = {fine.Job(seed, fine.COARSE, after): fine.Outcome([coarse] * fine.STEPS, 1.0) for after, seed in pairs}
    for (after, seed), loss in zip(pairs, finer, strict=True):
        result[fine.Job(seed, fine.FINE, after)] = fine.Outcome([loss] * fine.STEPS, 2.0)
    return result


class TestVerdicts:
    @pytest.mark.parametrize(
        ("finer", "verdict"),
        [
            ([0.9] * 6, "holds"),
            ([0.9] * 5 + [1.1], "holds in part"),
            ([0.9] * 3 + [1.1] * 3, "does not hold"),
            ([1.0] * 6, "does not hold"),
        ],
    )
    def test_granularity(self, finer: list[float], verdict: str) -> None:
        check = fine.check_granularity(outcomes(1.0, finer))
        assert check.verdict == verdict
        assert "2.00 times as long" in check.note

    def test_a_gain_that_does_not_grow(self) -> None:
        assert fine.check_length(outcomes(1.0, [0.9] * 6)).verdict == "does not hold"

    def test_the_order_is_not_asserted(self) -> None:
        check = fine.check_order(outcomes(1.0, [1.0, 1.0, 1.0, 0.9, 0.9, 0.9]))
        assert check.ours.startswith("+10.0% ± 0.0% lower loss with it after, at G = 4; +0.0%")
        assert check.verdict == "not reproducible here"


def test_record_agrees_with_its_figures() -> None:
    record = read_record("fine_grained_moe")
    assert record is not None
    figures, headline, length = record.result.figures, *record.result.checks[:2]

    def gains(steps: int) -> list[float]:
        keys = [
            f"seed={seed} G={{}} softmax={order} steps={steps}" for order in ("before", "after") for seed in fine.SEEDS
        ]
        return [1 - figures[f"loss {key.format(4)}"] / figures[f"loss {key.format(1)}"] for key in keys]

    early, final = gains(fine.STEPS // 4), gains(fine.STEPS)
    assert float(headline.ours.partition("%")[0]) == pytest.approx(100 * sum(final) / len(final), abs=0.06)
    assert headline.verdict == fine.majority_of(gain > 0 for gain in final)
    assert length.verdict == fine.majority_of(b > a for a, b in zip(early, final, strict=True))
    assert [round(figures[f"ranks {name}"], 2) for name in exact.VARIANTS] == [1.00, 5.43, 2.00, 7.32]


@pytest.mark.slow
def test_price() -> None:
    assert predicted.check_price().verdict == "holds"


def test_the_cheapest_layout_fits_and_is_no_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predicted, "layouts", lambda: [predicted.layout(name) for name in predicted.DISPATCHES])
    plan, best = predicted.cheapest(1, 8)
    steps = [predicted.predicted(1, 8, name).step_s.value for name in predicted.DISPATCHES]
    assert (best.step_s.value, plan.dispatch) == (min(steps), predicted.DISPATCHES[steps.index(min(steps))])


@pytest.mark.slow
def test_reproduction() -> None:
    result: PaperResult = fine.run(lambda done, total, what: None)
    assert all(math.isfinite(value) for value in result.figures.values())
    assert result.checks[0].verdict in ("holds", "holds in part")
