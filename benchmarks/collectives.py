"""Collectives of CPU tensors: ours, which send short messages by all-to-all, against gloo's own, in one run.

    python benchmarks/collectives.py [--ranks 2 4 8] [--rounds 20]

Both take turns call by call; medians over the rounds, in milliseconds, as rank 0 sees them.
"""

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from moestro.parallel import comm

SIZES = (256, 65_536, 4_194_304)  # bytes of the longer side


def measure(rank: int, world_size: int, rounds: int, meeting: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world_size)
    group = dist.group.WORLD
    for size in SIZES:
        long, short = torch.ones(size // 4), torch.ones(size // 4 // world_size)
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "all-reduce": (partial(comm.all_reduce, short, group), partial(dist.all_reduce, short)),
            "all-gather": (
                partial(comm.all_gather_into, long, short, group),
                partial(dist.all_gather_into_tensor, long, short),
            ),
            "reduce-scatter": (
                partial(comm.reduce_scatter_into, short, long, group),
                partial(dist.reduce_scatter_tensor, short, long),
            ),
        }
        for name, (ours, theirs) in pairs.items():
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(rounds):
                for call, kept in zip((ours, theirs), times, strict=True):
                    dist.barrier()
                    start = time.perf_counter()
                    call()
                    kept.append((time.perf_counter() - start) * 1e3)
            if rank == 0:
                a, b = (statistics.median(kept) for kept in times)
                print(f"{world_size:5} {size:>9,} {name:15} {a:8.2f} {b:8.2f} {a / b:7.2f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores\n")
    print(f"{'ranks':>5} {'bytes':>9} {'collective':15} {'ours':>8} {'gloo':>8} {'ratio':>7}")
    for world_size in args.ranks:
        meeting = Path(f"/tmp/moestro-collectives-{os.getpid()}-{world_size}")
        children = []
        for rank in range(world_size):
            child = os.fork()
            if child == 0:
                measure(rank, world_size, args.rounds, meeting)
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
        meeting.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
