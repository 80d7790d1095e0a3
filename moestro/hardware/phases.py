"""A job in phases on n units of a device: what it takes end to end, not what its kernel takes.

A speed-up that leaves out the preparation of the data, or its way to the device, is not one (arXiv 2207.07886 and the
vendor's records beside it). So the time of a job here is always that of all its phases.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import nnls

from moestro.errors import MoestroError

Term = Literal["fixed", "divided", "per_unit"]
TERMS: tuple[Term, ...] = ("fixed", "divided", "per_unit")


@dataclass(frozen=True)
class Phase:
    """fixed_s + divided_s / n + per_unit_s · n on n units.

    divided_s: work that the units share. per_unit_s: what the host does for one unit after the other.
    """

    name: str
    fixed_s: float = 0.0
    divided_s: float = 0.0
    per_unit_s: float = 0.0

    def seconds(self, units: int) -> float:
        """Raises MoestroError for less than one unit."""
        if units < 1:
            raise MoestroError(f"{self.name}: a job needs at least one unit, not {units}")
        return self.fixed_s + self.divided_s / units + self.per_unit_s * units


@dataclass(frozen=True)
class PhasedJob:
    """overlapped: all phases run at the same time, so that the longest counts; otherwise one after the other."""

    phases: tuple[Phase, ...]
    overlapped: bool = False

    def seconds(self, units: int) -> float:
        """End to end."""
        times = [phase.seconds(units) for phase in self.phases]
        return max(times) if self.overlapped else sum(times)

    def phase_seconds(self, units: int) -> dict[str, float]:
        return {phase.name: phase.seconds(units) for phase in self.phases}

    def best_units(self, limit: int) -> int:
        """The number of units up to `limit` at which the job ends first; the smallest of equals."""
        return min(range(1, limit + 1), key=self.seconds)


def fit_phase(name: str, units: Sequence[int], seconds: Sequence[float], terms: Sequence[Term] = TERMS) -> Phase:
    """The phase with the given terms, none negative, whose squared relative errors are smallest.

    Raises:
        MoestroError: fewer samples than terms, or a sample that is not positive.
    """
    if len(units) != len(seconds) or len(units) < len(terms):
        raise MoestroError(f"{name}: {len(units)} sizes and {len(seconds)} times do not fix {len(terms)} terms")
    n, measured = np.asarray(units, dtype=float), np.asarray(seconds, dtype=float)
    if not (np.isfinite(measured).all() and (measured > 0).all() and (n >= 1).all()):
        raise MoestroError(f"{name}: a phase is fitted to positive times on one unit or more")
    columns = {"fixed": np.ones_like(n), "divided": 1 / n, "per_unit": n}
    matrix = np.stack([columns[term] / measured for term in terms], axis=1)
    scale = matrix.max(axis=0)  # columns differ by the square of n, which costs digits otherwise
    coefficients, _ = nnls(matrix / scale, np.ones_like(n))
    found = dict(zip(terms, (coefficients / scale).tolist(), strict=True))
    return Phase(name, found.get("fixed", 0.0), found.get("divided", 0.0), found.get("per_unit", 0.0))
