"""RMSNorm with fp32 statistics."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """Scale the last axis to unit root mean square (arXiv 1910.07467), computed in fp32, returned in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":  # there PyTorch's own is a chain of operations that keeps every step for backward
            result: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
            return result
        wide = _wide(x)
        return F.rms_norm(wide, self.weight.shape, self.weight.to(wide.dtype), self.eps).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _RMSNorm(torch.autograd.Function):
    """y = x · r · w with r = 1 / sqrt(mean(x²) + eps); keeps x and r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        r = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (wide * r).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        normed = _wide(x) * r
        grad = grad.to(normed.dtype)
        grad_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        # d x = r (w g - n mean(w g n)), with n the normed x.
        scaled = grad * weight
        along = torch.linalg.vecdot(scaled, normed).unsqueeze(-1) / x.shape[-1]
        return scaled.addcmul_(normed, along, value=-1).mul_(r).to(x.dtype), grad_weight, None
