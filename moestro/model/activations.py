"""What stands between the products of a feed-forward, dense or expert.

With a gate the hidden row is curve(gate) · straight(up), of two products; without one it is curve(x), of a single one:

    swiglu          silu(gate) · up                          (arXiv 2002.05202)
    geglu           gelu(gate) · up                          (arXiv 2002.05202)
    clamped_swiglu  c · sigmoid(1.702 c) · (u + 1), where c = min(gate, limit) and u = up cut to ±limit    (GPT-OSS)
    relu2           relu(x)²                                 (arXiv 2109.08668)
    gelu            gelu(x)

GELU is the exact one, x Φ(x), not its approximation by tanh.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from moestro.config.moe import GATED, Activation

STEEPNESS = 1.702  # of clamped_swiglu's sigmoid


def num_products(kind: Activation) -> int:
    """2 with a gate, 1 without."""
    return 2 if kind in GATED else 1


def split(kind: Activation, products: Tensor) -> tuple[Tensor, Tensor | None]:
    """[..., num_products · H] → gate (or the only product) [..., H] and up [..., H] or None; views."""
    if kind not in GATED:
        return products, None
    gate, up = products.chunk(2, dim=-1)
    return gate, up


def activate(kind: Activation, gate: Tensor, up: Tensor | None, limit: float) -> Tensor:
    """The hidden rows [..., H], in memory of their own."""
    hidden = curve(kind, gate, limit)
    return hidden if up is None else hidden.mul_(straight(kind, up, limit))


def curve(kind: Activation, gate: Tensor, limit: float) -> Tensor:
    """In memory of its own."""
    if kind == "swiglu":
        return F.silu(gate)
    if kind == "clamped_swiglu":  # c sigmoid(a c) = silu(a c) / a
        return F.silu(gate.clamp(max=limit).mul_(STEEPNESS)).div_(STEEPNESS)
    if kind == "relu2":
        return F.relu(gate).square_()
    return F.gelu(gate)


def curve_backward(kind: Activation, grad: Tensor, gate: Tensor, limit: float) -> Tensor:
    """grad · curve'(gate), in memory of its own."""
    if kind == "swiglu":
        result: Tensor = torch.ops.aten.silu_backward(grad, gate)
    elif kind == "clamped_swiglu":
        result = torch.ops.aten.silu_backward(grad, gate.clamp(max=limit).mul_(STEEPNESS)).mul_(gate <= limit)
    elif kind == "relu2":
        result = F.relu(gate).mul_(grad).mul_(2)
    else:
        result = torch.ops.aten.gelu_backward(grad, gate)
    return result


def straight(kind: Activation, up: Tensor, limit: float) -> Tensor:
    """May be `up` itself."""
    return up.clamp(-limit, limit).add_(1) if kind == "clamped_swiglu" else up


def straight_backward_(kind: Activation, grad: Tensor, up: Tensor, limit: float) -> Tensor:
    """grad · straight'(up), in grad's place."""
    return grad.mul_((up >= -limit) & (up <= limit)) if kind == "clamped_swiglu" else grad
