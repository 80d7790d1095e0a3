"""How a layer's output joins the residual stream: added, or with the learned scales and biases of ZAYA1.

Three published forms, all a plain sum at first (see `ModelConfig.residual_scaling`):

    input     α x + b + f(norm(β x + c))          arXiv 2511.17127
    output    α x + b + β f(norm(x)) + c          arXiv 2605.05365
    released  (x + b) α + (f(norm(x)) + c) β      the released weights
"""

from typing import Literal

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """One layer's join. All four vectors are [hidden]; `output_…` belong to the layer, `residual_…` to the stream."""

    def __init__(self, hidden_size: int, kind: Literal["none", "input", "output", "released"]) -> None:
        super().__init__()
        self.kind = kind
        if kind != "none":
            self.residual_scale = nn.Parameter(torch.ones(hidden_size))
            self.residual_bias = nn.Parameter(torch.zeros(hidden_size))
            self.output_scale = nn.Parameter(torch.ones(hidden_size))
            self.output_bias = nn.Parameter(torch.zeros(hidden_size))

    def enter(self, x: Tensor) -> Tensor:
        """What the layer's norm sees of the stream x [..., hidden]."""
        return x * self.output_scale.to(x.dtype) + self.output_bias.to(x.dtype) if self.kind == "input" else x

    def join(self, x: Tensor, out: Tensor) -> Tensor:
        """The stream after a layer that made `out`, in x's dtype."""
        out = out.to(x.dtype)
        if self.kind == "none":
            return x + out
        alpha, b = self.residual_scale.to(x.dtype), self.residual_bias.to(x.dtype)
        beta, c = self.output_scale.to(x.dtype), self.output_bias.to(x.dtype)
        if self.kind == "released":
            return (x + b) * alpha + (out + c) * beta
        x = x * alpha + b
        return x + out if self.kind == "input" else x + out * beta + c


class InputScale(nn.Module):
    """(embedding + bias) · scale: the first join of the "released" form, which has no layer before it."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.bias.to(x.dtype)) * self.scale.to(x.dtype)
