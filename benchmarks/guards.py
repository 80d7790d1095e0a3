"""What the guards cost: processor time inside them over that of the run's steps.

    python benchmarks/guards.py [steps]

Times are of the main thread on one core, so that what else runs on the machine matters little. What is done every so
many steps is timed at steps of its own, and counted with its share.
"""

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from moestro.config import load_config
from moestro.train import loop
from moestro.train.guard_loop import Guard
from moestro.train.noise import QuietHost

EVERY = 10  # steps, of all that is not done at each one


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    torch.set_num_threads(1)
    spent: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    timed(loop._Trainer, "_step", spent["step"], lambda trainer: trainer.progress.step + 1)
    timed(Guard, "check", spent["guard"], lambda guard: guard.step)
    timed(Guard, "look", spent["guard"], lambda guard: guard.step)
    timed(QuietHost, "after", spent["collector"], lambda quiet: len(spent["collector"]) + 1)
    every = [f"guard.{name}_every={EVERY}" for name in ("probe", "checksums", "recompute", "gc")]
    with tempfile.TemporaryDirectory() as folder:
        run = [f"train.steps={steps}", f"run.dir={folder}", "run.trackers=[]", "run.device=cpu"]
        loop.train(load_config("sotu-tiny", [*run, *every, "guard.window=64"]).config)
    report({kind: dict(times) for kind, times in spent.items()}, steps)


def timed(owner: Any, name: str, into: dict[int, float], step_of: Callable[[Any], int]) -> None:
    plain = getattr(owner, name)

    def method(self: Any, *args: Any) -> Any:
        step, start = step_of(self), time.thread_time()
        try:
            return plain(self, *args)
        finally:
            into[step] += time.thread_time() - start

    setattr(owner, name, method)


def report(spent: dict[str, dict[int, float]], steps: int) -> None:
    def median(kind: str, rare: bool) -> float:
        return statistics.median(
            s for step, s in spent[kind].items() if 2 < step < steps and (step % EVERY == 0) == rare
        )

    step_s = median("step", False)
    shares = {"check of every step": (median("guard", False), 1), "probes": (median("guard", True), 100)}
    shares["collector"] = (median("collector", True), 50)
    print(f"a step takes {1e3 * step_s:.1f} ms of processor time")
    total = 0.0
    for name, (seconds, every) in shares.items():
        total += seconds / every / step_s
        print(f"{name}: {1e3 * seconds:.3f} ms, every {every}: {seconds / every / step_s:.3%} of a step")
    print(f"together {total:.2%}")


if __name__ == "__main__":
    main()
