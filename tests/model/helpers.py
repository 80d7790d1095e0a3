"""Tiny models and the comparisons the tests share."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from moestro.config import ModelConfig
from moestro.model.transformer import Transformer

DENSE: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 24,
    "qk_norm": "head",
}


def model_config(moe: dict[str, Any] | None = None, **settings: Any) -> ModelConfig:
    """A tiny config; `moe` adds to four experts of width 12, top-2, with renormalised weights where that can be."""
    full = None if moe is None else {"num_experts": 4, "top_k": 2, "expert_hidden_size": 12} | moe
    if full is not None and full["num_experts"] > 1 and np.min(full["top_k"]) == 1:
        full["router"] = {"renormalize": False} | full.get("router", {})
    return ModelConfig.model_validate(DENSE | {"moe": full} | settings)


def build(config: ModelConfig, seed: int = 0, **arguments: Any) -> Transformer:
    model = Transformer(config, **arguments)
    model.init_weights(seed)
    return model


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad)


def token_ids(batch: int, seq: int, vocab: int = 40, seed: int = 0) -> Tensor:
    return torch.randint(vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


def relative(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expected value."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))
