"""A training step on several processes of this machine, each rank's time taken apart: operations, host, exchanges.

Of an exchange the profiler sees the call that starts it; the wait for it is the gap behind that call. What exceeds the
usual gap there is the exchange's.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moestro.config import Config
from moestro.errors import MoestroError
from moestro.measure.primitives import NODE, PHASE, Spans
from moestro.measure.step import WARM_UP, BuiltStep, profiled, profiler_cost_s
from moestro.measure.step_marks import MarkedUpdate
from moestro.parallel.local import run_on_ranks

EXCHANGE = "c10d::"
WAITS_S = 200e-6  # of a rank among others: in a longer gap it waits for an exchange that was started before


@dataclass(frozen=True)
class RankAccount:
    """Seconds of one step of one rank; they add up to it. calls: operations, exchanges not counted."""

    passes_s: float  # operations of forward and backward
    update_s: float  # operations after the last backward
    host_s: float  # between operations
    exchanges: tuple[float, ...]  # each, in their order, with the wait for other ranks
    calls: int

    @property
    def step_s(self) -> float:
        return self.passes_s + self.update_s + self.host_s + sum(self.exchanges)


@dataclass(frozen=True)
class RanksStep:
    """steps_s: of each timed step, its slowest rank. ranks: the accounts of one further, profiled step."""

    steps_s: tuple[float, ...]
    ranks: tuple[RankAccount, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.steps_s)


def measure_on_ranks(config: Config, ranks: int, repeats: int, limit_s: float = 120.0) -> RanksStep:
    """The step of `config` on `ranks` new processes of this machine's CPU, one thread each where there are several.

    Raises:
        MoestroError: the layout does not fit so many ranks, or a rank failed.
    """
    if ranks == 1:
        found = [_on_rank(0, config, repeats)]
    else:
        try:
            found = run_on_ranks(_on_rank, ranks, config, repeats, limit_s=limit_s)
        except RuntimeError as error:
            raise MoestroError(str(error).strip().splitlines()[-1]) from error
    steps = tuple(max(times) for times in zip(*(times for times, _ in found), strict=True))
    # Of the profiled steps the middle one: the same on every rank.
    walls = [max(accounts[i].step_s for _, accounts in found) for i in range(repeats)]
    middle = sorted(range(repeats), key=walls.__getitem__)[(repeats - 1) // 2]
    return RanksStep(steps, tuple(accounts[middle] for _, accounts in found))


def _on_rank(rank: int, config: Config, repeats: int) -> tuple[list[float], list[RankAccount]]:
    built = BuiltStep(config, torch.device("cpu"))
    for _ in range(WARM_UP):
        built.run()
        built.put_back()
    cost_s = profiler_cost_s(built.device)
    update, plain, accounts = MarkedUpdate(built.update), [], []
    for _ in range(repeats):  # as many on every rank, whatever the time: the steps exchange data
        _together()
        start = time.perf_counter()
        built.run()
        plain.append(time.perf_counter() - start)
        built.put_back()
        _together()
        accounts.append(rank_account(profiled(built, update), cost_s))
    return plain, accounts


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()


def rank_account(spans: Spans, cost_s: float = 0.0) -> RankAccount:
    """Share out a profiled step. cost_s: that recording one event takes; half a call's own falls before it."""
    passes = update = host = 0.0
    exchanges, last_end = list[float](), spans.step.start_ns
    gaps = _gaps(spans, cost_s)
    plain = [gap for gap, after in gaps if not after]
    usual = statistics.median(plain) if plain else 0.0
    for span, (gap, after) in zip(spans.calls, gaps, strict=True):
        event = span.event
        seconds = max(0.0, (event.end_ns - event.start_ns) / 1e9 - cost_s * (span.inside + 0.5))
        waits = after or (exchanges and gap > WAITS_S)
        excess = max(0.0, gap - usual) if waits else 0.0
        host += gap - excess
        if excess:
            exchanges[-1] += excess
        if event.name.startswith(EXCHANGE):
            exchanges.append(seconds)
        elif any(e.name.startswith(PHASE) for e in span.around) and not any(
            e.name.startswith(NODE) for e in span.around
        ):
            update += seconds
        else:
            passes += seconds
        last_end = event.end_ns
    host += max(0.0, (spans.step.end_ns - last_end) / 1e9 - cost_s * spans.after)
    return RankAccount(passes, update, host, tuple(exchanges), len(spans.calls) - len(exchanges))


def _gaps(spans: Spans, cost_s: float) -> list[tuple[float, bool]]:
    """Before each call, and whether the call before was an exchange."""
    found, last_end, exchanged = [], spans.step.start_ns, False
    for span in spans.calls:
        gap = (span.event.start_ns - last_end) / 1e9 - cost_s * (span.between + 0.5)
        found.append((max(0.0, gap), exchanged))
        last_end, exchanged = span.event.end_ns, span.event.name.startswith(EXCHANGE)
    return found


def transfers_s(ranks: Sequence[RankAccount]) -> list[float]:
    """What the exchanges of each rank took without waiting: where all ranks make the same, of each the quickest rank's
    time, as the last one to come waits for nobody. Else, as in a pipeline, the median over all is taken for each."""
    counts = {len(rank.exchanges) for rank in ranks}
    if len(counts) == 1:
        return [sum(map(min, zip(*(rank.exchanges for rank in ranks), strict=True)))] * len(ranks)
    return [len(rank.exchanges) * statistics.median(rank.exchanges) if rank.exchanges else 0.0 for rank in ranks]
