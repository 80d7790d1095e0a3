"""DeepSeek-V3: the closed forms, the exact checks and that they can fail, the reading of runs, and the record."""

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from moestro.model.attention.mla import LatentAttention
from moestro.model.moe import route
from papers import deepseek_v3, deepseek_v3_counts, deepseek_v3_exact
from papers import deepseek_v3_kernels as kernels
from papers.deepseek_v3 import BALANCINGS, SEEDS, STEPS, Balancing, Job
from papers.result import PaperResult
from papers.store import read_record
from papers.toys import Curve

COUNTED = (
    deepseek_v3_counts.check_rate,
    deepseek_v3_counts.check_size,
    deepseek_v3_counts.check_flops,
    deepseek_v3_counts.check_cost,
    deepseek_v3_counts.check_cache,
)


class TestCounts:
    @pytest.mark.parametrize("check", COUNTED)
    def test_holds(self, check: Any) -> None:
        assert check().verdict == "holds"

    def test_to_the_digits_of_the_card(self) -> None:
        counts = deepseek_v3_counts.counts()
        assert counts.total_params == pytest.approx(671.03e9, abs=0.005e9)
        assert counts.active_params == pytest.approx(37.55e9, abs=0.005e9)
        assert deepseek_v3_counts.active_without_input(counts) == pytest.approx(36.62e9, abs=0.01e9)
        assert deepseek_v3_counts.flops_per_token(True) == pytest.approx(281.2e9, abs=0.05e9)
        assert deepseek_v3_counts.flops_per_token(False) == pytest.approx(250.4e9, abs=0.1e9)

    def test_another_rate_does_not_close(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(deepseek_v3_counts, "TOKENS_PER_DAY", 1.01 * deepseek_v3_counts.TOKENS_PER_DAY)
        assert deepseek_v3_counts.check_rate().verdict == "does not hold"
        assert deepseek_v3_counts.check_cost().verdict == "holds in part"


class TestExact:
    @pytest.mark.parametrize(
        "check",
        [
            deepseek_v3_exact.check_groups,
            deepseek_v3_exact.check_sequence_loss,
            deepseek_v3_exact.check_mtp,
            deepseek_v3_exact.check_absorbed,
        ],
    )
    def test_holds(self, check: Any) -> None:
        assert check().verdict == "holds"

    def test_bias_needs_its_steps(self) -> None:
        assert deepseek_v3_exact.check_bias().verdict == "holds"
        assert deepseek_v3_exact.check_bias(20).verdict == "holds in part"

    def test_a_bias_in_the_gates_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = route.select

        def spoiled(scores: Any, ranking: Tensor, *rest: Any) -> Any:
            return real(replace(scores, probs=ranking), ranking, *rest)

        monkeypatch.setattr(route, "select", spoiled)
        assert deepseek_v3_exact.check_bias().verdict == "holds in part"

    def test_no_limit_of_groups_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = deepseek_v3_exact.router_of
        monkeypatch.setattr(
            deepseek_v3_exact, "router_of", lambda *overrides: real("model.moe.router.top_groups=8", *overrides)
        )
        assert deepseek_v3_exact.check_groups().verdict != "holds"

    def test_plain_decoding_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(LatentAttention, "_absorbs", lambda self, queries, keys: False)
        assert deepseek_v3_exact.check_absorbed(16).verdict == "holds in part"


def curves(**loss: float) -> dict[Job, Curve]:
    wobble = {seed: 0.002 * i for i, seed in enumerate(SEEDS)}
    kinds: tuple[Balancing, ...] = BALANCINGS
    return {
        Job(kind, seed): Curve([loss[kind] + wobble[seed] * (kind == "bias")] * STEPS, [], [0.9] * STEPS, [])
        for kind in kinds
        for seed in SEEDS
    }


class TestTrend:
    def test_holds(self) -> None:
        assert deepseek_v3.check_scope(curves(sequence=2.2, bias=2.1, batch=2.101)).verdict == "holds"

    @pytest.mark.parametrize(
        ("bias", "batch", "verdict"),
        [(2.1, 2.3, "holds in part"), (2.3, 2.4, "does not hold"), (2.0, 2.1, "holds in part")],
    )
    def test_fails(self, bias: float, batch: float, verdict: str) -> None:
        assert deepseek_v3.check_scope(curves(sequence=2.2, bias=bias, batch=batch)).verdict == verdict

    def test_a_short_run_is_repeatable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(deepseek_v3, "STEPS", 2)
        for kind in BALANCINGS:
            curve = deepseek_v3.train(Job(kind, 0))
            assert deepseek_v3.train(Job(kind, 0)) == curve


@pytest.fixture
def as_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves that give the published rate of every shape, so that the reading is tested and not the curves."""
    rates = {**kernels.DENSE, **kernels.CONTIGUOUS, **kernels.MASKED}
    monkeypatch.setattr(kernels, "rate", lambda shape, device="": 1.01 * rates[shape])


class TestKernels:
    def test_products(self, as_published: None, monkeypatch: pytest.MonkeyPatch) -> None:
        assert kernels.check_products().verdict == kernels.check_groups_of_products().verdict == "holds"
        assert kernels.check_shared_processors().verdict == "holds"
        monkeypatch.setitem(kernels.DENSE, (1, 4096, 32768, 512), 200)
        assert kernels.check_products().verdict == "holds in part"
        monkeypatch.setattr(kernels, "COMPUTE_SMS", 132)
        assert kernels.check_shared_processors().verdict == "does not hold"

    def test_only_shapes_of_the_tables_were_fitted_to(self) -> None:
        fitted = kernels.shipped()
        assert fitted
        assert fitted <= {*kernels.DENSE, *kernels.CONTIGUOUS, *kernels.MASKED}
        assert any(shape not in fitted for shape in kernels.DENSE)

    def test_curves_of_the_h800_are_near_its_products(self) -> None:
        errors = sorted(abs(error) for error in kernels.errors(kernels.DENSE).values())
        assert errors[len(errors) // 2] < kernels.MEDIAN_LIMIT

    def test_exchange(self, monkeypatch: pytest.MonkeyPatch) -> None:
        theirs = {ranks: rates[0] for ranks, rates in kernels.DEEP_EP.items()}
        for factor, verdict in ((1.0, "holds"), (3.0, "does not hold")):
            found = {ranks: (gb * factor, 2.1 * factor) for ranks, gb in theirs.items()}
            monkeypatch.setattr(kernels, "exchange", found.__getitem__)
            assert kernels.check_exchange().verdict == verdict

    def test_our_exchange_is_of_the_hop_between_nodes(self) -> None:
        rate, ms = kernels.exchange(64)
        assert 5 < rate < 60
        assert ms > 1e3 * 2 * kernels.sent_bytes(8) / rate / 1e12

    def test_overlap(self) -> None:
        assert kernels.check_overlap().verdict == "holds"
        assert "0.53 and 0.76" in kernels.check_overlap().ours

    def test_serving(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert kernels.check_serving().verdict == "holds"
        monkeypatch.setattr(kernels, "NODE_OUT", 4e5)  # more than memory can be read
        assert kernels.check_serving().verdict == "holds in part"


def recorded() -> PaperResult:
    record = read_record("deepseek_v3")
    assert record is not None
    return record.result


class TestRecord:
    def test_closed_forms_are_those_of_now(self) -> None:
        assert list(recorded().checks[: len(COUNTED)]) == [check() for check in COUNTED]

    def test_trend_follows_from_the_figures(self) -> None:
        result = recorded()
        loss = {(b, seed): result.figures[f"loss {b} seed={seed}"] for b in BALANCINGS for seed in SEEDS}
        balance = {(b, seed): result.figures[f"balance {b} seed={seed}"] for b in BALANCINGS for seed in SEEDS}
        found = {Job(*key): Curve([value] * STEPS, [], [balance[key]] * STEPS, []) for key, value in loss.items()}
        assert deepseek_v3.check_scope(found).verdict == result.checks[-1].verdict


@pytest.mark.slow
def test_reproduction() -> None:
    """The whole of `moestro papers run deepseek_v3`, held against what we say of it."""
    result = deepseek_v3.run(lambda done, total, what: None)
    then = recorded()
    assert [check.verdict for check in result.checks] == [check.verdict for check in then.checks]
    assert {check.verdict for check in result.checks[:-1]} == {"holds"}
    assert result.figures.keys() == then.figures.keys()
