"""What a search looks for, and what a plan is worth by it: pure functions of a plan's numbers, floats or arrays alike.

With a fixed number of devices money is step time under another name, and so is goodput where all plans write and read
the same checkpoints: those rank as time does. Energy does not (a device that waits draws less), nor goodput where a
layout makes restarts slow, nor memory; and over several numbers of devices none does.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.predict.cost import HOUR_S
from moestro.predict.energy import COOLING, NODE, drawn_s
from moestro.predict.recovery import Storage, state_bytes
from moestro.predict.words import Prediction

Objective = Literal["time", "goodput", "money", "energy", "memory"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
# Ranked by numbers that only plan.more has.
BY_MORE = ("goodput", "energy")
DAY_S = 86400.0
MIB = 2.0**20
NEWTON_ROUNDS, BELOW_ONE = 12, 1 - 1e-15
Values = NDArray[np.float64]


class Numbers(NamedTuple):
    """Of one plan or of many (arrays of one shape): seconds of a step, bytes of the fullest device; what the slowest
    rank does, and checkpoints (plan.more.More), zeros where nobody asks for them."""

    step_s: Values
    total_bytes: Values
    computing_s: Values
    waiting_s: Values
    written: Values
    most_written: Values
    read: Values
    most_read: Values


def numbers_of(workload: Workload, plan: Plan, one: Prediction) -> Numbers:
    """Of one predicted plan."""
    time = one.time
    working = (time.compute + time.optimizer, time.host + time.bubble)
    values = (time.total, one.memory.total, *working, *state_bytes(workload, plan))
    return Numbers(*(np.asarray(value, dtype=np.float64) for value in values))


@dataclass(frozen=True)
class Failures:
    """device_mtbf_s: mean time between failures of one device that stop the job. restart_s: to find the fault and start
    again, before the checkpoint is read. checkpoint_s: for which training stands still; None: as long as the storage
    takes to write it. storage: None: reading a checkpoint takes no time of its own."""

    device_mtbf_s: float
    restart_s: float = 600.0
    checkpoint_s: float | None = 30.0
    storage: Storage | None = None

    def __post_init__(self) -> None:
        if not self.device_mtbf_s > 0 or not self.restart_s >= 0 or not (self.checkpoint_s or 0) >= 0:
            raise MoestroError("hours between failures are above 0; seconds of a checkpoint and a restart 0 or more")
        if self.checkpoint_s is None and self.storage is None:
            raise MoestroError("a checkpoint takes --checkpoint-s, or as long as --storage-gbps needs: give one")


@dataclass(frozen=True)
class Goal:
    """What to rank plans by, and what they must keep to. steps: of the whole run. watts: rated power of a device.
    free_bytes, free_share: to be left free of a device's memory, the larger counts. None: not known, or no limit.

    Raises:
        MoestroError: the objective or a limit needs what is not known.
    """

    objective: Objective = "time"
    steps: float = 1.0
    usd_per_hour: float | None = None  # of one device
    watts: float | None = None
    failures: Failures | None = None
    deadline_s: float | None = None
    budget_usd: float | None = None
    free_bytes: float = 0.0
    free_share: float = 0.0

    def __post_init__(self) -> None:
        if self.objective == "goodput" and self.failures is None:
            raise MoestroError(
                "goodput depends on how often devices fail: give --mtbf-hours of one device (50,000 is about what "
                "Llama 3's 419 interruptions in 54 days on 16,384 GPUs say)"
            )
        if self.usd_per_hour is None and (self.objective == "money" or self.budget_usd is not None):
            raise MoestroError("the catalog has no price for this hardware: give --usd-per-hour of one device")
        if self.objective == "energy" and self.watts is None:
            raise MoestroError("nobody knows the rated power of this hardware: energy cannot be ranked by")
        for name, value in (("--deadline", self.deadline_s), ("--budget", self.budget_usd), ("tokens", self.steps)):
            if value is not None and not 0 < value < np.inf:
                raise MoestroError(f"{name} must be above 0 and finite")
        if not 0 <= self.free_share < 1 or not self.free_bytes >= 0:
            raise MoestroError("--headroom is a share below 100% or a size, as 10% or 8GB")

    @property
    def plain(self) -> bool:
        """Whether the shortest step is all that counts."""
        return self.objective == "time" and self.deadline_s is None and self.budget_usd is None

    @property
    def details(self) -> bool:
        """Whether plans are ranked or limited by numbers that only plan.more has."""
        limited = self.deadline_s is not None or self.budget_usd is not None
        return self.objective in BY_MORE or (self.failures is not None and (limited or self.objective == "money"))

    def limit(self, there: float | None) -> float:
        """Bytes that a plan may take of a device that has `there`."""
        return np.inf if there is None else there - max(self.free_bytes, self.free_share * there)


TIME = Goal()  # the shortest step


class Outcome(NamedTuple):
    """Of a run of such steps. useful_s: a step with its share of checkpoints, lost work and restarts. goodput: the
    share of useful work; interval_s: the best between checkpoints, of checkpoint_s each, and restart_s after a failure:
    None without failures. joules: of useful work, from the wall."""

    useful_s: Values
    run_s: Values
    usd: Values | None
    joules: Values | None
    goodput: Values | None = None
    interval_s: Values | None = None
    checkpoint_s: Values | None = None
    restart_s: Values | None = None


def outcome(numbers: Numbers, goal: Goal, devices: int) -> Outcome:
    """Equal to predict.goodput, predict.cost and predict.energy of one plan."""
    useful, rest = numbers.step_s, None
    if goal.failures is not None:
        rest = _with_failures(numbers, goal.failures, devices)
        with np.errstate(divide="ignore"):  # so many failures that it never ends
            useful = numbers.step_s / rest[0]
    run = useful * goal.steps
    usd = None if goal.usd_per_hour is None else run * (devices * goal.usd_per_hour / HOUR_S)
    joules = None
    if goal.watts is not None:
        full_s = drawn_s(numbers.computing_s, numbers.waiting_s, numbers.step_s)
        joules = full_s * (goal.watts * NODE * COOLING * devices * goal.steps)
    return Outcome(useful, run, usd, joules, *(rest or ()))


def score(numbers: Numbers, found: Outcome, goal: Goal) -> Values:
    """The least is the best: seconds, dollars, joules or bytes."""
    match goal.objective:
        case "goodput":  # of the same tokens: the time until the work is done
            return found.run_s
        case "money":
            assert found.usd is not None
            return found.usd
        case "energy":
            assert found.joules is not None
            return found.joules
        case "memory":  # in whole MiB; of plans as lean the faster one
            return np.floor(numbers.total_bytes / MIB) * MIB + numbers.step_s / (1 + numbers.step_s)
    return numbers.step_s


def overrun(found: Outcome, goal: Goal) -> Values:
    """How many times the deadline or the budget a run takes, the larger; 1 or less: it keeps to both."""
    most = np.zeros_like(found.run_s)
    if goal.deadline_s is not None:
        most = np.maximum(most, found.run_s / goal.deadline_s)
    if goal.budget_usd is not None:
        assert found.usd is not None
        most = np.maximum(most, found.usd / goal.budget_usd)
    return most


def best_interval(checkpoint_s: Values, mtbf_s: float) -> Values:
    """As predict.goodput.best_interval: the root of ln(1 - x) + x + C/M = 0, by Newton's method from its right, where
    the falling, concave left side never overshoots."""
    share = checkpoint_s / mtbf_s
    x = np.clip(np.minimum(np.sqrt(2 * share), -np.expm1(-1 - share)), 0.0, BELOW_ONE)
    for _ in range(NEWTON_ROUNDS):
        x = np.clip(x + (np.log1p(-x) + x + share) * (1 - x) / np.maximum(x, 1e-300), 0.0, BELOW_ONE)
    return np.maximum(x, 1e-9) * mtbf_s


def _with_failures(numbers: Numbers, failures: Failures, devices: int) -> tuple[Values, Values, Values, Values]:
    """Goodput, interval, and seconds of a checkpoint and of a restart (predict.goodput.expected_time)."""
    mtbf_s, storage = failures.device_mtbf_s / devices, failures.storage
    checkpoint_s = np.full_like(numbers.step_s, failures.checkpoint_s or 0.0)
    restart_s = np.full_like(numbers.step_s, failures.restart_s)
    if storage is not None:
        own = storage.device_bytes_per_s
        restart_s = restart_s + np.maximum(numbers.read / storage.bytes_per_s, numbers.most_read / own)
        if failures.checkpoint_s is None:
            checkpoint_s = np.maximum(numbers.written / storage.bytes_per_s, numbers.most_written / own)
    interval_s = best_interval(checkpoint_s, mtbf_s)
    with np.errstate(over="ignore"):
        attempt = np.expm1((interval_s + checkpoint_s) / mtbf_s)
        share = interval_s / (mtbf_s * np.exp(restart_s / mtbf_s) * attempt)
    return share, interval_s, checkpoint_s, restart_s
