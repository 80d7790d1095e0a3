"""Curves of matrix products on made-up machines whose parameters are known."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import MoestroError
from moestro.hardware.curves.fitting import error_in_folds
from moestro.hardware.curves.gemm import DEFAULT, GemmCurve, fit_gemm
from moestro.hardware.curves.tiles import TileModel
from moestro.hardware.profile import Sample

PEAK, BANDWIDTH, UNITS = 400e12, 2e12, 100
TRUE = TileModel(
    rate_flops=300e12, overhead_s=6e-6, bytes_per_s=1.6e12, cast_bytes=0.06, small_tiles=1.0, tiles="128x256",
    units=UNITS, element_bytes=2,
)  # fmt: skip


def sample(m: int, n: int, k: int, seconds: float, dtype: str = "bf16", **more: int | str) -> Sample:
    return Sample(op="gemm", case={"m": m, "n": n, "k": k, "dtype": dtype} | more, median_s=seconds)


def made(count: int, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    draw = np.random.default_rng(seed)
    sizes = 2 ** draw.uniform(4, 14, (count, 3))
    out = []
    for m, n, k in np.maximum(1, np.round(sizes / 64) * 64).astype(int):
        out.append(sample(int(m), int(n), int(k), TRUE.seconds(m, n, k) * float(np.exp(noise * draw.normal()))))
    return out


@pytest.fixture(scope="module")
def curve() -> GemmCurve:
    return fit_gemm(made(150, noise=0.03), "bf16", PEAK, BANDWIDTH, UNITS)


def test_known_machine_is_recovered_within_five_percent(curve: GemmCurve) -> None:
    assert curve.model.tiles == "128x256"
    assert curve.model.rate_flops == pytest.approx(TRUE.rate_flops, rel=0.05)
    assert curve.model.overhead_s == pytest.approx(TRUE.overhead_s, rel=0.05)
    assert curve.model.bytes_per_s == pytest.approx(TRUE.bytes_per_s, rel=0.05)


def test_unseen_sizes_of_the_known_machine(curve: GemmCurve) -> None:
    errors = [abs(curve.seconds(*(s.number(x) for x in "mnk")) / s.median_s - 1) for s in made(200, seed=1)]
    assert np.median(errors) < 0.02
    assert np.quantile(errors, 0.9) < 0.06
    assert curve.held_out is not None
    assert curve.held_out.median < 0.05
    assert curve.held_out.count == 150


def test_waves_show_where_they_fill_up(curve: GemmCurve) -> None:
    """100 tiles fill the units once; the 101st costs a wave more."""
    full, more = curve.model.seconds(128 * 10, 256 * 10, 8192), curve.model.seconds(128 * 10 + 1, 256 * 10, 8192)
    assert more > 1.8 * full


def test_arrays_agree_with_numbers(curve: GemmCurve) -> None:
    m, n, k = (np.array([17.0, 512.0, 4096.0]) for _ in range(3))
    together = curve.seconds(m, n, k, 3)
    assert together.shape == (3,)
    assert together == pytest.approx([curve.seconds(float(a), float(a), float(a), 3) for a in m], rel=1e-3)
    assert curve.seconds(m[:, None], n[None], k[None]).shape == (3, 3)


sizes = st.integers(1, 200_000)


@settings(max_examples=60, deadline=None)
@given(m=sizes, n=sizes, k=sizes, batch=st.integers(1, 512), grow=st.sampled_from("mnk"))
def test_a_larger_product_takes_longer(curve: GemmCurve, m: int, n: int, k: int, batch: int, grow: str) -> None:
    at = {"m": m, "n": n, "k": k}
    seconds = curve.seconds(**at, batch=batch)
    assert np.isfinite(seconds)
    assert seconds >= 2 * m * n * k * batch / (1.05 * PEAK)
    larger = at | {grow: 2 * at[grow]}
    assert curve.seconds(**larger, batch=batch) >= 0.8 * seconds


def test_no_samples_give_the_class_default_and_say_so() -> None:
    curve = fit_gemm([], "fp8", PEAK, BANDWIDTH, UNITS)
    assert curve.basis == "class default of fp8"
    assert curve.held_out is None
    assert curve.efficiency(16384, 16384, 16384) == pytest.approx(DEFAULT["fp8"].of_peak, rel=0.2)
    assert fit_gemm([], "mxfp8", PEAK, BANDWIDTH, UNITS).basis == "class default of fp8"


@pytest.mark.parametrize("count", [1, 3])
def test_few_samples_shift_the_default_towards_them(count: int) -> None:
    samples = made(40)[:count]
    curve = fit_gemm(samples, "bf16", PEAK, BANDWIDTH, UNITS)
    before = fit_gemm([], "bf16", PEAK, BANDWIDTH, UNITS)
    at = [tuple(s.number(x) for x in "mnk") for s in samples]
    off = [abs(np.log(curve.seconds(*a) / s.median_s)) for a, s in zip(at, samples, strict=True)]
    was = [abs(np.log(before.seconds(*a) / s.median_s)) for a, s in zip(at, samples, strict=True)]
    assert sum(off) < sum(was)
    assert curve.basis == f"{count} samples"
    assert curve.held_out is None


def test_without_a_data_sheet_the_samples_stand_for_it() -> None:
    """A CPU of the catalog's gaps: no peak, no bandwidth, no compute units."""
    cpu = TileModel(1.2e11, 4e-6, 1.7e10, 0.06, 1.0, "64x64", None, 4)
    slow = [
        sample(a, b, c, cpu.seconds(a, b, c), "fp32") for a in (8, 64, 512) for b in (64, 512, 2048) for c in (64, 1024)
    ]
    curve = fit_gemm(slow, "fp32", None, None, None)
    assert curve.seconds(256, 1024, 512) == pytest.approx(cpu.seconds(256, 1024, 512), rel=0.1)
    assert 0.5 < curve.efficiency(2048, 2048, 2048) <= 1.3


def test_alignment_enters_where_the_samples_show_it() -> None:
    """On a machine that takes twice as long for odd n, odd sizes that were not measured take longer too."""
    near = [1000, 1001, 1008, 1016, 1023, 1024, 1025, 1032, 1040, 1041, 2047, 2048, 2049, 2056, 2064]
    samples = [sample(1024, n, k, (1 + n % 2) * TRUE.seconds(1024, n, k)) for n in near for k in (1024, 4096)]
    curve = fit_gemm(samples, "bf16", PEAK, BANDWIDTH, UNITS)
    assert curve.seconds(1024, 1033, 2048) > 1.6 * curve.seconds(1024, 1024, 2048)


def test_kernels_are_kept_apart_and_their_mean_stands_for_an_unknown_one() -> None:
    slow = [s.model_copy(update={"software": "slow", "median_s": 1.5 * s.median_s}) for s in made(60)]
    fast = [s.model_copy(update={"software": "fast"}) for s in made(60)]
    curve = fit_gemm([*slow, *fast], "bf16", PEAK, BANDWIDTH, UNITS)
    at = (1024, 2048, 4096)
    assert curve.seconds(*at, kernel="gemm, slow") == pytest.approx(
        1.5 * curve.seconds(*at, kernel="gemm, fast"), rel=0.1
    )
    assert curve.seconds(*at, kernel="gemm, fast") < curve.seconds(*at) < curve.seconds(*at, kernel="gemm, slow")
    assert curve.seconds(*at, kernel="never seen") == curve.seconds(*at)


def test_knee_is_where_squares_reach_the_share(curve: GemmCurve) -> None:
    side = round((curve.knee_flops() / 2) ** (1 / 3))
    best = max(curve.efficiency(s, s, s) for s in range(1024, 32768, 1024))
    assert curve.efficiency(side, side, side) == pytest.approx(0.9 * best, rel=0.08)
    assert curve.knee_flops(0.5) < curve.knee_flops(0.9)


def test_a_transferred_curve_scales_with_the_data_sheet(curve: GemmCurve) -> None:
    twice = curve.transferred(2.0, 2.0, UNITS, "a device")
    assert twice.basis == "shares of a device"
    big = (16384, 16384, 16384)
    assert curve.seconds(*big) == pytest.approx(2 * twice.seconds(*big), rel=0.02)
    assert twice.held_out is None


def test_batched_and_grouped_products_count_every_one() -> None:
    samples = [
        Sample(op="grouped_gemm", case={"groups": g, "m": 512, "n": 1024, "k": 1024, "dtype": "bf16"},
               median_s=TRUE.seconds(512, 1024, 1024, g)) for g in (1, 2, 4, 8, 16, 32, 64)
    ]  # fmt: skip
    curve = fit_gemm(samples, "bf16", PEAK, BANDWIDTH, UNITS)
    assert curve.seconds(512, 1024, 1024, 24) == pytest.approx(TRUE.seconds(512, 1024, 1024, 24), rel=0.15)


def test_no_prediction_is_faster_than_the_peak_allows(curve: GemmCurve) -> None:
    wild = replace(curve, model=replace(curve.model, rate_flops=100 * PEAK))
    assert wild.seconds(8192, 8192, 8192) == pytest.approx(2 * 8192**3 / (1.05 * PEAK))
    assert wild.seconds(np.array([8192.0]), np.array([8192.0]), np.array([8192.0]))[0] == wild.seconds(8192, 8192, 8192)


def test_folds_predict_every_sample_once_and_never_from_itself() -> None:
    seconds, asked = np.arange(1.0, 24.0), []

    def predict(inside: np.ndarray, outside: np.ndarray) -> np.ndarray:
        assert not set(inside) & set(outside)
        assert len(inside) + len(outside) == len(seconds)
        asked.extend(outside)
        return 1.1 * seconds[outside]

    held = error_in_folds(seconds, predict)
    assert sorted(asked) == list(range(23))
    assert held is not None
    assert held.median == pytest.approx(0.1)
    assert error_in_folds(seconds[:4], predict) is None


def test_report_names_the_form_and_the_error(curve: GemmCurve) -> None:
    report = curve.report("gemm bf16")
    assert report.form == "tiles 128x256, 150 samples"
    assert report.parameters["tile_n"] == 256
    assert report.held_out_median == pytest.approx(curve.held_out.median if curve.held_out else 0)


def test_bad_input_is_refused() -> None:
    with pytest.raises(MoestroError, match="no bf16 sample, and no peak"):
        fit_gemm([], "bf16", None, BANDWIDTH, None)
    with pytest.raises(MoestroError, match="unknown dtype 'bf17'"):
        fit_gemm([], "bf17", PEAK, BANDWIDTH, None)
    with pytest.raises(MoestroError, match="1 or more"):
        fit_gemm([sample(0, 8, 8, 1.0)], "bf16", PEAK, BANDWIDTH, None)
    with pytest.raises(MoestroError, match="has no number 'k'"):
        fit_gemm([Sample(op="gemm", case={"m": 8, "n": 8}, median_s=1.0)], "bf16", PEAK, BANDWIDTH, None)
