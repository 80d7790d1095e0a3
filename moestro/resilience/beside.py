"""Under torchrun or SLURM, which start ranks again themselves: a process beside each node's ranks that ends a hang.

torchrun sees a rank that ends, not one that hangs. This process looks at what all ranks tell, in the folder of the run,
which the nodes share. Of a hang that began on its node it records the evidence and kills the rank that the others wait
for; the launcher then ends the rest and starts all again, and `run.resume=auto` takes the newest good checkpoint.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from moestro.config.supervise import SuperviseConfig
from moestro.parallel.process import Rank
from moestro.resilience.stacks import dump_stacks
from moestro.resilience.watchdog import Hang, Patience, Watchdog, process_states
from moestro.train.heartbeat import WATCHED, read_beat
from moestro.train.incidents import Incident, record

LOOK_S = 0.5


@dataclass(frozen=True)
class Watch:
    """What the process is told. first, here: the ranks of its node, `here` of them."""

    folder: str
    ranks: int
    first: int
    here: int
    attempt: int
    patience: Patience


def watch_beside(folder: Path, settings: SuperviseConfig, me: Rank, alike: bool) -> None:
    """In a rank, before it trains: let it tell where it is and, in the first of a node, start the process beside it,
    which ends with the rank."""
    os.environ[WATCHED] = str(folder / "watch")
    if me.local_rank != 0:
        return
    patience = Patience(
        settings.hang_factor, settings.hang_floor_s, settings.long_s, settings.silent_s, settings.slow_factor, alike
    )  # fmt: skip
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    told = Watch(str(folder), me.world_size, me.rank - me.local_rank, me.local_world_size, attempt, patience)
    beside = subprocess.Popen(
        [sys.executable, "-m", "moestro.resilience.beside", json.dumps(asdict(told))],
        stdin=subprocess.PIPE,  # which ends when this rank does, however it ends
        start_new_session=True,
    )
    threading.Thread(target=beside.wait, daemon=True).start()


def look_beside(told: Watch, stop: threading.Event) -> None:
    """Until `stop`, or a hang that began on this node was ended."""
    folder, began = Path(told.folder), time.time()
    watched, node = folder / "watch", os.uname().nodename
    dog = Watchdog(told.ranks, told.patience, time.monotonic())
    mine, slow = range(told.first, told.first + told.here), set[int]()
    while not stop.wait(LOOK_S):
        # An earlier start of the ranks has left what it told last.
        read = [read_beat(watched, rank) for rank in range(told.ranks)]
        beats = [beat if beat is not None and beat.wall > began else None for beat in read]
        pids = {beat.rank: beat.pid for beat in beats if beat is not None and beat.rank in mine}
        hang = dog.look(beats, process_states(pids), time.monotonic())
        for rank, ratio in dog.slow_ranks().items():
            if rank in mine and rank not in slow:
                slow.add(rank)
                evidence = {"own_time_over_others": round(ratio, 2)}
                record(folder, Incident("slow_rank", "flag", dog.step, evidence, rank, node))
        if hang is not None and (hang.rank if hang.rank is not None else 0) in mine:
            end_hang(hang, folder, pids, dog.step, told.attempt)
            return


def end_hang(hang: Hang, folder: Path, pids: dict[int, int], step: int, attempt: int) -> None:
    """Record it, and kill the rank that it is about; where that is not known, the first of this node."""
    stacks = dump_stacks(folder / "watch", pids, folder / "stacks", attempt)
    evidence = hang.evidence | {"stacks": stacks, "attempt": attempt}
    record(folder, Incident("hang", "restart", step, evidence, hang.rank, os.uname().nodename))
    victim = pids.get(hang.rank if hang.rank is not None else 0, next(iter(pids.values()), None))
    sys.stderr.write(f"watch: rank {hang.rank} hangs after step {step}; it is killed, so that its launcher acts\n")
    if victim is not None:
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def main() -> None:
    tree = json.loads(sys.argv[1])
    told = Watch(**tree | {"patience": Patience(**tree["patience"])})
    stop = threading.Event()

    def end_with_rank() -> None:
        os.read(sys.stdin.fileno(), 1)  # returns when the rank is gone
        stop.set()

    threading.Thread(target=end_with_rank, daemon=True).start()
    look_beside(told, stop)


if __name__ == "__main__":
    main()
