"""How long ranks take to exchange data: every collective over sizes and groups, with each result verified.

A repetition starts at a barrier and lasts as long as its slowest rank. The cases are gone through in rounds, so that a
slow drift of the machine shows in the spread.
"""

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from moestro.errors import MoestroError
from moestro.hardware.device import resolve_device
from moestro.hardware.grouping import Grouping
from moestro.hardware.profile import Sample
from moestro.hardware.topology import usable_cores
from moestro.measure.exchanges import OPS, check_choice
from moestro.measure.pairs import measure_pairs
from moestro.measure.rounds import Case, Progress, Runner, teams_of
from moestro.parallel.local import run_on_ranks
from moestro.parallel.process import connected, world_size

ALONE = "one rank has nobody to exchange with: no collectives measured"
SPREAD_LIMIT = 0.5  # of a case, above which it is repeated, and then flagged
EXTRA_ROUNDS = 2
# A rank is slow when its own work (its operands, issuing the calls) takes this many times as long as that of the median
# of the others, and in some case at least this much longer.
SLOW_RATIO, SLOW_S = 2.5, 1e-3


@dataclass(frozen=True)
class WrongResult:
    """A collective gave wrong elements, counted over all ranks; `rank` is the first that received some."""

    op: str
    bytes: int
    ranks: int
    wrong: int
    rank: int

    def __str__(self) -> str:
        return (
            f"{self.op} of {self.bytes} bytes among {self.ranks} ranks gave {self.wrong} wrong elements (first on rank "
            f"{self.rank}); its times are left out"
        )


@dataclass(frozen=True)
class SlowRank:
    """The others wait for this rank. late_s: how much longer its own work takes, in the worst case (median)."""

    rank: int
    ratio: float  # of its own work to that of the median of the others, all cases together
    late_s: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: its own work takes {self.ratio:.1f} times as long as the others', who wait up "
            f"to {self.late_s * 1e3:.2g} ms for it"
        )


Finding = WrongResult | SlowRank


@dataclass(frozen=True)
class CollectiveResult:
    """The same on every rank.

    rank_skew_s: [ranks] how much longer a rank's own work takes than the median rank's, in the median case.
    grouping: the groups that the links between pairs of ranks show, where pairs were measured.
    """

    samples: tuple[Sample, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    rank_skew_s: tuple[float, ...] = ()
    grouping: Grouping | None = None


@dataclass(frozen=True)
class Plan:
    """What to measure. pair_bytes: the large message between every two ranks; 0: no pairs."""

    ops: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    group_sizes: tuple[int, ...]
    dtype: str = "fp32"
    warmup: int = 2
    repeats: int = 10
    rounds: int = 2
    check: bool = True
    pair_bytes: int = 0

    def validate(self, world: int) -> None:
        """Raises MoestroError for what no group of `world` ranks can do."""
        for op in self.ops:
            check_choice(op, self.dtype)
        if any(size < 1 for size in self.sizes_bytes):
            raise MoestroError(f"a message has at least 1 byte, not {min(self.sizes_bytes)}")
        if any(not 1 <= size <= world for size in self.group_sizes):
            wanted = ", ".join(map(str, self.group_sizes))
            raise MoestroError(
                f"groups of {wanted} ranks are wanted, but there are {world} ranks; start more (--nproc)"
            )
        if min(self.warmup, self.repeats, self.rounds) < 1:
            raise MoestroError("warmup, repeats and rounds are 1 or more")


def usual_plan(world: int, quick: bool, device: torch.device) -> Plan:
    """Every operation, from 1 KiB in steps of 4, among 2, 4, 8 ... ranks and all; quick: among all ranks only, but on
    a CPU, where groups share cores.
    """
    largest = 2**24 if quick else 2**26  # 16 and 64 MiB
    if device.type != "cpu":
        largest *= 16
    powers = [2**i for i in range(1, world.bit_length()) if 2**i < world]
    return Plan(
        ops=OPS,
        sizes_bytes=tuple(4**i for i in range(5, 16) if 4**i <= largest),
        group_sizes=(world,) if quick and device.type != "cpu" else (*powers, world),
        repeats=10 if quick else 20,
        pair_bytes=largest // 4,
    )


def collective_profile(
    world: int,
    quick: bool,
    *,
    device: str = "cpu",
    plan: Plan | None = None,
    limit_s: float | None = None,
    progress: Progress | None = None,
) -> CollectiveResult:
    """Measure collectives and pairs on the ranks that are running, or else on `world` new ranks of this machine.

    In a process that torchrun or `moestro ... --nproc` started, every rank calls this and `world` is their number. New
    ranks exchange over gloo on the CPU and show no progress. plan: None is `usual_plan`. limit_s: of the whole call,
    with the start of processes (None: 15 s if quick, else 120 s); what does not fit is noted. Every rank gets the same
    result.

    Raises:
        MoestroError: less than one rank, another number of ranks than are running, or what `Plan.validate` refuses.
        RuntimeError: a new rank failed.
    """
    if world < 1:
        raise MoestroError(f"collectives need 1 rank or more, not {world}")
    deadline = time.monotonic() + (limit_s or (15.0 if quick else 120.0))
    running = dist.get_world_size() if dist.is_initialized() else world_size()
    if running > 1:
        with connected(resolve_device(device, "--device"), world) as own:
            return _on_this_rank(own, plan or usual_plan(world, quick, own), deadline, progress)
    plan = plan or usual_plan(world, quick, torch.device("cpu"))
    plan.validate(world)
    if world == 1:
        return CollectiveResult(notes=(ALONE,))
    limit_s = deadline - time.monotonic() + 60  # the ranks watch the deadline; this is for one that hangs
    result: CollectiveResult = run_on_ranks(_on_new_rank, world, plan, deadline, limit_s=limit_s)[0]
    return replace(result, notes=(*_conditions(world, device), *result.notes))


def _conditions(world: int, device: str) -> list[str]:
    """What a reader should know of ranks that were started here."""
    notes = []
    cores = usable_cores()
    if world > cores:
        notes.append(f"{world} ranks share {cores} cores: their latencies are the scheduler's more than the link's")
    if resolve_device(device).type != "cpu":
        notes.append("collectives were measured over gloo on the CPU; for those of the devices start with --nproc")
    return notes


def _on_new_rank(rank: int, plan: Plan, deadline: float) -> CollectiveResult:
    return _on_this_rank(torch.device("cpu"), plan, deadline, None)


def _on_this_rank(device: torch.device, plan: Plan, deadline: float, progress: Progress | None) -> CollectiveResult:
    result = measure_collectives(
        device,
        plan.ops,
        plan.sizes_bytes,
        plan.group_sizes,
        warmup=plan.warmup,
        repeats=plan.repeats,
        rounds=plan.rounds,
        dtype=plan.dtype,
        check=plan.check,
        progress=progress,
        deadline=deadline - (0.1 * (deadline - time.monotonic()) if plan.pair_bytes else 0.0),
    )
    if not plan.pair_bytes or dist.get_world_size() == 1:
        return result
    pairs = measure_pairs(device, large_bytes=plan.pair_bytes, dtype=plan.dtype, deadline=deadline)
    one_link = dist.get_world_size() == 2  # which has nothing to be compared with
    grouped = () if pairs.grouping is None or one_link else (f"links between ranks: {pairs.grouping}",)
    return replace(
        result,
        samples=(*result.samples, *pairs.samples),
        notes=(*result.notes, *pairs.notes, *grouped),
        grouping=pairs.grouping,
    )


def measure_collectives(
    device: torch.device,
    ops: Sequence[str],
    sizes_bytes: Sequence[int],
    group_sizes: Sequence[int],
    *,
    warmup: int = 2,
    repeats: int = 10,
    rounds: int = 2,
    dtype: str = "fp32",
    check: bool = True,
    progress: Progress | None = None,
    deadline: float | None = None,
) -> CollectiveResult:
    """Time `ops` over sizes and groups on the ranks of the default process group, each of which must call this.

    group_sizes: each up to the number of ranks. A group that fits into the world several times is measured alone
    ("groups": "one" in the case) and with all its equals at the same time ("all"). A size is rounded to what the ranks
    divide; the case holds the true one. repeats: the most timings of a case in a round. deadline: of rank 0's
    time.monotonic(); towards it cases are repeated less often, and those that do not fit are left out and noted.
    An operation that the backend lacks, or that fails, is left out and noted. progress is called on rank 0.

    Raises:
        MoestroError: an unknown operation or dtype, a size below one byte, or a group of more ranks than there are.
    """
    plan = Plan(tuple(ops), tuple(sizes_bytes), tuple(group_sizes), dtype, warmup, repeats, rounds)
    plan.validate(dist.get_world_size())
    teams = [team for size in sorted(set(group_sizes)) if size > 1 for team in teams_of(size)]
    if not teams:
        return CollectiveResult(notes=(ALONE,))
    cases = [
        Case(op, size, team)
        for size in ends_first(sizes_bytes)
        for team in teams
        for op in ops
        if op != "send_recv" or team.size == 2
    ]
    runner = Runner(device, dtype, warmup, repeats, check, deadline)
    runner.run(cases, rounds, progress)
    results = _gather(cases)
    for _ in range(EXTRA_ROUNDS):
        noisy = [case for case, result in zip(cases, results, strict=True) if result.spread > SPREAD_LIMIT]
        if not noisy:
            break
        runner.run(noisy, 1)
        results = _gather(cases)
    return _summary(cases, results, dtype)


def ends_first(sizes: Sequence[int]) -> list[int]:
    """Each size once: smallest, largest, and then those in the middle of what is open, for time may be short."""
    rising = sorted(set(sizes))
    order = rising[:1] + rising[:0:-1][:1]
    spans = [(0, len(rising) - 1)]
    while spans:
        low, high = spans.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(rising[middle])
            spans += [(low, middle), (middle, high)]
    return order


@dataclass(frozen=True)
class _CaseResult:
    """One case as all ranks met it: [ranks that took part, repetitions] seconds."""

    ranks: tuple[int, ...]
    times_s: np.ndarray
    own_s: np.ndarray
    wrong: tuple[int, ...]
    bytes: int
    error: str

    @property
    def slowest_s(self) -> np.ndarray:
        return self.times_s.max(0)

    @property
    def spread(self) -> float:
        """(p90 - p10) / median; 0 where nothing was timed."""
        if self.times_s.size == 0:
            return 0.0
        low, median, high = np.quantile(self.slowest_s, (0.1, 0.5, 0.9))
        return float((high - low) / median)


def _gather(cases: Sequence[Case]) -> list[_CaseResult]:
    mine = [(case.bytes, case.times_s, case.own_s, case.wrong, case.error) for case in cases]
    everyone: list[list[tuple[int, list[float], list[float], int, str]]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    results = []
    for met in zip(*everyone, strict=True):
        ranks = tuple(rank for rank, (size, *_) in enumerate(met) if size)
        part = [met[rank] for rank in ranks]
        results.append(
            _CaseResult(
                ranks,
                times_s=np.array([times for _, times, *_ in part]),
                own_s=np.array([own for _, _, own, *_ in part]),
                wrong=tuple(wrong for *_, wrong, _ in part),
                bytes=part[0][0] if part else 0,
                error=next((error for *_, error in met if error), ""),
            )
        )
    return results


def _summary(cases: Sequence[Case], results: Sequence[_CaseResult], dtype: str) -> CollectiveResult:
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    samples, findings, notes = [], list[Finding](), []
    for case, result in zip(cases, results, strict=True):
        if any(result.wrong):
            first = next(rank for rank, wrong in zip(result.ranks, result.wrong, strict=True) if wrong)
            findings.append(WrongResult(case.op, result.bytes, case.team.size, sum(result.wrong), first))
        elif result.times_s.size and not result.error:
            nodes = len({hosts[rank] for rank in case.team.members[0]})
            samples.append(_sample(case, result, nodes, dtype))
    for op in dict.fromkeys(case.op for case in cases):
        errors = [result.error for case, result in zip(cases, results, strict=True) if case.op == op and result.error]
        if errors:
            notes.append(f"{op} is left out from where it failed: {errors[0]}")
    missing = sum(1 for result in results if not result.times_s.size and not result.error)
    if missing:
        notes.append(f"{missing} of {len(cases)} collective cases did not fit into the time, or came after a failure")
    # The first quartile: a scheduler holds up some repetitions, a slow rank is late in all.
    own = [(r.ranks, np.quantile(r.own_s, 0.25, axis=1, method="lower")) for r in results if r.own_s.size]
    skew, slow = slow_ranks(own, len(hosts))
    return CollectiveResult(tuple(samples), (*findings, *slow), tuple(notes), skew)


def _sample(case: Case, result: _CaseResult, nodes: int, dtype: str) -> Sample:
    low, median, high = np.quantile(result.slowest_s, (0.1, 0.5, 0.9)).tolist()
    return Sample(
        op=case.op,
        case={
            "bytes": result.bytes,
            "ranks": case.team.size,
            "nodes": nodes,
            "dtype": dtype,
            "world": dist.get_world_size(),
            "groups": case.team.groups,
        },
        median_s=median,
        low_s=low,
        high_s=high,
        repeats=result.times_s.shape[1],
        noisy=result.spread > SPREAD_LIMIT,
        bytes_moved=result.bytes,
    )


def slow_ranks(
    cases: Sequence[tuple[Sequence[int], Sequence[float] | np.ndarray]], world: int
) -> tuple[tuple[float, ...], list[SlowRank]]:
    """Who keeps the others waiting, from (ranks, seconds of own work of each) of every case.

    Returns the skew of every rank (its own work less the median rank's, in the median case; 0 where it took no part)
    and a finding for each that is slow.
    """
    own_s = np.full((len(cases), world), np.nan)
    for row, (ranks, seconds) in zip(own_s, cases, strict=True):
        row[list(ranks)] = seconds
    skews, findings = [], []
    for rank in range(world):
        took_part = own_s[~np.isnan(own_s[:, rank])]
        if not len(took_part):
            skews.append(0.0)
            continue
        mine = took_part[:, rank]
        skews.append(float(np.median(mine - np.nanmedian(took_part, 1))))
        others = np.nanmedian(np.delete(took_part, rank, 1), 1)
        ratio, late_s = float(mine.sum() / others.sum()), float((mine - others).max())
        if ratio >= SLOW_RATIO and late_s >= SLOW_S:
            findings.append(SlowRank(rank, ratio, late_s))
    return tuple(skews), findings
