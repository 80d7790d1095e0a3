"""Runs exchanges on the ranks of a group, round by round: barrier, operation, time. All ranks go the same way."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from moestro.errors import MoestroError
from moestro.hardware.device import synchronize
from moestro.measure.exchanges import Exchange, Place, build

Progress = Callable[[int, int, str], None]  # cases done, of how many, the one at hand

Result = TypeVar("Result")

TIMING_S = 1e-3  # shorter calls are timed several at once, back to back
MOST_CALLS = 10
FEWEST = 3  # repetitions of a case that takes more than its share of the time


@dataclass(frozen=True)
class Team:
    """Groups of equal size that exchange at the same time, and this rank's place in one of them (None: it looks on)."""

    size: int
    groups: str  # "one" or "all", as in a sample's case
    members: tuple[tuple[int, ...], ...]
    place: Place | None
    barrier: dist.ProcessGroup | None = None  # of all that exchange; None: of all ranks


@dataclass
class Case:
    """One operation, size and team, with what this rank met. Times are of one call."""

    op: str
    size_bytes: int  # as asked for
    team: Team
    bytes: int = 0  # as run; 0: this rank took no part
    calls: int = 0  # in one timing; 0: not run yet
    repeats: int = 0
    times_s: list[float] = field(default_factory=list)
    own_s: list[float] = field(default_factory=list)  # of that: this rank's own work, in which the others wait for it
    wrong: int = 0
    error: str = ""

    @property
    def text(self) -> str:
        return f"{self.op} {self.size_bytes} bytes, {self.team.size} ranks"


class Control:
    """What the ranks agree upon. Over the CPU where the group can, so that it needs nothing of what is measured."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cpu") if "cpu:" in dist.get_backend_config() else device

    def barrier(self, group: dist.ProcessGroup | None = None) -> None:
        dist.all_reduce(torch.zeros(1, device=self._device), group=group)

    def largest(self, *values: float) -> list[float]:
        """Of any rank, of each value."""
        tensor = torch.tensor(values, dtype=torch.float32, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        agreed: list[float] = tensor.tolist()
        return agreed

    def left_s(self, deadline: float | None) -> float:
        """Seconds to the deadline by rank 0's time.monotonic(), the same on every rank; at or below 0: none."""
        if deadline is None:
            return float("inf")
        return self.largest(deadline - time.monotonic() if dist.get_rank() == 0 else float("-inf"))[0]


@dataclass
class Runner:
    """deadline: of rank 0's time.monotonic(), or None. Operations that failed are not tried again."""

    device: torch.device
    dtype: str
    warmup: int
    repeats: int
    check: bool
    deadline: float | None

    def __post_init__(self) -> None:
        self._control = Control(self.device)
        self._failed = set[str]()

    def run(self, cases: Sequence[Case], rounds: int, progress: Progress | None = None) -> None:
        """Go through the cases `rounds` times, or until the deadline. Each round adds to a case's times."""
        steps = [case for _ in range(rounds) for case in cases]
        for done, case in enumerate(steps):
            if case.op in self._failed:
                continue
            share_s = self._control.left_s(self.deadline) / (len(steps) - done)
            if share_s <= 0:
                return
            if progress is not None and dist.get_rank() == 0:
                progress(done, len(steps), case.text)
            self._run_case(case, share_s)

    def _run_case(self, case: Case, share_s: float) -> None:
        exchange = self._try(case, lambda place: build(case.op, place, case.size_bytes, self.dtype, self.device))
        if case.op in self._failed:  # before any rank waits for one that cannot join
            return
        if exchange is not None:
            case.bytes = exchange.bytes
        warm = self._try(case, lambda _: self._warm_up(case, exchange) if exchange is not None else None)
        if case.op in self._failed:
            return
        call_s, repetition_s = self._control.largest(*(warm or (0.0, 0.0)))
        if case.calls == 0:
            case.calls = max(1, min(MOST_CALLS, round(TIMING_S / call_s)))
        fitting = share_s / (repetition_s + (case.calls - 1) * call_s)
        case.repeats = round(max(min(FEWEST, self.repeats), min(self.repeats, fitting)))
        if exchange is None:
            return
        for _ in range(case.repeats):
            time_s, own_s = self._repetition(case, exchange, case.calls)
            case.times_s.append(time_s)
            case.own_s.append(own_s)

    def _try(self, case: Case, work: Callable[[Place], Result]) -> Result | None:
        """work(place) on the ranks that take part. Where it fails on any, all give the operation up."""
        result, failed = None, 0.0
        if case.team.place is not None:
            try:
                result = work(case.team.place)
            except (MoestroError, RuntimeError, ValueError, TypeError) as error:  # what the backend cannot do
                case.error, failed = str(error).splitlines()[0], 1.0
        if self._control.largest(failed)[0]:
            self._failed.add(case.op)
        return result

    def _warm_up(self, case: Case, exchange: Exchange) -> tuple[float, float]:
        """Seconds of a call, and of a repetition of one call with all that belongs to it. Verifies the first call."""
        self._verify(case, exchange)
        call_s = repetition_s = 0.0
        for _ in range(self.warmup):
            begin = time.perf_counter()
            call_s = self._repetition(case, exchange, 1)[0] * exchange.trips
            repetition_s = time.perf_counter() - begin
        return call_s, repetition_s

    def _repetition(self, case: Case, exchange: Exchange, calls: int) -> tuple[float, float]:
        """Seconds of one call, and of this rank's own work: its operands, and until the call was issued."""
        clock = time.perf_counter
        begin = clock()
        exchange.refill()
        synchronize(self.device)
        own_s = clock() - begin
        self._control.barrier(case.team.barrier)
        issuing_s = 0.0
        begin = clock()
        for _ in range(calls):
            issue = clock()
            finish = exchange.start()
            issuing_s += clock() - issue
            finish()
        synchronize(self.device)
        return (clock() - begin) / calls / exchange.trips, own_s + issuing_s / calls

    def _verify(self, case: Case, exchange: Exchange) -> None:
        """One call of its own, as several on the same operands would add up."""
        if not self.check:
            return
        exchange.refill()
        exchange.start()()
        synchronize(self.device)
        case.wrong = max(case.wrong, exchange.wrong())


def teams_of(size: int) -> list[Team]:
    """The first `size` ranks alone, and all disjoint groups of consecutive ranks at once where there are several.

    Every rank must call it: creating a group is collective.
    """
    world, me = dist.get_world_size(), dist.get_rank()
    members = tuple(tuple(range(first, first + size)) for first in range(0, world - size + 1, size))
    groups = [_group(ranks) for ranks in members]
    mine = next((i for i, ranks in enumerate(members) if me in ranks), None)
    place = None if mine is None else Place(groups[mine], members[mine], me - members[mine][0])
    teams = [Team(size, "one", members[:1], place if mine == 0 else None, groups[0])]
    if len(members) > 1:
        teams.append(Team(size, "all", members, place, _group(range(size * len(members)))))
    return teams


def _group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    return None if len(ranks) == dist.get_world_size() else dist.new_group(list(ranks))
