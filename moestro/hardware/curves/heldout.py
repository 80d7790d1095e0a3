"""How wrong a curve is on samples that it has not seen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Point = TypeVar("Point")
Fit = Callable[[Sequence[Point]], Callable[[Point], float]]


@dataclass(frozen=True)
class HeldOut:
    """Relative errors |predicted - actual| / actual of a time, of samples that were left out of the fit."""

    median: float
    p90: float
    count: int


def errors(predicted: Sequence[float], actual: Sequence[float]) -> HeldOut:
    relative = np.abs(np.asarray(predicted) - np.asarray(actual)) / np.asarray(actual)
    return HeldOut(float(np.median(relative)), float(np.quantile(relative, 0.9)), len(relative))


def leave_one_out(points: Sequence[Point], fit: "Fit[Point]", actual: Callable[[Point], float]) -> HeldOut:
    """Fit to all points but one and predict that one, for every point."""
    predicted = []
    for i, point in enumerate(points):
        predicted.append(fit([*points[:i], *points[i + 1 :]])(point))
    return errors(predicted, [actual(point) for point in points])


def hold_out(
    points: Sequence[Point],
    fit: "Fit[Point]",
    actual: Callable[[Point], float],
    *,
    share: float = 0.1,
    seed: int = 0,
    folds: int = 1,
) -> HeldOut:
    """Fit to a random 1 - share of the points and predict the rest, `folds` times with different splits."""
    predicted, truth = [], []
    for fold in range(folds):
        order = np.random.default_rng((seed, fold)).permutation(len(points))
        cut = max(1, round(share * len(points)))
        curve = fit([points[i] for i in order[cut:]])
        for i in order[:cut]:
            predicted.append(curve(points[i]))
            truth.append(actual(points[i]))
    return errors(predicted, truth)
