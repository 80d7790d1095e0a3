"""How long a run takes when devices fail: expectations, the best checkpoint interval, and a simulation beside them.

Failures are exponential. Work is done in intervals, each ended by a checkpoint; a failure throws away the interval in
which it falls and costs a restart, which may fail too (MoFa, arXiv 2511.09837, its first-order form made exact).
"""

import math
import random
from dataclasses import dataclass

from moestro.errors import MoestroError

SEARCH_ROUNDS = 200


@dataclass(frozen=True)
class Reliability:
    """Of the whole job, seconds. checkpoint_s: for how long training stands still; restart_s: to find the fault, to
    start again and to load the last checkpoint."""

    mtbf_s: float  # mean time between failures that stop the job
    checkpoint_s: float
    restart_s: float

    def __post_init__(self) -> None:
        if not self.mtbf_s > 0 or not self.checkpoint_s >= 0 or not self.restart_s >= 0:
            raise MoestroError("mtbf must be above 0; checkpoint and restart times 0 or more")


@dataclass(frozen=True)
class TwoLevel:
    """Two kinds of faults: soft ones, after which copies in memory are still there, and losses of a node, which go back
    to the last checkpoint on disk. Every copy to disk is one to memory too."""

    soft_mtbf_s: float
    node_mtbf_s: float
    memory_checkpoint_s: float
    disk_checkpoint_s: float
    soft_restart_s: float
    node_restart_s: float

    def __post_init__(self) -> None:
        times = (self.memory_checkpoint_s, self.disk_checkpoint_s, self.soft_restart_s, self.node_restart_s)
        if not min(self.soft_mtbf_s, self.node_mtbf_s) > 0 or not min(times) >= 0:
            raise MoestroError("times between failures must be above 0; checkpoint and restart times 0 or more")


def job_mtbf(device_mtbf_s: float, devices: int) -> float:
    """Of a job that any of its devices stops."""
    return device_mtbf_s / devices


def expected_time(work_s: float, interval_s: float, faults: Reliability) -> float:
    """Expected seconds for `work_s` of useful work, a checkpoint after each `interval_s` of it; inf beyond floats.

    M · e^(R/M) · (e^((τ + C)/M) - 1) · W/τ
    """
    if not interval_s > 0 or not work_s >= 0:
        raise MoestroError("the checkpoint interval must be above 0, the work 0 or more")
    mtbf = faults.mtbf_s
    try:
        attempt = math.expm1((interval_s + faults.checkpoint_s) / mtbf)
        return mtbf * math.exp(faults.restart_s / mtbf) * attempt * work_s / interval_s
    except OverflowError:
        return math.inf


def goodput(interval_s: float, faults: Reliability) -> float:
    """Share of the time that is useful work."""
    return 1.0 / expected_time(1.0, interval_s, faults)


def first_order_waste(interval_s: float, faults: Reliability) -> float:
    """C/τ + (τ/2 + R)/M: what is usually quoted; 30 % off at C/M = 0.05 and 66 % at 0.2 (R/M = 0.1, best interval)."""
    return faults.checkpoint_s / interval_s + (interval_s / 2 + faults.restart_s) / faults.mtbf_s


def young_interval(faults: Reliability) -> float:
    """Young's √(2·C·M), for C much shorter than M."""
    return math.sqrt(2 * faults.checkpoint_s * faults.mtbf_s)


def best_interval(faults: Reliability) -> float:
    """The interval of the least expected time: the root of (1 - x)·e^(x + C/M) = 1 with x = τ/M, by bisection."""
    share = faults.checkpoint_s / faults.mtbf_s
    low, high = 0.0, 1.0
    for _ in range(SEARCH_ROUNDS):
        middle = (low + high) / 2
        # In logarithms, so that checkpoints longer than the time between failures do not overflow.
        if middle < 1 and math.log1p(-middle) + middle + share > 0:
            low = middle
        else:
            high = middle
    return max(high, 1e-9) * faults.mtbf_s


def simulate(
    work_s: float, interval_s: float, faults: Reliability, runs: int = 200, seed: int = 0
) -> tuple[float, float]:
    """Mean seconds of `runs` simulated jobs and the standard error of the mean."""
    rng = random.Random(seed)
    intervals = max(1, round(work_s / interval_s))
    times = [_one_run(rng, intervals, interval_s, faults) for _ in range(runs)]
    return _mean(times)


def two_level_time(work_s: float, interval_s: float, every: int, faults: TwoLevel) -> float:
    """Expected seconds for `work_s`: a copy to memory after each `interval_s`, and every `every`-th to disk too.

    With E(i) the expected time from the i-th copy of a period to the period's end, each E(i) is linear in E(i + 1) and,
    because a lost node goes back to the start, in E(0); solved from the last one to the first.
    """
    if not interval_s > 0 or every < 1:
        raise MoestroError("the checkpoint interval must be above 0, and every 1 or more")
    rate = 1 / faults.soft_mtbf_s + 1 / faults.node_mtbf_s
    soft = (1 / faults.soft_mtbf_s) / rate
    restart_s, becomes_hard = _soft_restart(faults, rate, soft)
    hard_s = math.expm1(min(700.0, rate * faults.node_restart_s)) / rate
    constant = factor = 0.0  # E(i) = constant + factor · E(0)
    for i in reversed(range(every)):
        length = interval_s + faults.memory_checkpoint_s + (faults.disk_checkpoint_s if i == every - 1 else 0.0)
        passes = math.exp(-rate * length)
        fails = -math.expm1(-rate * length)
        stays = 1 - fails * soft * (1 - becomes_hard)  # a soft fault tries the same interval again
        constant = (fails / rate + passes * constant + fails * (soft * restart_s + (1 - soft) * hard_s)) / stays
        factor = (passes * factor + fails * (soft * becomes_hard + (1 - soft))) / stays
    period_s = constant / (1 - factor) if factor < 1 else math.inf
    return period_s * work_s / (interval_s * every)


def best_two_level(faults: TwoLevel, most: int = 256) -> tuple[float, int]:
    """(interval, every) of the least expected time, from a grid around Young's interval and powers of √2 of `every`."""
    rate = 1 / faults.soft_mtbf_s + 1 / faults.node_mtbf_s
    start = math.sqrt(2 * max(faults.memory_checkpoint_s, 1e-3) / rate)
    counts = sorted({round(2 ** (k / 2)) for k in range(2 * int(math.log2(most)) + 1)})
    choices = [(start * 2 ** (k / 8), every) for k in range(-24, 49) for every in counts]
    return min(choices, key=lambda choice: two_level_time(1.0, choice[0], choice[1], faults))


def simulate_two_level(
    work_s: float, interval_s: float, every: int, faults: TwoLevel, runs: int = 200, seed: int = 0
) -> tuple[float, float]:
    """Mean seconds of `runs` simulated jobs of whole periods, and the standard error of the mean."""
    rng = random.Random(seed)
    periods = max(1, round(work_s / (interval_s * every)))
    return _mean([_one_two_level_run(rng, periods, interval_s, every, faults) for _ in range(runs)])


def _one_run(rng: random.Random, intervals: int, interval_s: float, faults: Reliability) -> float:
    clock, length = 0.0, interval_s + faults.checkpoint_s
    failure = rng.expovariate(1 / faults.mtbf_s)
    while intervals:
        if clock + length <= failure:
            clock += length
            intervals -= 1
            continue
        clock = failure
        failure += rng.expovariate(1 / faults.mtbf_s)
        while clock + faults.restart_s > failure:
            clock = failure
            failure += rng.expovariate(1 / faults.mtbf_s)
        clock += faults.restart_s
    return clock


def _one_two_level_run(rng: random.Random, periods: int, interval_s: float, every: int, faults: TwoLevel) -> float:
    rate = 1 / faults.soft_mtbf_s + 1 / faults.node_mtbf_s
    soft = (1 / faults.soft_mtbf_s) / rate
    clock, done, failure = 0.0, 0, rng.expovariate(rate)
    while done < periods * every:
        last = done % every == every - 1
        length = interval_s + faults.memory_checkpoint_s + (faults.disk_checkpoint_s if last else 0.0)
        if clock + length <= failure:
            clock += length
            done += 1
            continue
        hard = False
        while True:  # until a restart is through
            clock = failure
            failure += rng.expovariate(rate)
            hard = hard or rng.random() >= soft
            restart = faults.node_restart_s if hard else faults.soft_restart_s
            if clock + restart <= failure:
                clock += restart
                break
        if hard:
            done -= done % every
    return clock


def _soft_restart(faults: TwoLevel, rate: float, soft: float) -> tuple[float, float]:
    """Expected seconds of a restart after a soft fault, and the chance that a node is lost meanwhile."""
    fails = -math.expm1(-rate * faults.soft_restart_s)
    hard_s = math.expm1(min(700.0, rate * faults.node_restart_s)) / rate
    stays = 1 - fails * soft
    return (fails / rate + fails * (1 - soft) * hard_s) / stays, fails * (1 - soft) / stays


def _mean(times: list[float]) -> tuple[float, float]:
    mean = sum(times) / len(times)
    spread = math.sqrt(sum((time - mean) ** 2 for time in times) / max(1, len(times) - 1))
    return mean, spread / math.sqrt(len(times))
