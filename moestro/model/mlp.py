"""The dense feed-forward: SwiGLU (arXiv 2002.05202)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moestro.model.ops import Linear
from moestro.model.shards import TensorShard


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)). x: [batch, seq, hidden]."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)
        self.tp: TensorShard | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.tp is not None:
            x = self.tp.gather(x, 1)
        result: Tensor = self.down_proj(_SiluMul.apply(self.gate_proj(x), self.up_proj(x)))
        return result if self.tp is None else self.tp.scatter(result, 1)


class _SiluMul(torch.autograd.Function):
    """silu(gate) * up, keeping gate and up only: the silu is computed again in backward (one tensor less held)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
