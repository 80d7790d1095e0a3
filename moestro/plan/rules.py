"""Plans that need not be evaluated, by what they cannot be better than: all rules are sound, none is a guess.

A group's plans all take at least `least_step_s` and `least_bytes`. Two rules follow, and both leave the search's answer
as it is, whatever it ranks by: the best few, the front of time and memory, and the fastest plan that is too big.

    memory  the least bytes are more than a device has, and one that is too big was found that is as fast
    bound   a plan that is kept needs no more bytes and no more time than the least, and the best few have lower scores

Every score is the least where time and memory are (`least_score`), so that the rules hold for all objectives; by energy
and goodput the bound is loose and leaves out less.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from moestro.config.plan import Workload
from moestro.plan.candidates import Best
from moestro.plan.evaluate import Base, Evaluator, Group, seconds_of
from moestro.plan.frame import Floats
from moestro.plan.held import logits_spared
from moestro.plan.objective import MIB, Goal, Numbers, outcome, score
from moestro.predict.constants import Constants
from moestro.predict.memory import FRAGMENTATION

Rule = Literal["memory", "bound"]
SLACK = 1 - 1e-9  # sums in another order differ in the last digits


class Bounds(NamedTuple):
    """What no plan of a group falls short of: seconds of a step, and bytes of the fullest device."""

    step_s: float
    total_bytes: float


def bounds_of(evaluator: Evaluator, groups: Sequence[Group]) -> list[Bounds]:
    """Of each group of one family."""
    if not groups:
        return []
    kinds, family = evaluator.kinds, groups[0].base.family
    assert kinds is not None
    again = family.recompute != "none"
    whole = {cut: kinds.whole(cut) for cut in (False, True)}
    partly = any(pipeline.recompute_layers is not None for pipeline in groups[0].pipelines)  # may be 0 layers
    seconds = least_step_s(groups[0], evaluator.constants, *whole[True], again and not partly)
    activations = {
        cut: least_activations(evaluator.workload, groups[0].base, *counts, again) for cut, counts in whole.items()
    }
    return [Bounds(seconds, _least_bytes(evaluator, group, whole, activations)) for group in groups]


def least_step_s(group: Group, constants: Constants, counts: Floats, twice: Floats, again: bool) -> float:
    """All layers in one unit, perfectly balanced over the pipeline, without bubble, reduction and update.

    A pass takes max(C + c·h, H) + B + X - h with h = min(X, p·C): convex in its kernels C, host H and collectives B and
    X, as long as c ≤ 1, and proportional, so that a sum of passes takes at least what their sum takes as one. The
    slowest rank takes at least the mean, and pp · dp and so micro-batches ÷ pp are the same for all pipelines.

    counts, twice: how often the model has each kind of piece, and recomputes it where `again`.
    """
    if constants.contention > 1:
        return 0.0
    forward, recompute, backward, weight = group.base.rows
    passes = counts @ (forward + backward + weight) + (twice @ recompute) * again
    one = group.pipelines[0]
    return SLACK * float(one.micro_batches / one.pp * seconds_of(passes, constants))


def least_activations(workload: Workload, base: Base, counts: Floats, twice: Floats, again: bool) -> float:
    """Bytes that a micro-batch leaves behind in the whole model."""
    saved = np.array([0.0 if piece is None else piece.saved for piece in base.own])
    spared = np.array([0.0 if piece is None else max(0.0, piece.saved - piece.kept) for piece in base.own])
    found = counts @ saved - (twice @ spared) * again - logits_spared(workload, base.family)
    return max(0.0, float(found))


def _least_bytes(
    evaluator: Evaluator, group: Group, whole: Mapping[bool, tuple[Floats, Floats]], activations: Mapping[bool, float]
) -> float:
    """The model's weights, gradients and state, and one micro-batch's activations, shared out evenly over the pipeline.

    The fullest rank has at least the mean; at its fullest moment a rank holds each of its stages' activations at least
    once (where they go to the host, those of one stage). What comes and goes in a pass is left out.

    whole, activations: of the model on one pipeline rank (False) and on several (True).
    """
    base, (still, passing, _) = group.base, FRAGMENTATION
    stages = {pp: max(one.vpp for one in group.pipelines if one.pp == pp) for pp in {p.pp for p in group.pipelines}}
    least = np.inf
    for pp, one in {pipeline.pp: pipeline for pipeline in group.pipelines}.items():
        counts, flying = whole[pp > 1][0], activations[pp > 1] / pp
        outside = evaluator.outside_bytes(base.family, one, group.variants[0])
        for variant in group.variants:
            kept = float(counts @ evaluator.kept_bytes(base, one, variant)) / pp
            here = flying / stages[pp] if variant.offload == "activations" else flying
            least = min(least, (1 + still) * kept + (1 + passing) * here + outside)
    return SLACK * least


def least_score(least: Bounds, goal: Goal, devices: int) -> float:
    """What no plan scores below that takes at least so much: the score of a run of such steps that only waits, of which
    checkpoints are nothing to write or read."""
    if goal.plain:
        return least.step_s
    none, step_s = np.zeros(1), np.array([least.step_s])
    numbers = Numbers(step_s, np.array([least.total_bytes]), none, step_s, none, none, none, none)
    return SLACK * float(score(numbers, outcome(numbers, goal, devices), goal)[0])


def rule_out(least: Bounds, best: Best, limit: float) -> Rule | None:
    """The rule by which a group can be left out, now that `best` is known. limit: bytes of a device."""
    fastest = best.front[0].step_s if best.front else np.inf
    if least.step_s < min(fastest, best.faster_s):
        return None  # it may have the fastest of those that are too big
    if least.total_bytes > limit:  # where nothing fits, what comes nearest is told
        nearer = best.least is None or least.total_bytes < best.least.total_bytes
        return "memory" if best.front or not nearer else None
    if least_score(least, best.goal, best.devices) < best.worst_score:
        return None
    size = least.total_bytes - MIB  # the front goes in steps of that
    beaten = any(one.step_s <= least.step_s and one.total_bytes <= size for one in best.front)
    return "bound" if beaten else None
