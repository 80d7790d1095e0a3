"""Which cases tier 2 runs, and where its floors come from."""

import pytest

from doctor.helpers import ACCELERATOR, CPU, gemm, profile
from moestro.doctor.floors import best_gemm, plan_work
from moestro.hardware.devices import Device, Link, Memory
from moestro.hardware.figures import Figure
from moestro.hardware.profile import Sample

COPY = Sample(op="copy", case={"bytes": 2**24, "dtype": "fp32"}, median_s=0.01, high_s=0.02, bytes_moved=2**25)
LARGER = Sample(op="copy", case={"bytes": 2**30, "dtype": "fp32"}, median_s=0.01, bytes_moved=2**31)


def reduce(size: int, ranks: int, seconds: float, **case: int | str) -> Sample:
    of = {"bytes": size, "ranks": ranks, "nodes": 1, "dtype": "fp32", **case}
    return Sample(op="all_reduce", case=of, median_s=seconds, high_s=2 * seconds)


def achieved(value: float) -> Figure:
    return Figure(achieved=value, achieved_source="a test")


DEVICE = Device(
    id="x1", name="X1", vendor="X", kind="gpu", year=2026, peak_tflops={"bf16": achieved(700)},
    memory=Memory(gbps=achieved(4000)), links=(Link(name="xlink", topology="switch", gbps=achieved(400)),),
    devices_per_node=8,
)  # fmt: skip


def test_without_anything_known_there_is_no_verdict() -> None:
    for work in (plan_work("cpu", 2, CPU), plan_work("cuda", 8, ACCELERATOR), plan_work("cpu", 2, CPU, device=DEVICE)):
        assert work.gemm is work.copy is work.all_reduce is None
    assert plan_work("cuda", 8, ACCELERATOR).shape == (8192,) * 3
    assert plan_work("cpu", 2, CPU).dtype == "fp32"


def test_catalog_floors_are_a_share_of_what_was_achieved() -> None:
    work = plan_work("cuda", 8, ACCELERATOR, device=DEVICE)
    assert work.gemm
    assert work.copy
    assert work.all_reduce
    assert work.gemm.rate == pytest.approx(0.65 * 700e12)
    assert work.copy.rate == pytest.approx(0.65 * 4000e9)
    assert work.all_reduce.rate == pytest.approx(0.4 * 400e9)
    assert "catalog" in work.gemm.source
    assert plan_work("cuda", 4, ACCELERATOR, device=DEVICE).all_reduce is None  # part of a node may have less


def test_published_floors_of_the_central_machine() -> None:
    mi300x = DEVICE.model_copy(update={"id": "mi300x"})
    work = plan_work("cuda", 8, ACCELERATOR, device=mi300x)
    assert work.gemm
    assert work.copy
    assert work.all_reduce
    assert (work.gemm.rate, work.copy.rate, work.all_reduce.rate) == (600e12, 2000e9, 100e9)
    assert (work.dtype, work.shape, work.copy_bytes, work.reduce_bytes) == ("bf16", (8192,) * 3, 2**29, 2**26)
    assert "Primus" in work.gemm.source


def test_profile_gives_cases_and_floors_at_the_slow_end_of_its_spread() -> None:
    good = profile(
        gemm("fp32", 512, 2e11, slow=1.25),
        gemm("fp32", 1024, 1e11),
        COPY,
        LARGER,
        reduce(2**20, 2, 0.001),
        reduce(2**24, 2, 0.01),
        reduce(2**24, 4, 0.03),
        reduce(2**28, 2, 0.1),
        reduce(2**25, 2, 0.1, groups="all"),
    )
    work = plan_work("cpu", 2, CPU, good)
    assert (work.shape, work.dtype, work.threads) == ((512,) * 3, "fp32", 2)
    assert (work.copy_bytes, work.reduce_bytes) == (2**24, 2**24)
    assert work.gemm
    assert work.copy
    assert work.all_reduce
    assert work.gemm.rate == pytest.approx(0.8 * 2e11 / 1.25)
    assert work.copy.rate == pytest.approx(0.8 * 2**25 / 0.02)
    assert work.all_reduce.rate == pytest.approx(0.8 * 2**24 / 0.02)  # bus factor of 2 ranks: 1
    assert "good" in work.gemm.source


def test_what_a_profile_lacks_stays_as_planned() -> None:
    work = plan_work("cuda", 8, ACCELERATOR, profile(COPY), DEVICE)
    assert work.copy
    assert work.copy.rate == pytest.approx(0.8 * 2**25 / 0.02)
    assert work.gemm
    assert work.gemm.rate == pytest.approx(0.65 * 700e12)
    assert work.threads == 0


def test_product_of_a_profile_is_in_bf16_unless_that_is_emulated() -> None:
    fp32, bf16 = gemm("fp32", 1024, 1e11), gemm("bf16", 1024, 4e11)
    assert best_gemm(profile(fp32, bf16)) == bf16
    slow = gemm("bf16", 256, 1e9)
    assert best_gemm(profile(fp32, slow)) == fp32
    assert best_gemm(profile(slow)) == slow
    assert best_gemm(profile(gemm("fp8", 1024, 9e11))) is None
    transposed, noisy = gemm("fp32", 1024, 9e11, layout="nt"), fp32.model_copy(update={"noisy": True})
    assert best_gemm(profile(transposed, noisy)) is None
