"""What the tests of the kinds of attention share: positions of packed documents, weights away from their first values,
and one attention module alone."""

from typing import Any

import torch
from torch import Tensor, nn

from moestro.config import ModelConfig
from moestro.model.attention.mask import Positions, positions_of

from ..helpers import normal


def positions_at(config: ModelConfig, lengths: list[list[int]]) -> Positions:
    """Of rows that hold documents of these lengths, one after the other; every row as long as any other."""
    places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    numbers = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    packed = any(len(row) > 1 for row in lengths)
    return positions_of(
        config.layer_type(0), config, places, torch.stack(numbers) if packed else None, past=None, shard=None
    )


def fill(module: nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    """Values for every parameter, none of them special; matrices keep the size of what they multiply."""
    for seed, p in enumerate(module.parameters()):
        size = p.shape[1:].numel() ** -0.5 if p.dim() > 1 else 0.4
        p.data = normal(*p.shape, seed=seed, dtype=dtype) * size + (1.0 if p.dim() == 1 else 0.0)
    return module


def run(module: Any, x: Tensor, positions: Any, grad: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, and for (output · grad).sum() the gradient of x and of every parameter."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    out = module(x, positions)
    (out * grad).sum().backward()
    assert x.grad is not None
    grads = {}
    for name, p in module.named_parameters():
        assert p.grad is not None, name
        grads[name] = p.grad.clone()
    return out.detach(), x.grad, grads
