"""Curves on public records: what is held out is predicted, and better than the data sheet would."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from moestro.errors import MoestroError
from moestro.hardware.curves.attention import fit_attention
from moestro.hardware.curves.compute import Key, data_sheet, fit_group, grouped, known_device, predict, roofline_seconds
from moestro.hardware.curves.experts import DEFAULT_SKEW
from moestro.hardware.curves.gemm import DEFAULT, GemmCurve
from moestro.hardware.profile import Sample
from moestro.hardware.published.gemm import REQUIRED, read_gemm

MANY = 50  # rows of a device and dtype, from which on a tenth says something


@pytest.fixture(scope="module")
def read() -> tuple[list[Sample], dict[str, int]]:
    return read_gemm()


@pytest.fixture(scope="module")
def groups(read: tuple[list[Sample], dict[str, int]]) -> dict[Key, list[Sample]]:
    return grouped(read[0])


@pytest.fixture(scope="module")
def held_out(groups: dict[Key, list[Sample]]) -> dict[Key, tuple[GemmCurve, np.ndarray, np.ndarray]]:
    """Of each device and dtype: the curve of nine tenths, and on the last tenth its errors and the data sheet's."""
    found = {}
    for key, samples in groups.items():
        if key[1] != "gemm" or len(samples) < MANY:
            continue
        order = np.random.default_rng(7).permutation(len(samples))
        cut = len(samples) // 10
        inside, outside = [samples[i] for i in order[cut:]], [samples[i] for i in order[:cut]]
        curve = fit_group(key, inside)
        assert isinstance(curve, GemmCurve)
        actual = np.array([s.median_s for s in outside])
        sheet = np.array([roofline_seconds(s) or np.nan for s in outside])
        found[key] = curve, np.abs(predict(curve, outside) / actual - 1), np.abs(sheet / actual - 1)
    return found


def test_every_row_is_read_or_counted(read: tuple[list[Sample], dict[str, int]]) -> None:
    samples, unusable = read
    assert len(samples) == 19647
    assert unusable == {"memory rate without the size of its arrays": 7, "no dtype": 2, "of a part of a device": 3}
    ops = Counter(s.op for s in samples)
    assert ops == {"gemm": 11865, "moe_experts": 6318, "attention": 1400, "grouped_gemm": 60, "copy": 4}
    assert all(known_device(str(s.case["device"])) for s in samples)


def test_a_tenth_held_out_is_within_twelve_percent_for_every_device_and_dtype(held_out: dict) -> None:
    medians = {key: float(np.median(errors)) for key, (_, errors, _) in held_out.items()}
    assert len(medians) == 32
    assert {key: error for key, error in medians.items() if error > 0.12} == {}
    together = np.concatenate([errors for _, errors, _ in held_out.values()])
    assert np.median(together) < 0.05
    assert np.quantile(together, 0.9) < 0.16


def test_curves_beat_the_data_sheet(held_out: dict) -> None:
    for key, (_, errors, sheet) in held_out.items():
        if np.isfinite(sheet).all():
            assert np.median(errors) < np.median(sheet), key


def test_the_error_a_curve_states_is_that_of_the_tenth(held_out: dict) -> None:
    stated = np.array([curve.held_out.median for curve, _, _ in held_out.values() if curve.held_out])
    found = np.array([np.median(errors) for _, errors, _ in held_out.values()])
    assert np.median(found) == pytest.approx(np.median(stated), rel=0.4)


def test_fp8_is_not_a_flat_factor(held_out: dict) -> None:
    """Small products in fp8 reach a far smaller share of its peak than large ones; in bf16 the drop is smaller."""
    for device in ("h100-sxm", "h200-sxm", "b200", "gb300"):
        drops = {}
        for dtype in ("bf16", "fp8"):
            curve = held_out[device, "gemm", dtype][0]
            drops[dtype] = curve.efficiency(16384, 8192, 8192) / curve.efficiency(1024, 4096, 4096)
        assert drops["fp8"] > 1.3
        assert drops["fp8"] > drops["bf16"]


def test_defaults_are_the_medians_of_what_fits_the_devices(held_out: dict) -> None:
    for dtype, default in DEFAULT.items():
        fits = [(key[0], curve) for key, (curve, _, _) in held_out.items() if key[2] == dtype and curve.samples > 190]
        shares = []
        for device, curve in fits:
            known = known_device(device)
            assert known is not None
            peak, bandwidth, _ = data_sheet(known, dtype)
            if peak is not None and bandwidth is not None:
                model = curve.model
                shares.append((model.rate_flops / peak, model.overhead_s, model.cast_bytes))
        rate, overhead, cast = np.median(np.array(shares), axis=0)
        assert rate == pytest.approx(default.of_peak, rel=0.1)
        assert overhead == pytest.approx(default.overhead_s, rel=0.3)
        assert cast == pytest.approx(default.cast_bytes, rel=0.6)


@pytest.mark.parametrize("key", [("h200-sxm", "moe_experts", "bf16"), ("b300", "moe_experts", "nvfp4")])
def test_experts_held_out_are_within_fifteen_percent(groups: dict[Key, list[Sample]], key: Key) -> None:
    curve = fit_group(key, groups[key])
    assert curve.held_out is not None
    assert curve.held_out.median < 0.08
    assert curve.held_out.p90 < 0.3


def test_skew_is_the_median_over_devices(groups: dict[Key, list[Sample]]) -> None:
    """Power law ÷ balanced at ep 8: 1.50 to 1.51 on Hopper and 1.36 to 1.38 on Blackwell have been read from these."""
    balanced = {}
    ratios: dict[int, list[float]] = {}
    samples = [s for key, those in groups.items() if key[1] == "moe_experts" and key[0] != "l40s" for s in those]
    for s in samples:
        rest = tuple(sorted((k, v) for k, v in s.case.items() if k != "routing")), s.software
        if s.case["routing"] == "balanced":
            balanced[rest] = s.median_s
    for s in samples:
        rest = tuple(sorted((k, v) for k, v in s.case.items() if k != "routing")), s.software
        if s.case["routing"] != "balanced" and rest in balanced:
            ratios.setdefault(int(s.number("ep")), []).append(s.median_s / balanced[rest])
    for ep, default in DEFAULT_SKEW.items():
        assert np.median(ratios[ep]) == pytest.approx(default, rel=0.06), ep


@pytest.mark.parametrize("device", ["a100-sxm-80gb", "h100-sxm", "b200", "arc-pro-b60"])
def test_attention_held_out_is_within_twelve_percent(groups: dict[Key, list[Sample]], device: str) -> None:
    known = known_device(device)
    assert known is not None
    curve = fit_attention(groups[device, "attention", "bf16"], "bf16", *data_sheet(known, "bf16"))
    held = curve.phases["fwd"].held_out
    assert held is not None
    assert held.median < 0.08
    assert curve.phases["decode"].basis == "class default of attention"


def test_attention_rates_of_the_whole_square_are_halved(groups: dict[Key, list[Sample]]) -> None:
    """One source counts the square that its causal kernels skip; counted alike, none is above the peak."""
    rates = [s.flops_per_s or 0.0 for s in groups["b200", "attention", "bf16"]]
    assert max(rates) < 2250e12
    own = [s for s in groups["a100-pcie-80gb", "attention", "bf16"] if s.case["phase"] == "fwd"]
    assert max(s.flops_per_s or 0.0 for s in own) == pytest.approx(353.18e12 / 2)


HEADER = ",".join(REQUIRED)


def written(path: Path, *rows: str) -> Path:
    path.write_text("\n".join([HEADER + ",batch_or_groups,layout_or_stage,memory_gbps,notes", *rows]) + "\n")
    return path


def test_odd_rows_are_counted_with_their_reason(tmp_path: Path) -> None:
    path = written(
        tmp_path / "rows.csv",
        "x,H100 SXM,gemm,bfloat16,64,64,64,1.0,,,,,",
        "x,Unheard-of 9,gemm,fp8_e4m3,64,64,64,,5.0,,,,",
        "x,H100 SXM,gemm,bf16,64,,64,1.0,,,,,",
        "x,H100 SXM,gemm,bf16,64,64,64,nan,,,,,",
        "x,H100 SXM,gemm,posit8,64,64,64,1,,,,,",
        "x,H100 SXM,convolution,bf16,64,64,64,1,,,,,",
        'x,H100 SXM,"moe experts fwd (gate/up, act, down)",bf16,64,64,64,,1,8,ep=1,,',
        "x,H100 SXM,gemm,bf16,64",
    )
    samples, unusable = read_gemm(path)
    assert [s.case["device"] for s in samples] == ["h100-sxm", "Unheard-of 9"]
    assert samples[0].median_s == pytest.approx(2 * 64**3 / 1e12)
    assert samples[1].case["dtype"] == "fp8"
    assert samples[1].median_s == pytest.approx(5e-6)
    assert unusable == {
        "size missing": 2,
        "neither a time nor a rate": 1,
        "unknown dtype posit8": 1,
        "unknown operation convolution": 1,
        "top_k or ep missing": 1,
    }


def test_a_missing_column_or_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "short.csv"
    path.write_text("source,hardware,op,dtype,m,n\n")
    with pytest.raises(MoestroError, match="has no column k, tflops, time_us"):
        read_gemm(path)
    with pytest.raises(MoestroError, match="no file of products"):
        read_gemm(tmp_path / "none.csv")
    (tmp_path / "bad.csv.xz").write_bytes(b"not xz")
    with pytest.raises(MoestroError, match="not a CSV"):
        read_gemm(tmp_path / "bad.csv.xz")
