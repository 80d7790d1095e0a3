"""Products in a chosen dtype, on hardware that may lack the units for it.

Weights stay in the dtype they are stored in (fp32 while training) and products run in the activation's dtype. A CPU
without bf16 units multiplies bf16 eight to fifty times slower than fp32, so there the operands are widened, multiplied
in fp32 and the result narrowed again: the same numbers as a bf16 unit with an fp32 accumulator, at fp32's speed.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LOW_PRECISION = (torch.bfloat16, torch.float16)


@cache
def cpu_has_bf16_units() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a product of operands like `x` should be computed on x's device."""
    if x.device.type == "cpu" and x.dtype in LOW_PRECISION and not cpu_has_bf16_units():
        return torch.float32
    return x.dtype


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` in x's dtype. x: [..., in], weight: [out, in] of any float dtype; returns [..., out]."""
    if product_dtype(x) == x.dtype:
        return F.linear(x, weight.to(x.dtype))
    result: Tensor = _WidenedLinear.apply(x, weight)
    return result


class _WidenedLinear(torch.autograd.Function):
    """A low-precision product computed in fp32, keeping only the low-precision input for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x.float() @ weight.to(x.dtype).float().t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wide = grad.float()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = (wide @ weight.to(x.dtype).float()).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (wide.flatten(0, -2).t() @ x.flatten(0, -2).float()).to(weight.dtype)
        return grad_x, grad_weight


class Linear(nn.Linear):
    """`nn.Linear` whose product runs in the input's dtype (see `linear`)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out = linear(x, self.weight)
        return out if self.bias is None else out + self.bias.to(x.dtype)
