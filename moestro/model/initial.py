"""Initial weights: each a function of (seed, name) alone, so that no layout matters."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moestro.config import ModelConfig

# Vectors (and rows of vectors) that start at 0; all others start at 1, being scales.
ZEROS = ("bias", "sinks")
# Projections back into the residual stream.
OUTWARD = ("o_proj", "down_proj", "latent_out")


def is_vector(name: str, dim: int) -> bool:
    """Whether a parameter is element-wise (a norm, a scale, a bias), also when it has one for each expert."""
    return dim < 2 or name.endswith(ZEROS)


def initial_value(name: str, shape: Sequence[int], config: ModelConfig, seed: int) -> Tensor:
    """The whole parameter `name` at the start."""
    if is_vector(name, len(shape)):
        return torch.zeros(shape) if name.endswith(ZEROS) else torch.ones(shape)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    scale = config.init_scale
    if ".router." in name:
        assert config.moe is not None
        scale = config.moe.router.init_scale
    fan_in = math.prod(shape[1:]) if "conv" in name else shape[-1]
    std = (scale / fan_in) ** 0.5
    latent = config.moe is not None and config.moe.latent_size is not None
    inner = latent and ".experts." in name  # whose outward projection is latent_out
    if any(part in name for part in OUTWARD) and not inner:
        std /= (2 * config.num_layers) ** 0.5
    value = torch.empty(*shape)
    return nn.init.trunc_normal_(value, std=std, a=-2 * std, b=2 * std, generator=generator)
