"""BASE's assignment: optimal, balanced, the same every time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.model.moe.assignment import balanced_assignment

from ..helpers import normal
from .slow_selection import best_assignment


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 6), st.integers(1, 3), st.integers(0, 999), st.sampled_from([0.0, 1.0, 30.0]))
def test_no_balanced_assignment_scores_more(tokens: int, experts: int, seed: int, skew: float) -> None:
    scores = normal(tokens, experts, seed=seed)
    scores[:, 0] += skew
    found = balanced_assignment(scores)
    load = torch.bincount(found, minlength=experts)
    assert found.shape == (tokens,)
    assert load.max() - load.min() <= 1
    best = best_assignment(scores.tolist())
    total = sum(scores[t, e].item() for t, e in enumerate(found.tolist()))
    assert total == pytest.approx(sum(scores[t, e].item() for t, e in enumerate(best)), abs=1e-5)


def improvable(scores: list[list[float]], ids: list[int]) -> bool:
    """Whether moving tokens around a circle of experts, or along a path from an expert with one token more to one
    without, raises the sum: a circle of negative length, which Bellman's and Ford's rounds never settle."""
    experts = len(scores[0])
    load = [ids.count(e) for e in range(experts)]
    edges = {}
    for row, e in zip(scores, ids, strict=True):
        for other in range(experts):
            edges[e, other] = min(edges.get((e, other), math.inf), row[e] - row[other])
    for e in range(experts):
        if min(load) < max(load):
            edges[(experts, e) if load[e] == max(load) else (e, experts)] = 0.0
    distance = [0.0] * (experts + 1)
    for _ in range(experts + 2):
        before = list(distance)
        for (a, b), length in edges.items():
            distance[b] = min(distance[b], distance[a] + length)
    return max(x - y for x, y in zip(before, distance, strict=True)) > 1e-7


@pytest.mark.parametrize(("tokens", "experts"), [(96, 8), (101, 8), (7, 16), (130, 5)])
def test_larger_ones_cannot_be_improved(tokens: int, experts: int) -> None:
    scores = normal(tokens, experts, seed=tokens) + torch.linspace(2, -2, experts)
    found = balanced_assignment(scores)
    load = torch.bincount(found, minlength=experts)
    assert load.max() - load.min() <= 1
    assert not improvable(scores.tolist(), found.tolist())
    assert improvable(scores.tolist(), found.roll(1).tolist())


def test_ties_and_repeats() -> None:
    same = torch.zeros(10, 4)
    assert torch.equal(balanced_assignment(same), balanced_assignment(same))
    assert torch.bincount(balanced_assignment(same)).tolist() in (
        [3, 3, 2, 2],
        [2, 3, 3, 2],
        [2, 2, 3, 3],
        [3, 2, 2, 3],
    )
    copies = normal(2, 4).repeat_interleave(8, 0) * 1e6
    assert torch.bincount(balanced_assignment(copies)).tolist() == [4] * 4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_diverged_scores_come_to_an_end(value: float) -> None:
    """A step with them is refused by its loss, which needs an assignment first."""
    scores = normal(9, 3)
    scores[2] = value
    for table in (scores, torch.full((9, 3), value)):
        assert torch.bincount(balanced_assignment(table), minlength=3).tolist() == [3, 3, 3]
