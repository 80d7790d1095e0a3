"""Work on several gloo ranks of this machine, each a process of one thread: for measuring, checks and papers."""

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


def run_on_ranks(work: Callable[..., Any], world_size: int, *args: Any, limit_s: float = 120) -> list[Any]:
    """work(rank, *args) of every rank, in their order. `work` is a function of a module, so that processes can find it.

    Raises:
        RuntimeError: with the traceback of a rank that failed, or that the time is up.
    """
    # The ranks are forks of one fresh process, which imports torch once for all. Not of this one: a child of a process
    # that has used OpenMP may hang.
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        parent = context.Process(target=_parent, args=(sender, work, world_size, Path(folder) / "store", args, limit_s))
        parent.start()
        sender.close()
        try:
            good, value = pickle.loads(receiver.recv_bytes())
        except EOFError:
            good, value = False, "its processes ended"
        finally:
            parent.kill()  # it has nothing left to do but to tidy up, which takes seconds
            parent.join()
    if not good:
        raise RuntimeError(f"{work.__name__} on {world_size} ranks: {value}")
    result: list[Any] = value
    return result


def _parent(
    answer: Connection, work: Callable[..., Any], world_size: int, store: Path, args: tuple[Any, ...], limit_s: float
) -> None:
    import torch

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    ranks, pipes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        ranks.append(context.Process(target=_rank, args=(sender, work, rank, world_size, store, args)))
        ranks[-1].start()
        sender.close()
        pipes.append(receiver)
    try:
        results = _results(pipes, limit_s)
    finally:
        for process in ranks:
            process.kill()
    answer.send_bytes(pickle.dumps(results))


def _results(pipes: list[Connection], limit_s: float) -> tuple[bool, Any]:
    values = dict[int, Any]()
    while len(values) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in values]
        ready = wait(waiting, limit_s)
        if not ready:
            return False, f"{len(waiting)} ranks still run after {limit_s:g} s"
        for pipe in waiting:
            if pipe in ready:
                good, value = pickle.loads(pipe.recv_bytes())
                if not good:
                    return False, value
                values[pipes.index(pipe)] = value
    return True, [values[rank] for rank in range(len(pipes))]


def _rank(
    answer: Connection, work: Callable[..., Any], rank: int, world_size: int, store: Path, args: tuple[Any, ...]
) -> None:
    import torch.distributed as dist

    outcome: tuple[bool, Any]
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        result = work(rank, *args)
        dist.barrier()  # a rank that ended early would break the others' connections
        outcome = (True, result)
    except BaseException:
        outcome = (False, traceback.format_exc())
    answer.send_bytes(pickle.dumps(outcome))  # not send(): that would share a tensor's memory, which ends with us
