import statistics
from collections.abc import Callable, Mapping

import pytest
import torch

from moestro.measure.primitives import Account, Call, Timed
from moestro.measure.step import StepTimes
from moestro.measure.step_work import Operand
from papers import focal_loss, profilednn, turns
from papers import profilednn_kernels as kernels
from papers.profilednn import Apart, Whole


def times_of(**seconds: float) -> Callable[[Mapping[str, object]], dict[str, list[float]]]:
    """Instead of `alternate`: the same time for a way in every round."""
    return lambda ways: {name: [seconds[name.replace(" ", "_")]] * 3 for name in ways}


class TestTakingTurns:
    def test_in_turns(self) -> None:
        order: list[str] = []
        times = turns.alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2)
        assert order == ["a", "b"] * 3
        assert [len(each) for each in times.values()] == [2, 2]

    def test_a_slow_round_does_not_count(self) -> None:
        found = turns.speed_up([2.0, 20.0, 4.0], [1.0, 10.0, 2.0])
        assert (found.low, found.median, found.high) == (2, 2, 2)
        assert turns.speed_up([2.0, 2.0, 9.0], [1.0, 1.0, 1.0]).median == 2
        assert str(found) == "2.00 × (2.00 to 2.00)"


class TestOptimizer:
    def test_holds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "alternate", times_of(loop=3.0, foreach=2.0, ours=1.0))
        assert kernels.check_optimizer().verdict == "holds"

    def test_not_faster(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "alternate", times_of(loop=1.4, foreach=2.0, ours=1.0))
        assert kernels.check_optimizer().verdict == "holds in part"

    def test_other_numbers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "alternate", times_of(loop=3.0, foreach=2.0, ours=1.0))
        build = kernels.build_adamw
        config = kernels.OptimConfig(lr=1e-2)
        monkeypatch.setattr(kernels, "build_adamw", lambda tables, vectors, _: build(tables, vectors, config))
        assert kernels.check_optimizer().verdict == "holds in part"


class TestFocalLoss:
    def test_exact(self) -> None:
        assert kernels.focal_is_exact()

    def test_a_known_value(self) -> None:
        """One anchor, one class, p = 1/2: α · ¼ · ln 2."""
        loss = focal_loss.focal_loss(torch.zeros(1, 1), torch.tensor([0]), 0.25, 2.0)
        assert loss.item() == pytest.approx(0.25 * 0.25 * 0.6931472)

    def test_background_alone(self) -> None:
        logits, labels = torch.randn(4, 3), torch.full((4,), -1)
        assert torch.allclose(focal_loss.focal_loss(logits, labels), focal_loss.composed(logits, torch.zeros(4, 3)))

    def test_large_logits_stay_finite(self) -> None:
        logits = torch.tensor([[80.0, -80.0]], requires_grad=True)
        loss = focal_loss.focal_loss(logits, torch.tensor([1]))
        loss.backward()
        assert logits.grad is not None
        assert torch.isfinite(loss)
        assert torch.isfinite(logits.grad).all()

    @pytest.mark.parametrize("what", ["forward", "backward"])
    def test_planted_bug(self, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
        right = getattr(focal_loss._FocalLoss, what)

        def wrong(ctx, *given):  # type: ignore[no-untyped-def]
            out = right(ctx, *given)
            return out * 1.001 if what == "forward" else (out[0] * 1.001, *out[1:])

        monkeypatch.setattr(focal_loss._FocalLoss, what, staticmethod(wrong))
        assert not kernels.focal_is_exact()

    @pytest.mark.parametrize(("custom", "verdict"), [(1.0, "holds"), (1.9, "holds in part")])
    def test_speed(self, monkeypatch: pytest.MonkeyPatch, custom: float, verdict: str) -> None:
        monkeypatch.setattr(kernels, "alternate", times_of(plain=2.0, custom=custom))
        assert kernels.check_focal().verdict == verdict


class TestPrecision:
    def test_sums(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "TERMS", 256_000)
        assert kernels.check_sums().verdict == "holds"
        monkeypatch.setattr(kernels, "summed", lambda terms, dtype: terms.double().sum().item())
        assert kernels.check_sums().verdict == "holds in part"

    def test_a_sum_in_bf16_stalls(self) -> None:
        terms = torch.ones(512 * kernels.LANES)
        assert kernels.summed(terms, torch.bfloat16) == 256 * kernels.LANES
        assert kernels.summed(terms, torch.float32) == 512 * kernels.LANES

    def test_trainer(self) -> None:
        assert kernels.check_trainer(*kernels.bf16_run()).verdict == "holds"

    def test_a_router_in_bf16_is_seen(self) -> None:
        check = kernels.check_trainer(*kernels.bf16_run(["model.moe.router.fp32=false"]))
        assert check.verdict == "holds in part"

    def test_a_run_in_fp32_shows_nothing(self) -> None:
        operand = Operand((4,), (1,), "fp32", 4, True, False)
        calls = [
            Call("aten::mm", str(i), "forward", part, "gemm", (operand,), None, 0.0, 0.0)
            for i, part in enumerate((kernels.ROUTER, kernels.LOSS, "experts"))
        ]
        logits = {kernels.ROUTER: 8, kernels.LOSS: 1024}
        assert kernels.check_trainer(calls, logits).verdict == "holds in part"
        assert kernels.check_trainer([], logits).verdict == "does not hold"


@pytest.mark.parametrize(("last", "verdict"), [(0.9, "holds"), (1.1, "does not hold")])
def test_layout(monkeypatch: pytest.MonkeyPatch, last: float, verdict: str) -> None:
    monkeypatch.setattr(kernels, "alternate", times_of(channels_first=1.0, channels_last=last))
    assert kernels.check_layout().verdict == verdict


def call(phase: str, key: str = "add") -> Call:
    return Call("aten::add", key, phase, "experts", "elementwise", (), None, 0.0, 1000.0)


def apart(sum_over_step: float, backward: float = 2.0, steps: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Apart:
    """A step of 1 s with one call forward and one backward."""
    forward = sum_over_step / (1 + backward)
    timed = [Timed(forward * 0.9, forward * 0.1), Timed(backward * forward, 0.0)]
    account = Account(timed, 0.0, 0.0, sum_over_step)
    return Apart("toy", [call("forward"), call("backward")], StepTimes(list(steps), [1.0], account, 2, 0.0))


class TestSteps:
    @pytest.mark.parametrize(
        ("sums", "verdict"),
        [
            ((1.0, 0.9, 1.1), "holds"),
            ((1.0, 1.0, 0.8), "holds in part"),
            ((1.0, 1.2, 0.8), "does not hold"),
        ],
    )
    def test_sums(self, sums: tuple[float, ...], verdict: str) -> None:
        assert profilednn.check_sums_up([apart(each) for each in sums], 0.1).verdict == verdict

    def test_gaps_count(self) -> None:
        assert apart(0.9).sum_over_step == pytest.approx(0.9)
        assert apart(0.9, steps=(2.0, 2.0, 9.0)).sum_over_step == pytest.approx(0.45)

    def test_backward(self) -> None:
        assert apart(0.9, backward=1.5).backward_over_forward == pytest.approx(1.5)
        assert profilednn.check_backward([apart(1.0), apart(1.0, 1.1)]).verdict == "holds"
        assert profilednn.check_backward([apart(1.0), apart(1.0, 0.9)]).verdict == "holds in part"

    def test_a_busy_machine_is_told(self) -> None:
        assert "busy" in profilednn.check_sums_up([apart(1.0, steps=(1.0, 1.0, 2.0))], 0.1).note
        assert "busy" not in profilednn.check_sums_up([apart(1.0)], 0.1).note

    @pytest.mark.parametrize(("step_s", "verdict"), [(1.1, "holds"), (1.5, "does not hold")])
    def test_predicted(self, step_s: float, verdict: str) -> None:
        """A step with the calls of one that takes 1 s."""
        curves = profilednn.curves_of([apart(1.0)])
        whole = Whole("other", [call("forward"), call("backward")], [step_s] * 3)
        assert profilednn.check_predicted([whole], curves).verdict == verdict

    def test_presets_are_not_predicted_from_themselves(self) -> None:
        assert not set(profilednn.SEEN) & set(profilednn.UNSEEN)
        assert len(profilednn.UNSEEN) >= 4


@pytest.mark.slow
def test_whole_paper() -> None:
    result = profilednn.run(lambda done, total, what: None)
    checks = result.checks
    assert len(checks) == 8
    assert [check.verdict for check in checks[5:7]] == ["holds", "holds"]  # those that no clock is asked for
    sums = [value for name, value in result.figures.items() if "sum over step" in name]
    assert 0.5 < statistics.median(sums) < 2
