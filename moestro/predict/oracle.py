"""Where a prediction errs: measured seconds put in the place of predicted ones, one group after another.

First the kernels, then also the host's time, then also the exchanges. What the prediction still errs by is how it puts
parts together: what hides behind what, and who waits for whom (the oracle of Maya, arXiv 2503.20191).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean
from typing import TYPE_CHECKING, Literal

from moestro.config.plan import Plan, Workload
from moestro.config.root import Config
from moestro.errors import MoestroError
from moestro.graph.convert import plan_of, workload_of
from moestro.graph.count import count_step
from moestro.predict.constants import Constants
from moestro.predict.costs import Cost, StepCost
from moestro.predict.predict import compose, price_step
from moestro.predict.target import Target

if TYPE_CHECKING:
    from moestro.measure.step_ranks import RanksStep

Group = Literal["kernels", "host", "communication"]
GROUPS: tuple[Group, ...] = ("kernels", "host", "communication")


@dataclass(frozen=True)
class Measured:
    """Seconds of a pipeline rank's step. transfer_s: of exchanges, without waiting for other ranks."""

    passes_s: float
    update_s: float
    host_s: float
    transfer_s: float


@dataclass(frozen=True)
class Split:
    """composed_s: the step with no group measured, with the kernels, with the host too, and with all three."""

    measured_s: float
    composed_s: tuple[float, float, float, float]

    @property
    def predicted_s(self) -> float:
        return self.composed_s[0]

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def left(self) -> tuple[float, float, float]:
        """The error with the kernels measured, with the host too, and with the exchanges too."""
        kernels, host, all_three = (seconds / self.measured_s - 1 for seconds in self.composed_s[1:])
        return kernels, host, all_three

    @property
    def parts(self) -> dict[str, float]:
        """What each group adds to the error; they add up to it. overlap: what no measured part explains."""
        errors = [self.error, *self.left]
        found = [before - after for before, after in pairwise(errors)]
        return dict(zip((*GROUPS, "overlap"), (*found, errors[-1]), strict=True))


def measure_and_split(config: Config, target: Target, ranks: int, repeats: int = 5) -> Split:
    """Run the step of `config` on `ranks` processes here, and split the error of its prediction.

    Raises:
        MoestroError: the target is no measured CPU, the layout does not fit, or a process failed.
    """
    if not target.host_computes:
        raise MoestroError("the parts of a step are measured on a CPU's processes: give --profile of this machine's")
    from moestro.measure.step_ranks import measure_on_ranks

    workload, plan = workload_of(config), plan_of(config, ranks, ranks)
    return split(workload, plan, target, measure_on_ranks(config, ranks, repeats))


def split(workload: Workload, plan: Plan, target: Target, step: "RanksStep") -> Split:
    """Of a step that was measured on the plan's ranks."""
    costs = price_step(count_step(workload, plan), workload, plan, target)
    constants = target.constants_for(workload, plan.world_size)
    measured = by_pipeline_rank(step, plan)
    composed = []
    for number in range(len(GROUPS) + 1):
        changed = substitute(costs, constants, measured, GROUPS[:number])
        composed.append(compose(changed, plan, target, constants, exact=True).total)
    first, second, third, fourth = composed
    return Split(step.median_s, (first, second, third, fourth))


def by_pipeline_rank(step: "RanksStep", plan: Plan) -> list[Measured]:
    """Means over the ranks that hold the same stages: pp is the outermost dimension of rank numbers."""
    from moestro.measure.step_ranks import transfers_s

    size = plan.world_size // plan.pp
    found = []
    for first in range(0, plan.world_size, size):
        ranks = step.ranks[first : first + size]
        found.append(
            Measured(
                mean(rank.passes_s for rank in ranks),
                mean(rank.update_s for rank in ranks),
                mean(rank.host_s for rank in ranks),
                mean(transfers_s(ranks)),
            )
        )
    return found


def substitute(
    costs: StepCost, constants: Constants, measured: Sequence[Measured], groups: Sequence[Group]
) -> StepCost:
    """The costs with the seconds of some groups scaled to those measured on each pipeline rank."""
    stages, once = list(costs.stages), list(costs.once)
    for rank, parts in enumerate(measured):
        own = [i for i, stage in enumerate(stages) if stage.rank == rank]
        passes = [cost for i in own for cost in (stages[i].forward, stages[i].backward, stages[i].weight)]
        m, update = costs.micro_batches, once[rank][2]
        factors = dict[str, float]()
        if "kernels" in groups:
            factors["kernels"] = _ratio(parts.passes_s, m * sum(cost.compute_s(constants) for cost in passes))
            factors["update"] = _ratio(parts.update_s, update.compute_s(constants))
        if "host" in groups:
            spent = m * sum(cost.host_s(constants) for cost in passes)
            factors["launches"] = _ratio(parts.host_s, spent + sum(cost.host_s(constants) for cost in once[rank]))
        if "communication" in groups:
            sent = m * sum(_sent(cost, constants) for cost in passes)
            factors["collectives"] = _ratio(parts.transfer_s, sent + sum(_sent(cost, constants) for cost in once[rank]))
        for i in own:
            three = (_scaled(cost, factors) for cost in (stages[i].forward, stages[i].backward, stages[i].weight))
            forward, backward, weight = three
            stages[i] = replace(stages[i], forward=forward, backward=backward, weight=weight)
        gather, reduce, _ = (_scaled(cost, factors) for cost in once[rank])
        once[rank] = gather, reduce, _scaled(update, {**factors, "kernels": factors.get("update", 1.0)})
    return StepCost(tuple(stages), tuple(once), costs.micro_batches)


def _sent(cost: Cost, constants: Constants) -> float:
    return cost.communication_s(constants, hides=True) + cost.communication_s(constants, hides=False)


def _ratio(measured: float, predicted: float) -> float:
    """1 where nothing was predicted: then there is nothing to put it in the place of."""
    return measured / predicted if predicted > 0 else 1.0


def _scaled(cost: Cost, factors: dict[str, float]) -> Cost:
    kernels, launches = factors.get("kernels", 1.0), factors.get("launches", 1.0)
    collectives = factors.get("collectives", 1.0)
    return replace(
        cost,
        kernels={name: kernels * seconds for name, seconds in cost.kernels.items()},
        parts={name: kernels * seconds for name, seconds in cost.parts.items()},
        collectives={key: collectives * seconds for key, seconds in cost.collectives.items()},
        launches=launches * cost.launches,
        num_collectives=launches * cost.num_collectives,
    )
