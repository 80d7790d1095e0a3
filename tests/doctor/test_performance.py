"""Tier 2: rates under their floor, slow ranks and wrong results are told by name."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from doctor.helpers import ACCELERATOR, CPU
from moestro.doctor import performance
from moestro.doctor.checks import Check
from moestro.doctor.floors import Floor, Work, plan_work
from moestro.doctor.performance import RankResult, judge
from moestro.parallel.local import run_on_ranks

GPUS = Work("cuda", 4, "bf16", (8192,) * 3, 2**29, 2**26, 0, *(Floor(rate, "a test") for rate in (6e14, 2e12, 1e11)))


def results(**changes: Any) -> list[RankResult]:
    good = RankResult(0, 7e14, 3e12, reduce_s=6e-4)
    return [replace(good, rank=rank, **changes) for rank in range(4)]


def judged(ranks: list[RankResult], work: Work = GPUS) -> dict[str, Check]:
    return {check.name: check for check in judge(work, ACCELERATOR, ranks, ranks)}


def test_good_node() -> None:
    checks = judged(results())
    assert {check.status for check in checks.values()} == {"passed"}
    assert list(checks) == ["gemm", "memory rate", "all_reduce", "slow rank"]
    assert checks["gemm"].value == pytest.approx(700)
    assert checks["all_reduce"].value == pytest.approx(1.5 * 2**26 / 6e-4 / 1e9, rel=1e-4)


def test_device_under_the_floor_is_named() -> None:
    ranks = results()
    ranks[2] = replace(ranks[2], flops_per_s=5e14, copy_bytes_per_s=1e12)
    checks = judged(ranks)
    assert (checks["gemm"].status, checks["gemm"].value, checks["gemm"].limit) == ("failed", 500, 600)
    assert checks["gemm"].reason.startswith("cuda:2 500 TFLOP/s")
    assert "cuda:2 1,000 GB/s" in checks["memory rate"].reason
    assert "cuda:1" not in checks["gemm"].reason
    assert checks["slow rank"].status == "failed"
    assert "rank 2 (cuda:2) is slow: a product takes it 1.40 times" in checks["slow rank"].reason


def test_rate_at_the_floor_passes_and_without_a_floor_nothing_is_judged() -> None:
    assert judged(results(flops_per_s=6e14))["gemm"].status == "passed"
    unknown = replace(GPUS, gemm=None, copy=None, all_reduce=None)
    checks = judged(results(flops_per_s=1.0), unknown)
    assert {check.status for check in checks.values()} == {"passed"}
    assert "no floor is known" in checks["gemm"].reason
    assert checks["gemm"].limit is None


def test_slow_link() -> None:
    check = judged(results(reduce_s=2e-3))["all_reduce"]
    assert (check.status, check.limit) == ("failed", 100)
    assert "50.3 GB/s bus bandwidth" in check.reason


def test_wrong_result_is_told_even_if_it_is_fast() -> None:
    check = judged(results(reduce_s=None, wrong=("all_reduce of 64 bytes gave 3 wrong elements",)))["all_reduce"]
    assert check.status == "failed"
    assert check.reason == "wrong result: all_reduce of 64 bytes gave 3 wrong elements"  # once, not for each rank


def test_what_could_not_be_timed_fails_with_its_reason() -> None:
    lost = results(flops_per_s=None, reduce_s=None, notes=("left out: gemm: out of memory",))
    checks = judged(lost)
    assert "could not be timed: left out: gemm: out of memory" in checks["gemm"].reason
    assert "did not run" in checks["all_reduce"].reason
    assert {checks["gemm"].status, checks["all_reduce"].status} == {"failed"}


def test_slow_rank_on_a_busy_node_is_a_warning_unless_an_accelerator_is_slow() -> None:
    waiting = results(slow=("rank 1 is slow: its own work takes 4.0 times as long",))
    assert judged(waiting)["slow rank"].status == "failed"
    assert judge(GPUS, ACCELERATOR, waiting, waiting, busy=True)[-1].status == "warned"
    waiting[1] = replace(waiting[1], flops_per_s=1e14)
    assert judge(GPUS, ACCELERATOR, waiting, waiting, busy=True)[-1].status == "failed"
    assert judge(replace(GPUS, device_type="cpu"), CPU, waiting, waiting, busy=True)[-1].status == "warned"


def test_one_device_alone() -> None:
    checks = judged(results()[:1])
    assert checks["all_reduce"].status == checks["slow rank"].status == "skipped"
    assert checks["gemm"].status == "passed"


def sick_node(rank: int, work: Work, collective: bool, port: int) -> RankResult:
    """Rank 1 multiplies a hundred times too slowly, and a large all_reduce flips one of rank 0's elements."""
    mm, all_reduce = torch.mm, dist.all_reduce

    def slow_mm(*args: Any, **kwargs: Any) -> torch.Tensor:
        time.sleep(0.02)
        return mm(*args, **kwargs)

    class Corrupted:
        def __init__(self, work: dist.Work, tensor: torch.Tensor) -> None:
            self.work, self.tensor = work, tensor

        def wait(self) -> None:
            self.work.wait()
            self.tensor[1234] += 1

    def wrong_all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        done = all_reduce(tensor, *args, **kwargs)
        return Corrupted(done, tensor) if tensor.numel() > 1000 else done

    performance.SECONDS_PER_CASE = 0.1
    if rank == 1:
        torch.mm = slow_mm
    else:
        dist.all_reduce = wrong_all_reduce
    return performance.on_rank(rank, work, collective, port)


def test_two_ranks_of_which_one_is_slow_and_one_receives_wrong_sums() -> None:
    work = replace(plan_work("cpu", 2, CPU), shape=(32, 32, 32), copy_bytes=2**12, reduce_bytes=2**16)
    ranks = run_on_ranks(sick_node, 2, work, True, 0, limit_s=60)
    checks = {check.name: check for check in judge(work, CPU, ranks[:1], ranks)}
    assert checks["all_reduce"].status == "failed"
    assert "wrong result: all_reduce of 65536 bytes among 2 ranks" in checks["all_reduce"].reason
    assert "rank 0" in checks["all_reduce"].reason
    assert checks["slow rank"].status == "failed"
    assert "rank 1 is slow" in checks["slow rank"].reason
    assert "rank 0 is slow" not in checks["slow rank"].reason
    assert checks["gemm"].status == "passed"  # rank 0's own


def test_cpu_computes_with_all_threads_then_exchanges_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fake(
        rank_work: object, world: int, work: Work, collective: bool, port: int, limit_s: float
    ) -> list[RankResult]:
        calls.append((world, collective, work.shape))
        return [RankResult(rank) for rank in range(world)]

    monkeypatch.setattr(performance, "run_on_ranks", fake)
    devices, ranks = performance.measure_node(plan_work("cpu", 2, CPU))
    assert calls == [(1, False, (1024,) * 3), (2, True, performance.ONE_CPU_RANK)]
    assert (len(devices), len(ranks)) == (1, 2)
    calls.clear()
    devices, ranks = performance.measure_node(GPUS)
    assert calls == [(4, True, (8192,) * 3)]
    assert devices == ranks
    assert performance.measure_node(plan_work("cpu", 1, CPU))[1] == []
