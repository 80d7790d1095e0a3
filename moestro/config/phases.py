"""Phases of a run: what changes on the way, from the pretraining at a short context to the last steps at a long one."""

from typing import Literal, Self

from pydantic import Field, model_validator

from moestro.config.base import Section


class RampConfig(Section):
    """A global batch that grows at the start of a phase: start, start + increment, … up to global_batch_size."""

    start: int = Field(ge=1)  # sequences
    increment: int | None = Field(None, ge=1)  # None: start
    # How long it takes, in one of two units: every size lasts equally many steps, or sees equally many tokens.
    steps: int | None = Field(None, ge=1)
    tokens: int | None = Field(None, ge=1)  # positions: sequences · seq_len

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("say how long the ramp is in one of steps and tokens")
        return self

    def sizes(self, end: int) -> list[int]:
        """The batch sizes before `end`."""
        return list(range(self.start, end, self.increment or self.start))

    def batches(self, end: int, seq_len: int, steps: int) -> list[tuple[int, int]]:
        """A phase of `steps` steps as (global batch size, number of steps), in order.

        Raises:
            ValueError: `end` is not on the ramp, or the ramp is longer than the phase.
        """
        sizes, increment = self.sizes(end), self.increment or self.start
        if not sizes or sizes[-1] + increment != end:
            raise ValueError(
                f"batch_ramp from {self.start} in jumps of {increment} does not come to global_batch_size = {end}"
            )
        batches, done, seen = [], 0, 0
        for i, size in enumerate(sizes, start=1):
            if self.steps is not None:
                count = self.steps * i // len(sizes) - done
            else:
                assert self.tokens is not None
                count = max(0, -(-(self.tokens * i // len(sizes) - seen) // (size * seq_len)))
            done, seen = done + count, seen + count * size * seq_len
            batches.append((size, count))
        if done >= steps:
            raise ValueError(f"batch_ramp takes {done} steps, the phase has {steps}; it must come to its end before")
        return [(size, count) for size, count in (*batches, (end, steps - done)) if count]


class PhaseConfig(Section):
    """One phase. What it leaves out is as in the sections [data], [model.rope], [train] and [optim]."""

    steps: int = Field(ge=1)
    seq_len: int | None = Field(None, ge=2)
    # Context extension: the base and the factor of model.rope (not of sliding layers that have a rope of their own).
    rope_theta: float | None = Field(None, gt=0)
    rope_factor: float | None = Field(None, ge=1)
    global_batch_size: int | None = Field(None, ge=1)
    micro_batch_size: int | None = Field(None, ge=1)
    batch_ramp: RampConfig | None = None
    # Weights of the sources, by name or number; sources left out take no part.
    mixture: dict[str, float] | None = None
    # A phase that sets one of these begins a schedule of its own, which lasts until the next phase that does. Without
    # them the learning rate follows the schedule that is running, so that by default one spans all phases.
    lr_scale: float | None = Field(None, gt=0)  # peak over optim.lr and optim.muon_lr
    schedule: Literal["cosine", "wsd", "constant"] | None = None
    warmup_steps: int | None = Field(None, ge=0)  # None: none, but in the first phase optim.warmup_steps
    decay_fraction: float | None = Field(None, ge=0, le=1)
    min_lr_ratio: float | None = Field(None, ge=0, le=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.mixture is not None and (min(self.mixture.values(), default=0) < 0 or not any(self.mixture.values())):
            raise ValueError("mixture needs weights of at least 0, and one above")
        return self

    @property
    def begins_schedule(self) -> bool:
        own = (self.lr_scale, self.schedule, self.warmup_steps, self.decay_fraction, self.min_lr_ratio)
        return any(value is not None for value in own)
