"""The best plan on each of several numbers of devices, and the best of them all: there the objectives part."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moestro.config.plan import Workload
from moestro.errors import MoestroError
from moestro.plan.candidates import Found, weigh
from moestro.plan.objective import Goal
from moestro.plan.search import search
from moestro.plan.space import Space
from moestro.plan.workers import Progress
from moestro.predict.target import Target


@dataclass(frozen=True)
class Counts:
    """found: by number of devices. missed: of those on which there is no plan, why. best: the number to take."""

    found: dict[int, Found]
    missed: dict[int, str]
    best: int


def search_counts(
    workload: Workload, targets: Mapping[int, Target], space: Callable[[int], Space], goal: Goal, keep: int = 20,
    exact: int = 8, workers: int = 1, progress: Callable[[int], Progress | None] = lambda count: None,
) -> Counts:  # fmt: skip
    """targets, space: of each number of devices. progress: as for `search`, of a number.

    Raises:
        MoestroError: no number of devices has a plan; it says why of each.
    """
    found, missed = dict[int, Found](), dict[int, str]()
    for count, target in targets.items():
        try:
            found[count] = search(workload, target, count, space(count), keep, exact, workers, goal, progress(count))
        except MoestroError as error:
            missed[count] = str(error)
    if not found:
        raise MoestroError("\n".join(missed.values()))

    def worth(count: int) -> float:
        return weigh(workload, *found[count].exact[0], goal).score

    return Counts(found, missed, min(found, key=worth))
