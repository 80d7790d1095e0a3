"""Config as data: frozen pydantic models, TOML presets, overrides. The only place where defaults live."""

from moestro.config.attention import AttentionExpertsConfig, CCAConfig, MLAConfig, RopeConfig
from moestro.config.counts import (
    CacheBytes,
    Counts,
    Part,
    attention_params,
    cache_bytes,
    count,
    feed_forward_params,
    moe_params,
    resolved_model,
)
from moestro.config.data import DataConfig, SourceConfig, TokenizerConfig
from moestro.config.load import LoadedConfig, describe, load_config, parse_config, preset_names, to_toml
from moestro.config.media import EncoderConfig
from moestro.config.model import DepthConfig, ModelConfig, MTPConfig
from moestro.config.moe import BalanceConfig, MoEConfig, RouterConfig
from moestro.config.parallel import ParallelConfig
from moestro.config.root import Config
from moestro.config.train import OptimConfig, RunConfig, TrainConfig

__all__ = [
    "AttentionExpertsConfig",
    "BalanceConfig",
    "CCAConfig",
    "CacheBytes",
    "Config",
    "Counts",
    "DataConfig",
    "DepthConfig",
    "EncoderConfig",
    "LoadedConfig",
    "MLAConfig",
    "MTPConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "Part",
    "RopeConfig",
    "RouterConfig",
    "RunConfig",
    "SourceConfig",
    "TokenizerConfig",
    "TrainConfig",
    "attention_params",
    "cache_bytes",
    "count",
    "describe",
    "feed_forward_params",
    "load_config",
    "moe_params",
    "parse_config",
    "preset_names",
    "resolved_model",
    "to_toml",
]
