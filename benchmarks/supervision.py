"""What being watched costs a step: the same run, with its heartbeat on and off in turns of a few steps.

    python benchmarks/supervision.py [steps]

Every step calls what it calls anyway; in turn with and without the thread that tells where it is, twice a second, and
looks twenty times a second where the main one is. Medians of the steps of each kind, and of the ratios of neighbours.
"""

import os
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from moestro.config import load_config
from moestro.train import loop
from moestro.train.heartbeat import WATCHED, Heartbeat

TURN = 5  # steps


class _Done(Exception):
    """All steps are timed; what follows them in a run is of no interest here."""


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    torch.set_num_threads(1)
    times: list[tuple[bool, float]] = []
    plain = loop._Trainer._step
    with tempfile.TemporaryDirectory() as folder:

        def step(trainer: Any, *rest: Any) -> bool:
            if len(times) % TURN == 0:
                trainer.pulse.__exit__()
                trainer.pulse = heartbeat(folder if len(times) // TURN % 2 else None)
            before = trainer.progress.train_time_s
            kept = plain(trainer, *rest)
            times.append((len(times) // TURN % 2 == 1, trainer.progress.train_time_s - before))
            if len(times) == steps:
                trainer.pulse.__exit__()
                raise _Done
            return kept

        loop._Trainer._step = step  # type: ignore[method-assign, assignment]
        overrides = [f"train.steps={steps + 1}", f"run.dir={folder}", "run.trackers=[]", "run.device=cpu"]
        with suppress(_Done):
            loop.train(load_config("sotu-tiny", overrides).config)
    report(times[2 * TURN :])
    print(f"the thread takes {thread_share():.2%} of a core")


def thread_share(seconds: float = 10.0) -> float:
    """Of a core, that the thread takes while the main one computes: what it costs at least, without any noise."""
    spent: list[float] = []
    plain = Heartbeat._beat

    def beat(self: Heartbeat, path: Path) -> None:
        before = time.thread_time()
        plain(self, path)
        spent.append(time.thread_time() - before)

    Heartbeat._beat = beat  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        pulse, weights, end = heartbeat(folder), torch.randn(512, 512), time.monotonic() + seconds
        pulse.at("passes")
        while time.monotonic() < end:
            weights = torch.tanh(weights @ weights)
        pulse.__exit__()
    Heartbeat._beat = plain  # type: ignore[method-assign]
    return spent[0] / seconds


def heartbeat(folder: str | None) -> Heartbeat:
    if folder is not None:
        os.environ[WATCHED] = folder
    made = Heartbeat(0).__enter__()
    os.environ.pop(WATCHED, None)
    return made


def report(times: list[tuple[bool, float]]) -> None:
    turns = [times[i : i + TURN] for i in range(0, len(times) - TURN + 1, TURN)]
    medians = [(turn[0][0], statistics.median(s for _, s in turn)) for turn in turns]
    on, off = ([s for kind, s in medians if kind is wanted] for wanted in (True, False))
    ratios = sorted(b / a if is_on else a / b for (_, a), (is_on, b) in pairwise(medians))
    low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
    print(f"{len(on)} turns on, {len(off)} off, of {TURN} steps each")
    print(f"off {statistics.median(off) * 1e3:.1f} ms, on {statistics.median(on) * 1e3:.1f} ms a step")
    print(f"on over off, of neighbours: median {statistics.median(ratios):.4f}, quartiles {low:.4f} to {high:.4f}")


if __name__ == "__main__":
    main()
