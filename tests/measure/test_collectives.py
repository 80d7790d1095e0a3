"""Collectives: results, findings and times, on two gloo ranks and without any."""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import MoestroError
from moestro.hardware.profile import Sample
from moestro.measure import collectives, rounds
from moestro.measure.collectives import (
    CollectiveResult,
    Plan,
    SlowRank,
    WrongResult,
    collective_profile,
    ends_first,
    measure_collectives,
    slow_ranks,
    usual_plan,
)
from moestro.measure.exchanges import DTYPES, OPS, Values, count_wrong, uneven_splits
from moestro.parallel.local import run_on_ranks

CPU = torch.device("cpu")


def quickly(ops: tuple[str, ...], sizes: tuple[int, ...] = (4096,), **options: Any) -> CollectiveResult:
    return measure_collectives(CPU, ops, sizes, [2], warmup=1, repeats=3, rounds=1, **options)


class Tampered:
    """A work whose result is changed once it is there."""

    def __init__(self, work: dist.Work, change: Callable[[], object]) -> None:
        self.work, self.change = work, change

    def wait(self) -> None:
        self.work.wait()
        self.change()


def corrupted(rank: int, value: float, count: int) -> CollectiveResult:
    """all_reduce gives `value` in the first `count` elements on rank 1."""
    real = dist.all_reduce

    def tampering(tensor: torch.Tensor, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        work = real(tensor, *args, async_op=async_op, **kwargs)
        if not async_op or rank == 0:  # what is not asynchronous is the measurement's own
            return work
        return Tampered(work, lambda: tensor[:count].fill_(value))

    dist.all_reduce = tampering
    try:
        return quickly(("all_reduce", "all_gather"))
    finally:
        dist.all_reduce = real


def slowed(rank: int, op: str, name: str) -> CollectiveResult:
    """Rank 1 sleeps before each `name`."""
    real = getattr(dist, name)

    def sleeping(*args: Any, **kwargs: Any) -> Any:
        if rank == 1:
            time.sleep(0.02)
        return real(*args, **kwargs)

    setattr(dist, name, sleeping)
    try:
        return quickly((op,))
    finally:
        setattr(dist, name, real)


def refused(name: str) -> CollectiveResult:
    real = getattr(dist, name)

    def refusing(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"no {name} here\nand more")

    setattr(dist, name, refusing)
    try:
        return quickly(("all_reduce", "broadcast", "ring"), sizes=(64, 4096))
    finally:
        setattr(dist, name, real)


def unprepared(rank: int) -> CollectiveResult:
    """Rank 1 has no memory for the operands of all_gather: rank 0 must not wait for it."""
    real = rounds.build

    def building(op: str, *args: Any) -> Any:
        if op == "all_gather" and rank == 1:
            raise torch.OutOfMemoryError("no room")
        return real(op, *args)

    rounds.build = building
    try:
        return quickly(("all_gather", "all_reduce"), sizes=(64, 4096))
    finally:
        rounds.build = real


def on_two_ranks(rank: int) -> dict[str, Any]:
    steps: list[tuple[int, int, str]] = []
    met: dict[str, Any] = {
        "odd": quickly(OPS, sizes=(1, 1001, 65536), progress=lambda *step: steps.append(step)),
        "dtypes": {dtype: quickly(OPS, dtype=dtype) for dtype in ("bf16", "int8")},
        "corrupted": corrupted(rank, -7.0, 3),
        "nan": corrupted(rank, math.nan, 1),
        "slow": slowed(rank, "all_to_all", "all_to_all_single"),
        "slow_late": slowed(rank, "ring", "batch_isend_irecv"),
        "refused": refused("broadcast"),
        "unprepared": unprepared(rank),
        "alone": measure_collectives(CPU, OPS, [64], [1]),
        "over": quickly(OPS, deadline=time.monotonic() - 1),
        # Only rank 0's clock counts: a rank that thinks it is too late must not stay behind.
        "early": quickly(("all_reduce",), deadline=time.monotonic() + (60 if rank == 0 else -60)),
        "late": quickly(("all_reduce",), deadline=time.monotonic() + (60 if rank == 1 else -60)),
        "profile": collective_profile(2, True, plan=Plan(("ring",), (64,), (2,), repeats=1, pair_bytes=4096)),
    }
    met["steps"] = steps
    with pytest.raises(MoestroError, match=r"groups of 3 ranks are wanted, but there are 2"):
        measure_collectives(CPU, OPS, [64], [3])
    with pytest.raises(MoestroError, match=r"3 ranks are wanted|2 are running"):
        collective_profile(3, True)
    return met


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_on_ranks(on_two_ranks, 2)


@pytest.fixture(scope="module")
def met(two_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    return two_ranks[0]


def wrong_in(result: CollectiveResult) -> list[WrongResult]:
    """On a busy machine a rank may be slow as well."""
    return [finding for finding in result.findings if isinstance(finding, WrongResult)]


def sizes_of(result: CollectiveResult, op: str) -> list[object]:
    return sorted(sample.case["bytes"] for sample in result.samples if sample.op == op)  # type: ignore[type-var]


def test_every_rank_has_the_same_result(two_ranks: list[dict[str, Any]]) -> None:
    first, second = ({**met, "steps": None} for met in two_ranks)
    assert first == second


def test_right_results_of_sizes_that_ranks_and_dtype_do_not_divide(met: dict[str, Any]) -> None:
    odd: CollectiveResult = met["odd"]
    assert wrong_in(odd) == []
    assert odd.notes == ()
    assert {sample.op for sample in odd.samples} == set(OPS)
    assert sizes_of(odd, "all_reduce") == [4, 1000, 65536]  # 1 byte is rounded up to one element
    assert sizes_of(odd, "all_gather") == [8, 1000, 65536]  # and to one of each rank


def test_samples_hold_their_case_and_plausible_times(met: dict[str, Any]) -> None:
    for sample in met["odd"].samples:
        assert sample.case == {
            "bytes": sample.bytes_moved, "ranks": 2, "nodes": 1, "dtype": "fp32", "world": 2, "groups": "one"
        }  # fmt: skip
        assert sample.low_s <= sample.median_s <= sample.high_s
        assert 1e-6 < sample.median_s < 10
        assert sample.repeats >= 3


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_narrow_dtypes_are_exact(met: dict[str, Any], dtype: str) -> None:
    result: CollectiveResult = met["dtypes"][dtype]
    assert wrong_in(result) == []
    assert {sample.case["dtype"] for sample in result.samples} == {dtype}
    assert len(result.samples) == len(OPS)


def test_a_corrupted_result_is_named_and_not_timed(met: dict[str, Any]) -> None:
    result: CollectiveResult = met["corrupted"]
    assert wrong_in(result) == [WrongResult("all_reduce", 4096, 2, wrong=3, rank=1)]
    assert [sample.op for sample in result.samples] == ["all_gather"]
    assert "all_reduce of 4096 bytes among 2 ranks gave 3 wrong elements (first on rank 1)" in str(result.findings[0])


def test_nan_is_wrong(met: dict[str, Any]) -> None:
    assert wrong_in(met["nan"]) == [WrongResult("all_reduce", 4096, 2, wrong=1, rank=1)]


@pytest.mark.parametrize("case", ["slow", "slow_late"])
def test_a_slow_rank_is_named(met: dict[str, Any], case: str) -> None:
    (finding,) = met[case].findings
    assert isinstance(finding, SlowRank)
    assert finding.rank == 1
    assert 0.015 < finding.late_s < 1
    assert "rank 1 is slow" in str(finding)
    assert met[case].rank_skew_s[1] > 0.005


def test_what_the_backend_lacks_is_noted_and_the_rest_measured(met: dict[str, Any]) -> None:
    result: CollectiveResult = met["refused"]
    assert {sample.op for sample in result.samples} == {"all_reduce", "ring"}
    assert result.notes[0] == "broadcast is left out from where it failed: no broadcast here"


def test_a_rank_that_cannot_take_part_holds_up_nobody(met: dict[str, Any]) -> None:
    result: CollectiveResult = met["unprepared"]
    assert [sample.op for sample in result.samples] == ["all_reduce", "all_reduce"]
    assert result.notes[0] == "all_gather is left out from where it failed: no room"


def test_one_rank_has_nobody_to_exchange_with(met: dict[str, Any]) -> None:
    assert met["alone"].samples == ()
    assert "one rank" in met["alone"].notes[0]
    assert collective_profile(1, True).notes == met["alone"].notes


def test_the_deadline_is_that_of_rank_0(met: dict[str, Any]) -> None:
    assert met["over"].samples == ()
    assert met["over"].notes == ("8 of 8 collective cases did not fit into the time, or came after a failure",)
    assert len(met["early"].samples) == 1
    assert met["late"].samples == ()


def test_progress_is_told_on_rank_0(two_ranks: list[dict[str, Any]]) -> None:
    steps = two_ranks[0]["steps"]
    assert [step[0] for step in steps] == list(range(24))
    assert steps[0] == (0, 24, "all_reduce 1 bytes, 2 ranks")
    assert two_ranks[1]["steps"] == []


def test_a_profile_on_running_ranks_has_collectives_and_pairs(met: dict[str, Any]) -> None:
    result: CollectiveResult = met["profile"]
    assert [(s.op, s.case["bytes"], s.case.get("pair")) for s in result.samples] == [
        ("ring", 64, None), ("send_recv", 8, "0-1"), ("send_recv", 4096, "0-1")
    ]  # fmt: skip
    assert result.grouping is not None
    assert result.grouping.groups == ((0, 1),)


def test_a_profile_starts_ranks_where_none_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, Plan]] = []

    def fake(work: Callable[..., Any], world: int, plan: Plan, deadline: float, limit_s: float) -> list[Any]:
        asked.append((world, plan))
        assert limit_s > deadline - time.monotonic() > 0
        return [CollectiveResult(notes=("from the ranks",))] * world

    monkeypatch.setattr(collectives, "run_on_ranks", fake)
    notes = collective_profile(999, False).notes
    assert asked == [(999, usual_plan(999, False, CPU))]
    assert notes[0].startswith("999 ranks share ")
    assert notes[-1] == "from the ranks"


def test_the_usual_plans() -> None:
    quick, full = usual_plan(2, True, CPU), usual_plan(4, False, CPU)
    assert quick.sizes_bytes == tuple(2**i for i in range(10, 25, 2))
    assert quick.group_sizes == (2,)
    assert (full.sizes_bytes[0], full.sizes_bytes[-1]) == (2**10, 2**26)
    assert full.group_sizes == (2, 4)
    assert usual_plan(6, False, CPU).group_sizes == (2, 4, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ops": ("all_reduc",)}, r"no collective 'all_reduc'; .* Did you mean 'all_reduce'"),
        ({"dtype": "fp8"}, "collectives are measured in fp64, fp32"),
        ({"sizes_bytes": (64, 0)}, "at least 1 byte, not 0"),
        ({"group_sizes": (0,)}, "groups of 0 ranks"),
        ({"repeats": 0}, "1 or more"),
    ],
)
def test_bad_plans(change: dict[str, Any], message: str) -> None:
    plan = Plan(**{"ops": ("ring",), "sizes_bytes": (64,), "group_sizes": (2,), **change})
    with pytest.raises(MoestroError, match=message):
        collective_profile(2, True, plan=plan)


def test_no_rank_is_refused() -> None:
    with pytest.raises(MoestroError, match="1 rank or more, not 0"):
        collective_profile(0, True)


@settings(deadline=None, max_examples=50)
@given(ranks=st.integers(2, 40), count=st.integers(1, 10_000))
def test_uneven_splits(ranks: int, count: int) -> None:
    splits = np.array(uneven_splits(ranks, count))
    assert splits.min() >= 0
    assert max(splits.sum(0).max(), splits.sum(1).max()) == count
    assert (splits == 0).any()
    assert splits[:, 0].sum() >= splits[:, -1].sum()


@settings(deadline=None, max_examples=50)
@given(dtype=st.sampled_from(sorted(DTYPES)), ranks=st.integers(2, 60), offset=st.integers(0, 500))
def test_sums_of_values_are_exact(dtype: str, ranks: int, offset: int) -> None:
    kind, exact = DTYPES[dtype]
    values = Values(kind, CPU, ranks, exact // ranks)
    each = torch.stack([values.of(rank, 300, offset).double() for rank in range(ranks)])
    assert torch.equal(values.sums(300, offset).double(), each.sum(0))
    assert each.sum(0).max() <= exact


@settings(deadline=None, max_examples=50)
@given(rank=st.integers(0, 50), other=st.integers(0, 50), shift=st.sampled_from([1, 2, 64, 1024, 2**20]))
def test_wrong_rank_or_part_shows_in_every_element(rank: int, other: int, shift: int) -> None:
    values = Values(torch.float32, CPU, 51, 2**24)
    right = values.of(rank, 500)
    assert count_wrong(values.of(rank, 500, shift), right) == 500
    assert count_wrong(values.of(other, 500), right) == (0 if rank == other else 500)


def test_counting_wrong_elements_of_any_layout() -> None:
    right = torch.arange(12.0).view(3, 4).t()
    wrong = right.clone()
    wrong[2, 1] = math.nan
    wrong[0, 0] = 5
    assert count_wrong(right.contiguous(), right) == 0
    assert count_wrong(wrong, right) == 2


def test_a_dtype_too_narrow_for_so_many_ranks() -> None:
    with pytest.raises(MoestroError, match="cannot add up 200 ranks without rounding; measure in fp32"):
        Values(torch.bfloat16, CPU, 200, 2**8 // 200)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 10**9), max_size=30))
def test_sizes_come_ends_first(sizes: list[int]) -> None:
    order = ends_first(sizes)
    assert sorted(order) == sorted(set(sizes))
    if sizes:
        assert order[0] == min(sizes)
        assert order[-1 if len(order) == 1 else 1] == max(sizes)


def test_slow_ranks_from_own_work() -> None:
    even = [((0, 1, 2), [1e-3, 1.1e-3, 0.9e-3])] * 4
    assert slow_ranks(even, 3)[1] == []
    late = [((0, 1, 2), [1e-3, 1e-3, 6e-3])] * 4
    skew, (finding,) = slow_ranks(late, 3)
    assert finding == SlowRank(2, ratio=pytest.approx(6.0), late_s=pytest.approx(5e-3))
    assert skew == pytest.approx((0.0, 0.0, 5e-3))


def test_slow_ranks_needs_time_that_matters() -> None:
    assert slow_ranks([((0, 1), [1e-6, 9e-6])], 2)[1] == []


def test_slow_ranks_where_some_take_no_part() -> None:
    skew, found = slow_ranks([((0, 1), [1e-3, 8e-3]), ((1, 2), [8e-3, 1e-3])], 4)
    assert [finding.rank for finding in found] == [1]
    assert skew[3] == 0.0
    assert slow_ranks([], 2) == ((0.0, 0.0), [])


def test_a_sample_of_a_collective_has_its_algorithm_bandwidth() -> None:
    sample = Sample(op="all_reduce", case={"bytes": 1000}, median_s=1e-6, bytes_moved=1000)
    assert sample.bytes_per_s == pytest.approx(1e9)
