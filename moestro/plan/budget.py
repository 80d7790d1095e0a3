"""What fits a given device: the largest batch, context or model, by predicted memory (arXiv 2506.08935's question)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from moestro.config.counts import count
from moestro.config.plan import Plan, Workload, misfits
from moestro.errors import MoestroError
from moestro.graph.count import count_step
from moestro.hardware.fits import SHARE
from moestro.plan.alignment import Priced, price_shape
from moestro.plan.shapes import scaled
from moestro.predict.memory import memory_of
from moestro.predict.predict import device_bytes
from moestro.predict.target import Target

MOST_SEQUENCES, MOST_TOKENS = 2**16, 2**24
CONTEXT_STEP = 128  # tokens
FACTOR_STEP = 1 / 64  # of a preset's widths
LARGEST = 64.0  # times a preset's widths
Recompute = Literal["none", "selective", "block"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "block")


@dataclass(frozen=True)
class Most:
    """How far one size may go with all else as it is. size: of a micro-batch in sequences, of a context in tokens, of a
    model in parameters; 0: not even the smallest fits. more: it was not followed further."""

    what: Literal["batch", "context", "model"]
    recompute: Recompute
    size: int
    workload: Workload
    plan: Plan
    priced: Priced | None
    more: bool = False


@dataclass(frozen=True)
class Budget:
    """needed_bytes: of the run as it is. rows: of every kind of recomputation, the largest batch, context and model."""

    limit_bytes: float
    needed_bytes: float
    rows: tuple[Most, ...]


def within(workload: Workload, plan: Plan, target: Target, memory_gb: float | None = None) -> Budget:
    """memory_gb: of one device (10⁹ bytes), instead of what it has.

    Raises:
        MoestroError: nobody knows the device's memory, or the plan does not fit the workload.
    """
    there = memory_gb * 1e9 if memory_gb is not None else device_bytes(target, plan.world_size)
    if there is None or there <= 0:
        raise MoestroError(f"nobody knows the memory of {target.place.device.id}; give --memory-gb")
    wrong = misfits(workload, plan)
    if wrong:
        raise MoestroError("; ".join(wrong))
    limit, rows = SHARE * there, []
    for recompute in RECOMPUTE:
        own = plan.model_copy(update={"recompute": recompute, "recompute_layers": None})
        rows += [_batch(workload, own, target, limit), _context(workload, own, target, limit)]
        rows.append(_model(workload, own, target, limit))
    return Budget(limit, needed(workload, plan, target), tuple(rows))


def needed(workload: Workload, plan: Plan, target: Target) -> float:
    """Bytes of the fullest device, as a device that is short of memory needs them."""
    return memory_of(count_step(workload, plan), workload, plan, target.place.device)[0].needed


def _batch(workload: Workload, plan: Plan, target: Target, limit: float) -> Most:
    """Of the micro-batch; the global batch stays, or where it is smaller grows with it."""

    def of(sequences: int) -> tuple[Workload, Plan]:
        each = plan.dp * sequences
        whole = max(1, round(workload.global_batch_size / each)) * each
        changes = {"global_batch_size": whole}
        return workload.model_copy(update=changes), plan.model_copy(update={"micro_batch_size": sequences})

    return _most("batch", of, target, limit, MOST_SEQUENCES)


def _context(workload: Workload, plan: Plan, target: Target, limit: float) -> Most:
    """Of sequences one at a time, in whole steps that the ranks share out."""
    step = max(CONTEXT_STEP, 2 * plan.cp * plan.tp)

    def of(steps: int) -> tuple[Workload, Plan]:
        tokens = steps * step
        model = workload.model.model_copy(update={"max_seq_len": max(workload.model.max_seq_len, tokens)})
        batch = max(plan.dp, workload.tokens // tokens // plan.dp * plan.dp)
        changes = {"seq_len": tokens, "model": model, "global_batch_size": batch}
        return workload.model_copy(update=changes), plan.model_copy(update={"micro_batch_size": 1})

    return _most("context", of, target, limit, MOST_TOKENS // step, step)


def _model(workload: Workload, plan: Plan, target: Target, limit: float) -> Most:
    """Of this family: widths and layers scaled together, at the run's own batch and context."""
    plan = plan.model_copy(update={"layers_per_stage": None})

    def of(steps: int) -> tuple[Workload, Plan]:
        model = scaled(workload.model, steps * FACTOR_STEP, 64)
        return workload.model_copy(update={"model": model}), plan

    found = _most("model", of, target, limit, int(LARGEST / FACTOR_STEP))
    size = count(found.workload.model, found.workload.seq_len).total_params if found.size else 0
    return Most("model", found.recompute, size, found.workload, plan, found.priced, found.more)


def _most(
    what: Literal["batch", "context", "model"], of: Callable[[int], tuple[Workload, Plan]], target: Target,
    limit: float, most: int, unit: int = 1,
) -> Most:  # fmt: skip
    """The largest of 1 … most whose memory is within the limit: doubled until it is not, then by bisection."""

    def fits(size: int) -> bool:
        workload, plan = of(size)
        return not misfits(workload, plan) and needed(workload, plan, target) <= limit

    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    workload, plan = of(max(low, 1))
    priced = price_shape(workload, plan, target) if low else None
    return Most(what, plan.recompute, low * unit, workload, plan, priced, more=low == most)
