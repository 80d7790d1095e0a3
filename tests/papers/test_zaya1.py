"""ZAYA1: the exact checks and that they can fail, the reading of training runs, and the record."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moestro.model.attention.cca import ConvolutionalAttention
from moestro.model.moe.router import Router
from papers import zaya1, zaya1_attention, zaya1_exact
from papers.result import PaperResult
from papers.store import read_record
from papers.toys import Curve
from papers.zaya1 import BIAS_LRS, KINDS, SEEDS, STEPS, WINDOW, Job


class TestCounts:
    def test_size_closes_but_for_active_parameters(self) -> None:
        check = zaya1.check_size()
        assert check.verdict == "holds in part"
        assert "8.303 B, 753.6 M active" in check.ours

    def test_table_and_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert zaya1.check_table().verdict == "holds"
        assert zaya1.check_cache().verdict == "holds"
        monkeypatch.setattr(zaya1, "built_parts", lambda config: {"router": 1})
        assert zaya1.check_table().verdict == "holds in part"
        monkeypatch.setitem(zaya1.RELEASED, "active", 0)
        monkeypatch.setitem(zaya1.PAPERS_OWN, "active", 0)
        assert zaya1.check_table().verdict == "does not hold"


class TestAttention:
    @pytest.mark.parametrize(
        "check",
        [
            zaya1_attention.check_padding,
            zaya1_attention.check_packing,
            zaya1_attention.check_halo,
            zaya1_attention.check_bound,
        ],
    )
    def test_holds(self, check: Any) -> None:
        assert check().verdict == "holds"

    def test_decoding(self) -> None:
        assert zaya1_attention.check_decoding(40).verdict == "holds"

    def test_convolutions_without_the_first_ones_bias_are_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = ConvolutionalAttention._convolved

        def spoiled(self: ConvolutionalAttention, latents: Tensor, position: Tensor) -> Tensor:
            bias = self.conv_qk_depthwise.bias
            assert bias is not None
            with torch.no_grad():
                kept = bias.clone()
                bias.zero_()
                out = real(self, latents, position)
                bias.copy_(kept)
            return out

        monkeypatch.setattr(ConvolutionalAttention, "_convolved", spoiled)
        assert zaya1_attention.check_padding().verdict == "does not hold"

    def test_unnormed_keys_are_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = ConvolutionalAttention._normed

        def spoiled(self: ConvolutionalAttention, convolved: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
            query, key = real(self, convolved, latents)
            return query, key * 1.1

        monkeypatch.setattr(ConvolutionalAttention, "_normed", spoiled)
        assert zaya1_attention.check_bound().verdict == "does not hold"
        assert zaya1_attention.check_padding().verdict == "does not hold"


class TestExact:
    @pytest.mark.parametrize(
        "check",
        [
            zaya1_exact.check_residuals,
            zaya1_exact.check_router,
            zaya1_exact.check_controller,
            zaya1_exact.check_global_load,
        ],
    )
    def test_holds(self, check: Any) -> None:
        assert check().verdict == "holds"

    def test_without_transformers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(zaya1_exact, "find_spec", lambda name: None)
        assert zaya1_exact.check_transformers().verdict == "not reproducible here"

    def test_a_bias_in_the_weights_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Router._logits

        def spoiled(self: Router, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
            logits, state = real(self, x, state)
            return logits + self.bias, state

        monkeypatch.setattr(Router, "_logits", spoiled)
        assert zaya1_exact.check_router().verdict != "holds"

    def test_another_controller_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = zaya1_exact.update_balance

        def signs(bias: Tensor, moments: Tensor, share: Tensor, counts: Tensor, config: Any) -> None:
            real(bias, moments, share, counts, config.model_copy(update={"bias_rule": "sign"}))

        monkeypatch.setattr(zaya1_exact, "update_balance", signs)
        assert zaya1_exact.check_controller().verdict == "does not hold"


def curves(zaya_late: int, zaya_entropy: float) -> dict[Job, Curve]:
    """Linear routers are balanced after step 100 and have entropy 0.5."""
    found = {}
    for kind in KINDS:
        late, share = (zaya_late, zaya_entropy) if kind == "zaya" else (100, 0.5)
        balance = [0.5] * late + [1.0] * (STEPS - late)
        for seed in SEEDS:
            for bias_lr in BIAS_LRS:
                entropy = [share + 0.01 * seed] * STEPS
                found[Job(kind, seed, bias_lr)] = Curve([1.0] * STEPS, [0.0] * STEPS, balance, entropy)
    return found


class TestTrends:
    def test_steps_to_balance_wait_for_a_whole_window(self) -> None:
        curve = Curve([], [], [1.0] * (WINDOW - 1) + [0.0] + [1.0] * WINDOW, [])
        assert zaya1.steps_to_balance(curve) == 2 * WINDOW
        assert zaya1.steps_to_balance(Curve([], [], [0.9] * 50, [])) is None

    @pytest.mark.parametrize(("late", "verdict"), [(60, "holds"), (100, "does not hold"), (STEPS, "does not hold")])
    def test_balance(self, late: int, verdict: str) -> None:
        assert zaya1.check_balance(curves(late, 0.5)).verdict == verdict

    @pytest.mark.parametrize(("against", "verdict"), [(1, "holds in part"), (3, "does not hold")])
    def test_most_pairs_count(self, against: int, verdict: str) -> None:
        found = curves(60, 0.5)
        late = found[Job("linear", SEEDS[0])]
        found |= dict.fromkeys([job for job in found if job.kind == "zaya"][:against], late)
        assert zaya1.check_balance(found).verdict == verdict

    @pytest.mark.parametrize(("entropy", "verdict"), [(0.4, "holds"), (0.6, "does not hold")])
    def test_certainty(self, entropy: float, verdict: str) -> None:
        assert zaya1.check_certainty(curves(60, entropy)).verdict == verdict

    def test_a_short_run_is_repeatable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(zaya1, "STEPS", 2)
        curve = zaya1.train(Job("zaya", 0))
        assert zaya1.train(Job("zaya", 0)) == curve
        assert all(0 < value <= 1 for value in curve.balance + curve.entropy)


def recorded() -> PaperResult:
    record = read_record("zaya1")
    assert record is not None
    return record.result


class TestRecord:
    def test_exact_checks_are_those_of_now(self) -> None:
        now = {check.claim: check for check in (zaya1.check_size(), zaya1.check_cache())}
        then = {check.claim: check for check in recorded().checks}
        assert all(then[claim] == check for claim, check in now.items())

    def test_trends_follow_from_the_figures(self) -> None:
        result = recorded()
        balance, certainty = result.checks[-2:]
        for check, name in ((balance, "steps to 0.99"), (certainty, "token entropy")):
            pairs = [
                [result.figures[f"{name} {kind} bias_lr={bias_lr:g} seed={seed}"] for kind in KINDS]
                for seed in SEEDS
                for bias_lr in BIAS_LRS
            ]
            better = sum(zaya < linear for zaya, linear in pairs)
            assert f"in {better} of {len(pairs)} pairs" in check.note
            expected = "holds" if better == 6 else "holds in part" if better > 3 else "does not hold"
            assert check.verdict == expected


@pytest.mark.slow
def test_reproduction() -> None:
    """The whole of `moestro papers run zaya1`, held against what we say of it."""
    result = zaya1.run(lambda done, total, what: None)
    then = recorded()
    assert [check.verdict for check in result.checks] == [check.verdict for check in then.checks]
    assert result.checks[0].verdict == "holds in part"
    assert {check.verdict for check in result.checks[1:-2]} <= {"holds", "not reproducible here"}
    assert result.figures.keys() == then.figures.keys()
