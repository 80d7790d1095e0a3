"""The whole configuration of a run."""

from typing import Self

from pydantic import model_validator

from moestro.config.base import Section
from moestro.config.data import DataConfig
from moestro.config.model import ModelConfig
from moestro.config.train import OptimConfig, RunConfig, TrainConfig


class Config(Section):
    """Everything `moestro train` needs: five sections, each a table of the TOML file."""

    description: str = ""
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig = OptimConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.data.seq_len > self.model.max_seq_len:
            raise ValueError(f"data.seq_len = {self.data.seq_len} exceeds model.max_seq_len = {self.model.max_seq_len}")
        return self
