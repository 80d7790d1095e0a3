"""Who sends how much to whom in an expert all-to-all: what routing makes of it.

Tokens of all ranks are alike, so every rank sends the same shares; what differs is how much each receives. Going back
the sums are sent instead of received, and the busiest port is the same.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from moestro.config.plan import RoutingConfig
from moestro.errors import MoestroError

Floats = NDArray[np.float64]
LAYERS = 32  # orders of experts that a power law is drawn for: its mean over them is within a few percent
STEEPEST = 8.0


@lru_cache(maxsize=1024)
def hot_rank(routing: RoutingConfig, experts: int, top_k: int, ranks: int, distinct: bool = False) -> float:
    """What the busiest of `ranks` receives over the mean, on average over layers; 1 where routing is balanced.

    distinct: a rank gets one copy of a token, however many of its experts the token goes to.

    Raises:
        MoestroError: loads of another number of experts, or experts that the ranks cannot share out.
    """
    received = rank_shares(routing, experts, top_k, ranks)
    if distinct:  # of top_k draws, those that hit the rank at least once
        received = 1 - (1 - received) ** top_k
    return float((received.max(axis=1) / received.mean(axis=1)).mean())


def demand(shares: Floats, bytes_each: float) -> Floats:
    """[ranks, ranks] bytes from row to column, of ranks that each send `bytes_each` (to themselves too) by `shares`."""
    return np.tile(shares * bytes_each, (len(shares), 1))


@lru_cache(maxsize=1024)
def rank_shares(routing: RoutingConfig, experts: int, top_k: int, ranks: int) -> Floats:
    """[layers, ranks] of all (token, expert) pairs what each rank receives; rows add up to 1.

    A power law's layers are drawn (the same at every call); experts lie on the ranks in their order.

    Raises:
        MoestroError: as hot_rank.
    """
    if experts < 1 or experts % ranks:
        raise MoestroError(f"{experts} experts cannot be shared out to {ranks} ranks")
    if routing.kind == "balanced" or ranks == 1:
        return np.full((1, ranks), 1 / ranks)
    loads = _measured(routing, experts) if routing.loads else _drawn(routing, experts, top_k)
    return np.asarray(loads.reshape(len(loads), ranks, -1).sum(axis=2))


def _measured(routing: RoutingConfig, experts: int) -> Floats:
    if any(len(layer) != experts for layer in routing.loads):
        raise MoestroError(f"routing.loads are of {len(routing.loads[0])} experts; the model has {experts}")
    loads = np.array(routing.loads, dtype=np.float64)
    return np.asarray(loads / loads.sum(axis=1, keepdims=True))


def _drawn(routing: RoutingConfig, experts: int, top_k: int) -> Floats:
    """[LAYERS, experts] expected loads of a power law, each layer's experts in an order of their own."""
    alpha = routing.alpha if routing.kind == "power_law" else _steepness(routing.max_over_mean or 1.0, experts, top_k)
    loads = _loads(experts, alpha, top_k)
    draw = np.random.default_rng(0)
    return np.stack([draw.permutation(loads) for _ in range(LAYERS)])


def _loads(experts: int, alpha: float, top_k: int) -> Floats:
    """Shares of the pairs when each token draws top_k different experts by weights ∝ rank^-alpha.

    Drawing without replacement is a race of exponential clocks: by the time t at which top_k have rung on average, an
    expert of weight w is among them with 1 - exp(-w t), at most once for a token.
    """
    weights = np.arange(1, experts + 1, dtype=np.float64) ** -alpha
    low, high = 0.0, 1e9 * experts**alpha
    for _ in range(120):
        time = (low + high) / 2
        low, high = (time, high) if float(-np.expm1(-weights * time).sum()) < top_k else (low, time)
    return np.asarray(-np.expm1(-weights * high) / top_k)


def _steepness(max_over_mean: float, experts: int, top_k: int) -> float:
    """The power of the law whose busiest expert has max_over_mean times the mean, by bisection."""
    low, high = 0.0, STEEPEST
    for _ in range(50):
        alpha = (low + high) / 2
        if float(_loads(experts, alpha, top_k).max()) * experts < max_over_mean:
            low = alpha
        else:
            high = alpha
    return low
