"""A stack of convolutions on one large image: its memory, its work, and its gradient tile by tile. For `gigapixel.py`.

Every layer is a convolution without padding and a ReLU; the loss is the mean square of the last layer's output. Without
padding a tile of the output depends on a piece of the image and on nothing else, so that tiles can be exact.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Layer:
    channels: int
    kernel: int
    stride: int = 1


@dataclass(frozen=True)
class Stack:
    """channels: of the image. item_bytes: of one number."""

    layers: tuple[Layer, ...]
    channels: int = 3
    item_bytes: int = 4

    def shapes(self, height: int, width: int) -> list[tuple[int, int, int]]:
        """(channels, height, width) of the image and of every layer's output."""
        shapes = [(self.channels, height, width)]
        for layer in self.layers:
            height, width = ((side - layer.kernel) // layer.stride + 1 for side in (height, width))
            shapes.append((layer.channels, height, width))
        return shapes

    def sizes(self, height: int, width: int) -> list[int]:
        """Bytes of the image and of every layer's output."""
        return [self.item_bytes * prod(shape) for shape in self.shapes(height, width)]

    @property
    def stride(self) -> int:
        """Pixels of the image from one pixel of the output to the next."""
        return prod(layer.stride for layer in self.layers)

    @property
    def field(self) -> int:
        """Pixels of the image, in one direction, that a pixel of the output sees."""
        field = 1
        for layer in reversed(self.layers):
            field = (field - 1) * layer.stride + layer.kernel
        return field

    @property
    def params(self) -> int:
        inputs = (self.channels, *(layer.channels for layer in self.layers))
        return sum(o.channels * (i * o.kernel**2 + 1) for i, o in zip(inputs, self.layers, strict=False))


def peak_bytes(stack: Stack, height: int, width: int, segment: int | None = None) -> int:
    """The most that image, activations and their gradients take in one step.

    The backward of a layer's ReLU holds all outputs so far, the gradient that arrived and the one it makes; a
    convolution's output goes as soon as its ReLU is done. Parameters are left out, and so is what a convolution uses
    inside. segment: with checkpoints after so many layers, only their inputs stay, and one segment is made again.
    """
    image, *outputs = stack.sizes(height, width)
    step = segment or len(outputs)
    peak, kept = 0, image
    for start in range(0, len(outputs), step):
        made = outputs[start : start + step]
        peak = max(peak, *(kept + sum(made[: i + 1]) + 2 * size for i, size in enumerate(made)))
        kept += made[-1]
    return peak


def resident_bytes(stack: Stack, height: int, width: int) -> int:
    """The same with what a convolution's backward on a CPU (oneDNN) takes inside.

    That is a copy, in an order of its own, of its input and one of its output's gradient.
    """
    sizes = stack.sizes(height, width)
    inside = [sum(sizes[: i + 1]) + 2 * (sizes[i] + sizes[i + 1]) for i in range(1, len(sizes) - 1)]
    return max(peak_bytes(stack, height, width), *inside)


def step_flops(stack: Stack, height: int, width: int, again: bool = False) -> int:
    """Forward and backward of all convolutions; none for the image's gradient. again: with forward made twice."""
    shapes = stack.shapes(height, width)
    total = 0
    for i, (layer, (inputs, _, _), output) in enumerate(zip(stack.layers, shapes, shapes[1:], strict=False)):
        forward = 2 * prod(output) * inputs * layer.kernel**2
        total += forward * ((2 if i == 0 else 3) + again)
    return total


Tile = tuple[slice, slice]  # rows and columns of the image that a tile of the output sees


def tiles(stack: Stack, height: int, width: int, down: int, across: int) -> Iterator[Tile]:
    """Cuts the output in down × across nearly equal parts. Raises ValueError for more parts than pixels."""
    _, rows, columns = stack.shapes(height, width)[-1]
    if not (1 <= down <= rows and 1 <= across <= columns):
        raise ValueError(f"cannot cut {rows} x {columns} pixels of output in {down} x {across} tiles")
    for row in _cuts(stack, rows, down):
        for column in _cuts(stack, columns, across):
            yield row, column


def _cuts(stack: Stack, length: int, parts: int) -> list[slice]:
    ends = [length * i // parts for i in range(parts + 1)]
    return [slice(a * stack.stride, (b - 1) * stack.stride + stack.field) for a, b in pairwise(ends)]


def build(stack: Stack, seed: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    inputs, modules = stack.channels, list[nn.Module]()
    for layer in stack.layers:
        conv = nn.Conv2d(inputs, layer.channels, layer.kernel, layer.stride)
        modules.append(nn.Sequential(conv, nn.ReLU()))
        inputs = layer.channels
    return nn.Sequential(*modules).to(dtype)


def accumulate(model: nn.Sequential, image: Tensor, count: int, segment: int | None = None) -> float:
    """Adds a piece's share of the gradient, and returns its share of the loss.

    image: [1, C, H, W]; count: pixels times channels of the whole output, over which the loss is a mean.
    """
    x = image
    for start in range(0, len(model), segment or len(model)):
        part = model[start : start + (segment or len(model))]
        x = part(x) if segment is None else checkpoint(part, x, use_reentrant=False)
    loss = x.square().sum() / count
    del x
    loss.backward()
    return loss.item()


def gradients(stack: Stack, model: nn.Sequential, image: Tensor, pieces: Sequence[Tile]) -> tuple[float, list[Tensor]]:
    """Loss and gradients, summed over pieces of the image, each of which alone is in memory with its activations."""
    model.zero_grad()
    count = prod(stack.shapes(*image.shape[2:])[-1])
    loss = sum(accumulate(model, image[:, :, rows, columns], count) for rows, columns in pieces)
    return loss, [p.grad.clone() for p in model.parameters() if p.grad is not None]
