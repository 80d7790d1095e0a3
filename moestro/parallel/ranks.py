"""Work that all ranks do together, where an error on one of them is an error on all."""

import pickle
import traceback
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from moestro.errors import MoestroError
from moestro.parallel.comm import Group, rank_in, size_of

T = TypeVar("T")
R = TypeVar("R")


class RankFailure(Exception):
    """What a rank raised, raised on every rank."""

    def __init__(self, rank: int, error: BaseException) -> None:
        super().__init__(rank, error)
        self.rank, self.error = rank, error

    def __str__(self) -> str:
        return f"rank {self.rank}: {type(self.error).__name__}: {self.error}"


def together(group: Group, function: Callable[[], T]) -> list[T]:
    """Call `function` on every rank of the group and return the results of all, in order of rank.

    Raises:
        RankFailure: on every rank, the first rank's error.
    """
    mine = _attempt(function, rank_in(group))
    everyone: list[Any] = [mine]
    if group is not None:
        everyone = [None] * size_of(group)
        dist.all_gather_object(everyone, mine, group=group)
    return _values(everyone)


def on_first(group: Group, function: Callable[[], T]) -> T:
    """Call `function` on the group's first rank and return its result on all.

    Raises:
        RankFailure: on every rank.
    """
    outcome: list[Any] = [_attempt(function, 0) if rank_in(group) == 0 else None]
    if group is not None:
        dist.broadcast_object_list(outcome, src=dist.get_global_rank(group, 0), group=group)
    return cast(T, _values(outcome)[0])


def gathered(group: Group, each: Callable[[], T], first: Callable[[list[T]], R]) -> R:
    """Call `each` on every rank, then `first` on the first rank with the results of all; return its result on all.

    Raises:
        RankFailure: on every rank, if one of these fails.
    """
    everyone = _gather(group, each)
    return on_first(group, lambda: first(_values(everyone)))


def dealt(group: Group, each: Callable[[], T], first: Callable[[list[T]], list[R]]) -> R:
    """As `gathered`, but `first` makes a result for every rank, and each rank gets its own.

    Raises:
        RankFailure: on every rank, if one of these fails.
    """
    everyone = _gather(group, each)
    hands: list[Any] | None = None
    if rank_in(group) == 0:
        results, failure = _attempt(lambda: first(_values(everyone)), 0)
        hands = [(None, failure)] * size_of(group) if results is None else [(result, None) for result in results]
    mine: list[Any] = [hands[0] if hands else None]
    if group is not None:
        dist.scatter_object_list(mine, hands, src=dist.get_global_rank(group, 0), group=group)
    return cast(R, _values(mine)[0])


def _gather(group: Group, function: Callable[[], T]) -> list[Any]:
    """The outcomes of all ranks on the first, nothing on others."""
    mine = _attempt(function, rank_in(group))
    if group is None:
        return [mine]
    everyone: list[Any] | None = [None] * size_of(group) if rank_in(group) == 0 else None
    dist.gather_object(mine, everyone, dst=dist.get_global_rank(group, 0), group=group)
    return everyone or []


def _attempt(function: Callable[[], T], rank: int) -> tuple[T | None, RankFailure | None]:
    try:
        return function(), None
    except RankFailure as failure:
        return None, failure
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        return None, RankFailure(rank, _sendable(_root_cause(error)))


def _values(outcomes: list[tuple[T | None, RankFailure | None]]) -> list[T]:
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return [cast(T, value) for value, _ in outcomes]


def _root_cause(error: BaseException) -> BaseException:
    """The error below torch's wrappings."""
    if isinstance(error, MoestroError):  # it says all that the user needs
        return error
    failures = getattr(error, "failures", None)  # CheckpointException: rank → (exception, traceback)
    if failures:
        return _root_cause(next(iter(failures.values()))[0])
    return _root_cause(error.__cause__) if error.__cause__ is not None else error


def _sendable(error: BaseException) -> BaseException:
    """The error as it survives pickling, else its text; with its traceback as a note."""
    copy: BaseException
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:
        copy = RuntimeError(f"{type(error).__name__}: {error}")
    copy.add_note("".join(traceback.format_tb(error.__traceback__)))
    return copy
