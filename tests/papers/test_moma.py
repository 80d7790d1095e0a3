"""MoMa: the exact checks, the toy stream, verdicts that can fail, and what was recorded."""

import math

import pytest
import torch

from moestro.config import RouterConfig, count
from moestro.data.batches import IGNORE
from papers import moma, moma_exact, moma_table
from papers.moma import KINDS, SEEDS, SPAN, SPANS, VOCAB_SIZE, Job, Outcome, Outcomes, TwoSources
from papers.moma_table import TABLE, rounds_to
from papers.result import PaperResult
from papers.store import read_record
from papers.toys import Curve


class TestExactChecks:
    @pytest.mark.parametrize(
        "check",
        [
            moma_exact.check_gradient,
            moma_exact.check_permutation,
            moma_exact.check_even,
            moma_exact.check_future,
            moma_exact.check_depth,
            moma_exact.check_upcycled,
        ],
    )
    def test_holds(self, check) -> None:  # type: ignore[no-untyped-def]
        assert check().verdict == "holds"

    @pytest.mark.parametrize("check", [moma_exact.check_gradient, moma_exact.check_permutation])
    def test_needs_groups(self, check, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
        mixed = RouterConfig(selection="expert_choice", score="sigmoid", renormalize=False)
        monkeypatch.setattr(
            moma_exact, "layer_of", lambda _, built=moma_exact.layer_of: built(moma_exact.config(mixed))
        )
        assert check().verdict == "does not hold"

    def test_future_check_sees_a_causal_router(self, monkeypatch: pytest.MonkeyPatch) -> None:
        top_k = RouterConfig()
        monkeypatch.setattr(
            moma_exact, "model_of", lambda _, built=moma_exact.model_of: built(moma_exact.config(top_k))
        )
        assert moma_exact.check_future().verdict == "does not hold"


class TestTable:
    def test_the_formula_closes_but_for_family_names(self) -> None:
        assert moma_table.check_table().verdict == "holds in part"
        for row in TABLE:
            for experts, published in ((1, row.published[0]), (8, row.published[1])):
                assert abs(moma_table.off(row.params(experts), published)) < 0.06

    def test_presets(self) -> None:
        check = moma_table.check_presets()
        assert check.verdict == "holds in part"
        for row in TABLE:
            assert row.built() == pytest.approx(row.params(8), rel=0.005)

    @pytest.mark.parametrize(
        ("params", "published", "closes"),
        [(211e6, "210M", True), (216e6, "210M", False), (1.849e9, "1.9B", False), (1.85001e9, "1.9B", True),
         (317.4e6, "317M", True), (317.6e6, "317M", False), (11.6e9, "12B", True)],
    )  # fmt: skip
    def test_rounding(self, params: float, published: str, closes: bool) -> None:
        assert rounds_to(params, published) == closes

    def test_savings_in_time(self) -> None:
        assert {name: round(value, 2) for name, value in moma_table.worth().items()} == {
            "4t4i": 3.06,
            "8 mixed": 2.72,
            "MoD + 4t4i": 2.91,
        }
        assert moma_table.check_worth().verdict == "does not hold"


class TestTwoSources:
    def test_spans_follow_their_own_source(self) -> None:
        task = TwoSources(seed=0)
        for source in task.sources:
            source.noise = 0.0
        batch = task.batch(4, SPANS * SPAN)
        spans = batch.input_ids.view(-1, SPAN), batch.labels.view(-1, SPAN)
        kinds = []
        for ids, labels in zip(*spans, strict=True):
            kind = int(ids[0] >= VOCAB_SIZE)
            kinds.append(kind)
            source, offset = task.sources[kind], kind * VOCAB_SIZE
            follow = source.next_token[source.cluster[ids[0] - offset]] + offset
            assert labels[0] == IGNORE
            assert torch.equal(labels[1:], follow[ids[1:] - offset])
        assert torch.tensor(kinds).view(4, SPANS).sum(1).tolist() == [1] * 4
        assert len(set(torch.tensor(kinds).view(4, SPANS).argmax(1).tolist())) > 1  # in any order

    def test_spans_are_packed_documents(self) -> None:
        batch = TwoSources(seed=1).batch(2, SPANS * SPAN)
        assert batch.document_ids[0].tolist() == [i for i in range(SPANS) for _ in range(SPAN)]
        assert batch.position_ids[1].tolist() == list(range(SPAN)) * SPANS

    def test_stream_is_fixed_by_its_seed_and_goes_on(self) -> None:
        one, other = TwoSources(seed=3), TwoSources(seed=3)
        first, same, second = one.batch(2, 6), other.batch(2, 6), one.batch(2, 6)
        assert torch.equal(first.input_ids, same.input_ids)
        assert not torch.equal(first.input_ids, second.input_ids)
        assert second.sample_ids.tolist() == [2, 3]


class TestTraining:
    def test_models_pass_a_token_through_one_feed_forward(self) -> None:
        width = {kind: count(moma.toy(kind), SPAN) for kind in KINDS}
        dense = width["dense"].part("dense feed-forward").train_products
        assert all(width[kind].part("experts").train_products == dense for kind in ("mixed", "1t1i"))

    @pytest.mark.parametrize("kind", ["dense", "1t1i"])
    def test_a_run_is_repeatable(self, kind: str) -> None:
        job = Job(seed=100, kind=kind, steps=2)
        outcome = moma.train(job)
        assert outcome.loss == pytest.approx(math.log(2 * VOCAB_SIZE), abs=0.5)
        assert moma.train(job).losses == outcome.losses


def outcomes(losses: dict[str, tuple[float, float]], training: float = 0.0) -> Outcomes:
    curve = Curve([2.0] * moma.STEPS, [])
    return {
        Job(seed, kind): Outcome(curve, 1.0, pair, (pair[0] - training, pair[1] - training))
        for seed in SEEDS
        for kind, pair in losses.items()
    }


class TestVerdicts:
    def test_of_trends(self) -> None:
        good = outcomes({"dense": (1.6, 1.7), "mixed": (1.5, 1.7), "1t1i": (1.4, 1.6)})
        assert moma.check_gain(good).verdict == moma.check_share(good).verdict == "holds"
        assert moma.check_mixed(good).verdict == moma.check_stand_in(good).verdict == "holds"
        bad = outcomes({"dense": (1.6, 1.7), "mixed": (1.3, 1.5), "1t1i": (1.6, 1.6)}, training=0.02)
        assert moma.check_gain(bad).verdict == "holds in part"
        assert moma.check_share(bad).verdict == "does not hold"
        assert moma.check_mixed(bad).verdict == moma.check_stand_in(bad).verdict == "does not hold"

    def test_cost_shows_flops_beside_time(self) -> None:
        check = moma.check_cost(outcomes(dict.fromkeys(KINDS, (1.0, 1.0))))
        assert "FLOPs" in check.ours
        assert "CPU time" in check.ours
        assert check.verdict == "not reproducible here"


def test_recorded_verdicts_follow_from_the_recorded_figures() -> None:
    record = read_record("moma")
    assert record is not None
    figures, found = record.result.figures, {check.claim: check for check in record.result.checks}

    def pair(what: str, kind: str, seed: int) -> tuple[float, float]:
        return figures[f"{what}, first source: {kind} seed={seed}"], figures[
            f"{what}, second source: {kind} seed={seed}"
        ]

    made: Outcomes = {
        Job(seed, kind): Outcome(
            Curve([], []), 1.0, pair("loss", kind, seed), pair("loss with training's choice", kind, seed)
        )
        for seed in SEEDS
        for kind in KINDS
    }
    for check in (moma.check_gain, moma.check_share, moma.check_mixed, moma.check_stand_in):
        again = check(made)
        assert again.verdict == found[again.claim].verdict
    assert record.result.checks[0].claim == moma.check_gain(made).claim


@pytest.mark.slow
def test_reproduction() -> None:
    """The whole of `moestro papers run moma`."""
    seen: list[int] = []
    result: PaperResult = moma.run(lambda done, total, what: seen.append(done))
    assert seen == list(range(1, len(seen) + 1))
    assert {check.verdict for check in result.checks[5:11]} == {"holds"}
