import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import MoestroError
from moestro.hardware.curves.busbw import OPS, algbw, bus_factor, busbw, per_nic_gbps
from moestro.hardware.curves.shapes import AlphaBeta, HalfSize, Piecewise, Sigmoid
from moestro.hardware.curves.transfer import ALL, fit_transfer

SIZES = 2.0 ** np.arange(10, 31)
MB = 1e6
MIB = 2**20

# All-reduce, MiB → busbw GB/s (stas00/ml-engineering, network benchmarks): 4 nodes of 8 B200, and 8 H200 with NVLS.
B200 = {1: 5.37, 2: 10.38, 4: 18.9, 8: 35.12, 16: 64.43, 32: 91.19, 64: 156.74, 128: 197.94, 256: 229.09, 512: 326.9,
        1024: 361.99, 2048: 372.42, 4096: 377.34, 8192: 380.39, 16384: 381.8}  # fmt: skip
H200 = {1: 39.93, 2: 64.53, 4: 107.16, 8: 155.53, 16: 219.89, 32: 275.84, 64: 346.51, 128: 401.93, 256: 436.15,
        512: 450.29, 1024: 463.58, 2048: 469.17, 4096: 473.1, 8192: 477.45, 16384: 482.26}  # fmt: skip
# All-to-all over 128 ranks of an Ascend-like machine, bytes → ms, as its authors published them.
WORLD_128 = {
    31457: 0.566, 62914: 0.469, 2**17: 0.393, 2**18: 0.405, 2**19: 0.515, MIB: 0.440, 2 * MIB: 0.559, 4 * MIB: 0.764,
    8 * MIB: 0.564, 16 * MIB: 0.621, 24 * MIB: 0.597, 25 * MIB: 0.631, 32 * MIB: 0.696, 48 * MIB: 0.832,
    64 * MIB: 1.067, 96 * MIB: 1.359, 128 * MIB: 1.722, 256 * MIB: 2.758, 512 * MIB: 5.048, 1024 * MIB: 9.903,
}  # fmt: skip


def noisy(shape, seed, share=0.03):
    times = shape.seconds(SIZES)
    return times * np.exp(share * np.random.default_rng(seed).standard_normal(len(times)))


def published(table, ranks, forms=ALL):
    factor = bus_factor("all_reduce", ranks)
    sizes = np.array(list(table)) * float(MIB)
    return fit_transfer(sizes, sizes * factor / (np.array(list(table.values())) * 1e9), factor, forms)


def test_bus_factors_are_those_of_the_nccl_tests():
    assert bus_factor("all_reduce", 8) == 2 * 7 / 8
    for op in ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_uneven"):
        assert bus_factor(op, 8) == 7 / 8
    for op in ("broadcast", "reduce", "send_recv", "ring"):
        assert bus_factor(op, 8) == 1
    assert {bus_factor(op, 1) for op in OPS} == {0.0}
    assert algbw(8e9, 2) == 4e9
    assert busbw("all_reduce", 4, 8e9, 2) == 6e9


def test_rate_of_a_nic():
    assert per_nic_gbps(377.34, nodes=4, ranks=32) == pytest.approx(36.5, abs=0.05)
    assert per_nic_gbps(400, nodes=1, ranks=8) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: bus_factor("allreduce", 8),
        lambda: bus_factor("all_reduce", 0),
        lambda: algbw(1, 0),
        lambda: algbw(1, math.nan),
        lambda: per_nic_gbps(1, nodes=3, ranks=2),
        lambda: per_nic_gbps(1, nodes=0, ranks=2),
    ],
)
def test_impossible_collectives(wrong):
    with pytest.raises(MoestroError):
        wrong()


def test_a_misspelt_collective_gets_a_hint():
    with pytest.raises(MoestroError, match="Did you mean 'all_reduce'"):
        bus_factor("allreduce", 8)


@pytest.mark.parametrize("seed", range(5))
def test_alpha_beta_is_recovered(seed):
    curve = fit_transfer(SIZES, noisy(AlphaBeta(20e-6, 300e9), seed))
    assert curve.form == "alpha_beta"
    assert curve.parameters["alpha_s"] == pytest.approx(20e-6, rel=0.05)
    assert curve.parameters["bandwidth"] == pytest.approx(300e9, rel=0.05)
    assert curve.held_out.median < 0.05
    assert curve.held_out.count == len(SIZES)


@pytest.mark.parametrize("seed", range(5))
def test_half_size_is_recovered(seed):
    truth = HalfSize(20e-6, 300e9, 8e6)
    curve = fit_transfer(SIZES, noisy(truth, seed))
    assert curve.form == "half_size"
    assert curve.parameters["alpha_s"] == pytest.approx(20e-6, rel=0.05)
    assert curve.parameters["bandwidth"] == pytest.approx(300e9, rel=0.05)
    assert curve.seconds(SIZES) == pytest.approx(truth.seconds(SIZES), rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_sigmoid_is_recovered(seed):
    # Its three regions meet: 20 µs until 64 KiB, then up to the plateau at 256 MiB.
    truth = Sigmoid(20e-6, 300e9, latency_log2=16, plateau_log2=28, height=2.18, middle=19.6, slope=0.6, floor=9.29)
    curve = fit_transfer(SIZES, noisy(truth, seed), forms=("sigmoid",))
    assert curve.parameters["alpha_s"] == pytest.approx(20e-6, rel=0.05)
    assert curve.parameters["bandwidth"] == pytest.approx(300e9, rel=0.05)
    assert abs(curve.parameters["latency_log2"] - 16) <= 1
    assert np.median(np.abs(curve.seconds(SIZES) / truth.seconds(SIZES) - 1)) < 0.05


def test_sigmoid_is_chosen_where_only_it_fits():
    truth = Sigmoid(20e-6, 300e9, latency_log2=16, plateau_log2=28, height=2.18, middle=19.6, slope=0.6, floor=9.29)
    curve = fit_transfer(SIZES, noisy(truth, 1, share=0.003))
    assert curve.form in ("sigmoid", "piecewise")
    assert curve.held_out.median < fit_transfer(SIZES, noisy(truth, 1, 0.003), forms=("alpha_beta",)).held_out.median


def test_published_fit_of_four_nodes():
    curve = published(B200, 32, ("alpha_beta",))
    assert curve.parameters["alpha_s"] == pytest.approx(414e-6, rel=0.01)
    assert curve.parameters["bandwidth"] == pytest.approx(367e9, rel=0.01)
    assert curve.size_at(0.5) == pytest.approx(78 * MB, rel=0.01)
    assert curve.size_at(0.9) == pytest.approx(705 * MB, rel=0.01)
    assert published(B200, 32, ("piecewise",)).size_at(0.9) == pytest.approx(747 * MB, rel=0.02)


def test_published_fit_of_one_node_needs_more_than_alpha_beta():
    simple = published(H200, 8, ("alpha_beta",))
    assert simple.parameters["alpha_s"] == pytest.approx(50e-6, rel=0.01)
    assert simple.parameters["bandwidth"] == pytest.approx(453e9, rel=0.01)
    assert simple.size_at(0.9) == pytest.approx(116 * MB, rel=0.01)
    best = published(H200, 8)
    assert best.form != "alpha_beta"
    assert best.held_out.median < simple.held_out.median - 0.02
    assert published(H200, 8, ("piecewise",)).size_at(0.9) == pytest.approx(257 * MB, rel=0.01)


def test_published_all_to_all_over_128_ranks():
    curve = fit_transfer(list(WORLD_128), [ms * 1e-3 for ms in WORLD_128.values()], bus_factor("all_to_all", 128))
    assert curve.held_out.median <= 0.12
    assert curve.bandwidth(float(1024 * MIB)) == pytest.approx(108e9, rel=0.1)


def test_numbers_and_arrays_agree():
    times = noisy(AlphaBeta(20e-6, 300e9), 0)
    sizes = np.array([1.0, 777.0, 1024.0, 5e4, 2**20, 3e8, 2**30, 1e12])
    for form in ALL:
        curve = fit_transfer(SIZES, times, 1.5, (form,))
        assert curve.form == form
        assert curve.seconds(sizes) == pytest.approx([curve.seconds(float(size)) for size in sizes], rel=1e-9)
        assert np.all(curve.seconds(sizes) > 0)
        assert curve.bandwidth(1e6) == pytest.approx(1.5e6 / curve.seconds(1e6))


def test_piecewise_keeps_dips_and_goes_on_beyond_its_ends():
    shape = Piecewise((1e3, 1e6, 2e6, 1e9), (1e-5, 2e-4, 1e-4, 1e-2))
    for size, time in zip(shape.sizes_bytes, shape.times_s, strict=True):
        assert shape.seconds(size) == pytest.approx(time)
    assert shape.seconds(math.sqrt(1e6 * 2e6)) == pytest.approx(math.sqrt(2e-4 * 1e-4))
    assert 0 < shape.seconds(1.0) <= 1e-5
    assert 1e-2 < shape.seconds(2e9) <= 2e-2


def test_all_reduce_with_a_dip_is_predicted():
    dip = {32: 98.3, 64: 84.9, 128: 88.2, 256: 91.0, 512: 93.0, 1024: 94.2}
    curve = published({1: 17.1, 2: 23.8, 4: 40.3, 8: 68.6, 16: 93.9, **dip}, 32)
    assert curve.held_out.median < 0.12


def test_repeated_sizes_count_as_their_median():
    sizes, times = [1e3] * 3 + [1e6] * 3, [1e-5, 1e-5, 9.0, 1e-3, 1e-3, 1e-9]
    curve = fit_transfer(sizes, times, forms=("piecewise",))
    assert curve.samples == 6
    assert curve.seconds(1e3) == pytest.approx(1e-5)
    assert curve.points.times_s == (1e-5, 1e-3)


def test_few_samples():
    one = fit_transfer([1e6], [1e-3])
    assert one.form == "alpha_beta"
    assert one.held_out is None
    assert one.seconds(2e6) == pytest.approx(2e-3)
    two = fit_transfer([1e3, 1e6], [1e-5, 1e-3])
    assert two.seconds(1e6) == pytest.approx(1e-3)
    three = fit_transfer([1e3, 1e6, 1e9], [1e-5, 1e-3, 1.0])
    assert three.held_out is not None
    assert three.held_out.count == 3


def test_only_latency_claims_no_endless_bandwidth():
    curve = fit_transfer([8.0, 16.0, 32.0, 64.0], [5e-6, 4.9e-6, 5.1e-6, 4.8e-6], forms=("alpha_beta",))
    assert curve.parameters["bandwidth"] <= 100.01 * 64 / 4.8e-6
    assert curve.seconds(64.0) == pytest.approx(5e-6, rel=0.1)


@pytest.mark.parametrize(
    ("sizes", "times", "options"),
    [
        ([], [], {}),
        ([1e3], [1e-3, 1e-3], {}),
        ([0.0, 1e3], [1e-3, 1e-3], {}),
        ([1e3, -5], [1e-3, 1e-3], {}),
        ([1e3, 1e4], [1e-3, 0.0], {}),
        ([1e3, 1e4], [1e-3, math.nan], {}),
        ([1e3, math.inf], [1e-3, 1e-3], {}),
        ([1e3], [1e-3], {"factor": 0.0}),
        ([1e3], [1e-3], {"factor": math.nan}),
        ([1e3], [1e-3], {"forms": ()}),
        ([1e3], [1e-3], {"forms": ("alpha",)}),
    ],
)
def test_bad_samples_are_refused(sizes, times, options):
    with pytest.raises(MoestroError):
        fit_transfer(sizes, times, **options)


@pytest.mark.parametrize("share", [0.0, 1.0, 1.5, math.nan])
def test_share_of_the_bandwidth_must_be_one(share):
    with pytest.raises(MoestroError):
        fit_transfer([1e3, 1e6], [1e-5, 1e-3]).size_at(share)


def test_size_at_follows_the_rule_of_alpha_beta():
    curve = fit_transfer(SIZES, AlphaBeta(20e-6, 300e9).seconds(SIZES), 1.5, ("alpha_beta",))
    assert curve.parameters["bandwidth"] == pytest.approx(450e9)
    for share in (0.5, 0.9):
        assert curve.size_at(share) == pytest.approx(20e-6 * 300e9 * share / (1 - share), rel=1e-3)


def test_report():
    curve = fit_transfer(SIZES, noisy(AlphaBeta(20e-6, 300e9), 0))
    report = curve.report("copy")
    assert (report.what, report.form, report.samples) == ("copy", "alpha_beta", len(SIZES))
    assert report.held_out_median == curve.held_out.median
    assert fit_transfer([1e3], [1e-3]).report("one").held_out_median is None


@given(
    st.lists(
        st.tuples(st.integers(1, 10**12), st.floats(1e-7, 1e3)), min_size=2, max_size=12, unique_by=lambda pair: pair[0]
    )
)
def test_alpha_beta_never_falls_whatever_it_was_fitted_to(points):
    curve = fit_transfer(*zip(*points, strict=True), forms=("alpha_beta",))
    times = curve.seconds(np.logspace(0, 13, 50))
    assert np.all(np.isfinite(times))
    assert np.all(times > 0)
    assert np.all(np.diff(times) > 0)
    assert curve.parameters["alpha_s"] >= 0


@given(
    st.lists(
        st.tuples(st.integers(1, 10**12), st.floats(1e-7, 1e3)), min_size=2, max_size=8, unique_by=lambda pair: pair[0]
    )
)
def test_piecewise_goes_through_its_points(points):
    curve = fit_transfer(*zip(*points, strict=True), forms=("piecewise",))
    for size, time in points:
        assert curve.seconds(size) == pytest.approx(time, rel=1e-6)
    beyond = curve.seconds(np.array([1e-3, 1e14]))
    assert np.all(np.isfinite(beyond))
    assert np.all(beyond > 0)
