"""What an expert is, pair by pair, and the choices of experts that the tests share."""

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from moestro.config.moe import Activation
from moestro.model.activations import num_products
from moestro.model.moe.dispatch import Dispatch, combine, dispatch
from moestro.model.moe.experts import ExpertWeights, grouped_experts, reference_experts, segmented_experts
from moestro.model.moe.router import Routing

from ..helpers import normal

NAMES = ["out", "x", "row_weight", "gate_up", "down", "gate_up_bias", "down_bias"]
KINDS: tuple[Activation, ...] = get_args(Activation)
LIMIT = 0.7  # so that many of a normal's values lie beyond it


def run(kind: str, x: Tensor, plan: Dispatch, weights: Sequence[Tensor], activation: Activation = "swiglu") -> Tensor:
    function = {"reference": reference_experts, "segmented": segmented_experts, "grouped": grouped_experts}[kind]
    return function(x, plan, ExpertWeights(*weights), activation, LIMIT)


def hidden_of(activation: Activation, products: Tensor) -> Tensor:
    """products: [W, H] of one token; the formulas once more, apart from the code's."""
    x, up = products[0], products[-1]
    if activation == "clamped_swiglu":
        x, up = x.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT) + 1
    curve = {
        "swiglu": lambda: x / (1 + (-x).exp()),
        "clamped_swiglu": lambda: x / (1 + (-1.702 * x).exp()),
        "relu2": lambda: x * x * (x > 0),
    }.get(activation, lambda: x * (1 + torch.erf(x / 2**0.5)) / 2)()
    return curve * up if len(products) == 2 else curve


def pair_by_pair(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Activation = "swiglu",
) -> Tensor:
    """[T, D]: every token's experts, one matrix-vector product at a time."""
    out = []
    for t, row in enumerate(ids.tolist()):
        total = x[t] * 0
        for k, e in enumerate(row):
            if e < len(down):
                products = gate_up[e] @ x[t] + (0 if gate_up_bias is None else gate_up_bias[e])
                result = down[e] @ hidden_of(activation, products) + (0 if down_bias is None else down_bias[e])
                total = total + weights[t, k] * result
        out.append(total)
    return torch.stack(out)


class Case:
    """Leaves x, weights, gate_up, down and, if wanted, the biases; and a choice of experts."""

    def __init__(
        self,
        ids: Tensor,
        experts: int,
        hidden: int,
        width: int,
        dtype: torch.dtype = torch.float32,
        activation: Activation = "swiglu",
        bias: bool = False,
    ) -> None:
        self.ids, self.experts, self.activation = ids, experts, activation
        products = num_products(activation)
        self.leaves = [
            normal(len(ids), hidden, seed=1, dtype=dtype, grad=True),
            normal(*ids.shape, seed=2, dtype=dtype, grad=True),
            (normal(experts, products, width, hidden, seed=3, dtype=dtype) / 2).requires_grad_(),
            (normal(experts, hidden, width, seed=4, dtype=dtype) / 2).requires_grad_(),
        ]
        if bias:
            self.leaves.append(normal(experts, products, width, seed=6, dtype=dtype, grad=True))
            self.leaves.append(normal(experts, hidden, seed=8, dtype=dtype, grad=True))
        self.upstream = normal(len(ids), hidden, seed=5, dtype=dtype)

    def plan(self, weights: Tensor) -> Dispatch:
        stats: Any = None
        return dispatch(Routing(self.ids, weights, stats), self.experts)

    def rows(self, kind: str, leaves: Sequence[Tensor] | None = None) -> Tensor:
        x, weights, *packed = leaves or self.leaves
        return run(kind, x, self.plan(weights), packed, self.activation)

    def combined(self, kind: str, leaves: Sequence[Tensor] | None = None) -> Tensor:
        x, weights, *packed = leaves or self.leaves
        if kind == "pairs":
            return pair_by_pair(x, self.ids, weights, *packed, activation=self.activation)
        return combine(self.rows(kind, leaves), self.plan(weights), len(x))

    def of(self, kind: str) -> list[Tensor]:
        """Combined output and the gradients of all leaves."""
        out = self.combined(kind)
        grads = torch.autograd.grad(out, self.leaves, self.upstream, allow_unused=True)
        return [out, *(torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, self.leaves, strict=True))]


def choose(tokens: int, experts: int, top_k: int) -> Tensor:
    return normal(tokens, experts, seed=7).argsort(1)[:, :top_k]


CHOICES = {
    "random": (choose(9, 4, 2), 4),
    "idle_expert": (choose(9, 3, 2) + 1, 5),  # experts 0 and 4 get nothing
    "all_on_one": (torch.full((9, 1), 2), 4),
    "one_expert": (torch.zeros(9, 1, dtype=torch.int64), 1),
    "every_expert": (choose(9, 4, 4), 4),
    "one_token": (choose(1, 4, 2), 4),
    "dropped_and_padding": (torch.tensor([[0, 4], [4, 4], [3, 1], [4, 0], [4, 4]]), 4),
    "nothing_kept": (torch.full((5, 2), 4), 4),
}
