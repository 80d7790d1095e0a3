"""A tiny model with plain optimizers on one process, and its tensors under their checkpoint names."""

from typing import Any

import torch
from train.helpers import model_config

from moestro.config import OptimConfig
from moestro.model.transformer import Transformer
from moestro.optim.build import build_optimizers
from moestro.optim.muon import Muon
from moestro.parallel.logical import LogicalTensor, model_tensors, whole

MOMENTS = ("exp_avg", "exp_avg_sq")
BALANCE: dict[str, Any] = {"balance": {"bias_rule": "adamw"}}
Optimizers = list[torch.optim.Optimizer]


def make(optimizer: str = "muon", seed: int = 0, **changes: Any) -> tuple[Transformer, Optimizers]:
    model = Transformer(model_config(**{"moe": BALANCE, **changes}))
    model.init_weights(seed)
    return model, build_optimizers(model, OptimConfig(name=optimizer))


def work(model: Transformer, optimizers: Optimizers, steps: int = 2) -> None:
    """Some optimizer steps on a made-up loss, and some life in the balance buffers."""
    for number in range(steps):
        ids = torch.arange(24).view(2, 12) + number
        out = model(ids)
        (model.logits(out.hidden).square().mean() + sum(s.aux_loss for s in out.router_stats)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for i, layer in enumerate(model.moe_layers()):
        for buffer in (layer.router.bias, layer.router.bias_moments, layer.router.global_load):
            buffer.add_(torch.rand(buffer.shape, generator=torch.Generator().manual_seed(i)))


def tensors(model: Transformer, optimizers: list[torch.optim.Optimizer]) -> dict[str, LogicalTensor]:
    """Weights, buffers and optimizer state, not copied; moments that are not there yet are made."""
    found = model_tensors(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            state = optimizer.state[parameter]
            if not state and isinstance(optimizer, Muon):
                state["momentum_buffer"] = torch.zeros_like(parameter)
            elif not state:
                state |= {"step": torch.tensor(0.0), **{k: torch.zeros_like(parameter) for k in MOMENTS}}
            for key, value in state.items():
                found[f"optimizer.state.{names[parameter]}.{key}"] = whole(value)
    return found
