"""One process among the ranks of a run: who it is, as its launcher says, and its life in the default process group.

Nothing here loads torch before a group is needed, so that a command which is none of a group's business stays quick.
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import count
from typing import TYPE_CHECKING

from moestro.errors import MoestroError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store

# Longer than anything one rank does while the others wait: the first tokenisation of a corpus, a large checkpoint.
TIMEOUT = timedelta(minutes=30)
# After a failure: how long rank 0 is let speak first, the store has to answer, the group to close, and the others to
# have asked the store before its host goes.
YIELD_S, ASK, CLOSE_S, LINGER_S = 1.0, timedelta(seconds=10), 5.0, 2.0
# A rank that has lost its launcher is asked to stop, as by SIGTERM, and has this long to save.
ORPHAN_S = 60.0
LIFELINE = "MOESTRO_LIFELINE"  # in the environment: a file descriptor that ends when the launcher does
LOST_A_PEER = 3  # exit status of a rank that ends because another failed, which says why

_groups = count()  # of this process, as of every rank


class RankError(MoestroError):
    """A user error inside a group, on the rank that met it first and so prints it, whichever rank that is."""


class PeerError(MoestroError):
    """Another rank failed first. It says why, or could not: then one of the others has the text to print."""

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(text)
        self.status = status  # to exit with


@dataclass(frozen=True)
class Rank:
    """This process's number among all, and among those on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    is_slurm: bool = False


def this_rank() -> Rank:
    """What the environment says: RANK and WORLD_SIZE (torchrun, --nproc), else the tasks of an srun, else one process.

    A shell of salloc, and a batch script that calls no srun, have SLURM_NTASKS and SLURM_PROCID but no SLURM_STEP_…:
    they are one process.

    Raises:
        MoestroError: a variable is not a number, or out of range.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        me = Rank(_number("RANK"), _number("WORLD_SIZE"), _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1))
    elif _number("SLURM_STEP_NUM_TASKS", 1) > 1:
        on_node = re.match(r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))  # "8(x2)": 8 on each of 2 nodes
        me = Rank(
            _number("SLURM_PROCID"),
            _number("SLURM_STEP_NUM_TASKS"),
            _number("SLURM_LOCALID"),
            int(on_node[0]) if on_node else 1,
            is_slurm=True,
        )
    else:
        return Rank()
    if me.rank >= me.world_size:
        raise MoestroError(f"the environment says rank {me.rank} of {me.world_size} (RANK, WORLD_SIZE); unset both")
    return me


def world_size() -> int:
    return this_rank().world_size


def prints(error: BaseException) -> bool:
    """Whether this rank is the one to print `error`: rank 0 what all meet alike, any rank what it alone met."""
    try:
        return isinstance(error, RankError) or this_rank().rank == 0
    except MoestroError:
        return True


def end_with_launcher() -> None:
    """In a rank that `launch` started: stop when the launcher is gone, however it went. Elsewhere: nothing."""
    lifeline = os.environ.pop(LIFELINE, None)
    if lifeline is None:
        return

    def watch() -> None:
        os.read(int(lifeline), 1)  # returns when the launcher's end is closed
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def connected(device: "torch.device", world_size: int) -> Iterator["torch.device"]:
    """The default process group, for the time of the block; gives the device of this rank. None for one process.

    The ranks leave together. When one fails, the others' collectives fail too: the first to fail raises its error (a
    user error as RankError), the others raise PeerError. A group that the caller has made already is used and kept.
    """
    if world_size == 1:
        yield device
        return
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        yield device
        return
    me = this_rank()
    if me.world_size != world_size:
        raise MoestroError(f"{world_size} ranks are wanted, but {me.world_size} are running; start with --nproc")
    device = _own_device(device, me)
    store = _join(me, device)
    try:
        yield device
        dist.all_reduce(torch.zeros(1))  # on the CPU, over gloo
    except BaseException as error:
        verdict = _verdict(store, me, error)
        # In a thread, because a collective that is still under way would hold this rank until the others join it.
        closing = threading.Thread(target=dist.destroy_process_group, daemon=True)
        closing.start()
        closing.join(CLOSE_S)
        if me.rank == 0:
            with suppress(RuntimeError):
                _wait(lambda: store.add("told", 0) >= world_size, LINGER_S)
        if verdict is error:
            raise
        raise verdict from error
    dist.destroy_process_group()


def first_host(nodes: str) -> str:
    """The first name in a node list of SLURM: gpu03 of `gpu[03-05,7],login1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else ""


def meeting_point(me: Rank) -> tuple[str, int]:
    """Host and port of the store: MASTER_ADDR and MASTER_PORT, else under SLURM the first node and the job's port."""
    address = os.environ.get("MASTER_ADDR")
    if address is None and me.is_slurm:
        address = first_host(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", ""))
    if not address:
        raise MoestroError("MASTER_ADDR is not set; give the name of rank 0's machine, or start with torchrun")
    if "MASTER_PORT" not in os.environ and me.is_slurm:  # below the ports that systems hand out by themselves
        return address, 10_000 + (_number("SLURM_JOB_ID", 0) + 1009 * _number("SLURM_STEP_ID", 0)) % 20_000
    return address, _number("MASTER_PORT")


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise MoestroError(f"the environment variable {name} should be a number, but is {text or 'not set'}")
    return int(text)


def _own_device(device: "torch.device", me: Rank) -> "torch.device":
    """The accelerator with the number of this rank on its machine, made the current one."""
    import torch

    if device.type == "cpu":
        return device
    here = torch.accelerator.device_count()
    if me.is_slurm and here == 1:  # srun --gpus-per-task shows each task its own device only
        index = 0
    elif max(me.local_world_size, me.local_rank + 1) > here:
        raise MoestroError(
            f"{max(me.local_world_size, me.local_rank + 1)} ranks on this machine, but {here} {device.type} devices; "
            f"start {here}, or set run.device=cpu"
        )
    else:
        index = me.local_rank
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def _join(me: Rank, device: "torch.device") -> "Store":
    """Make the default group and return the store it met at."""
    import torch.distributed as dist

    host, port = meeting_point(me)
    is_host = me.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    backend = "gloo"
    if device.type != "cpu":
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
    try:
        # A store outlives a group, and torchrun's even a failed attempt: no group may read an earlier one's addresses.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt {attempt} group {next(_groups)}", _tcp_store(host, port, is_host))
        store.set_timeout(TIMEOUT)
        dist.init_process_group(backend, store=store, rank=me.rank, world_size=me.world_size, timeout=TIMEOUT)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise RankError(
            f"the {me.world_size} ranks could not meet at {host}:{port} ({str(error).splitlines()[0]}); see that all "
            "were started and reach it, or set MASTER_ADDR and MASTER_PORT"
        ) from error
    return store


@cache
def _tcp_store(host: str, port: int, is_host: bool) -> "Store":
    """One for the life of the process: a second one could meet the first before it is gone."""
    import torch.distributed as dist

    return dist.TCPStore(host, port, None, is_host, timeout=TIMEOUT, wait_for_workers=False)


def _verdict(store: "Store", me: Rank, error: BaseException) -> BaseException:
    """What this rank should raise, now that it met `error`: the first rank to say so here is the cause.

    An error that all meet alike is rank 0's to say.
    """
    is_mistake = isinstance(error, (MoestroError, OSError)) and not isinstance(error, BrokenPipeError)
    status = 2 if is_mistake else {KeyboardInterrupt: 130, BrokenPipeError: 0}.get(type(error), LOST_A_PEER)
    own = RankError(str(error)) if is_mistake else error
    if isinstance(error, RuntimeError) and (lost := re.search(r"Connection (closed|reset) by peer", str(error))):
        own = PeerError(LOST_A_PEER, f"lost another rank ({lost[0]}); it crashed or was killed")
    try:
        store.set_timeout(ASK)
        if me.rank > 0:
            _wait(lambda: store.check(["failed"]), YIELD_S)
        said = store.compare_set("failed", "", f"{me.rank} {status}").decode()
        store.add("told", 1)
    except RuntimeError:  # the store went down with its host
        return own
    rank, status = (int(number) for number in said.split())
    if rank == me.rank:
        return own
    return KeyboardInterrupt() if status == 130 else PeerError(status)


def _wait(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
