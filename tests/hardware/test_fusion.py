import math

import numpy as np
import pytest

from moestro.errors import MoestroError
from moestro.hardware.curves.busbw import bus_factor
from moestro.hardware.curves.fusion import measured_size_at, recommend_bucket
from moestro.hardware.curves.shapes import AlphaBeta
from moestro.hardware.curves.transfer import fit_transfer

SIZES = 2.0 ** np.arange(14, 34)


def curve(alpha_s=400e-6, bus=360e9, op="all_reduce", ranks=32):
    factor = bus_factor(op, ranks)
    return fit_transfer(SIZES, AlphaBeta(alpha_s, bus / factor).seconds(SIZES), factor, ("alpha_beta",))


def test_bucket_reaches_nine_tenths_of_the_bandwidth():
    bucket = recommend_bucket({"all_reduce": curve()}, 4, 32)
    expected = 9 * 400e-6 * 360e9 / bus_factor("all_reduce", 32)
    assert bucket.bytes == pytest.approx(expected, rel=0.01)
    assert bucket.params == pytest.approx(expected / 4, rel=0.01)
    assert bucket.half_bytes["all_reduce"] == pytest.approx(expected / 9, rel=0.01)
    assert (bucket.limited_by, bucket.count, bucket.exposed_s) == ("knee", None, {})


def test_the_slower_operation_decides():
    curves = {"reduce_scatter": curve(100e-6, op="reduce_scatter"), "all_gather": curve(300e-6, op="all_gather")}
    bucket = recommend_bucket(curves, {"reduce_scatter": 4, "all_gather": 2}, 32)
    assert bucket.params == pytest.approx(bucket.knee_bytes["all_gather"] / 2)
    assert bucket.bytes == pytest.approx(bucket.params * 4)


def test_exposed_time_is_least_at_the_best_count():
    """k·α + T/k with k* = √(T/α)."""
    one, params = curve(), 40e9
    bucket = recommend_bucket({"all_reduce": one}, 4, 32, params=params)
    transfer_s = params * 4 * one.factor / 360e9
    assert bucket.best_count == pytest.approx(math.sqrt(transfer_s / 400e-6), rel=0.01)
    count = params / bucket.params
    assert bucket.count == pytest.approx(count)
    for scale, exposed in bucket.exposed_s.items():
        k = max(1.0, count / scale)
        assert exposed == pytest.approx(k * 400e-6 + transfer_s / k, rel=0.01)


def test_a_small_model_takes_smaller_buckets_so_that_the_last_is_short():
    bucket = recommend_bucket({"all_reduce": curve()}, 4, 32, params=200e6)
    assert bucket.limited_by == "overlap"
    assert bucket.count == pytest.approx(bucket.best_count)
    assert bucket.exposed_s[1.0] <= min(bucket.exposed_s[0.25], bucket.exposed_s[4.0]) + 1e-12


def test_a_tiny_model_is_one_bucket():
    bucket = recommend_bucket({"all_reduce": curve()}, 4, 32, params=1000)
    assert bucket.limited_by == "model"
    assert bucket.params == 1000
    assert bucket.count == 1


def test_hidden_start_ups_allow_more_buckets():
    plain = recommend_bucket({"all_reduce": curve()}, 4, 32, params=200e6)
    hidden = recommend_bucket({"all_reduce": curve()}, 4, 32, params=200e6, hidden=0.9)
    assert hidden.best_count == pytest.approx(plain.best_count * math.sqrt(10), rel=0.01)


def test_curves_without_start_up_leave_the_knee():
    free = fit_transfer(SIZES, SIZES / 1e9, 1.0, ("piecewise",))
    bucket = recommend_bucket({"ring": free}, 4, 32, params=200e6)
    assert 0 < bucket.params < 200e6
    assert all(math.isfinite(exposed) for exposed in bucket.exposed_s.values())


def test_megatron_rule_for_comparison():
    assert recommend_bucket({"all_reduce": curve()}, 4, 8).megatron_params == 40e6
    assert recommend_bucket({"all_reduce": curve()}, 4, 1024).megatron_params == 1.024e9


def test_measured_knee_counts_where_alpha_beta_is_too_small():
    """Eight H200 with in-switch reduction (MiB → busbw GB/s): 116 MB by α-β, 257 MB measured."""
    table = {1: 39.93, 2: 64.53, 4: 107.16, 8: 155.53, 16: 219.89, 32: 275.84, 64: 346.51, 128: 401.93, 256: 436.15,
             512: 450.29, 1024: 463.58, 2048: 469.17, 4096: 473.1, 8192: 477.45, 16384: 482.26}  # fmt: skip
    sizes = np.array(list(table)) * 2.0**20
    one = fit_transfer(sizes, sizes * 1.75 / (np.array(list(table.values())) * 1e9), 1.75)
    assert measured_size_at(one, 0.5) == pytest.approx(22e6, rel=0.02)
    assert measured_size_at(one, 0.9) == pytest.approx(257e6, rel=0.01)


def test_points_that_end_early_leave_it_to_alpha_beta():
    short = fit_transfer(SIZES[:6], AlphaBeta(100e-6, 200e9).seconds(SIZES[:6]))
    assert measured_size_at(short, 0.9) == pytest.approx(9 * 100e-6 * 200e9, rel=0.01)


@pytest.mark.parametrize(
    "change",
    [{"curves": {}}, {"bytes_per_param": 0}, {"ranks": 0}, {"params": 0}, {"hidden": 1.0}, {"hidden": -0.1}],
)
def test_bad_input(change):
    given = {"curves": {"all_reduce": curve()}, "bytes_per_param": 4, "ranks": 8, **change}
    with pytest.raises(MoestroError):
        recommend_bucket(given.pop("curves"), given.pop("bytes_per_param"), given.pop("ranks"), **given)
