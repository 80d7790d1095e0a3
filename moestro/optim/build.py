"""Which parameter goes to which optimizer, and the learning rate at each step."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from moestro.config import OptimConfig
from moestro.model.initial import is_vector
from moestro.optim.muon import Muon
from moestro.parallel.comm import Group

Kind = Literal["table", "vector", "matrix"]

# Looked up, compared with every token, or slid along them, not multiplied like the inner matrices: AdamW fits better.
NOT_FOR_MUON = ("embed_tokens.", "lm_head.", "conv", "position_embed", "queries")


def kind_of(name: str, parameter: Tensor, config: OptimConfig) -> Kind:
    """Vectors (norms) are not decayed; tables are AdamW's decayed parameters; matrices are Muon's."""
    if is_vector(name, parameter.dim()):
        return "vector"
    return "table" if config.name == "adamw" or any(part in name for part in NOT_FOR_MUON) else "matrix"


def build_optimizers(model: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """AdamW alone, or Muon for the matrices inside the layers (packed experts included) and AdamW for the rest.

    Every parameter is in exactly one group. For a model that one process holds; see `update.py` for the others.
    """
    kinds: dict[Kind, list[nn.Parameter]] = {"table": [], "vector": [], "matrix": []}
    for name, parameter in model.named_parameters():
        kinds[kind_of(name, parameter, config)].append(parameter)
    optimizers = build_adamw(kinds["table"], kinds["vector"], config)
    return with_peaks([*optimizers, *build_muon({None: kinds["matrix"]}, config)])


def build_adamw(
    tables: list[nn.Parameter], vectors: list[nn.Parameter], config: OptimConfig
) -> list[torch.optim.Optimizer]:
    """One optimizer, or none if there is nothing to do."""
    groups = [
        {"params": tables, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    fused = all(p.device.type in ("cpu", "cuda") for p in tables + vectors)
    groups = [g for g in groups if g["params"]]
    return [torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)] if groups else []


def build_muon(
    matrices: dict[int | None, list[nn.Parameter]], config: OptimConfig, tp: Group = None
) -> list[torch.optim.Optimizer]:
    """One optimizer for whole matrices, by the axis that tp cuts; or none if there is nothing to do."""
    groups = [{"params": parameters, "tp_axis": axis} for axis, parameters in matrices.items() if parameters]
    if not groups:
        return []
    return [Muon(groups, config.muon_lr, config.momentum, config.weight_decay, config.newton_schulz_steps, tp)]


def with_peaks(optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """The same, remembering the learning rates they have now as those that `set_learning_rate` scales."""
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
