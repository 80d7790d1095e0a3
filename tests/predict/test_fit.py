"""Fitted constants: known ones are found again, intervals come from residuals, the shipped ones hold on public runs."""

from collections.abc import Sequence

import numpy as np
import pytest

from moestro.config.plan import Plan, Workload
from moestro.hardware.catalog import load_device
from moestro.predict.confidence import interval, residuals_of
from moestro.predict.constants import Calibration, Constants, generation, load_calibration
from moestro.predict.fit import fit_calibration, predicted, source_of
from moestro.predict.many import many_step_times, table
from moestro.predict.public import PublicRun
from moestro.predict.step import Place, cost_step
from moestro.predict.validate import Row, by_kind, group, groups, null_model, price_runs


def some(runs: Sequence[PublicRun], device: str, count: int) -> list[PublicRun]:
    """Every n-th complete run of a device, over all of its rows."""
    own = [run for run in runs if run.device == device and run.complete and run.quantity == "step_s"]
    return own[:: max(1, len(own) // count)]


def test_known_constants_are_found_again(public_runs: list[PublicRun]) -> None:
    runs = [run for run in some(public_runs, "a100-sxm-80gb", 40) if generation(run.workload) == "eager"]
    priced, _ = price_runs(runs, lambda done, total, what: None)
    true = Constants(gemm=1.2, memory=1.5, launch_s=60e-6, collective_host_s=200e-6, inside=1.1)
    times = many_step_times(table([c for _, c in priced], [r.plan for r, _ in priced]), true)
    moved = [
        (run.__class__(**{**vars(run), "measured": float(t)}), c) for (run, c), t in zip(priced, times, strict=True)
    ]
    found = predicted(moved, fit_calibration(moved))
    errors = [abs(seconds / run.measured - 1) for run, seconds in found]
    assert np.median(errors) < 0.02
    assert max(errors) < 0.15


def test_shipped_constants_hold_on_a_sample_of_public_runs(public_runs: list[PublicRun]) -> None:
    runs = [*some(public_runs, "a100-sxm-80gb", 60), *some(public_runs, "h100-sxm", 30)]
    priced, failed = price_runs(runs, lambda done, total, what: None)
    assert not failed
    errors = [abs(seconds / run.measured - 1) for run, seconds in predicted(priced, load_calibration())]
    null = null_model(runs)
    nothing = [abs(null[run.row] / run.measured - 1) for run in runs if run.row in null]
    assert np.median(errors) < 0.10
    assert np.quantile(errors, 0.9) < 0.25
    assert np.median(errors) < np.median(nothing) / 2


def test_groups_and_sources(public_runs: list[PublicRun]) -> None:
    runs = public_runs[:4]
    rows = [
        Row(run, run.measured * factor, run.measured * 2)
        for run, factor in zip(runs, (0.9, 1.1, 1.2, 1.0), strict=True)
    ]
    one = group("four", rows)
    assert (one.runs, one.median, one.null_median) == (4, pytest.approx(0.1), pytest.approx(1.0))
    assert sum(part.runs for part in groups(rows, by_kind)) == 4
    assert source_of(runs[0]) == "github VIA-Research/vTrain"


class TestIntervals:
    calibration = load_calibration()

    def test_four_of_five_runs_lie_inside(self, public_runs: list[PublicRun]) -> None:
        runs = some(public_runs, "a100-sxm-80gb", 60)
        priced, _ = price_runs(runs, lambda done, total, what: None)
        inside = 0
        for run, seconds in predicted(priced, self.calibration):
            found = interval(seconds, run.workload, run.device, run.num_devices, self.calibration)
            inside += found.low <= run.measured <= found.high
        assert 0.6 < inside / len(priced) < 0.97

    def test_an_unknown_device_is_less_sure_and_says_so(self, public_runs: list[PublicRun]) -> None:
        workload = some(public_runs, "h100-sxm", 1)[0].workload
        known = interval(1.0, workload, "h100-sxm", 64, self.calibration)
        unknown = interval(1.0, workload, "gaudi-3", 64, self.calibration)
        assert unknown.high - unknown.low > known.high - known.low
        assert "extrapolation" in unknown.basis
        assert "extrapolation" not in known.basis
        assert "beyond" in interval(1.0, workload, "h100-sxm", 100_000, self.calibration).basis

    def test_nothing_known(self, public_runs: list[PublicRun]) -> None:
        found = interval(1.0, public_runs[0].workload, "h100-sxm", 8, Calibration())
        assert (found.low, found.high) == (0.5, 2.0)
        assert "no validated run" in found.basis

    def test_residuals_need_several_runs(self, public_runs: list[PublicRun]) -> None:
        runs = some(public_runs, "h100-sxm", 30)
        assert residuals_of([(run, run.measured) for run in runs[:3]], unseen=False) == []
        perfect = residuals_of([(run, run.measured) for run in runs], unseen=False)
        assert all(entry.low == entry.high == 1 for entry in perfect)


def test_prediction_of_deepseek_v3_identities() -> None:
    """2,048 H800, 62.9 M tokens a step, 19.926 s (2505.09343); FLOPs of 2412.19437."""
    from moestro.config import load_config, resolved_model
    from moestro.graph.count import count_step

    model = resolved_model(load_config("deepseek-v3").config)
    workload = Workload(model=model.model_copy(update={"mtp": None}), seq_len=4096, global_batch_size=15360)
    graph = count_step(workload, Plan(pp=16, dp=128, ep=64, schedule="dualpipe", zero=1))
    assert graph.tokens == pytest.approx(272.80e9 * 19.926 / 86400, rel=0.005)
    assert graph.model_flops / graph.tokens == pytest.approx(250.4e9, rel=0.005)
    per_device = graph.model_flops / graph.tokens * 272.80e9 / 86400 / 2048
    assert per_device == pytest.approx(385e12, rel=0.005)
    place = Place.of(load_device("h800-sxm"), 8)
    assert cost_step(workload, Plan(pp=16, dp=128, ep=64, schedule="dualpipe", zero=1), place).micro_batches == 120
