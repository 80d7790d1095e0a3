"""The key-value cache of incremental decoding."""

import torch
from torch import Tensor

from moestro.config import ModelConfig


class LayerCache:
    """Keys and values of one layer in buffers of a fixed length, filled from the left."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key, value  # [batch, kv_heads, max_len, head_dim]
        self.length = 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new entries [batch, kv_heads, new, head_dim] and return all entries so far."""
        end = self.length + key.shape[2]
        self.key[:, :, self.length : end] = key
        self.value[:, :, self.length : end] = value
        self.length = end
        return self.key[:, :, :end], self.value[:, :, :end]


class KVCache:
    """One LayerCache for each layer. `length` positions are filled."""

    def __init__(
        self, config: ModelConfig, batch: int, max_len: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        shape = (batch, config.resolved_num_kv_heads, max_len, config.resolved_head_dim)
        self.layers = [
            LayerCache(torch.empty(shape, device=device, dtype=dtype), torch.empty(shape, device=device, dtype=dtype))
            for _ in range(config.num_layers)
        ]
        self.max_len = max_len

    @property
    def length(self) -> int:
        return self.layers[0].length
