"""The options of grouped-query attention, each alone and those of a family together, for tests that hold for all."""

from typing import Any

import torch

from moestro.config import ModelConfig
from moestro.model.attention.gqa import GroupedQueryAttention

from ..helpers import normal

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"qk_norm": "none"},
    "norm of heads": {"qk_norm": "head", "head_dim": 6},
    "olmoe": {"qk_norm": "projection", "clip_qkv": 0.8},
    "biases": {"attention_bias": "all"},
    "sinks": {"attention_sinks": True, "num_kv_heads": 4},
    "window": {"sliding_window": 5},
    "gpt-oss": {
        "attention_bias": "qkv",
        "attention_sinks": True,
        "sliding_window": 3,
        "layer_types": ["sliding", "full"],
        "sliding_rope": {"theta": 100.0},
        "rope": {"scaling": "yarn", "factor": 4.0, "original_max_seq_len": 16, "truncate": False},
    },
    "part of a head rotated": {"head_dim": 6, "rope": {"fraction": 0.4, "theta": 100.0}},
}


def attention(config: ModelConfig, layer: int = 0, dtype: torch.dtype = torch.float32) -> GroupedQueryAttention:
    """With random weights, also where they start at zero or one."""
    module = GroupedQueryAttention(config, layer)
    for i, parameter in enumerate(module.parameters()):
        parameter.data = normal(*parameter.shape, seed=i, dtype=dtype) / (4 if parameter.dim() > 1 else 1)
    return module
