"""What is wrong with a step, from its numbers alone: no tensors, no ranks, no clock."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from moestro.checkpoint.manifest import StepFigures
from moestro.config.guard import GuardConfig
from moestro.train.incidents import Signal

MAD_SIGMA = 1.4826  # of a normal distribution: standard deviation over the median absolute deviation
# A spread below these is not believed: of losses as a share of their median, of logarithms of gradient norms as it is.
LEAST_LOSS_SPREAD = 0.01
LEAST_GRAD_SPREAD = 0.1
LARGEST_UPDATE = 3.0  # learning rates


class Verdict(NamedTuple):
    signal: Signal
    evidence: dict[str, Any]
    roll_back: bool  # whether the settings ask for it


def robust_sigmas(history: Sequence[float], value: float, least_spread: float) -> float:
    """How many robust standard deviations `value` lies above the median of `history`; the spread is at least
    `least_spread`. An infinite or missing value is infinitely far."""
    if not math.isfinite(value):
        return math.inf
    middle = median(history)
    spread = MAD_SIGMA * median(abs(x - middle) for x in history)
    return (value - middle) / max(spread, least_spread)


def spike(history: Sequence[StepFigures], loss: float, grad_norm: float, settings: GuardConfig) -> Verdict | None:
    """A loss or gradient norm far above those of the steps before, and above all of them.

    Text of two kinds makes losses with two modes, of which the rarer one is many deviations from the median of all;
    that a spike must also be the highest keeps such runs quiet.
    """
    if len(history) < settings.window // 2:
        return None
    losses = [figures.loss for figures in history]
    if settings.spike_sigma is not None and loss > max(losses):
        middle = median(losses)
        sigmas = robust_sigmas(losses, loss, LEAST_LOSS_SPREAD * abs(middle))
        if sigmas > settings.spike_sigma:
            evidence = {"loss": loss, "median": round(middle, 6), "sigmas": round(sigmas, 2)}
            return Verdict("loss_spike", evidence, settings.spike_action == "roll_back")
    norms = [figures.grad_norm for figures in history if figures.grad_norm > 0]
    if settings.grad_sigma is not None and norms and grad_norm > max(norms):
        logs = [math.log(norm) for norm in norms]
        sigmas = robust_sigmas(logs, math.log(grad_norm), LEAST_GRAD_SPREAD)
        if sigmas > settings.grad_sigma:
            evidence = {"grad_norm": grad_norm, "median": round(median(norms), 6), "sigmas": round(sigmas, 2)}
            return Verdict("grad_spike", evidence, settings.grad_action == "roll_back")
    return None


def deepest_valley(norms: Sequence[float]) -> tuple[int, float]:
    """The layer whose norm lies deepest below layers on both of its sides, and by what share of the lower of these two
    heights; (0, 0.0) if the norms have no valley.

    In healthy MoE runs norms rise with depth; a valley in the middle comes before a collapse, long before the loss
    shows one (SIGMA, arXiv 2512.13488). Seen on few models.
    """
    where, deepest = 0, 0.0
    for layer in range(1, len(norms) - 1):
        rim = min(max(norms[:layer]), max(norms[layer + 1 :]))
        if rim > 0 and 1 - norms[layer] / rim > deepest:
            where, deepest = layer, 1 - norms[layer] / rim
    return where, deepest


def uneven_experts(shares: Sequence[float], settings: GuardConfig) -> tuple[list[int], list[int]]:
    """Dead and hot experts of a layer by the load they had: shares of the (token, expert) pairs, which add up to 1.

    Never by a balance loss, which looks perfect at small logits whatever the load is.
    """
    relative = [share * len(shares) for share in shares]
    dead = [e for e, load in enumerate(relative) if load <= settings.dead_below]
    hot = [e for e, load in enumerate(relative) if load >= settings.hot_above]
    return dead, hot


def odd_ones(values: Sequence[int]) -> list[int]:
    """Which of several ranks hold another value than most do; all of them if no value has a majority."""
    counts = {value: values.count(value) for value in values}
    most = max(counts.values())
    if most == len(values):
        return []
    if 2 * most <= len(values):
        return list(range(len(values)))
    return [rank for rank, value in enumerate(values) if counts[value] < most]


def odd_updates(sizes: Mapping[str, float], lrs: Mapping[str, float]) -> dict[str, float]:
    """Tensors whose update is not of the size that the optimizer gives, with that size over the learning rate.

    The root mean square of an update of AdamW is about 0.2 to 1 learning rates and Muon's is scaled to 0.2 of its own
    (arXiv 2502.16982), weight decay aside; so much more than one is a defect of the state or of the arithmetic.
    """
    found = {}
    for name, size in sizes.items():
        ratio = size / lrs[name] if lrs[name] > 0 else 0.0
        if not ratio <= LARGEST_UPDATE:  # also NaN
            found[name] = ratio
    return found
