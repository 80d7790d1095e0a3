"""Agreement among ranks: what one does for all, and what all must decide alike."""

import signal
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moestro.errors import MoestroError
from moestro.parallel.comm import Group, all_reduce, rank_in

Result = TypeVar("Result")


def on_main(world: Group, function: Callable[[], Result]) -> Result:
    """Call `function` on the main rank only; every rank gets its (picklable) result, or raises its MoestroError.

    Any other error ends the main rank at once; the others hear of it from whoever started them.
    """
    if world is None:
        return function()
    box: list[Any] = [None, None]
    if rank_in(world) == 0:
        try:
            box[0] = function()
        except MoestroError as error:
            box[1] = str(error)
    dist.broadcast_object_list(box, src=0, group=world)
    if box[1] is not None:
        raise MoestroError(box[1])
    result: Result = box[0]
    return result


def main_first(world: Group, function: Callable[[], Result]) -> Result:
    """Call `function` on the main rank, then on the others, which find its work done."""
    if world is None:
        return function()
    result: list[Result] = []
    on_main(world, lambda: result.append(function()))
    return result[0] if result else function()


def agreed_signal(world: Group, requested: str | None) -> str | None:
    """The signal that any rank was sent: all stop after the same step, or none does."""
    if world is None:
        return requested
    number = torch.tensor(signal.Signals[requested].value if requested else 0)
    highest = int(all_reduce(number, world, dist.ReduceOp.MAX))
    return signal.Signals(highest).name if highest else None
