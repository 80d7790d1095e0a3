"""Learning rates of large models from those that were best for small ones: a line in log rate over log parameters.

    ln η = slope · ln N + intercept,     weight decay λ = 0.1 · η      (MM1, arXiv 2403.09611)

MM1's own line, of models from 9 million to 1.2 billion parameters, has the slope -0.4214 and the intercept -0.5535.
"""

import csv
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path

import numpy as np

from moestro.errors import MoestroError

FEWEST = 3  # sizes: two points always lie on a line
DECAY = 0.1
FAR = 30.0  # times the largest size: beyond it a law is no more than a hint
SHARE = 0.8  # of rates that the interval is to hold
MM1 = (-0.4214, -0.5535)


@dataclass(frozen=True)
class Rate:
    """low, high: where four of five best rates of such a size fall, if the line holds there. beyond: times the largest
    size that the law was made of."""

    params: float
    lr: float
    low: float
    high: float
    weight_decay: float
    beyond: float


@dataclass(frozen=True)
class RateLaw:
    """points: (parameters, best rate). spread: standard deviation of ln rate around the line."""

    slope: float
    intercept: float
    points: tuple[tuple[float, float], ...]
    spread: float

    def at(self, params: float) -> Rate:
        """Raises MoestroError for a size that is not above zero."""
        from scipy.special import stdtrit  # Student's t; scipy.stats takes seconds to import

        if not 0 < params < float("inf"):
            raise MoestroError(f"a model of {params:g} parameters has no learning rate")
        logs = np.log([size for size, _ in self.points])
        around = (log(params) - logs.mean()) ** 2 / np.sum((logs - logs.mean()) ** 2)
        wide = float(stdtrit(len(logs) - 2, (1 + SHARE) / 2)) * self.spread * (1 + 1 / len(logs) + around) ** 0.5
        middle = self.slope * log(params) + self.intercept
        rate, largest = exp(middle), max(size for size, _ in self.points)
        return Rate(params, rate, exp(middle - wide), exp(middle + wide), DECAY * rate, params / largest)


def fit_rates(points: Sequence[tuple[float, float]]) -> RateLaw:
    """points: (parameters, best learning rate); of one size several are taken as they are.

    Raises:
        MoestroError: fewer than three sizes, or a number that is not above zero.
    """
    if any(not 0 < number < float("inf") for point in points for number in point):
        raise MoestroError("sizes and learning rates are numbers above zero")
    sizes = {size for size, _ in points}
    if len(sizes) < FEWEST:
        raise MoestroError(
            f"{len(sizes)} sizes are too few for a law of learning rates: through two points goes a line whatever they "
            f"are; give the best rate of {FEWEST} sizes or more"
        )
    x, y = np.log(np.array(points, dtype=np.float64)).T
    slope, intercept = np.polyfit(x, y, 1)
    left = y - slope * x - intercept
    return RateLaw(float(slope), float(intercept), tuple(points), float(np.sqrt(left @ left / (len(points) - 2))))


def best_rates(grid: Mapping[float, Sequence[tuple[float, float]]]) -> tuple[list[tuple[float, float]], list[str]]:
    """Of a grid search (size -> pairs of rate and loss) the best rate of each size, and notes.

    The best is where a parabola in log rate through the lowest loss and its neighbours has its lowest point. A lowest
    loss at the end of the rates that were tried is no best, and its size is left out.
    """
    points, notes = [], []
    for size, tried in sorted(grid.items()):
        rates, losses = np.array(sorted(tried), dtype=np.float64).T
        i = int(np.nanargmin(losses)) if np.isfinite(losses).any() else 0
        if i in (0, len(rates) - 1):
            notes.append(f"{size:,.0f} parameters: the lowest loss is at the end of the rates tried; left out")
            continue
        x = np.log(rates[i - 1 : i + 2])
        bend, tilt, _ = np.polyfit(x - x[1], losses[i - 1 : i + 2], 2)
        best = x[1] - tilt / (2 * bend) if np.isfinite(bend) and bend > 0 else x[1]
        points.append((float(size), float(np.exp(np.clip(best, x[0], x[2])))))
    return points, notes


def read_rates(path: Path) -> tuple[list[tuple[float, float]], list[str]]:
    """A CSV with columns params and lr (best rates), or params, lr and loss (a grid search): points and notes.

    Raises:
        MoestroError: it cannot be read, lacks a column, or holds something that is no number.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MoestroError(f"cannot read {path}: {error}") from error
    if not rows or not {"params", "lr"} <= set(rows[0]):
        raise MoestroError(f"{path} needs a line of names with params and lr (and loss, of a grid search)")
    grid = defaultdict[float, list[tuple[float, float]]](list)
    points = []
    for number, row in enumerate(rows, 2):
        try:
            params, rate = float(row["params"]), float(row["lr"])
            if "loss" in row:
                grid[params].append((rate, float(row["loss"])))
            points.append((params, rate))
        except (TypeError, ValueError) as error:
            raise MoestroError(f"{path}, line {number}: params, lr and loss are numbers") from error
    return best_rates(grid) if grid else (points, [])
