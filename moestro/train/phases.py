"""The course of a run: its phases as stretches of steps that are all alike."""

from dataclasses import dataclass
from typing import Any

from moestro.config import Config
from moestro.errors import MoestroError
from moestro.parallel.layout import Layout, resolve_layout


@dataclass(frozen=True)
class Stretch:
    """Consecutive steps of one phase with one batch size. A phase without a batch ramp is one stretch."""

    phase: int
    first_step: int
    steps: int
    first_sample: int  # of the run
    config: Config  # with the phase's settings and this batch size in their sections
    layout: Layout

    @property
    def end(self) -> int:
        return self.first_step + self.steps

    @property
    def batch_tokens(self) -> int:
        """Positions in a global batch, padding included."""
        return self.config.train.global_batch_size * self.config.data.seq_len

    @property
    def settings(self) -> dict[str, Any]:
        """What a phase can change, for the log."""
        config = self.config
        weights = zip(config.data.source_names, config.data.sources, strict=True)
        return {
            "seq_len": config.data.seq_len,
            "rope_theta": config.model.rope.theta,
            "global_batch_size": config.train.global_batch_size,
            "batch_tokens": self.batch_tokens,
            "mixture": {name: source.weight for name, source in weights if source.weight},
        }

    def samples_before(self, step: int) -> int:
        """How many samples the run has seen before a step of this stretch."""
        return self.first_sample + (step - self.first_step) * self.config.train.global_batch_size


def resolve_stretches(config: Config, world_size: int, ranks_per_node: int | None = None) -> list[Stretch]:
    """All stretches of a run in order.

    Raises:
        MoestroError: the layout does not fit, at all or to one of the phases.
    """
    stretches, step, sample = [], 0, 0
    for number in range(config.num_phases):
        for batch, steps in config.batches(number):
            phase = _with_batch(config.in_phase(number), batch)
            try:
                layout = resolve_layout(phase, world_size, ranks_per_node)
            except MoestroError as error:
                where = f"train.phases.{number}: " if config.train.phases else ""
                raise MoestroError(f"{where}{error}") from error
            stretches.append(Stretch(number, step, steps, sample, phase, layout))
            step, sample = step + steps, sample + steps * batch
    return stretches


def _with_batch(config: Config, size: int) -> Config:
    if size == config.train.global_batch_size:
        return config
    train = config.train.model_copy(update={"global_batch_size": size})
    return config.model_copy(update={"train": train})
