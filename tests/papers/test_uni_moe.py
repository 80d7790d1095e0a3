"""Uni-MoE: the exact checks, each able to fail, the toy, the verdicts on made-up runs, the record, and (slow) all."""

import math
from collections.abc import Mapping
from itertools import product

import pytest
import torch
from torch import Tensor

from moestro.data.batches import IGNORE
from papers import uni_moe, uni_moe_exact, uni_moe_table
from papers.result import PaperResult
from papers.store import read_record
from papers.uni_moe import KINDS, SEEDS, TRAINED, Job, Kind, Outcome, Outcomes


class TestExactChecks:
    @pytest.mark.parametrize(
        "check",
        [
            uni_moe_exact.check_sizes,
            uni_moe_exact.check_gate,
            uni_moe_exact.check_balance,
            uni_moe_exact.check_prior,
            uni_moe_exact.check_split,
            uni_moe_exact.check_batches,
        ],
    )
    def test_holds(self, check) -> None:  # type: ignore[no-untyped-def]
        assert check().verdict == "holds"

    def test_size_by_hand(self) -> None:
        """LLaMA-7B's and three more of its feed-forwards, but for the routers."""
        counts = uni_moe_exact.sizes(experts=4, every=1)
        feed_forwards = 32 * 3 * 4096 * 11008
        assert counts.total_params - counts.part("router").total == 6_738_415_616 + 3 * feed_forwards

    def test_another_gate_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = uni_moe_exact.RouterConfig
        monkeypatch.setattr(uni_moe_exact, "RouterConfig", lambda **_: config(renormalize=False))
        assert uni_moe_exact.check_gate().verdict == "holds in part"

    def test_another_balance_loss_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(uni_moe_exact, "balance_loss", lambda *_: torch.tensor(1.0))
        assert uni_moe_exact.check_balance().verdict == "does not hold"

    @pytest.mark.parametrize("check", [uni_moe_exact.check_prior, uni_moe_exact.check_split])
    def test_losses_of_other_modalities_are_found(self, check, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
        """The router's tokens have no modality of their own."""
        router = uni_moe_exact.Router.forward

        def blind(self, x: Tensor, groups):  # type: ignore[no-untyped-def]
            types = torch.arange(len(x)) % 2
            return router(self, x, uni_moe_exact.TokenGroups(len(x), token_types=types))

        monkeypatch.setattr(uni_moe_exact.Router, "forward", blind)
        assert check().verdict == "does not hold"

    def test_batches_that_mix_are_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = uni_moe_exact.TrainStream

        def by_sample(data, config, seed, batch_size):  # type: ignore[no-untyped-def]
            return stream(data, config.model_copy(update={"batch_by": "sample"}), seed=seed)

        monkeypatch.setattr(uni_moe_exact, "TrainStream", by_sample)
        assert uni_moe_exact.check_batches().verdict == "holds in part"

    def test_a_short_epoch_is_found(self) -> None:
        assert uni_moe_exact.check_batches(batches=20).verdict == "holds in part"


class TestTable:
    def test_recovery(self) -> None:
        check = uni_moe_table.check_recovery()
        assert check.verdict == "holds in part"
        assert check.ours == "7.8 and 22.2 points lost; given back Task1 14% and 64%, Task2 83% and 103%"

    def test_auxiliary(self) -> None:
        assert uni_moe_table.check_auxiliary().verdict == "holds"


class TestToy:
    def test_modalities_share_no_token_and_a_is_the_same_with_b(self) -> None:
        alone, both = (uni_moe.Modalities(0, data).batch(3, uni_moe.SEQ_LEN) for data in TRAINED)
        border = uni_moe.TYPE_VOCAB
        assert torch.equal(both.input_ids[:3], alone.input_ids)
        assert torch.equal(both.labels[:3], alone.labels)
        assert int(both.input_ids[:3].max()) < border <= int(both.input_ids[3:].min())
        second = both.labels[3:]
        assert (second[:, 0] == IGNORE).all()
        assert border <= int(second[:, 1:].min())
        assert torch.equal(second[:, :-1][:, 1:], both.input_ids[3:, 2:])

    def test_equal_active_feed_forwards(self) -> None:
        dense, sparse, _ = (uni_moe_exact.count(uni_moe.toy(kind), uni_moe.SEQ_LEN) for kind in KINDS)
        assert dense.part("dense feed-forward").active == sparse.part("experts").active

    @pytest.mark.parametrize("kind", KINDS)
    def test_starts_at_a_guess_and_repeats(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(uni_moe, "HELD_OUT", 16)
        for data in TRAINED:
            outcome = uni_moe.train(Job(0, kind, data), steps=1, later_steps=1)
            assert outcome.loss == pytest.approx(math.log(2 * uni_moe.TYPE_VOCAB), abs=0.8)
            assert 0 <= outcome.accuracy <= 1
            assert 0 <= outcome.overlap <= 1
        assert uni_moe.train(Job(0, kind, data), steps=1, later_steps=1) == outcome


def made_up(drops: dict[Kind, list[float]], overlap: float = 0.5) -> Outcomes:
    """Accuracy 0.9 on A, less `drops` (a share a seed) with B and later."""
    result: Outcomes = {}
    for kind, seed_drops in drops.items():
        for seed, drop in zip(SEEDS, seed_drops, strict=True):
            result[Job(seed, kind, "A")] = Outcome(0.9, 0.5, later=0.9 - drop)
            shared = overlap if kind == "moe" else overlap / 2
            result[Job(seed, kind, "A+B")] = Outcome(0.9 - drop, 0.5, overlap=shared)
    return result


class TestVerdicts:
    @pytest.mark.parametrize(
        ("sparse", "verdict"),
        [
            ([0.01] * 4, "holds"),
            ([-0.02] * 4, "holds"),
            ([0.01, 0.01, 0.01, 0.2], "holds in part"),
            ([0.01, 0.01, 0.2, 0.2], "does not hold"),
            ([0.2] * 4, "does not hold"),
        ],
    )
    def test_drop(self, sparse: list[float], verdict: str) -> None:
        outcomes = made_up({"dense": [0.1] * 4, "moe": sparse, "moe_prior": [0.0] * 4})
        check = uni_moe.check_together(outcomes)
        assert check.verdict == verdict
        assert "dense +10.0" in check.ours
        assert "nothing to win back" not in check.note
        assert uni_moe.check_later(outcomes).verdict == verdict

    @pytest.mark.parametrize(("overlap", "verdict"), [(0.5, "holds"), (0.95, "holds in part"), (0.0, "holds in part")])
    def test_overlap(self, overlap: float, verdict: str) -> None:
        outcomes = made_up({kind: [0.1] * 4 for kind in KINDS}, overlap)
        assert uni_moe.check_overlap(outcomes).verdict == verdict


def outcomes_of(figures: Mapping[str, float]) -> Outcomes:
    outcomes = {}
    for place in product(SEEDS, KINDS, TRAINED):
        key = uni_moe.figure_key(job := Job(*place))
        outcomes[job] = Outcome(
            figures[f"accuracy {key}"],
            figures[f"loss {key}"],
            figures.get(f"accuracy {key} then B", 0.0),
            figures.get(f"accuracy on B {key} then B", 0.0),
            figures.get(f"overlap {key}", 1.0),
        )
    return outcomes


def test_record_agrees_with_its_figures() -> None:
    record = read_record("uni_moe")
    assert record is not None
    outcomes = outcomes_of(record.result.figures)
    checks = (uni_moe.check_together, uni_moe.check_later, uni_moe.check_overlap)
    verdicts = [check.verdict for check in record.result.checks]
    assert verdicts[:3] == [check(outcomes).verdict for check in checks]
    assert record.result.checks[0].ours == checks[0](outcomes).ours
    assert verdicts[3:] == [*["holds"] * 6, "holds in part", "holds"]


@pytest.mark.slow
def test_reproduction() -> None:
    result: PaperResult = uni_moe.run(lambda done, total, what: None)
    assert all(math.isfinite(value) for value in result.figures.values())
    assert len(result.checks) == 11
