"""What it costs to train a mixture whose pool of experts grows in stages, against one with all experts from the start.

Each stage is the same model with fewer experts, the same number chosen, on the fastest plan that the search finds for
it on the same devices; stages are shares of all tokens (EMO, arXiv 2605.13247, whose shares come from a scaling law
with unpublished constants: shares are given here). What growing does to the loss is not predicted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from moestro.config.counts import count
from moestro.config.model import ModelConfig
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.plan.search import search
from moestro.plan.shapes import changed
from moestro.plan.space import space_of
from moestro.predict.target import Target

ROUNDED = 0.01  # by which shares may miss 1: they are published rounded


@dataclass(frozen=True)
class Stage:
    """experts: in each layer's pool. share: of all tokens. held_bytes: on the fullest device, by this plan."""

    experts: int
    share: float
    total_params: int
    plan: Plan
    step_s: float
    held_bytes: float


@dataclass(frozen=True)
class Growth:
    """stages: the last has all experts. steps: of the whole run. devices: of every stage."""

    stages: tuple[Stage, ...]
    steps: int
    devices: int

    @property
    def hours(self) -> float:
        """Of all devices together."""
        return self._hours(sum(stage.share * stage.step_s for stage in self.stages))

    @property
    def whole_hours(self) -> float:
        """With all experts from the start."""
        return self._hours(self.stages[-1].step_s)

    @property
    def saving(self) -> float:
        """Share of the device hours that growing saves."""
        return 1 - self.hours / self.whole_hours

    @property
    def most_saving(self) -> float:
        """Were all stages as fast as the first, whatever their shares but the last one's."""
        return (1 - self.stages[-1].share) * (1 - self.stages[0].step_s / self.stages[-1].step_s)

    def _hours(self, mean_step_s: float) -> float:
        return self.devices * self.steps * mean_step_s / 3600


def price_growth(
    workload: Workload, target: Target, devices: int, stages: Sequence[tuple[int, float]], steps: int,
    given: Mapping[str, tuple[Any, ...]] | None = None, progress: Callable[[int, int], None] = lambda done, total: None,
) -> Growth:  # fmt: skip
    """stages: (experts, share of the tokens), fewest experts first. given: as space_of. progress: stages done, of all.

    Raises:
        MoestroError: a model without experts, stages that do not grow or whose shares do not add up to 1, a number of
            experts that the model cannot have, or no plan for one of them.
    """
    sizes, total = [experts for experts, _ in stages], sum(share for _, share in stages)
    if workload.model.moe is None:
        raise MoestroError("a model without experts has none to grow")
    if len(stages) < 2 or sizes != sorted(set(sizes)) or not all(share > 0 for _, share in stages):
        raise MoestroError("give two stages or more, each with more experts than the one before and a share above zero")
    if not abs(total - 1) <= ROUNDED:
        raise MoestroError(f"the shares of the stages add up to {total:.3g}, not 1")
    priced = []
    for number, (experts, share) in enumerate(stages):
        work = workload.model_copy(update={"model": with_experts(workload.model, experts)})
        space = space_of(work, devices, target.place.node_size, given)
        plan, found = search(work, target, devices, space, exact=4).exact[0]
        params = count(work.model, work.seq_len).total_params
        priced.append(Stage(experts, share / total, params, plan, found.step_s.value, found.memory.total))
        progress(number + 1, len(stages))
    return Growth(tuple(priced), steps, devices)


def with_experts(model: ModelConfig, experts: int) -> ModelConfig:
    """The same with another number of experts in each layer's pool.

    Raises:
        MoestroError: the model cannot have so many.
    """
    moe = model.moe
    assert moe is not None
    if experts % moe.granularity:
        raise MoestroError(f"{experts} experts are no multiple of moe.granularity = {moe.granularity}")
    try:
        grown = type(moe).model_validate({**dict(moe), "num_experts": experts // moe.granularity})
        return changed(model, {"moe": grown})
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise MoestroError(f"the model cannot have {experts} experts: {reason}") from error
