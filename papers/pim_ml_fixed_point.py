"""Logistic regression as a machine with integers computes it: for `papers/pim_ml.py`.

Rows are cut over cores. In every step a core computes the gradient of its rows from the model that the host sent it,
and the host adds up the cores' gradients, for there is no path between cores. Numbers are fixed-point: an integer v
with shift s stands for v / 2^s. The released kernels (github CMU-SAFARI/pim-ml) use a shift of 10, a table of the
sigmoid up to 20, symmetric, and cut every product of a feature and an error back to the feature's shift before it is
added; so does this. Integers of 32 bits wrap here as they do there.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

SHIFT = 10
BOUNDARY = 20
FEATURES = 16
STEPS, RATE = 150, 2.0


class SigmoidTable:
    """Sigmoid of fixed-point numbers: entries for 0 … boundary, mirrored below zero, constant outside.

    The result has the input's shift, so that 1 is 2^shift. bytes: of the table, with 16-bit entries.
    """

    def __init__(self, shift: int = SHIFT, boundary: int = BOUNDARY) -> None:
        self.one, self.last = 1 << shift, boundary << shift
        inputs = torch.arange(self.last + 1, dtype=torch.float64) / self.one
        self.entries = (torch.sigmoid(inputs) * self.one).round().to(torch.int32)
        self.bytes = 2 * len(self.entries)

    def __call__(self, x: Tensor) -> Tensor:
        """x: int32 of any shape."""
        half = self.entries[x.abs().clamp(max=self.last)]
        return torch.where(x < 0, self.one - half, half)


def table_error(shift: int, boundary: int = BOUNDARY) -> float:
    """Largest distance from the sigmoid of real inputs, rounded to the table's step first; outside of it as well."""
    table = SigmoidTable(shift, boundary)
    x = torch.linspace(-1.5 * BOUNDARY, 1.5 * BOUNDARY, 1_000_003, dtype=torch.float64)
    fixed = (x * table.one).round().to(torch.int32)
    return (table(fixed).double() / table.one - torch.sigmoid(x)).abs().max().item()


@dataclass(frozen=True)
class Numbers:
    """Bits and shifts of features and weights; without bits of features: fp32. table_shift: the sigmoid's.

    cut_products: as released, each product loses its low bits before the sum; otherwise whole ones are added.
    """

    name: str
    feature_bits: int | None = None
    feature_shift: int = SHIFT
    weight_bits: int = 32
    weight_shift: int = SHIFT
    table_shift: int = SHIFT
    cut_products: bool = True


FLOAT = Numbers("fp32")
INT32 = Numbers("int32", feature_bits=32)
INT8 = Numbers("int8", feature_bits=8, feature_shift=5, weight_bits=16)
INT8_WIDE = replace(INT8, name="int8, whole sums", cut_products=False)
INTEGERS = (INT32, INT8, INT8_WIDE)


@dataclass(frozen=True)
class Rows:
    """x: [N, FEATURES]; y: [N], 0 or 1."""

    x: Tensor
    y: Tensor


def make_rows(seed: int, count: int) -> tuple[Rows, Rows]:
    """Training and test rows of one noisy linear rule: normal features of different scales, labels drawn from it."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2 * count, FEATURES, generator=generator) * torch.linspace(0.25, 1.5, FEATURES)
    rule = torch.randn(FEATURES, generator=generator)
    y = (torch.rand(2 * count, generator=generator) < torch.sigmoid(x @ rule)).to(torch.int32)
    return Rows(x[:count], y[:count]), Rows(x[count:], y[count:])


def quantized(x: Tensor, shift: int, bits: int) -> Tensor:
    """Rounded to fixed-point and clamped to what `bits` hold; int32."""
    limit = 2 ** (bits - 1)
    return (x.double() * 2**shift).round().clamp(-limit, limit - 1).to(torch.int32)


def core_gradient(x: Tensor, y: Tensor, weights: Tensor, numbers: Numbers, table: SigmoidTable) -> Tensor:
    """The sum over a core's rows, [FEATURES]: in fp32, or int32 with the features' shift (plus the table's, uncut).

    x: [n, FEATURES], float or quantized; weights alike: [FEATURES].
    """
    if numbers.feature_bits is None:
        return x.T @ (torch.sigmoid(x @ weights) - y)
    product = (x * weights).sum(1, dtype=torch.int32)
    score = product >> (numbers.feature_shift + numbers.weight_shift - numbers.table_shift)
    error = table(score) - (y << numbers.table_shift)
    products = x * error[:, None]
    if numbers.cut_products:
        products >>= numbers.table_shift
    return products.sum(0, dtype=torch.int32)


def gradient(rows: Rows, model: Tensor, numbers: Numbers, cores: int) -> Tensor:
    """Of the whole set in fp64 or fp32, as the host has it after adding up the cores': [FEATURES], mean over rows.

    The host adds integers exactly, and floats in the order of the cores.
    """
    x, weights, table = rows.x, model, SigmoidTable(numbers.table_shift)
    if numbers.feature_bits is not None:
        x = quantized(rows.x, numbers.feature_shift, numbers.feature_bits)
        weights = quantized(model, numbers.weight_shift, numbers.weight_bits)
    parts = zip(x.chunk(cores), rows.y.chunk(cores), strict=True)
    partial = torch.stack([core_gradient(a, b, weights, numbers, table) for a, b in parts])
    if numbers.feature_bits is None:
        return partial.cumsum(0)[-1] / len(rows.y)
    shift = numbers.feature_shift + (0 if numbers.cut_products else numbers.table_shift)
    return partial.sum(0, dtype=torch.int64) / (len(rows.y) * 2.0**shift)


def train(rows: Rows, numbers: Numbers, cores: int = 4) -> Tensor:
    """The model after STEPS of gradient descent; the host keeps it in fp32. [FEATURES]."""
    model = torch.zeros(FEATURES)
    for _ in range(STEPS):
        model = model - RATE * gradient(rows, model, numbers, cores).float()
    return model


def accuracy(model: Tensor, rows: Rows) -> float:
    """Share of right signs; in fp32, so that only the training differs."""
    return ((rows.x @ model > 0) == (rows.y == 1)).float().mean().item()
