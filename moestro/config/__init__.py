"""Config as data: frozen pydantic models, TOML presets, overrides. The only place where defaults live."""

from moestro.config.counts import Counts, attention_params, count, feed_forward_params, moe_params
from moestro.config.data import DataConfig, SourceConfig, TokenizerConfig
from moestro.config.load import LoadedConfig, describe, load_config, parse_config, preset_names, to_toml
from moestro.config.model import BalanceConfig, ModelConfig, MoEConfig, RouterConfig
from moestro.config.parallel import ParallelConfig
from moestro.config.root import Config
from moestro.config.train import OptimConfig, RunConfig, TrainConfig

__all__ = [
    "BalanceConfig",
    "Config",
    "Counts",
    "DataConfig",
    "LoadedConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RouterConfig",
    "RunConfig",
    "SourceConfig",
    "TokenizerConfig",
    "TrainConfig",
    "attention_params",
    "count",
    "describe",
    "feed_forward_params",
    "load_config",
    "moe_params",
    "parse_config",
    "preset_names",
    "to_toml",
]
