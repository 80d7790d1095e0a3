"""Would we have chosen well? Of published runs that differ in nothing but their layout, whether the prediction ranks
them as measured, and how much slower its choice was than the best of them.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from moestro.config.plan import Plan
from moestro.predict.fit import source_of
from moestro.predict.validate import Row

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Layout:
    """measured_s: the median of its runs. complete: all of its runs told their whole configuration."""

    plan: Plan
    predicted_s: float
    measured_s: float
    runs: int
    complete: bool


@dataclass(frozen=True)
class Choice:
    """Layouts of one workload on the same devices, the one that is predicted fastest first.

    kendall, spearman: rank correlation of predicted and measured seconds, -1 to 1; None: all are equal in one of them.
    """

    source: str
    model: str
    device: str
    num_devices: int
    layouts: tuple[Layout, ...]
    kendall: float | None
    spearman: float | None

    @property
    def regret(self) -> float:
        """Measured seconds of our choice over those of the best, less 1."""
        return self.layouts[0].measured_s / min(one.measured_s for one in self.layouts) - 1

    @property
    def spread(self) -> float:
        """Measured seconds of the slowest over those of the best, less 1: the largest regret that there could be."""
        times = [one.measured_s for one in self.layouts]
        return max(times) / min(times) - 1

    @property
    def blind(self) -> float:
        """The regret to expect of a choice at random."""
        times = [one.measured_s for one in self.layouts]
        return sum(times) / len(times) / min(times) - 1


@dataclass(frozen=True)
class Regrets:
    """Of some choices. right: how many were the best layout. median, p90: of regret; blind: median of a choice at
    random; kendall, spearman: medians, of those that have one."""

    name: str
    choices: int
    layouts: int
    right: int
    median: float
    p90: float
    blind: float
    kendall: float | None
    spearman: float | None


def choices(rows: Sequence[Row]) -> list[Choice]:
    """Of all groups of two layouts or more with the same source, model, devices, sequence, batch, precision and
    software, the largest first. Repeated runs of a layout count as one."""
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        run = row.run
        workload = run.workload.model_dump_json()
        groups[source_of(run), run.model, run.device, run.num_devices, run.devices_per_node, workload].append(row)
    found = [_choice(members) for members in groups.values()]
    return sorted((one for one in found if len(one.layouts) > 1), key=lambda one: -len(one.layouts))


def regrets(name: str, some: Sequence[Choice]) -> Regrets:
    """Of one choice or more."""
    lost = [one.regret for one in some]
    kendalls = [one.kendall for one in some if one.kendall is not None]
    spearmans = [one.spearman for one in some if one.spearman is not None]
    return Regrets(
        name,
        len(some),
        sum(len(one.layouts) for one in some),
        sum(one.regret == 0 for one in some),
        median(lost),
        float(np.quantile(lost, 0.9)),
        median(one.blind for one in some),
        median(kendalls) if kendalls else None,
        median(spearmans) if spearmans else None,
    )


def regrets_by(some: Sequence[Choice], key: Callable[[Choice], str]) -> list[Regrets]:
    """By `key`, the most choices first."""
    members: dict[str, list[Choice]] = defaultdict(list)
    for one in some:
        members[key(one)].append(one)
    return [regrets(name, own) for name, own in sorted(members.items(), key=lambda item: -len(item[1]))]


def kendall(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Kendall's tau-b: pairs in the same order less those in the other, over the pairs that have an order in each."""
    first, second = (np.sign(np.subtract.outer(values, values)) for values in (np.array(one), np.array(other)))
    ordered = float(np.sqrt((first**2).sum() * (second**2).sum()))
    return float((first * second).sum()) / ordered if ordered else None


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Correlation of the ranks; equal values share theirs."""
    first, second = (_ranks(np.array(values)) for values in (one, other))
    first, second = first - first.mean(), second - second.mean()
    size = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / size if size else None


def _ranks(values: Floats) -> Floats:
    """How many are less, and half of those that are equal."""
    difference = np.sign(np.subtract.outer(values, values))
    return np.asarray((difference.sum(axis=1)) / 2, dtype=np.float64)


def _choice(rows: Sequence[Row]) -> Choice:
    """Of equal predictions the first published one is taken."""
    by_plan: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_plan[row.run.plan.model_dump_json()].append(row)
    layouts = [
        Layout(
            own[0].run.plan, own[0].predicted, median(row.run.measured for row in own), len(own),
            all(row.run.complete for row in own),
        )
        for own in by_plan.values()
    ]  # fmt: skip
    layouts.sort(key=lambda one: one.predicted_s)
    predicted, measured = [one.predicted_s for one in layouts], [one.measured_s for one in layouts]
    run = rows[0].run
    return Choice(
        source_of(run), run.model, run.device, run.num_devices, tuple(layouts), kendall(predicted, measured),
        spearman(predicted, measured),
    )  # fmt: skip
