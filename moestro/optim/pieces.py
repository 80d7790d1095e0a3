"""Muon where a rank's tensors hold pieces of matrices: flat slices under ZeRO-1, shards under FSDP2."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import torch
from torch import nn

from moestro.config import OptimConfig
from moestro.optim.matrix_exchange import Matrix, MatrixExchange
from moestro.optim.muon import update_scale
from moestro.parallel.flat import FlatShard, Span
from moestro.parallel.parts import Part


class PieceMuon(torch.optim.Optimizer):
    """As `Muon`, in three parts: momentum for each element, the exchange, decay and addition for each element.

    A list of tensors and a MatrixExchange for each group of ranks. A step overwrites the gradients, which saves a copy.
    """

    def __init__(self, shares: Sequence[tuple[list[nn.Parameter], MatrixExchange]], config: OptimConfig) -> None:
        defaults = {"lr": config.muon_lr, "momentum": config.momentum, "weight_decay": config.weight_decay}
        super().__init__([{"params": tensors} for tensors, _ in shares], defaults)
        self.exchanges = [exchange for _, exchange in shares]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure: gradients are there already
        for group, exchange in zip(self.param_groups, self.exchanges, strict=True):
            updates = []
            for tensor in group["params"]:
                state = self.state[tensor]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(tensor)
                state["momentum_buffer"].lerp_(tensor.grad, 1 - group["momentum"])
                updates.append(tensor.grad.lerp_(state["momentum_buffer"], group["momentum"]))  # Nesterov
                tensor.mul_(1 - group["lr"] * group["weight_decay"])
            for i, update in exchange.orthogonalize(updates):
                matrix = exchange.matrices[i]
                piece = matrix.piece(group["params"][matrix.tensor], exchange.mine[i])
                piece.add_(update.view(piece.shape).to(piece.dtype), alpha=-group["lr"] * matrix.scale)


def matrices_of_flat(flat: FlatShard, parts: Sequence[Part]) -> Iterator[Matrix]:
    """The matrices of the parameters of `flat`, whose shard is the exchange's one tensor."""
    for index, part in enumerate(parts):
        rows, columns = part.size[-2:]
        for number in range(prod(part.size[:-2])):
            first = number * rows * columns
            spans = flat.spans(index, first, first + rows * columns)
            yield _matrix(0, part, [Span(s.rank, s.first - first, s.last - first, s.offset) for s in spans])


def matrices_of_shard(tensor: int, part: Part, axis: int, ranks: int) -> Iterator[Matrix]:
    """The matrices of a part that FSDP2 splits along `axis` into equal pieces, the last ones shorter or empty."""
    *lead, rows, columns = part.size
    chunk = -(-part.size[axis] // ranks)
    bounds = [(min(r * chunk, part.size[axis]), min((r + 1) * chunk, part.size[axis])) for r in range(ranks)]
    for number, place in enumerate(product(*(range(n) for n in lead))):
        if axis < len(lead):  # whole matrices
            rank = place[axis] // chunk
            local = list(lead)
            local[axis] = bounds[rank][1] - bounds[rank][0]
            at = 0
            for d, n in enumerate(local):
                at = at * n + place[d] - (bounds[rank][0] if d == axis else 0)
            yield _matrix(tensor, part, [Span(rank, 0, rows * columns, at * rows * columns)])
        else:
            line = columns if axis == len(lead) else rows
            spans = [
                Span(rank, low * line, high * line, number * (high - low) * line)
                for rank, (low, high) in enumerate(bounds)
                if low < high
            ]
            yield _matrix(tensor, part, spans, turned=axis == len(lead) + 1)


def _matrix(tensor: int, part: Part, spans: list[Span], turned: bool = False) -> Matrix:
    rows, columns = part.size[-2:]
    return Matrix(tensor, rows, columns, matrix_axis(part), update_scale(*part.shape[-2:]), tuple(spans), turned)


def matrix_axis(part: Part) -> int | None:
    """0 if tensor parallelism cuts the rows of the part's matrices, 1 for the columns."""
    return None if part.tp_axis is None else part.tp_axis - len(part.size) + 2
