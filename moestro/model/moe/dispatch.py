"""Stages two and four: index lists that group (token, expert) pairs by expert, and the way back.

No copy of the tokens is made here. The experts read rows of the original [T, D] tensor through `row_token`, so what a
layer keeps for backward does not grow with top_k (the index lists of MoEBlaze, arXiv 2601.05296).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moestro.model.moe.router import Routing


@dataclass(frozen=True)
class Dispatch:
    """Rows 0…R-1 are grouped by expert, and by token inside an expert."""

    row_token: Tensor  # [R] int64, the token a row reads and adds to
    row_weight: Tensor  # [R] fp32, its gate weight; carries the router's gradient
    counts: Tensor  # [E] int64, rows of each expert


def dispatch(routing: Routing, num_experts: int, rows: int | None = None) -> Dispatch:
    """Sort the pairs by expert; pairs marked E (dropped or padding) get no row.

    rows: R where the caller knows it, so that the host need not wait for the device to count.
    """
    flat = routing.expert_ids.reshape(-1)
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]
    order = order[: int(counts.sum()) if rows is None else rows]
    top_k = routing.expert_ids.shape[1]
    return Dispatch(order // top_k, routing.weights.reshape(-1)[order], counts)


def combine(rows: Tensor, plan: Dispatch, tokens: int) -> Tensor:
    """Add the experts' (already weighted) rows [R, D] to their tokens: [T, D], zero where a token has no row."""
    result: Tensor = _AddToTokens.apply(rows, plan.row_token, tokens)
    return result


class _AddToTokens(torch.autograd.Function):
    """index_add into zeros. Autograd's own keeps the rows for backward, for their shape alone."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, row_token: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(row_token)
        return rows.new_zeros(tokens, rows.shape[1]).index_add_(0, row_token, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (row_token,) = ctx.saved_tensors
        return grad.index_select(0, row_token), None, None
