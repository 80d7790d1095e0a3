"""Saving by all ranks against gathering to the first rank and saving there, of the same state, on one disk.

    python benchmarks/checkpoint.py [--ranks 1,2,4,8] [--megabytes 64] [--rounds 3] [--folder DIR] [--json]

The state is that of ZeRO-1: weights on every rank, two moments in slices of the flattened tensors. Each round takes, in
turn, from a barrier to a barrier:

* disk: the first rank writes and flushes one file of as many bytes;
* ours: `save_checkpoint` by all ranks, with checksums, read back, flushed, renamed;
* alone: the moments are gathered to the first rank, which calls `save_checkpoint` by itself: the same guarantees;
* torch.save: the same gather, then one torch.save, flushed: no checksums, not read back;
* waits: how long `AsyncSaver.save` keeps training waiting.

Medians over the rounds. All ranks share this machine's disk and cores: with a disk per node the first column scales on.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from moestro.checkpoint.manifest import sync
from moestro.checkpoint.saver import AsyncSaver
from moestro.checkpoint.store import Progress, save_checkpoint
from moestro.parallel.comm import Group
from moestro.parallel.logical import Chunk, LogicalTensor, boxes_of_slice, whole

TENSORS = 12  # of the weights, each with two moments
SHAPE_TAIL = (2, 64, 256)  # merged experts: [experts, gate or up, width, hidden]
NAMES = ("exp_avg", "exp_avg_sq")


class State:
    """A rank's part, and the whole that the first rank makes of all parts."""

    def __init__(self, megabytes: int, group: Group, rank: int, ranks: int) -> None:
        self.group, self.rank, self.ranks = group, rank, ranks
        experts = max(1, round(megabytes * 1e6 / 4 / 3 / TENSORS / math.prod(SHAPE_TAIL)))
        self.shape = (experts, *SHAPE_TAIL)
        self.numel = math.prod(self.shape)
        self.slice = -(-self.numel // ranks)
        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(self.shape, generator=generator) for _ in range(TENSORS)]
        self.moments = {(i, name): torch.rand(self.slice) for i in range(TENSORS) for name in NAMES}
        self.bytes = 3 * TENSORS * self.numel * 4

    def parts(self) -> dict[str, LogicalTensor]:
        tensors = {f"model.{i}.weight": whole(weight) for i, weight in enumerate(self.weights)}
        first, last = (min(n * self.slice, self.numel) for n in (self.rank, self.rank + 1))
        for (i, name), flat in self.moments.items():
            chunks, at = [], 0
            for start, size in boxes_of_slice(self.shape, first, last):
                count = math.prod(size)
                chunks.append(Chunk(start, flat[at : at + count].view(size)))
                at += count
            tensors[f"optimizer.state.{i}.weight.{name}"] = LogicalTensor(self.shape, chunks)
        return tensors

    def gathered(self) -> dict[str, Tensor]:
        """The whole state on the first rank, nothing elsewhere."""
        tensors = {f"model.{i}.weight": weight for i, weight in enumerate(self.weights)}
        for (i, name), flat in self.moments.items():
            pieces = [torch.empty_like(flat) for _ in range(self.ranks)] if self.rank == 0 else None
            if self.group is None:
                pieces = [flat]
            else:
                dist.gather(flat, pieces, dst=0, group=self.group)
            if pieces is not None:
                value = torch.cat(pieces)[: self.numel].view(self.shape)
                tensors[f"optimizer.state.{i}.weight.{name}"] = value
        return tensors if self.rank == 0 else {}


def measure(folder: Path, state: State, rounds: int) -> dict[str, float]:
    """Median seconds of each way."""
    group, saver = state.group, AsyncSaver(state.group)
    waits = []

    def disk(step: int) -> None:
        if state.rank == 0:
            block = os.urandom(1 << 24)
            with (folder / "file").open("wb") as file:
                for at in range(0, state.bytes, len(block)):
                    file.write(block[: state.bytes - at])
                file.flush()
                os.fsync(file.fileno())

    def ours(step: int) -> None:
        save_checkpoint(folder / "ours", state.parts(), Progress(step, 0, 0.0), 1, group)

    def alone(step: int) -> None:
        tensors = {name: whole(tensor) for name, tensor in state.gathered().items()}
        if state.rank == 0:
            save_checkpoint(folder / "alone", tensors, Progress(step, 0, 0.0), 1)

    def torch_save(step: int) -> None:
        tensors = state.gathered()
        if state.rank == 0:
            torch.save(tensors, folder / "state.pt")
            sync(folder / "state.pt")

    def background(step: int) -> None:
        saver.save(folder / "background", state.parts(), Progress(step, 0, 0.0), 1)
        saved = saver.wait()
        assert saved is not None
        assert saved.path is not None
        waits.append(saved.copy_s)

    ways: dict[str, Callable[[int], None]] = {"disk": disk, "ours": ours, "alone": alone, "torch.save": torch_save}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(rounds + 1):
        for name, way in ways.items():
            if group is not None:
                dist.barrier(group)
            start = time.perf_counter()
            way(step)
            if group is not None:
                dist.barrier(group)
            seconds[name].append(time.perf_counter() - start)
        background(step)
    found = {name: statistics.median(values[1:]) for name, values in seconds.items()}  # the first round warms up
    return {**found, "waits": statistics.median(waits[1:]), "bytes": state.bytes}


def run(folder: Path, ranks: int, megabytes: int, rounds: int) -> dict[str, float]:
    """Measure with so many forks of this process."""
    result = folder / "result.json"
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            _rank(folder, rank, ranks, megabytes, rounds, result)
        children.append(child)
    failed = [child for child in children if os.waitpid(child, 0)[1] != 0]
    if failed:
        sys.exit(f"{len(failed)} of {ranks} ranks failed")
    found: dict[str, float] = json.loads(result.read_text())
    return found


def _rank(folder: Path, rank: int, ranks: int, megabytes: int, rounds: int, result: Path) -> None:
    code = 1
    try:
        group = None
        if ranks > 1:
            dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
            group = dist.group.WORLD
        found = measure(folder, State(megabytes, group, rank, ranks), rounds)
        if rank == 0:
            result.write_text(json.dumps(found))
        code = 0
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk to measure")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = {}
    for ranks in map(int, options.ranks.split(",")):
        folder = Path(tempfile.mkdtemp(prefix=".checkpoint-benchmark-", dir=options.folder)).resolve()
        try:
            table[ranks] = run(folder, ranks, options.megabytes, options.rounds)
        finally:
            shutil.rmtree(folder)
    if options.json:
        print(json.dumps(table, indent=1))
        return
    print(f"{table[min(table)]['bytes'] / 1e6:.0f} MB, medians of {options.rounds}, torch {torch.__version__}")
    print("ranks  disk MB/s   ours s   MB/s  of disk   alone s  /ours   torch.save s  /ours   training waits s")
    for ranks, t in table.items():
        disk, ours = (t["bytes"] / 1e6 / t[way] for way in ("disk", "ours"))
        print(
            f"{ranks:5d} {disk:10.0f} {t['ours']:8.2f} {ours:6.0f} {ours / disk:8.0%} {t['alone']:9.2f} "
            f"{t['alone'] / t['ours']:6.2f} {t['torch.save']:14.2f} {t['torch.save'] / t['ours']:6.2f} "
            f"{t['waits']:18.3f}"
        )


if __name__ == "__main__":
    main()
