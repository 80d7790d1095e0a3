"""Which parameter goes to which optimizer, and the learning rate at each step."""

import math

import torch
from torch import nn

from moestro.config import OptimConfig
from moestro.optim.muon import Muon

# Looked up or compared with every token, not multiplied like the inner matrices: AdamW fits them better.
NOT_FOR_MUON = ("embed_tokens.weight", "lm_head.weight")


def build_optimizers(model: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """AdamW alone, or Muon for the matrices inside the layers (packed experts included) and AdamW for the rest.

    Vectors (norms) are not decayed. Every parameter is in exactly one group.
    """
    matrices, tables, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            vectors.append(parameter)
        elif config.name == "adamw" or name in NOT_FOR_MUON:
            tables.append(parameter)
        else:
            matrices.append(parameter)
    groups = [
        {"params": tables, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p in tables + vectors)
    adamw = torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=fused
    )
    optimizers: list[torch.optim.Optimizer] = [adamw]
    if matrices:
        muon = Muon(matrices, config.muon_lr, config.momentum, config.weight_decay, config.newton_schulz_steps)
        optimizers.append(muon)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_learning_rate(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor


def lr_factor(step: int, steps: int, config: OptimConfig) -> float:
    """Share of the peak learning rate at `step` (from 0) of `steps`.

    Linear warm-up from peak / warmup_steps; then `cosine` to min_lr_ratio at the end, `wsd` constant until the last
    decay_fraction of the run and linear to min_lr_ratio from there, or `constant`.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    low = config.min_lr_ratio
    if config.schedule == "cosine":
        progress = (step - config.warmup_steps) / max(steps - config.warmup_steps, 1)
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    if config.schedule == "wsd":
        decay_steps = config.decay_fraction * steps
        left = (steps - step) / decay_steps if decay_steps > 0 else 1.0
        return low + (1 - low) * min(1.0, max(left, 0.0))
    return 1.0
