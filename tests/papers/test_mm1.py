"""MM1: the exact checks, each able to fail, the toy, verdicts on made-up runs, the record, and (slow) everything."""

import math
from itertools import product

import pytest
import torch

from moestro.data.batches import IGNORE
from moestro.model.media import placeholder
from moestro.plan import rates
from papers import mm1, mm1_exact
from papers.mm1 import CONNECTORS, SEEDS, TOKENS, Job, Losses
from papers.result import PaperResult
from papers.store import read_record


class TestExactChecks:
    @pytest.mark.parametrize(
        "check",
        [
            mm1_exact.check_learning_rates,
            mm1_exact.check_extrapolation,
            mm1_exact.check_share,
            mm1_exact.check_sizes,
            mm1_exact.check_mixture,
            mm1_exact.check_encoders,
            mm1_exact.check_connectors,
            mm1_exact.check_resolution,
        ],
    )
    def test_holds(self, check) -> None:  # type: ignore[no-untyped-def]
        assert check().verdict == "holds"

    def test_the_law_by_hand(self) -> None:
        assert [mm1_exact.learning_rate(n) for n in mm1_exact.RATES] == pytest.approx(
            [5.83e-5, 4.08e-5, 2.21e-5], rel=2e-3
        )

    def test_a_rate_that_is_off_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mm1_exact, "RATES", {3e9: 6e-5, 7e9: 4e-5, 30e9: 1.8e-5})
        assert mm1_exact.check_learning_rates().verdict == "holds in part"

    def test_an_interval_that_is_too_narrow_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rates, "SHARE", 0.4)
        assert mm1_exact.check_extrapolation().verdict == "does not hold"

    def test_the_budget_is_flagged(self) -> None:
        check = mm1_exact.check_budget()
        assert check.verdict == "arithmetic does not close"
        assert check.ours == "419 B"

    def test_shares_solved(self) -> None:
        solved = [mm1_exact.feed_forward_billions(*sizes) for sizes in mm1_exact.MIXTURES.values()]
        assert solved == pytest.approx([122 / 63, 160 / 31])

    def test_well_known_shapes_have_their_sizes(self) -> None:
        sizes = {name: whole / 1e9 for name, (_, whole) in mm1_exact.sane_shapes().items()}
        assert sizes == pytest.approx(
            {"LLaMA-7B": 6.74, "Mistral-7B": 7.24, "GPT-3 6.7B": 6.65, "GPT-3 2.7B": 2.65}, rel=5e-3
        )

    def test_a_share_out_of_bounds_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mm1_exact, "MIXTURES", {"3B-MoE": (3.0, 64.0, 64, 1)})
        assert mm1_exact.check_share().verdict == "holds in part"

    def test_another_mixture_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        mixture = mm1_exact.Mixture
        monkeypatch.setattr(mm1_exact, "Mixture", lambda weights, seed: mixture((47, 43, 10), seed))
        assert mm1_exact.check_mixture().verdict == "holds in part"

    def test_a_weight_without_a_gradient_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = mm1_exact.Encoder.forward
        monkeypatch.setattr(mm1_exact.Encoder, "forward", lambda *inputs: forward(*inputs).detach().requires_grad_())
        assert mm1_exact.check_connectors().verdict == "holds in part"

    def test_other_positions_are_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Turned by a quarter."""
        resize = mm1_exact.resize_positions

        def turned(table, patches, shape):  # type: ignore[no-untyped-def]
            positions = resize(table, patches, shape).unflatten(0, (math.isqrt(patches),) * 2)
            return positions.transpose(0, 1).flatten(0, 1)

        monkeypatch.setattr(mm1_exact, "resize_positions", turned)
        assert mm1_exact.check_resolution().verdict == "holds in part"


class TestToy:
    def test_answers_are_the_colours_that_were_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mm1, "NOISE", 0.0)
        batch = mm1.Pictures(seed=0, num_tokens=4).batch(5, 4 + 2 * mm1.QUESTIONS)
        (media,) = batch.media
        assert (batch.input_ids[:, :4] == placeholder(0)).all()
        for row, labels, patches in zip(batch.input_ids[:, 4:], batch.labels[:, 4:], media.patches, strict=True):
            asked, answers = row[::2], row[1::2]
            assert len(set(asked.tolist())) == mm1.QUESTIONS
            assert torch.equal(patches[asked].argmax(-1) + mm1.PATCHES, answers)
            assert torch.equal(labels[::2], answers)
            assert (labels[1::2] == IGNORE).all()

    @pytest.mark.parametrize("connector", CONNECTORS)
    def test_starts_at_a_guess_and_repeats(self, connector: mm1.Connector) -> None:
        job = Job(seed=0, connector=connector, num_tokens=4)
        curve = mm1.train(job, steps=2)
        assert curve.loss[0] == pytest.approx(math.log(mm1.VOCAB_SIZE), abs=0.6)
        assert mm1.train(job, steps=2) == curve


def made_up(token_gain: float, connector_gap: float) -> Losses:
    return {
        Job(seed, c, t): 2 - token_gain * i + connector_gap * j
        for seed, (i, t), (j, c) in product(SEEDS, enumerate(TOKENS), enumerate(CONNECTORS))
    }


class TestVerdicts:
    @pytest.mark.parametrize(
        ("gain", "gap", "verdict"),
        [(0.5, 0.01, "holds"), (0.5, 0.3, "holds in part"), (0.0, 0.1, "does not hold"), (-0.5, 0.0, "does not hold")],
    )
    def test_tokens(self, gain: float, gap: float, verdict: str) -> None:
        assert mm1.check_tokens(made_up(gain, gap)).verdict == verdict

    @pytest.mark.parametrize(("gain", "verdict"), [(0.1, "holds"), (0.0, "does not hold")])
    def test_each_connector(self, gain: float, verdict: str) -> None:
        assert mm1.check_each_connector(made_up(gain, 1.0)).verdict == verdict

    @pytest.mark.parametrize(("gap", "verdict"), [(0.01, "holds"), (0.06, "does not hold")])
    def test_spread(self, gap: float, verdict: str) -> None:
        """A gain of 1, of which a tenth is allowed between three connectors."""
        assert mm1.check_connector_spread(made_up(0.5, gap)).verdict == verdict


def test_record_agrees_with_its_figures() -> None:
    record = read_record("mm1")
    assert record is not None
    jobs = [Job(*place) for place in product(SEEDS, CONNECTORS, TOKENS)]
    losses = {job: record.result.figures[mm1.figure_key(job)] for job in jobs}
    checks = (mm1.check_tokens, mm1.check_each_connector, mm1.check_connector_spread)
    verdicts = [check.verdict for check in record.result.checks]
    assert verdicts[:3] == [check(losses).verdict for check in checks]
    assert verdicts[3:] == ["holds", "arithmetic does not close", *["holds"] * 6, "not reproducible here"]


@pytest.mark.slow
def test_reproduction() -> None:
    result: PaperResult = mm1.run(lambda done, total, what: None)
    assert all(math.isfinite(value) for value in result.figures.values())
    assert len(result.checks) == 13
