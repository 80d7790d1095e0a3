from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.model.moe.dispatch import Dispatch, combine, dispatch
from moestro.model.moe.router import Routing

from ..helpers import normal


def routing(ids: list[list[int]], weights: torch.Tensor | None = None) -> Routing:
    expert_ids = torch.tensor(ids, dtype=torch.int64)
    stats: Any = None
    return Routing(expert_ids, normal(*expert_ids.shape) if weights is None else weights, stats)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_rows_are_the_kept_pairs_grouped_by_expert_then_token(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 6))
    top_k = data.draw(st.integers(1, experts))
    tokens = data.draw(st.integers(1, 8))
    ids = [
        [e if data.draw(st.integers(0, 4)) else experts for e in data.draw(st.permutations(range(experts)))[:top_k]]
        for _ in range(tokens)
    ]
    weights = normal(tokens, top_k)
    plan = dispatch(routing(ids, weights), experts)
    pairs = sorted((e, t, k) for t, row in enumerate(ids) for k, e in enumerate(row) if e < experts)
    assert plan.row_token.tolist() == [t for _, t, _ in pairs]
    assert torch.equal(plan.row_weight, torch.tensor([weights[t, k].item() for _, t, k in pairs]))
    assert plan.counts.tolist() == [sum(e == expert for e, _, _ in pairs) for expert in range(experts)]


def test_a_weight_gradient_returns_to_its_pair() -> None:
    weights = normal(2, 2).requires_grad_()
    plan = dispatch(routing([[1, 0], [2, 1]], weights), 2)  # token 1's first choice was dropped
    plan.row_weight.backward(torch.tensor([10.0, 20.0, 30.0]))
    assert weights.grad is not None
    assert weights.grad.tolist() == [[20.0, 10.0], [0.0, 30.0]]


def test_combine_adds_the_rows_of_a_token() -> None:
    plan = dispatch(routing([[0, 1], [3, 3], [1, 2], [3, 0]]), 3)
    assert plan.row_token.tolist() == [0, 3, 0, 2, 2]
    rows = normal(5, 4, grad=True)
    out = combine(rows, plan, 4)
    expected = torch.stack([rows[0] + rows[2], torch.zeros(4), rows[3] + rows[4], rows[1]])
    torch.testing.assert_close(out, expected)
    upstream = normal(4, 4, seed=1)
    out.backward(upstream)
    torch.testing.assert_close(rows.grad, upstream[plan.row_token])


def test_nothing_to_dispatch() -> None:
    plan = dispatch(routing([[2, 2], [2, 2]]), 2)
    assert len(plan.row_token) == len(plan.row_weight) == 0
    assert plan.counts.tolist() == [0, 0]
    assert (combine(torch.empty(0, 3), plan, 2) == torch.zeros(2, 3)).all()


def test_the_index_lists_are_all_that_is_made() -> None:
    """Bytes of the plan do not grow with the hidden size: R tokens and weights, E counts."""
    plan = dispatch(routing([[0, 1]] * 5), 2)
    assert isinstance(plan, Dispatch)
    assert sum(t.numel() for t in vars(plan).values()) == 10 + 10 + 2
