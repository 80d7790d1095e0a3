"""A linear program with integers, written row by row and solved by HiGHS."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from moestro.errors import MoestroError

GAP = 1e-6  # between a solution and its bound, of its value, at which it counts as the best


@dataclass(frozen=True)
class Solution:
    """bound: no solution is below it; equal to `value`, within GAP, unless time ran out."""

    values: NDArray[np.float64]
    value: float
    bound: float

    @property
    def proven(self) -> bool:
        return self.value - self.bound <= 2 * GAP * max(abs(self.value), 1e-12)

    def count(self, variable: int) -> int:
        return round(float(self.values[variable]))


@dataclass
class Program:
    """Minimises the sum of cost · variable."""

    _cost: list[float] = field(default_factory=list)
    _high: list[float] = field(default_factory=list)
    _integer: list[bool] = field(default_factory=list)
    _entries: list[tuple[int, int, float]] = field(default_factory=list)
    _least: list[float] = field(default_factory=list)
    _most: list[float] = field(default_factory=list)

    def number(self, cost: float = 0.0, most: float = np.inf) -> int:
        """A variable of zero or more."""
        return self._variable(cost, most, integer=False)

    def integer(self, most: float, cost: float = 0.0) -> int:
        """A whole one, 0 … most."""
        return self._variable(cost, most, integer=True)

    def add_cost(self, variable: int, cost: float) -> None:
        self._cost[variable] += cost

    def row(self, terms: Iterable[tuple[int, float]], least: float = -np.inf, most: float = np.inf) -> None:
        """least ≤ Σ factor · variable ≤ most; a variable may come several times."""
        self._entries += [(len(self._least), variable, factor) for variable, factor in terms]
        self._least.append(least)
        self._most.append(most)

    def solve(self, limit_s: float) -> Solution | None:
        """None: there is no solution.

        Raises:
            MoestroError: time ran out before there was one.
        """
        rows, columns, factors = zip(*self._entries, strict=True)
        shape = (len(self._least), len(self._cost))
        matrix = csr_array((factors, (rows, columns)), shape=shape)
        found = milp(
            np.array(self._cost),
            integrality=np.array(self._integer, dtype=np.int64),
            bounds=Bounds(np.zeros(shape[1]), np.array(self._high)),
            constraints=LinearConstraint(matrix, np.array(self._least), np.array(self._most)),
            options={"time_limit": limit_s, "mip_rel_gap": GAP},
        )
        if found.x is None:
            if found.status == 2:
                return None
            raise MoestroError(f"no placement found within {limit_s:g} s ({found.message}); give more time")
        return Solution(found.x, float(found.fun), float(found.mip_dual_bound))

    def _variable(self, cost: float, most: float, integer: bool) -> int:
        self._cost.append(cost)
        self._high.append(most)
        self._integer.append(integer)
        return len(self._cost) - 1
