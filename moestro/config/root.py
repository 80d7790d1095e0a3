"""The whole configuration of a run, and what it is in each phase."""

from typing import Any, Self, TypeVar

from pydantic import ValidationError, model_validator

from moestro.config.base import Section
from moestro.config.data import DataConfig, SourceConfig
from moestro.config.guard import GuardConfig
from moestro.config.model import ModelConfig
from moestro.config.parallel import ParallelConfig
from moestro.config.supervise import SuperviseConfig
from moestro.config.train import OptimConfig, RunConfig, TrainConfig

AnySection = TypeVar("AnySection", bound=Section)


class Config(Section):
    """Everything `moestro train` needs: eight sections, each a table of the TOML file."""

    description: str = ""
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig = OptimConfig()
    parallel: ParallelConfig = ParallelConfig()
    run: RunConfig = RunConfig()
    guard: GuardConfig = GuardConfig()
    supervise: SuperviseConfig = SuperviseConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_length("data.seq_len")
        for number, phase in enumerate(self.train.phases):
            where = f"train.phases.{number}"
            try:
                config = self.in_phase(number)
                if phase.batch_ramp is not None:
                    config._check_ramp(number, self)
            except ValidationError as error:
                raise ValueError(f"{where}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            config._check_length(f"{where}.seq_len" if phase.seq_len is not None else "data.seq_len")
        return self

    def _check_length(self, where: str) -> None:
        seq_len = self.data.seq_len
        if seq_len > self.model.max_seq_len:
            raise ValueError(f"{where} = {seq_len} exceeds model.max_seq_len = {self.model.max_seq_len}")
        for encoder in self.model.encoders:
            if encoder.num_tokens > seq_len:
                raise ValueError(
                    f"{where} = {seq_len} has no room for the {encoder.num_tokens} tokens of encoder '{encoder.name}'"
                )
        router = self.model.moe.router if self.model.moe else None
        if router is not None and router.group_size and seq_len % router.group_size:
            raise ValueError(
                f"{where} = {seq_len} is not a multiple of model.moe.router.group_size = "
                f"{router.group_size}; groups may not straddle sequences, or results would depend on micro_batch_size"
            )

    def _check_ramp(self, number: int, whole: "Config") -> None:
        for size, _ in whole.batches(number):
            if self.train.micro_batch_size is not None and size % self.train.micro_batch_size:
                raise ValueError(
                    f"batch_ramp has a batch of {size}, not a multiple of micro_batch_size = "
                    f"{self.train.micro_batch_size}"
                )

    @property
    def num_phases(self) -> int:
        return max(1, len(self.train.phases))

    def in_phase(self, number: int) -> "Config":
        """The configuration with what phase `number` sets put in its sections, and without phases.

        `optim` and `train.steps` stay: a learning rate's schedule may span several phases.
        """
        if not self.train.phases:
            return self
        phase = self.train.phases[number]
        rope = _replaced(self.model.rope, theta=phase.rope_theta, factor=phase.rope_factor)
        train = _replaced(
            self.train, global_batch_size=phase.global_batch_size, micro_batch_size=phase.micro_batch_size, phases=()
        )
        data = self.data.model_copy(update={"sources": self._mixed(phase.mixture)})
        if phase.seq_len is not None:
            data = data.model_copy(update={"seq_len": phase.seq_len})
        model = self.model if rope == self.model.rope else self.model.model_copy(update={"rope": rope})
        return self.model_copy(update={"model": model, "data": data, "train": train})

    def as_of(self, step: int) -> "Config":
        """The configuration of the phase in which the model was after `step` steps: that of a checkpoint's model."""
        end = 0
        for number, phase in enumerate(self.train.phases):
            end += phase.steps
            if step <= end:
                return self.in_phase(number)
        return self.in_phase(self.num_phases - 1)

    def batches(self, number: int) -> list[tuple[int, int]]:
        """Phase `number` as (global batch size, number of steps), in order."""
        if not self.train.phases:
            return [(self.train.global_batch_size, self.train.steps)]
        phase, config = self.train.phases[number], self.in_phase(number)
        if phase.batch_ramp is None:
            return [(config.train.global_batch_size, phase.steps)]
        return phase.batch_ramp.batches(config.train.global_batch_size, config.data.seq_len, phase.steps)

    def _mixed(self, mixture: dict[str, float] | None) -> tuple[SourceConfig, ...]:
        sources, names = self.data.sources, self.data.source_names
        if mixture is None:
            return sources
        numbers = {str(i): name for i, name in enumerate(names)}
        weights = {key if key in names else numbers.get(key, key): weight for key, weight in mixture.items()}
        unknown = [key for key in weights if key not in names]
        if unknown:
            raise ValueError(f"mixture names a source '{unknown[0]}'; known are {', '.join(names)}")
        if len(weights) < len(mixture):
            raise ValueError("mixture names a source twice, by name and by number")
        # Copied, not checked again: here a weight may be 0.
        return tuple(
            source.model_copy(update={"weight": weights.get(name, 0.0)})
            for name, source in zip(names, sources, strict=True)
        )


def _replaced(section: AnySection, **values: Any) -> AnySection:
    """The section with the values that are not None, checked again."""
    given = {name: value for name, value in values.items() if value is not None}
    return type(section).model_validate(dict(section) | given) if given else section
