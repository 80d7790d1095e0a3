"""Agreement among ranks: what one does for all, and what all must decide alike."""

import signal
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from moestro.parallel.comm import Group, all_reduce
from moestro.parallel.ranks import RankFailure, on_first

Result = TypeVar("Result")


def on_main(world: Group, function: Callable[[], Result]) -> Result:
    """Call `function` on the main rank only; every rank gets its (picklable) result, or raises its error."""
    if world is None:
        return function()
    try:
        return on_first(world, function)
    except RankFailure as failed:
        raise failed.error from failed


def main_first(world: Group, function: Callable[[], Result]) -> Result:
    """Call `function` on the main rank, then on the others, which find its work done."""
    if world is None:
        return function()
    result: list[Result] = []
    on_main(world, lambda: result.append(function()))  # itself it need not travel
    return result[0] if result else function()


def agreed_signal(world: Group, requested: str | None) -> str | None:
    """The signal that any rank was sent: all stop after the same step, or none does."""
    if world is None:
        return requested
    number = torch.tensor(signal.Signals[requested].value if requested else 0)
    highest = int(all_reduce(number, world, dist.ReduceOp.MAX))
    return signal.Signals(highest).name if highest else None
