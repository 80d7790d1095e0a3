"""The learning rate over the phases of a run."""

from dataclasses import dataclass
from typing import Any

from moestro.config import Config, OptimConfig
from moestro.optim.build import lr_factor


@dataclass(frozen=True)
class Schedule:
    """A learning rate's course from one step on, until the next schedule begins."""

    first_step: int
    steps: int
    optim: OptimConfig
    scale: float  # peak over that of the configuration

    def factor(self, step: int) -> float:
        """Share of the configured peak learning rates at a step of the run."""
        return self.scale * lr_factor(step - self.first_step, self.steps, self.optim)


def schedules(config: Config) -> list[Schedule]:
    """One schedule over the whole run, and for each phase that sets one of a schedule's keys a new one.

    A new schedule has no warm-up unless its phase asks for one: that of [optim] is for weights and moments that are
    new, and would take the rate of a short late phase to nothing for most of it.
    """
    starts: list[tuple[int, OptimConfig, float]] = []
    step = 0
    for phase in config.train.phases:
        if phase.begins_schedule or not starts:
            given: dict[str, Any] = {
                "schedule": phase.schedule,
                "warmup_steps": phase.warmup_steps if phase.warmup_steps is not None or not step else 0,
                "decay_fraction": phase.decay_fraction,
                "min_lr_ratio": phase.min_lr_ratio,
            }
            optim = config.optim.model_copy(update={key: v for key, v in given.items() if v is not None})
            starts.append((step, optim, 1.0 if phase.lr_scale is None else phase.lr_scale))
        step += phase.steps
    starts = starts or [(0, config.optim, 1.0)]
    ends = [first for first, _, _ in starts[1:]] + [config.train.steps]
    return [Schedule(first, end - first, optim, scale) for (first, optim, scale), end in zip(starts, ends, strict=True)]
