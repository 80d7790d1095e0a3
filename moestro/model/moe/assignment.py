"""Equal loads by solving an assignment (BASE layers, arXiv 2103.16716): exact and deterministic.

Minimum-cost flow on the graph of experts. Its edge i → j is the token of expert i that loses least by moving to j.
Giving every token its best expert is optimal for the loads that result. Moving one token along each edge of a
*shortest* path from one expert to another changes only the loads of its two ends, and keeps the assignment optimal for
the new loads; so experts with too much send tokens to those with room until the loads are right. When tokens do not
divide evenly, the cheapest moves first also settle which experts hold one more.

A move costs a few operations on an E x E matrix, on the host.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


def balanced_assignment(scores: Tensor) -> Tensor:
    """The expert of each token, [n] int64, that maximises Σ scores[t, expert] among all assignments with equal loads
    (differing by at most one when E does not divide n).

    scores: [n, E]; what is not finite makes some assignment, for the loss to tell of it.
    """
    table = scores.detach().to("cpu", torch.float64).nan_to_num(0.0, 0.0, 0.0).numpy()
    table = table / max(np.abs(table).max(initial=0.0), 1e-30)  # the tolerances below are for numbers near 1
    tokens, experts = table.shape
    choice = table.argmax(1) if tokens else np.zeros(0, dtype=np.int64)
    load = np.bincount(choice, minlength=experts)
    loss = np.full((experts, experts), np.inf)  # of the cheapest move from one expert to another
    mover = np.zeros((experts, experts), dtype=np.int64)  # and the token that makes it
    for expert in range(experts):
        _cheapest_moves(table, choice, expert, loss, mover)
    while path := _next_path(load, loss, tokens // experts):
        movers = [mover[a, b] for a, b in pairwise(path)]
        choice[movers] = path[1:]
        load[path[0]] -= 1
        load[path[-1]] += 1
        for expert in path:
            _cheapest_moves(table, choice, expert, loss, mover)
    return torch.from_numpy(choice).to(scores.device)


def _cheapest_moves(table: Array, choice: Integers, expert: int, loss: Array, mover: Integers) -> None:
    """Row `expert` of `loss` and `mover`, in place."""
    mine = np.flatnonzero(choice == expert)
    if len(mine) == 0:
        loss[expert] = np.inf
    else:
        cost = table[mine, expert, None] - table[mine]
        best = cost.argmin(0)
        loss[expert], mover[expert] = cost[best, np.arange(len(best))], mine[best]
    loss[expert, expert] = 0


def _next_path(load: Integers, loss: Array, floor: int) -> list[int]:
    """Experts along which tokens should move next, none when the loads are right."""
    if (load > floor + 1).any():
        return _shortest_path(loss, load > floor + 1, load <= floor)
    if (load < floor).any():
        return _shortest_path(loss, load == floor + 1, load < floor)
    return []


def _shortest_path(loss: Array, starts: Flags, ends: Flags) -> list[int]:
    """The nodes of the shortest path from one of `starts` to one of `ends` [E] bool (Bellman and Ford; there are no
    circles of negative length)."""
    length = np.where(starts, 0.0, np.inf)
    before = np.full(len(loss), -1)
    while True:
        way = length[:, None] + loss
        # A detour that only rounding makes shorter could run in circles.
        better = way.min(0) < length - 1e-12
        if not better.any():
            break
        before = np.where(better, way.argmin(0), before)
        length = np.where(better, way.min(0), length)
    path = [int(np.where(ends, length, np.inf).argmin())]
    while before[path[-1]] >= 0:
        path.append(int(before[path[-1]]))
    return path[::-1]
