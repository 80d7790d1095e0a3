"""Tier 2: does the node compute, move memory and exchange data as fast as such a node should, and rightly?"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from moestro.doctor.checks import Check, failed, passed, skipped, three_digits, warned
from moestro.doctor.floors import Floor, Work
from moestro.doctor.limits import Limits
from moestro.hardware.curves.busbw import busbw
from moestro.hardware.topology import usable_cores
from moestro.parallel.launch import free_port
from moestro.parallel.local import run_on_ranks

SECONDS_PER_CASE = 0.6
COLLECTIVE_S = 10.0  # after which no more repetitions begin
LIMIT_S = 60.0  # of each run on ranks, its start included
ONE_CPU_RANK = (256, 256, 256)  # product by which ranks that share the cores of a CPU are compared
EXCHANGE = "find the link between the devices: run again with fewer (*_VISIBLE_DEVICES); reset or replace it"
SLOW = "see cpu load, cpu settings and the kernel log (throttling); reset the device, replace it if it stays slow"


@dataclass(frozen=True)
class RankResult:
    """What one rank met. flops_per_s, copy_bytes_per_s: medians. reduce_s: of the slowest rank, None without one.

    findings: of the collective, each a sentence that names operation or rank; wrong ones first.
    """

    rank: int
    flops_per_s: float | None = None
    copy_bytes_per_s: float | None = None
    reduce_s: float | None = None
    wrong: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


RankWork = Callable[[int, Work, bool, int], RankResult]


def on_rank(rank: int, work: Work, collective: bool, port: int) -> RankResult:
    """Product and copy on this rank's device, then the all-reduce among all, whose result is verified."""
    import torch

    from moestro.measure.gemm import gemm_case
    from moestro.measure.memory import memory_case
    from moestro.measure.timing import measure_cases

    device = torch.device(work.device_type if work.device_type == "cpu" else f"{work.device_type}:{rank}")
    if device.type == "cpu" and not collective:
        torch.set_num_threads(work.threads or usable_cores())
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank)
    m, n, k = work.shape
    cases = [gemm_case(device, m, n, k, work.dtype), memory_case(device, "copy", work.copy_bytes)]
    timed = measure_cases(cases, device, seconds_per_case=SECONDS_PER_CASE)
    by_op = {sample.op: sample for sample in timed.samples}
    gemm, copy = by_op.get("gemm"), by_op.get("copy")
    result = RankResult(
        rank,
        gemm.flops_per_s if gemm else None,
        copy.bytes_per_s if copy else None,
        notes=tuple(timed.notes),
    )
    return _with_collective(result, work, device, port) if collective else result


def _with_collective(result: RankResult, work: Work, device: object, port: int) -> RankResult:
    import torch
    import torch.distributed as dist

    from moestro.measure.collectives import WrongResult, measure_collectives

    assert isinstance(device, torch.device)
    if device.type != "cpu":  # the ranks have met over gloo; now their devices have to
        dist.destroy_process_group()
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
        dist.init_process_group(backend, f"tcp://127.0.0.1:{port}", rank=result.rank, world_size=work.ranks)
    met = measure_collectives(
        device,
        ("all_reduce",),
        (work.reduce_bytes,),
        (work.ranks,),
        repeats=5,
        deadline=time.monotonic() + COLLECTIVE_S,
    )
    return replace(
        result,
        reduce_s=met.samples[0].median_s if met.samples else None,
        wrong=tuple(str(finding) for finding in met.findings if isinstance(finding, WrongResult)),
        slow=tuple(str(finding) for finding in met.findings if not isinstance(finding, WrongResult)),
        notes=(*result.notes, *met.notes),
    )


def measure_node(work: Work, rank_work: RankWork = on_rank) -> tuple[list[RankResult], list[RankResult]]:
    """(of every device, of every rank of the collective). The same ranks on accelerators, one on each.

    A CPU computes in one process with all its threads, then exchanges between ranks of one thread each.
    """
    if work.device_type != "cpu":
        together = run_on_ranks(rank_work, work.ranks, work, work.ranks > 1, free_port(), limit_s=LIMIT_S)
        return together, together
    alone = run_on_ranks(rank_work, 1, work, False, 0, limit_s=LIMIT_S)
    if work.ranks == 1:
        return alone, []
    small = replace(work, shape=ONE_CPU_RANK, dtype="fp32", copy_bytes=2**20)
    return alone, run_on_ranks(rank_work, work.ranks, small, True, 0, limit_s=LIMIT_S)


def judge(
    work: Work, limits: Limits, devices: Sequence[RankResult], ranks: Sequence[RankResult], busy: bool = False
) -> list[Check]:
    """The findings of tier 2: gemm, memory rate, all_reduce, slow rank. busy: others use the CPUs."""
    m, n, k = work.shape
    compute = (1e9, "GFLOP/s") if work.device_type == "cpu" else (1e12, "TFLOP/s")
    flops = {r.rank: r.flops_per_s for r in devices}
    copied = {r.rank: r.copy_bytes_per_s for r in devices}
    notes = [note for result in devices for note in result.notes]
    return [
        rate_check("gemm", f"{m}x{n}x{k} {work.dtype}", flops, work.gemm, compute, work, notes),
        rate_check(
            "memory rate", f"copy of {work.copy_bytes >> 20} MiB", copied, work.copy, (1e9, "GB/s"), work, notes
        ),
        collective_check(work, ranks),
        slow_rank_check(work, limits, ranks, busy),
    ]


def rate_check(
    name: str,
    what: str,
    rates: dict[int, float | None],
    floor: Floor | None,
    scale: tuple[float, str],
    work: Work,
    notes: Sequence[str] = (),
) -> Check:
    """The slowest device against the floor; every one below it is named. Told in `scale`: a unit's size and name."""
    size, unit = scale
    known = {rank: rate / size for rank, rate in rates.items() if rate}
    if len(known) < len(rates) or not known:
        said = notes[0] if notes else "the timing gave no result"
        return failed(name, f"{what} could not be timed: {said}", "see the devices' own checks and the kernel log")
    slowest = min(known.values())
    figures = {"value": round(slowest, 4), "unit": unit}
    several = f" on the slowest of {len(known)} devices" if len(known) > 1 else ""
    reason = f"{three_digits(slowest)} {unit}{several} ({what})"
    if floor is None:
        return passed(name, f"{reason}; no floor is known: --profile gives one", **figures)
    limit = floor.rate / size
    figures["limit"] = round(limit, 4)
    below = [f"{_device(work, rank)} {three_digits(rate)}" for rank, rate in known.items() if rate < limit]
    if below:
        reason = f"{', '.join(below)} {unit} ({what}); the floor is {three_digits(limit)}: {floor.source}"
        return failed(name, reason, SLOW, **figures)
    return passed(name, f"{reason}, floor {three_digits(limit)}", **figures)


def _device(work: Work, rank: int) -> str:
    return work.device_type if work.device_type == "cpu" else f"{work.device_type}:{rank}"


def collective_check(work: Work, ranks: Sequence[RankResult]) -> Check:
    """The all-reduce: every element right, and its bus bandwidth against the floor."""
    name = "all_reduce"
    if len(ranks) < 2:
        return skipped(name, "one device has nobody to exchange with")
    wrong = dict.fromkeys(text for result in ranks for text in result.wrong)
    if wrong:
        return failed(name, "wrong result: " + "; ".join(wrong), EXCHANGE)
    reduce_s = ranks[0].reduce_s
    what = f"{work.reduce_bytes >> 20} MiB among {len(ranks)} ranks"
    if reduce_s is None:
        said = next((note for result in ranks for note in result.notes), "no timing came back")
        return failed(name, f"{what} did not run: {said}", EXCHANGE)
    gbps = busbw(name, len(ranks), work.reduce_bytes, reduce_s) / 1e9
    figures = {"value": round(gbps, 4), "unit": "GB/s"}
    reason = f"{three_digits(gbps)} GB/s bus bandwidth, every element right ({what})"
    if work.all_reduce is None:
        return passed(name, f"{reason}; no floor is known: --profile gives one", **figures)
    limit = work.all_reduce.rate / 1e9
    figures["limit"] = round(limit, 4)
    if gbps < limit:
        floor = f"the floor is {three_digits(limit)}: {work.all_reduce.source}"
        return failed(name, f"{three_digits(gbps)} GB/s bus bandwidth ({what}); {floor}", EXCHANGE, **figures)
    return passed(name, f"{reason}, floor {three_digits(limit)}", **figures)


def slow_rank_check(work: Work, limits: Limits, ranks: Sequence[RankResult], busy: bool = False) -> Check:
    """Ranks that compute slower than the others, or that the others wait for in the all-reduce, by number.

    busy: others use the CPUs of the node, which then may be what slows a rank: a warning, unless an accelerator is
    slow, to which that does nothing.
    """
    if len(ranks) < 2:
        return skipped("slow rank", "one device has nobody to be slower than")
    computing, worst = list[str](), 1.0
    for result in ranks:
        others = [other.flops_per_s for other in ranks if other is not result and other.flops_per_s]
        if not others or not result.flops_per_s:
            continue
        ratio = median(others) / result.flops_per_s
        worst = max(worst, ratio)
        if ratio > limits.slow_rank:
            rank = f"rank {result.rank}" + ("" if work.device_type == "cpu" else f" ({_device(work, result.rank)})")
            computing.append(f"{rank} is slow: a product takes it {ratio:.2f} times as long as the others")
    found = computing + list(dict.fromkeys(text for result in ranks for text in result.slow))
    figures = {"value": round(worst, 3), "limit": limits.slow_rank, "unit": "times the others"}
    if not found:
        reason = f"none of {len(ranks)}; the slowest takes {worst:.2f} times as long as the others"
        return passed("slow rank", reason, **figures)
    if busy and (work.device_type == "cpu" or not computing):
        return warned("slow rank", "; ".join(found), "other processes use the CPUs: measure again without", **figures)
    return failed("slow rank", "; ".join(found), SLOW, **figures)
