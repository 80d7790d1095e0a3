"""Where each rank of a run that hangs is: the stacks of all its threads, by faulthandler, on a signal."""

import os
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from moestro.train.heartbeat import stacks_of

DUMP_S = 1.0  # that ranks have to write
SHOWN_FRAMES = 3  # of a stack


def dump_stacks(watched: Path, pids: Mapping[int, int], kept: Path, attempt: int) -> dict[str, list[str]]:
    """The innermost frames of each rank that answers, by "rank N"; one that was stopped does not. The whole dumps are
    put into the folder `kept`."""
    told = {rank: pid for rank, pid in pids.items() if stacks_of(watched, rank).exists()}  # others would die of it
    for pid in told.values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(DUMP_S)
    shown: dict[str, list[str]] = {}
    for rank in told:
        source = stacks_of(watched, rank)
        with suppress(OSError):
            kept.mkdir(exist_ok=True)
            shutil.copyfile(source, kept / f"attempt-{attempt}-rank-{rank}.txt")
        if frames := innermost(source):
            shown[f"rank {rank}"] = frames
    return shown


def innermost(path: Path) -> list[str]:
    """The innermost frames of the main thread in a dump of faulthandler, which writes that thread last."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    starts = [i for i, line in enumerate(lines) if line.startswith(("Thread ", "Current thread "))]
    frames = [line.strip() for line in lines[starts[-1] + 1 :] if line.strip().startswith("File ")] if starts else []
    return frames[:SHOWN_FRAMES]
