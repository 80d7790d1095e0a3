"""Alignment, tiles, waves and the knee, derived from sweeps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import MoestroError
from moestro.hardware.curves.alignment import alignment, alignment_table, knee, tile_efficiency, wave_efficiency
from moestro.hardware.profile import Sample

NEAR = [1000 + i for i in range(80)]


def sweep(needed: int, loss: float = 0.3, noise: float = 0.0) -> list[Sample]:
    """Products over n on a machine that loses `loss` of its rate for each halving of the alignment below `needed`."""
    draw = np.random.default_rng(0)
    samples = []
    for n in NEAR:
        power = min(n & -n, needed)
        rate = 1e12 * (1 - loss) ** np.log2(needed / power) * np.exp(noise * draw.normal()) * n**0.1
        samples.append(Sample(op="gemm", case={"m": 512, "n": n, "k": 512}, median_s=2 * 512 * n * 512 / rate))
    return samples


@pytest.mark.parametrize("needed", [1, 2, 8, 32])
def test_the_alignment_of_a_made_up_machine_is_found(needed: int) -> None:
    assert alignment(sweep(needed, noise=0.005)) == needed


def test_a_lower_share_is_content_with_less() -> None:
    assert alignment(sweep(16, loss=0.05), share=0.9) == 4
    assert alignment(sweep(16, loss=0.05), share=0.98) == 16


def test_growth_with_size_is_no_misalignment() -> None:
    rates = {n: n * 1e9 for n in range(512, 8193, 64)}
    samples = [Sample(op="gemm", case={"m": 8, "n": n, "k": 8}, median_s=128 * n / rate) for n, rate in rates.items()]
    table = alignment_table(samples, "n")
    assert set(table) == {64, 128, 256}
    assert max(table.values()) / min(table.values()) < 1.05


def test_other_sizes_are_not_compared() -> None:
    """A fast product of another k does not make this sweep's aligned sizes look slow."""
    other = [s.model_copy(update={"case": s.case | {"k": 4096}, "median_s": s.median_s / 100}) for s in sweep(8)[::7]]
    assert alignment([*sweep(8), *other]) == 8


def test_head_dimensions_by_the_samples_own_flops() -> None:
    samples = [
        Sample(op="attention", case={"seq": 128, "head_dim": d}, median_s=1.0, flops=d * (1e9 if d % 16 == 0 else 5e8))
        for d in range(64, 129, 4)
    ]
    assert alignment(samples, "head_dim", share=0.9) == 16


def test_a_single_size_is_no_sweep() -> None:
    with pytest.raises(MoestroError, match="no sweep over n"):
        alignment(sweep(8)[:1])


@given(m=st.integers(1, 5000), n=st.integers(1, 5000), units=st.integers(1, 304))
def test_tiles_and_waves_are_shares(m: int, n: int, units: int) -> None:
    assert 0 < tile_efficiency(m, n, 128, 256) <= 1
    assert 0 < wave_efficiency(m, n, 128, 256, units) <= 1


def test_full_tiles_and_full_waves_are_one() -> None:
    assert tile_efficiency(256, 512, 128, 256) == 1
    assert tile_efficiency(129, 256, 128, 256) == pytest.approx(129 / 256)
    assert wave_efficiency(128 * 11, 128 * 12, 128, 128, 132) == 1
    assert wave_efficiency(128 * 11, 128 * 12 + 1, 128, 128, 132) == pytest.approx(143 / 264)


def test_knee_is_the_smallest_work_at_the_share() -> None:
    rates = {256: 1e12, 512: 5e12, 1024: 9.1e12, 2048: 10e12}
    samples = [Sample(op="gemm", case={"m": s, "n": s, "k": s}, median_s=2 * s**3 / r) for s, r in rates.items()]
    assert knee(samples) == pytest.approx(2 * 1024**3)
    assert knee(samples, 0.95) == pytest.approx(2 * 2048**3)
    with pytest.raises(MoestroError):
        knee([])
