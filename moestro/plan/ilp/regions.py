"""Layers over groups of devices of unlike speed, in a given order: the stages' part of planning over regions.

After DeepCEE (arXiv 2505.15536): heavy collectives inside a group, a pipeline between groups, and to each group as many
layers as its speed deserves and its memory holds. Exact, by dynamic programming over stages in their order; for a plan
with its memory counted micro-batch by micro-batch there is `plan.ilp.balance`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from operator import add

from moestro.errors import MoestroError


@dataclass(frozen=True)
class Group:
    """Devices that are alike. stages: pipeline stages in it. layer_s: seconds of a layer on one of them, forward and
    backward. most_layers: that one can hold. extra_s: of its last stage (a head), beside layers."""

    stages: int
    layer_s: float
    most_layers: int | None = None
    extra_s: float = 0.0


def layers_over(groups: Sequence[Group], num_layers: int) -> tuple[int, ...]:
    """Layers of each stage, of which the slowest takes least; of several such choices that of the least time in all.

    Raises:
        MoestroError: more stages than layers, or more layers than the groups can hold.
    """
    stages = [
        (group.layer_s, group.extra_s if n == group.stages - 1 else 0.0, group.most_layers or num_layers)
        for group in groups
        for n in range(group.stages)
    ]
    if len(stages) > num_layers:
        raise MoestroError(f"{len(stages)} stages for {num_layers} layers: take fewer stages")
    if sum(most for _, _, most in stages) < num_layers:
        raise MoestroError(f"the groups hold {sum(most for _, _, most in stages)} layers, the model has {num_layers}")
    slowest = _fewest(stages, num_layers, max, inf)
    assert slowest is not None
    found = _fewest(stages, num_layers, add, slowest[0])
    assert found is not None, "the first answer is one"
    return found[1]


def _fewest(
    stages: Sequence[tuple[float, float, int]], num_layers: int, join: Callable[[float, float], float], limit_s: float
) -> tuple[float, tuple[int, ...]] | None:
    """The least sum, in the sense of `join`, with no stage longer than limit_s, and the layers of each stage."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}  # by layers on the stages so far
    for layer_s, extra_s, most in stages:
        after: dict[int, tuple[float, tuple[int, ...]]] = {}
        for placed, (whole, sizes) in best.items():
            for size in range(1, min(most, num_layers - placed) + 1):
                seconds = size * layer_s + extra_s
                found = join(whole, seconds), (*sizes, size)
                if seconds <= limit_s and found < after.get(placed + size, (inf, ())):
                    after[placed + size] = found
        best = after
    return best.get(num_layers)
