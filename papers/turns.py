"""Two ways of doing the same, timed in turns in one process, so that a busy machine slows both."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

ROUNDS = 15


@dataclass(frozen=True)
class SpeedUp:
    """Ratios of two ways' times over rounds."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} × ({self.low:.2f} to {self.high:.2f})"


def alternate(ways: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of each way in each round, after one round that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
    return {name: each[1:] for name, each in times.items()}


def speed_up(slow: Sequence[float], fast: Sequence[float]) -> SpeedUp:
    """Median, 10th and 90th percentile."""
    low, median, high = np.percentile(np.array(slow) / np.array(fast), (10, 50, 90)).tolist()
    return SpeedUp(median, low, high)
