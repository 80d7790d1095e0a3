"""Random numbers of routing: each a function of (sequence seed, layer) alone, whatever rank or micro-batch asks."""

import hashlib
from typing import Literal

import torch
from torch import Tensor


def uniform_noise(seeds: Tensor, layer: int, seq_len: int, width: int, like: Tensor, use: str = "") -> Tensor:
    """Uniform in [0, 1): [sequences * seq_len, width] in the dtype and on the device of `like`.

    use: keeps apart several draws of one layer.
    """
    rows = []
    for seed in seeds.tolist():
        digest = hashlib.blake2b(f"{seed}/{layer}{use}".encode(), digest_size=7).digest()
        generator = torch.Generator(device=like.device).manual_seed(int.from_bytes(digest))
        rows.append(torch.rand(seq_len, width, generator=generator, device=like.device, dtype=like.dtype))
    return torch.cat(rows)


def jitter_noise(seeds: Tensor, layer: int, seq_len: int, width: int, amount: float, like: Tensor) -> Tensor:
    """Uniform in [1 - amount, 1 + amount], [sequences * seq_len, width]."""
    return uniform_noise(seeds, layer, seq_len, width, like).mul_(2 * amount).add_(1 - amount)


def logit_noise(
    seeds: Tensor,
    layer: int,
    seq_len: int,
    width: int,
    kind: Literal["gaussian", "gumbel", "one_gumbel"],
    like: Tensor,
) -> Tensor:
    """[sequences * seq_len, width] of unit scale: normal; the difference of two Gumbel variables, which is logistic;
    or one Gumbel variable."""
    # In double precision and away from 0 and 1: one end of every transform below is infinite there.
    double = like.new_empty(0, dtype=torch.float64)
    u = uniform_noise(seeds, layer, seq_len, width, double, f"/{kind}").clamp_(1e-12, 1 - 1e-12)
    if kind == "gaussian":
        noise = torch.special.ndtri(u)
    elif kind == "gumbel":
        noise = torch.logit(u)
    else:
        noise = -torch.log(-torch.log(u))
    return noise.to(like.dtype)
