"""The dense feed-forward, with or without a gate."""

from typing import Any

import torch
from torch import Tensor, nn

from moestro.config.moe import GATED, Activation
from moestro.model.activations import activate, curve, curve_backward, straight, straight_backward_
from moestro.model.ops import Linear
from moestro.model.shards import TensorShard


class FeedForward(nn.Module):
    """down(activation(gate(x), up(x))), or down(activation(up(x))). x: [batch, seq, hidden]."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: Activation = "swiglu", limit: float = 7.0
    ) -> None:
        """limit: of "clamped_swiglu"."""
        super().__init__()
        self.activation, self.limit = activation, limit
        self.gate_proj = Linear(hidden_size, intermediate_size) if activation in GATED else None
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)
        self.tp: TensorShard | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.tp is not None:
            x = self.tp.gather(x, 1)
        if self.gate_proj is None:
            gate, up = self.up_proj(x), None
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        result: Tensor = self.down_proj(Activate.apply(gate, up, self.activation, self.limit))
        return result if self.tp is None else self.tp.scatter(result, 1)


class Activate(torch.autograd.Function):
    """curve(gate) · straight(up), keeping gate and up only: the rest is computed again in backward (a tensor less)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, kind: Activation, limit: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kind, ctx.limit = kind, limit
        return activate(kind, gate, up, limit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kind, limit = ctx.kind, ctx.limit
        gate, up = ctx.saved_tensors
        if up is None:
            return curve_backward(kind, grad, gate, limit), None, None, None
        d_gate = curve_backward(kind, grad * straight(kind, up, limit), gate, limit)
        return d_gate, straight_backward_(kind, curve(kind, gate, limit).mul_(grad), up, limit), None, None
