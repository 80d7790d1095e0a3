"""Runs a function on several gloo ranks. A parent that has imported torch forks the ranks: the import is paid once."""

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from typing import Any


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 240) -> None:
    """Call `function(rank, *args)` on `world_size` ranks with a default gloo group, in processes of their own.

    The ranks are forks of a fresh interpreter, never of pytest's, whose threads would not survive a fork. `function`
    must be importable (a module's top level).

    Raises:
        AssertionError: with the traceback of the first rank that failed, or that the time is up.
    """
    context = get_context("spawn")
    reports = context.SimpleQueue()
    parent = context.Process(target=_parent, args=(reports, function, world_size, args, timeout_s))
    parent.start()
    parent.join(timeout_s + 60)
    if parent.is_alive():
        parent.kill()
        raise AssertionError(f"{function.__name__} on {world_size} ranks did not end")
    if not reports.empty():
        raise AssertionError(reports.get())
    assert parent.exitcode == 0, f"exit code {parent.exitcode}"


def _parent(reports: Any, function: Callable[..., Any], world_size: int, args: tuple[Any, ...], limit_s: float) -> None:
    # Paid here, once for all ranks: what they would import at their first backward, checkpoint or FSDP unit.
    import sympy  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.pipelining

    torch.set_num_threads(1)
    from moestro.parallel.launch import free_port

    port, children = free_port(), {}
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            _child(reports, function, rank, world_size, port, args)
        children[child] = rank
    deadline = time.monotonic() + limit_s
    failed = False
    while children:
        done, status = os.waitpid(-1, os.WNOHANG)
        if done:
            children.pop(done)
            failed = failed or status != 0
        elif failed or time.monotonic() > deadline:
            if not failed:
                reports.put(f"{function.__name__}: ranks {sorted(children.values())} still run after {limit_s} s")
            for child in children:
                os.kill(child, signal.SIGKILL)
            failed = True
            time.sleep(0.05)
        else:
            time.sleep(0.01)
    sys.exit(1 if failed else 0)


def _child(
    reports: Any, function: Callable[..., Any], rank: int, world_size: int, port: int, args: tuple[Any, ...]
) -> None:
    import torch.distributed as dist

    code = 0
    try:
        warnings.simplefilter("ignore")
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
        dist.init_process_group(
            "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size, timeout=timedelta(seconds=180)
        )
        function(rank, *args)
        dist.barrier()
    except BaseException:
        reports.put(f"rank {rank} of {world_size}:\n{traceback.format_exc()}")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
