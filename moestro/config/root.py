"""The whole configuration of a run."""

from typing import Self

from pydantic import model_validator

from moestro.config.base import Section
from moestro.config.data import DataConfig
from moestro.config.model import ModelConfig
from moestro.config.parallel import ParallelConfig
from moestro.config.train import OptimConfig, RunConfig, TrainConfig


class Config(Section):
    """Everything `moestro train` needs: six sections, each a table of the TOML file."""

    description: str = ""
    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig = OptimConfig()
    parallel: ParallelConfig = ParallelConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.data.seq_len > self.model.max_seq_len:
            raise ValueError(f"data.seq_len = {self.data.seq_len} exceeds model.max_seq_len = {self.model.max_seq_len}")
        router = self.model.moe.router if self.model.moe else None
        if router is not None and router.group_size and self.data.seq_len % router.group_size:
            raise ValueError(
                f"data.seq_len = {self.data.seq_len} is not a multiple of model.moe.router.group_size = "
                f"{router.group_size}; groups may not straddle sequences, or results would depend on micro_batch_size"
            )
        return self
