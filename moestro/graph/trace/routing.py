"""What a router would have chosen: the answer when a traced program sorts scores that have no values.

A choice is the order of C candidates, of each row. Rows fall on them as `RoutingConfig` says:

* balanced: in every C rows each candidate is first once, second once, and so on; which candidates a row has together
  is random. Loads are even to the last row, and the number of ranks that a row's experts lie on is the hypergeometric
  one on average.
* power_law: without replacement by weights ∝ rank^-alpha, the ranks in an order of their own for each call (layer).
* measured: the same with that alpha whose busiest candidate has max_over_mean times the mean.
* recorded: choices [rows, K] of a real run, one call after the other, from the beginning again when they are used up.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from moestro.config.plan import RoutingConfig

TOP = 8  # of "measured": the choices of a row by which a load is counted


class Routing:
    """Deterministic: the same calls get the same answers."""

    def __init__(self, config: RoutingConfig, recorded: Sequence[Tensor] = (), seed: int = 0) -> None:
        self.config, self.recorded = config, list(recorded)
        self.seed, self.calls = seed, 0
        self.generator = torch.Generator()
        self._waiting: dict[object, list[int]] = defaultdict(list)  # of each place, calls that have not been repeated

    def order(self, rows: int, candidates: int, place: object = None, again: bool = False) -> Tensor:
        """[rows, candidates] int64: each row's candidates, the best first.

        again: as in the first call from this place that has not been repeated yet (recomputation must choose the same).
        """
        call = self._number(place, again)
        self.generator.manual_seed(self.seed + call)
        if self.recorded:
            found = self._recorded(self.recorded[call % len(self.recorded)], rows, candidates)
            if found is not None:
                return found
        if self.config.kind == "balanced":
            return self._balanced(rows, candidates)
        alpha = self.config.alpha
        if self.config.kind == "measured":
            alpha = skew(self.config.max_over_mean or 1.0, candidates, min(TOP, candidates))
        return self._drawn(power_law(candidates, alpha), rows)

    def _number(self, place: object, again: bool) -> int:
        if again and self._waiting[place]:
            return self._waiting[place].pop(0)
        call, self.calls = self.calls, self.calls + 1
        self._waiting[place].append(call)
        return call

    def _balanced(self, rows: int, candidates: int) -> Tensor:
        blocks = -(-rows // candidates)
        shuffled = torch.rand(blocks, candidates, generator=self.generator).argsort(1)
        shift = torch.arange(candidates)
        turned = (shift.unsqueeze(0) + shift.unsqueeze(1)) % candidates  # a Latin square
        return shuffled[:, turned].flatten(0, 1)[:rows]

    def _drawn(self, shares: Tensor, rows: int) -> Tensor:
        """By the exponential race: the order of Exp(1) / share is that of draws without replacement."""
        shares = shares[torch.randperm(len(shares), generator=self.generator)]
        race = torch.empty(rows, len(shares)).exponential_(generator=self.generator) / shares
        return race.argsort(1)

    def _recorded(self, choices: Tensor, rows: int, candidates: int) -> Tensor | None:
        """The row's choices, then the others. None where they do not fit what is asked."""
        if int(choices.max()) >= candidates or choices.shape[1] > candidates:
            return None
        first = choices[torch.arange(rows) % len(choices)]
        place = torch.full((rows, candidates), candidates).scatter_(
            1, first, torch.arange(first.shape[1]).expand_as(first)
        )
        return place.argsort(dim=1, stable=True)


def power_law(candidates: int, alpha: float) -> Tensor:
    """[candidates] shares ∝ rank^-alpha, the largest first."""
    weights = torch.arange(1, candidates + 1, dtype=torch.float64) ** -alpha
    return weights / weights.sum()


def skew(max_over_mean: float, candidates: int, top: int) -> float:
    """The alpha by which the busiest of `candidates` gets max_over_mean times the mean load, by bisection.

    Of k draws a candidate with share p is expected to be among 1 - (1 - p)^k of the rows, at most all of them.
    """
    low, high = 0.0, 8.0
    for _ in range(50):
        alpha = (low + high) / 2
        load = 1 - (1 - power_law(candidates, alpha)) ** top
        if float(load.max() / load.mean()) < max_over_mean:
            low = alpha
        else:
            high = alpha
    return low
