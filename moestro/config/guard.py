"""Settings of `[guard]`: what a step must look like to count, and what is done about one that does not."""

from typing import Literal

from pydantic import Field, field_validator

from moestro.config.base import Section


class GuardConfig(Section):
    """Everything is noted in the run's audit.jsonl. To roll back is to load the newest checkpoint that verifies and go
    on from there, in the same process."""

    # A step whose gradient is NaN or infinite changes nothing and its text is passed over. After so many of them in a
    # row, or at once if weights are not finite either, the run rolls back, or stops where it cannot.
    max_skips: int = Field(2, ge=0)
    max_rollbacks: int = Field(3, ge=0)  # to one and the same checkpoint
    # A loss this many robust standard deviations (1.4826 MAD) above the median of the last `window` ones, and above
    # all of them; none: off.
    spike_sigma: float | None = Field(6.0, gt=0)
    spike_action: Literal["roll_back", "flag"] = "roll_back"
    spike_skips: int = Field(2, ge=1)  # steps that are passed over after a roll-back: the one that was seen and before
    grad_sigma: float | None = Field(8.0, gt=0)  # the same of the gradient norm's logarithm
    grad_action: Literal["roll_back", "flag"] = "flag"
    window: int = Field(128, ge=16, le=4096)  # half of it must be there before anything counts as a spike
    skip_steps: tuple[int, ...] = ()  # steps to pass over in any case, counted from 1 as in metrics.jsonl
    # Every so many steps: norms of the layers, load of the experts and sizes of updates; none: never.
    probe_every: int | None = Field(100, ge=1)
    # How far the norm of a layer may lie below layers on both of its sides, as a share of theirs, in two probes in a
    # row. The rule is empirical (SIGMA).
    valley: float = Field(0.1, gt=0, lt=1)
    dead_below: float = Field(0.02, ge=0, lt=1)  # an expert's load since the last probe over the mean of the layer
    hot_above: float = Field(8.0, gt=1)
    # Every so many steps, and before each checkpoint: replicas compare checksums of their weights; none: never.
    checksums_every: int | None = Field(100, ge=1)
    recompute_every: int | None = Field(100, ge=1)  # the same product on every replica, or twice where there is one
    gc_every: int | None = Field(50, ge=1)  # all ranks collect garbage at the same steps, and never between them
    drop_page_cache: bool = False  # give the operating system's copies of text and checkpoints back

    @field_validator("skip_steps")
    @classmethod
    def _count_from_one(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if any(step < 1 for step in steps):
            raise ValueError("steps are counted from 1")
        return tuple(sorted(set(steps)))
