"""The storage demand of training, against ZAYA1's figures."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import MoestroError
from moestro.hardware.storage import StorageDemand, extra_faults, scatter_factor

ZAYA1 = {"global_batch": 4096, "seq_len": 4096, "token_bytes": 4, "iteration_s": 2.5}
MAX_IOPS = 70_000.0


def zaya1(**changes: float) -> StorageDemand:
    return StorageDemand(**{**ZAYA1, **changes})  # type: ignore[arg-type]


def test_zaya1_instance() -> None:
    demand = zaya1()
    assert demand.bytes_per_iteration == 64 * 2**20
    assert demand.pages_per_iteration == 16_384
    assert demand.iops == 6_553.6
    assert round(demand.break_even_s(MAX_IOPS), 3) == 0.234
    assert demand.bytes_per_s == 64 * 2**20 / 2.5


@pytest.mark.parametrize(
    ("scatter", "iops", "break_even_s"), [(1, 6_554, 0.234), (2, 13_107, 0.468), (8, 52_429, 1.872)]
)
def test_zaya1_is_not_bound_by_storage(scatter: float, iops: int, break_even_s: float) -> None:
    demand = zaya1(scatter=scatter)
    assert round(demand.iops) == iops
    assert round(demand.break_even_s(MAX_IOPS), 3) == break_even_s
    assert not demand.is_storage_bound(MAX_IOPS)


def test_a_step_shorter_than_break_even_waits() -> None:
    assert zaya1(scatter=8, iteration_s=1.8).is_storage_bound(MAX_IOPS)
    assert not zaya1(scatter=8, iteration_s=1.9).is_storage_bound(MAX_IOPS)


def test_scatter_factor() -> None:
    assert scatter_factor(1, 4096, 4) == 1.25
    assert scatter_factor(0, 4096, 4) == 1.0
    assert scatter_factor(8, 4096, 4) == 3.0
    assert scatter_factor(1, 128, 2) == 17.0  # a short sample is mostly pages that it does not fill
    assert scatter_factor(1, 4096, 4, page_bytes=16_384) == 2.0


@settings(deadline=None)
@given(m=st.floats(0, 100), seq_len=st.integers(1, 10**6), token_bytes=st.sampled_from([2, 4]))
def test_extra_faults_is_the_inverse(m: float, seq_len: int, token_bytes: int) -> None:
    assert extra_faults(scatter_factor(m, seq_len, token_bytes), seq_len, token_bytes) == pytest.approx(m, abs=1e-6)


@settings(deadline=None)
@given(scatter=st.floats(1, 50), step_s=st.floats(1e-3, 100), max_iops=st.floats(1, 1e7))
def test_bound_exactly_where_the_demand_exceeds_what_storage_serves(
    scatter: float, step_s: float, max_iops: float
) -> None:
    demand = zaya1(scatter=scatter, iteration_s=step_s)
    if abs(demand.iops - max_iops) > 1e-6 * max_iops:
        assert demand.is_storage_bound(max_iops) == (demand.iops > max_iops)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch": 0}, "global_batch is above zero, not 0"),
        ({"iteration_s": float("nan")}, "iteration_s is above zero, not nan"),
        ({"scatter": 0.5}, "1 or more, not 0.5"),
    ],
)
def test_bad_demands(change: dict[str, float], message: str) -> None:
    with pytest.raises(MoestroError, match=message):
        zaya1(**change)


def test_bad_arguments() -> None:
    with pytest.raises(MoestroError, match="more than 0 reads per second"):
        zaya1().break_even_s(0)
    with pytest.raises(MoestroError, match="extra faults are 0 or more"):
        scatter_factor(-1, 4096, 4)
