"""What the fits of compute curves share: positive numbers drawn to a guess, and errors in folds."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from moestro.hardware.curves.heldout import HeldOut, errors

Floats = NDArray[np.float64]

SCATTER = 0.1  # of a sample's log time about a physical model, against which the spread of numbers is weighed
FOLDS = 5


def fit_positive(
    model: Callable[[Sequence[float]], Floats], guess: Sequence[float], spread: Sequence[float], seconds: Floats
) -> tuple[list[float], float]:
    """The positive numbers whose `model(numbers)` is nearest to `seconds` in log, and the misfit that is left.

    spread: how far each number may be, in log, from its guess at no more cost than one sample's scatter; three times
    that is the limit, so that a number on which the samples have no bearing stays physical. Outliers count linearly.
    """
    start, target = np.log(np.asarray(guess)), np.log(seconds)
    room = np.asarray(spread)

    def misses(logs: Floats) -> Floats:
        off = (np.log(model([float(value) for value in np.exp(logs)])) - target) / SCATTER
        return np.concatenate([off, (logs - start) / room])

    limits = (start - 3.0 * room, start + 3.0 * room)
    from scipy.optimize import least_squares  # here: it takes a second to load, and curves kept on disk need none

    found = least_squares(misses, start, bounds=limits, loss="soft_l1", ftol=1e-4, xtol=1e-4, max_nfev=40)
    return [float(value) for value in np.exp(found.x)], float(found.cost)


def error_in_folds(
    seconds: Floats, predict: Callable[[NDArray[np.int64], NDArray[np.int64]], Sequence[float] | Floats]
) -> HeldOut | None:
    """Error of predict(inside, outside): times of the samples `outside` by a fit to those `inside`. None below 5."""
    if len(seconds) < FOLDS:
        return None
    fold = np.random.default_rng(0).permutation(len(seconds)) % FOLDS
    predicted = np.empty(len(seconds))
    for f in range(FOLDS):
        outside = np.flatnonzero(fold == f)
        predicted[outside] = predict(np.flatnonzero(fold != f), outside)
    return errors(list(predicted), list(seconds))
