"""The physics linter flags what cannot be, and nothing else."""

import pytest

from moestro.config.counts import resolved_model
from moestro.config.load import load_config
from moestro.config.plan import Workload
from moestro.hardware.catalog import load_device
from moestro.predict.physics import Claim, check, check_step, mfu_verdict
from moestro.predict.public import PublicRun

PARAMS = 31e9
# Times to the first token of Gemma 4 31B in milliseconds: prompt, on 8 TPU v6e, on 2 H100; 4 requests a second from 1k.
ROWS = ((512, 45, 51), (1024, 49, 58), (4096, 61, 1443), (8192, 1013, 7202), (15360, 62, 99))


@pytest.mark.parametrize(("prompt", "tpu_ms", "gpu_ms"), ROWS)
def test_exactly_the_16k_row_of_the_gemma_table_is_impossible(prompt: int, tpu_ms: float, gpu_ms: float) -> None:
    for milliseconds, devices, peak, floor_ms in ((tpu_ms, 8, 918e12, 130), (gpu_ms, 2, 989e12, 481)):
        verdict = check(Claim(f"{prompt}", milliseconds / 1e3, devices, flops=2 * PARAMS * prompt), peak)
        assert verdict.possible == (prompt != 15360)
        if prompt == 15360:
            assert verdict.floor_s * 1e3 == pytest.approx(floor_ms, abs=1)
            assert "take at least" in verdict.reason


def test_a_load_above_one_is_impossible_however_long_the_time() -> None:
    claim = Claim("16k", 60.0, 2, flops=2 * PARAMS * 15360, requests_per_s=4)
    verdict = check(claim, 989e12)
    assert not verdict.possible
    assert "load of 1.9" in verdict.reason


def test_bytes_bound_too() -> None:
    claim = Claim("decode", 0.004, 2, flops=1e9, bytes=2 * PARAMS)
    assert not check(claim, 989e12, 3.35e12).possible
    assert check(claim, 989e12).possible  # no bandwidth, no bound
    assert "GB/s" in check(claim, 989e12, 3.35e12).reason
    # 2 · 31 GB over two H100 take 9.25 ms; a hair less is not called impossible.
    assert check(Claim("decode", 0.00925, 2, bytes=2 * PARAMS), 989e12, 3.35e12).possible


def test_a_training_step_against_its_model_flops() -> None:
    model = resolved_model(load_config("mixtral-8x7b").config)
    workload = Workload(model=model, seq_len=4096, global_batch_size=64)
    device = load_device("h100-sxm")
    verdict = check_step(workload, device, 64, 1.0)
    assert verdict is not None
    peak = device.peak_flops("bf16")
    assert peak is not None
    at_peak = verdict.floor_s
    assert at_peak == pytest.approx(6 * 12.7e9 * 64 * 4096 / (64 * peak), rel=0.1)
    for share, possible in ((1.1, True), (0.5, False)):
        found = check_step(workload, device, 64, at_peak * share)
        assert found is not None
        assert found.possible is possible


def test_a_utilisation_above_one_is_an_error_of_counting() -> None:
    assert mfu_verdict(0.43).possible
    assert not mfu_verdict(1.2).possible
    assert not mfu_verdict(0.0).possible


def test_no_published_training_run_is_called_impossible(public_runs: list[PublicRun]) -> None:
    checked = 0
    devices = {device: load_device(device) for device in {run.device for run in public_runs}}
    for run in (run for run in public_runs if run.quantity == "step_s"):
        verdict = check_step(run.workload, devices[run.device], run.num_devices, run.measured)
        if verdict is not None:
            checked += 1
            assert verdict.possible, (run.row, run.source, verdict.reason)
    assert checked > 1400
