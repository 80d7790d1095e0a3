"""A plan's layers and recomputation placed anew: what pieces cost and keep becomes an integer program, and its answer a
plan again, which the prediction has the last word on."""

from collections.abc import Sequence
from dataclasses import dataclass

from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.hardware.fits import SHARE, usable_bytes
from moestro.plan.ilp.improve import best_placement
from moestro.plan.ilp.instance import placement_of, plan_of, stages_of
from moestro.plan.ilp.place import place
from moestro.plan.ilp.stages import closed_form_s
from moestro.predict.pools import parts_of_ranks
from moestro.predict.predict import device_bytes, predict_step
from moestro.predict.target import Target
from moestro.predict.words import Prediction

LIMIT_S = 5.0  # for each program
ROUNDS = 3  # with less memory each, where a prediction needs more than the program thought


@dataclass(frozen=True)
class Balanced:
    """even: the plan with layers as even as they come out and the recomputation that fits; None: none of them does.
    gap: how far the program's closed form of this plan may be above its least, where time ran out; else about 0."""

    plan: Plan
    step: Prediction
    even: tuple[Plan, Prediction] | None
    gap: float


def balanced(
    workload: Workload, plan: Plan, target: Target, limit_bytes: float | None = None, limit_s: float = LIMIT_S
) -> Balanced:
    """As balance, with what it is held against. limit_s: for each program.

    Raises:
        MoestroError: as balance.
    """
    best = balance(workload, plan, target, limit_bytes, limit_s)
    limits = _limits(workload, plan, target, limit_bytes)
    even = [(one, _predicted(workload, one, target)) for one in _even(workload, plan)]
    fitting = [(one, found) for one, found in even if not _beyond(found, limits)]
    found = min(fitting, key=lambda pair: pair[1].step_s.value, default=None)
    return Balanced(
        best, _predicted(workload, best, target), found, _gap(workload, plan, target, limits, best, limit_s)
    )


def _gap(
    workload: Workload, plan: Plan, target: Target, limits: Sequence[float], best: Plan, limit_s: float
) -> float:  # fmt: skip
    """Of the program whose ways of recomputing are the chosen plan's. With several chunks on a rank, which have no one
    closed form: none is told."""
    if plan.vpp > 1:
        return 0.0
    kinds = next((some for some in _kinds(workload) if best.recompute in some), _kinds(workload)[-1])
    try:
        stages, _ = stages_of(workload, plan, target, limits, kinds)
        bound_s = place(stages, limit_s=limit_s).bound_s
    except MoestroError:
        return 0.0
    return max(0.0, closed_form_s(stages, placement_of(best, stages, kinds)) / bound_s - 1)


def balance(
    workload: Workload, plan: Plan, target: Target, limit_bytes: float | None = None, limit_s: float = LIMIT_S
) -> Plan:
    """The plan with the layers and the recomputation of each stage that make its step shortest.

    Everything else stays as it is. The step, pass by pass, is never longer than that of the same plan with layers as
    even as they come out, whichever recomputation that takes to fit. A plan of our trainer recomputes all of its layers
    or none, since the trainer does; Megatron's recomputes so many of each stage, and either blocks or parts of them.

    Args:
        limit_bytes: that a device may need; None: 0.98 of what each has.
        limit_s: for each program.

    Raises:
        MoestroError: the plan does not fit the workload or the target; or no placement fits in memory, and it says how
            much would be needed.
    """
    limits, candidates = _limits(workload, plan, target, limit_bytes), list[Plan]()
    refusal: MoestroError | None = None
    for kinds in _kinds(workload):
        try:
            candidates += _placed(workload, plan, target, limits, kinds, limit_s)
        except MoestroError as error:
            refusal = error
    candidates += [one for one in _even(workload, plan) if not _beyond(_predicted(workload, one, target), limits)]
    if not candidates:
        raise refusal or MoestroError(
            "no placement of the layers fits by the prediction; take more stages, a smaller micro-batch or more ranks "
            "that split the optimizer's state"
        )
    return min(candidates, key=lambda one: _predicted(workload, one, target).step_s.value)


def _kinds(workload: Workload) -> tuple[tuple[str, ...], ...]:
    """What one plan can do to its layers; a trainer that recomputes all or none has plans of one kind only."""
    if workload.trainer == "moestro":
        return (("none",), ("block",))
    return (("none", "selective"), ("none", "block"))


def _even(workload: Workload, plan: Plan) -> list[Plan]:
    plain = plan.model_copy(update={"layers_per_stage": None, "recompute_layers": None, "recompute_per_stage": None})
    kinds = dict.fromkeys(kind for some in _kinds(workload) for kind in some)
    return [plain.model_copy(update={"recompute": kind}) for kind in kinds]


def _placed(
    workload: Workload, plan: Plan, target: Target, limits: Sequence[float], kinds: Sequence[str], limit_s: float
) -> list[Plan]:
    """No plan: what the program takes to fit does not, by the prediction."""
    room = list(limits)
    for _ in range(ROUNDS):
        stages, send_s = stages_of(workload, plan, target, room, kinds)
        found = plan_of(plan, stages, best_placement(stages, send_s, limit_s), kinds)
        beyond = _beyond(_predicted(workload, found, target), limits)
        if not beyond:
            return [found]
        room = [limit - beyond for limit in room]
    return []


def _predicted(workload: Workload, plan: Plan, target: Target) -> Prediction:
    """Pass by pass, where the schedule has an order."""
    try:
        return predict_step(workload, plan, target, exact=plan.pp > 1)
    except MoestroError:
        return predict_step(workload, plan, target)


def _limits(workload: Workload, plan: Plan, target: Target, limit_bytes: float | None) -> list[float]:
    """Of each pipeline rank. Raises MoestroError where nobody knows."""
    if limit_bytes is not None:
        return [limit_bytes] * plan.pp
    if target.parts:
        sizes = [usable_bytes(part.place.device) for part in parts_of_ranks(plan, target.parts)]
    else:
        sizes = [device_bytes(target, plan.world_size)] * plan.pp
    if any(size is None for size in sizes):
        raise MoestroError(f"the memory of {target.place.device.id} is not known: give a limit in bytes")
    return [SHARE * size for size in sizes if size is not None]


def _beyond(found: Prediction, limits: Sequence[float]) -> float:
    """Bytes by which a device needs more than it has. Of unlike limits, with fragmentation, which is told of all."""
    if len(set(limits)) == 1:
        return max(0.0, found.memory.needed - limits[0])
    return max(0.0, *(there - limit for there, limit in zip(found.memory_by_rank, limits, strict=True)))
