"""Predicting a step from its calls by curves."""

import pytest

from moestro.errors import MoestroError
from moestro.hardware.profile import Machine, MachineProfile, Sample
from moestro.measure.primitives import Call
from moestro.measure.step_curves import Line, compose, curves_of_profile, fit_line, fit_steps
from moestro.measure.step_work import Gemm, Operand

RATE, OVERHEAD, SPEED = 50e9, 2e-6, 10e9


def add(size: int, op: str = "aten::add") -> Call:
    return Call(op, f"{op}{size}", "forward", "", "elementwise", (), None, 0.0, 12.0 * size)


def product(m: int, n: int, k: int) -> Call:
    operands = tuple(Operand(s, (s[1], 1), "fp32", 4, True, False) for s in ((m, k), (k, n)))
    gemm = Gemm(1, m, n, k)
    return Call(
        "aten::mm", f"mm{m} {n} {k}", "forward", "", "gemm", operands, gemm, gemm.flops, 4.0 * (m * k + k * n + m * n)
    )


def seconds(call: Call) -> float:
    return OVERHEAD + max(call.flops / RATE, call.bytes_moved / SPEED)


def test_a_line_is_found_again():
    rows = [(add(size), 3e-6 + 12.0 * size / SPEED) for size in (1, 100, 10_000, 1_000_000)]
    line = fit_line(rows)
    assert line.fixed_s == pytest.approx(3e-6, rel=1e-6)
    assert line.per_byte_s == pytest.approx(1 / SPEED, rel=1e-6)
    assert line.per_flop_s == 0


def test_one_call_is_its_own_line():
    assert fit_line([(add(100), 5e-6)]).seconds(add(100)) == pytest.approx(5e-6)


def test_an_unseen_step_is_predicted_from_others():
    sizes = (32, 64, 96, 128, 192, 256)
    seen = [product(m, n, k) for m in sizes for n in sizes[:3] for k in sizes[:3]] + [add(64 * s) for s in sizes]
    curves = fit_steps([(call, seconds(call)) for call in seen], gap_s=1e-6)
    unseen = [product(160, 80, 72), product(200, 200, 64), add(5000), add(7000), add(5000)]
    truth = sum(seconds(call) for call in unseen) + 5e-6
    assert compose(unseen, curves) == pytest.approx(truth, rel=0.15)
    assert compose([], curves) == 0


def test_an_operation_that_no_step_had_is_priced_as_its_kind():
    curves = fit_steps([(add(size), seconds(add(size))) for size in (10, 100, 1000, 10_000, 100_000)], gap_s=0.0)
    assert curves.seconds(add(500, "aten::sub")) == pytest.approx(curves.seconds(add(500)), rel=1e-6)
    strange = Call("aten::fft", "fft", "forward", "", "other", (), None, 0.0, 6000.0)
    assert curves.seconds(strange) == pytest.approx(curves.seconds(add(500)), rel=1e-6)


def test_sums_come_out_right_even_where_some_calls_were_interrupted():
    calls = [add(size) for size in (10, 100, 1000, 10_000)] * 5
    measured = [(call, seconds(call) * (11 if i % 5 == 0 else 1)) for i, call in enumerate(calls)]
    whole = sum(each for _, each in measured)
    assert compose(calls, fit_steps(measured, gap_s=0.0)) == pytest.approx(whole)


def test_nothing_measured_is_refused():
    with pytest.raises(MoestroError, match="take a step apart"):
        fit_steps([], 0.0)


def profile(samples: list[Sample]) -> MachineProfile:
    machine = Machine(device_name="a machine", device_type="cpu")
    return MachineProfile(name="mine", created_at="", mode="quick", machine=machine, samples=tuple(samples))


def test_a_profile_prices_products_by_their_curve_and_the_rest_by_copies():
    copies = [
        Sample(op="copy", case={"bytes": size}, median_s=1e-6 + 2 * size / SPEED, bytes_moved=2.0 * size)
        for size in (2**10, 2**15, 2**20)
    ]
    calls = [product(m, n, 128) for m in (64, 128, 256) for n in (64, 128, 256)]
    gemms = [
        Sample(
            op="gemm",
            case={"m": c.gemm.m, "n": c.gemm.n, "k": 128, "dtype": "fp32"},
            median_s=seconds(c),
            flops=c.flops,
        )
        for c in calls
        if c.gemm is not None
    ]
    curves = curves_of_profile(profile([*copies, *gemms]))
    assert curves.seconds(calls[4]) == pytest.approx(seconds(calls[4]), rel=0.1)
    assert curves.seconds(add(2**15 // 6)) == pytest.approx(1e-6 + 2**16 / SPEED, rel=0.05)
    assert curves.seconds(add(2**24)) == pytest.approx(12 * 2**24 / SPEED, rel=0.05)
    with pytest.raises(MoestroError, match="no samples of copies"):
        curves_of_profile(profile(gemms))
    with pytest.raises(MoestroError, match="no samples of products"):
        curves_of_profile(profile(copies))


def test_a_line_takes_flops_and_bytes():
    assert Line(1.0, 2.0, 3.0).seconds(product(1, 1, 1)) == 1 + 2 * 2 + 3 * 12
