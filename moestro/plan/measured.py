"""Layers and recomputation placed on measured memory: the integer program of `ilp` with bytes fitted to dry runs in
place of counted ones. Times stay predicted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.hardware.fits import SHARE, usable_bytes
from moestro.plan.ilp.improve import best_placement
from moestro.plan.ilp.instance import placement_of, plan_of, stages_of
from moestro.plan.ilp.stages import Extra, Layers, Stages, rank_bytes
from moestro.predict.dry_run import PLAIN, StageMemory
from moestro.predict.memory import outside_bytes
from moestro.predict.predict import device_bytes, predict_step
from moestro.predict.probe_rounds import unlike_layers
from moestro.predict.target import Target


@dataclass(frozen=True)
class MeasuredPlan:
    """rank_bytes: of each pipeline rank's tensors, by the fitted numbers. step_s: predicted pass by pass."""

    plan: Plan
    rank_bytes: tuple[float, ...]
    step_s: float


def balance_measured(
    workload: Workload, plan: Plan, target: Target, memory: StageMemory, limit_bytes: float | None = None
) -> MeasuredPlan:
    """The plan with the layers and recomputation of each stage that make its step shortest and fit by `memory`.

    Args:
        memory: of dry runs with this plan's micro-batch, degrees and ZeRO level.
        limit_bytes: of a device's tensors; None: `room_bytes`.

    Raises:
        MoestroError: the dry runs lack a number that is needed, or nothing fits.
    """
    limit = room_bytes(workload, plan, target) if limit_bytes is None else limit_bytes
    found, refusal = list[MeasuredPlan](), None
    for kinds in _kinds(workload, memory):
        stages, send_s = measured_stages(workload, plan, target, memory, limit, kinds)
        try:
            placement = best_placement(stages, send_s)
        except MoestroError as error:
            refusal = error
            continue
        placed = plan_of(plan, stages, placement, kinds)
        step_s = predict_step(workload, placed, target, exact=plan.pp > 1).step_s.value
        found.append(MeasuredPlan(placed, tuple(rank_bytes(stages, placement)), step_s))
    if not found:
        assert refusal is not None
        raise refusal
    return min(found, key=lambda one: one.step_s)


def measured_of(workload: Workload, plan: Plan, target: Target, memory: StageMemory) -> MeasuredPlan:
    """What a plan takes by the fitted numbers, with the layers and recomputation that it has.

    Raises:
        MoestroError: the dry runs lack a number that is needed.
    """
    kinds = (PLAIN, plan.recompute) if workload.trainer == "megatron" and plan.recompute != PLAIN else (plan.recompute,)
    stages, _ = measured_stages(workload, plan, target, memory, float("inf"), kinds)
    step_s = predict_step(workload, plan, target, exact=plan.pp > 1).step_s.value
    return MeasuredPlan(plan, tuple(rank_bytes(stages, placement_of(plan, stages, kinds))), step_s)


def room_bytes(workload: Workload, plan: Plan, target: Target) -> float:
    """What tensors may take of a device: 0.98 of its memory less libraries and communicators, as predictions have them.

    Raises:
        MoestroError: the device's memory is not known.
    """
    size = usable_bytes(target.place.device) if target.parts else device_bytes(target, plan.world_size)
    if size is None:
        raise MoestroError(f"the memory of {target.place.device.id} is not known: give a limit (--limit-gb)")
    return SHARE * size - sum(outside_bytes(plan, workload, target.place.device))


def measured_stages(
    workload: Workload,
    plan: Plan,
    target: Target,
    memory: StageMemory,
    limit_bytes: float,
    kinds: Sequence[str],
) -> tuple[Stages, float]:
    """`ilp.instance.stages_of` with these bytes, and the seconds of a message between stages.

    Layers unlike the others, which dry runs have on their first or last stage only, are taken as counted times what the
    others' fitted bytes are to their counted ones; on that stage the sum is as measured.
    """
    lacking = [kind for kind in kinds if kind not in memory.activation_bytes]
    if lacking:
        raise MoestroError(f"no probe had layers of '{lacking[0]}': add a stage with some to the dry run")
    stages, send_s = stages_of(workload, plan, target, [limit_bytes] * plan.pp, kinds)
    layers, unlike = _layers(stages, memory, unlike_layers(workload, plan), kinds)
    extras = [Extra(one.forward_s, one.backward_s) for one in stages.extras]
    first = _end_bytes(memory, "first", kinds, [run for run in unlike if not run.at_end])
    last = _end_bytes(memory, "last", kinds, [run for run in unlike if run.at_end])
    once = [(stages.members(rank)[0], memory.constant_bytes) for rank in range(stages.pp)]
    for stage, size in ((0, first), (len(extras) - 1, last), *once):
        extras[stage] = replace(extras[stage], held_bytes=extras[stage].held_bytes + size)
    limits = (limit_bytes,) * stages.pp
    return replace(stages, layers=layers, extras=tuple(extras), limits_bytes=limits), send_s


def _layers(
    stages: Stages, memory: StageMemory, before: int, kinds: Sequence[str]
) -> tuple[tuple[Layers, ...], list[Layers]]:  # fmt: skip
    """All runs with fitted bytes; and those of them that are unlike most: `before` layers, and those with the head."""
    usual = max((run for run in stages.layers if not run.at_end), key=lambda run: run.count)
    kept = [memory.activation_bytes[kind] for kind in kinds]
    back = memory.activation_bytes.get(PLAIN, 0.0) if memory.comes_back else 0.0
    brief = tuple(0.0 if kind == PLAIN else max(0.0, back - size) for kind, size in zip(kinds, kept, strict=True))
    ratios = [fitted / counted if counted else 1.0 for fitted, counted in zip(kept, usual.kept_bytes, strict=True)]
    runs, unlike, place = list[Layers](), list[Layers](), 0
    for run in stages.layers:
        if run.at_end or place < before:
            held = run.held_bytes * memory.layer_bytes / usual.held_bytes
            sizes = tuple(size * ratio for size, ratio in zip(run.kept_bytes, ratios, strict=True))
            unlike.append(replace(run, held_bytes=held, kept_bytes=sizes, brief_bytes=brief))
            runs.append(unlike[-1])
        else:
            runs.append(replace(run, held_bytes=memory.layer_bytes, kept_bytes=tuple(kept), brief_bytes=brief))
        place += run.count
    return tuple(runs), unlike


def _kinds(workload: Workload, memory: StageMemory) -> list[tuple[str, ...]]:
    """What one plan can do to its layers, of what was probed."""
    kinds = list(memory.activation_bytes)
    if workload.trainer == "moestro":
        return [(kind,) for kind in kinds]
    return [(PLAIN, kind) for kind in kinds if kind != PLAIN] or [(PLAIN,)]


def _end_bytes(memory: StageMemory, end: str, kinds: Sequence[str], unlike: Sequence[Layers]) -> float:
    """Without unlike layers, which are placed with the others. The end's name tells how these were recomputed."""
    for number, name in (*enumerate(f"{end} ({kind})" for kind in kinds), (0, end)):
        if name in memory.end_bytes:
            flying = memory.end_in_flight[name]
            taken = (run.count * (run.held_bytes + flying * run.kept_bytes[number]) for run in unlike)
            return memory.end_bytes[name] - sum(taken)
    raise MoestroError(f"no {end} stage with layers of '{kinds[0]}' was probed: add it to the dry run")
