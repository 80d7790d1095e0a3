"""Profiles made of public records."""

from pathlib import Path

import pytest

from moestro.errors import MoestroError
from moestro.hardware.profile import load_profile, save_profile
from moestro.hardware.published.profiles import published_device_ids, published_profile


def test_a_device_with_few_records_has_a_profile_that_is_written_and_read(tmp_path: Path) -> None:
    assert {"h800-sxm", "h100-sxm", "b200"} <= set(published_device_ids())
    profile = published_profile("tpu-v7")
    assert profile.mode == "published"
    assert profile.machine.device_id == "tpu-v7"
    assert all(s.source != "measured" for s in profile.samples)
    assert {"copy tpu-v7", "tpu-v7 copy"} & {fit.what for fit in profile.fits}
    assert profile.constants["memory_gbps"] == pytest.approx(6395.76, rel=1e-3)
    fast = published_profile("h800-sxm")
    assert fast.constants["best_gflops_fp8"] == max(
        (s.flops or 0) / s.median_s / 1e9 for s in fast.samples if s.op in ("gemm", "grouped_gemm")
    )
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path) == profile


def test_a_device_without_records_is_refused() -> None:
    with pytest.raises(MoestroError, match="no public record of 'h101-sxm'"):
        published_profile("h101-sxm")
