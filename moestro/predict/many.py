"""The closed form of `step_time` for many steps at once, as NumPy arrays: for fitting constants and for searching."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.config.plan import Plan
from moestro.predict.constants import Constants
from moestro.predict.costs import KERNEL_CLASSES, Cost, StageCost, StepCost
from moestro.predict.step import units

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]
COLUMNS = (*KERNEL_CLASSES, "launches", "collectives", "in", "out", "hide_in", "hide_out")
_KERNELS = slice(0, len(KERNEL_CLASSES))
FORWARD, BACKWARD, WEIGHT, JOINED = range(4)


@dataclass(frozen=True)
class Table:
    """Passes of all stages of all steps (COLUMNS), equal ones once; what ranks do once a step; and the plans' numbers.

    Ranks are numbered through all steps, those of one step next to each other.
    """

    distinct: Floats  # [distinct passes, columns]
    row: Whole  # among them, of each pass
    kind: Whole  # FORWARD, BACKWARD, WEIGHT; JOINED: all of them as one unit
    busy: NDArray[np.bool_]  # whether it is a unit that its rank runs
    rank: Whole  # of the pass
    once: Floats  # [ranks, 3, columns]: gather, reduction, update
    first_rank: Whole  # of each step
    step: Whole  # of each rank
    mirror: Whole  # of each rank, the one that shares its stages (DualPipe), or itself
    micro_batches: Floats
    pp: Floats
    vpp: Floats
    send: Floats  # seconds from rank to rank, once through the pipeline
    schedules: tuple[str, ...]


def table(costs: Sequence[StepCost], plans: Sequence[Plan]) -> Table:
    passes, kind, busy, rank, once, first, step, mirror = [], [], [], [], [], [], [], []
    ranks = 0
    for number, (cost, plan) in enumerate(zip(costs, plans, strict=True)):
        first.append(ranks)
        for stage in cost.stages:
            for which, one, runs in _passes(stage, plan):
                passes.append(_row(one))
                kind.append(which)
                busy.append(runs)
                rank.append(ranks + stage.rank)
        once += [[_row(part) for part in of_rank] for of_rank in cost.once]
        step += [number] * plan.pp
        own = list(range(ranks, ranks + plan.pp))
        mirror += own[::-1] if plan.schedule == "dualpipe" else own
        ranks += plan.pp
    distinct, row = np.unique(np.array(passes), axis=0, return_inverse=True)
    return Table(
        distinct, row.reshape(-1), np.array(kind), np.array(busy), np.array(rank), np.array(once), np.array(first),
        np.array(step), np.array(mirror),
        np.array([cost.micro_batches for cost in costs], dtype=np.float64),
        np.array([plan.pp for plan in plans], dtype=np.float64),
        np.array([plan.vpp if plan.pp > 1 else 1 for plan in plans], dtype=np.float64),
        np.array([sum(s.send_s for s in cost.stages[: plan.pp - 1]) for cost, plan in zip(costs, plans, strict=True)]),
        tuple(plan.schedule if plan.pp > 1 else "1f1b" for plan in plans),
    )  # fmt: skip


def _passes(stage: StageCost, plan: Plan) -> list[tuple[int, Cost, bool]]:
    """(Kind, cost, whether the rank runs it as a unit) of the passes of a stage."""
    run = units(stage, plan)
    joined = len(run) == 1
    split = [(kind, cost, not joined) for kind, cost in enumerate((stage.forward, stage.backward, stage.weight))]
    return [*split, (JOINED, run[0], True)] if joined else split


def many_step_times(of: Table, constants: Constants) -> Floats:
    """Seconds of each step; equal to `step_time(...).total`."""
    compute, seconds = (values[of.row] for values in _seconds(of.distinct, constants))
    per_rank = _by_rank(of, seconds * of.busy)
    slowest = _slowest(per_rank, of)
    busy = per_rank[slowest]
    others, back, fill = (
        np.add.reduceat(ranks, of.first_rank) - ranks[slowest]
        for ranks in (per_rank, *(_by_rank(of, seconds * (of.kind == kind)) for kind in (BACKWARD, WEIGHT)))
    )
    bubble = bubbles(of.schedules, of.pp, of.vpp, others, back, fill) + 2 * of.send * constants.between
    behind_reduce = _by_rank(of, compute * ((of.kind == BACKWARD) | (of.kind == WEIGHT)))[slowest]
    behind_gather = _by_rank(of, compute * (of.kind == FORWARD))[slowest]
    gather, reduce, update = (of.once[slowest, i] for i in range(3))
    exposed = _exposed(reduce, behind_reduce, constants) + _exposed(gather, behind_gather, constants)
    return of.micro_batches * busy + bubble + exposed + _seconds(update, constants)[1] + constants.step_s


def bubbles(
    schedules: Sequence[str], pp: Floats, vpp: Floats, others: Floats, back: Floats, fill: Floats
) -> Floats:  # fmt: skip
    """step.bubble_s of many pipelines: of each, the passes of all ranks but the slowest; seconds."""
    names = np.array(schedules)
    two_ways = others + back - 2 * fill
    waits = {
        "gpipe": others,
        "zero_bubble": (others - 2 * fill) / vpp,
        "zbv": np.maximum(back / 2, back - fill),
        "dualpipev": two_ways / 2,
        "dualpipe": (pp / 2 - 1) / np.maximum(1, pp - 1) * two_ways,
    }
    found = np.select([names == name for name in waits], list(waits.values()), others / vpp)
    return np.asarray(np.maximum(0.0, found), dtype=np.float64)


def _by_rank(of: Table, values: Floats) -> Floats:
    found = np.bincount(of.rank, values, len(of.step)).astype(np.float64)
    return (found + found[of.mirror]) / 2


def _row(cost: Cost) -> list[float]:
    comm = [0.0, 0.0, 0.0, 0.0]
    for (_, between, hides), seconds in cost.collectives.items():
        comm[2 * hides + between] += seconds
    return [*(cost.kernels.get(name, 0.0) for name in KERNEL_CLASSES), cost.launches, cost.num_collectives, *comm]


def _seconds(rows: Floats, constants: Constants) -> tuple[Floats, Floats]:
    """(Kernels alone, all) of each row: Cost.compute_s and Cost.seconds."""
    compute = rows[:, _KERNELS] @ np.array([getattr(constants, name) for name in KERNEL_CLASSES])
    n = len(KERNEL_CLASSES)
    host = rows[:, n] * constants.launch_s + rows[:, n + 1] * constants.collective_host_s
    blocks = rows[:, n + 2] * constants.inside + rows[:, n + 3] * constants.between
    hides = rows[:, n + 4] * constants.inside + rows[:, n + 5] * constants.between
    hidden = np.minimum(hides, constants.hidden * compute)
    return compute, np.maximum(compute + constants.contention * hidden, host) + blocks + hides - hidden


def _exposed(rows: Floats, behind_s: Floats, constants: Constants) -> Floats:
    n = len(KERNEL_CLASSES)
    blocks = rows[:, n + 2] * constants.inside + rows[:, n + 3] * constants.between
    hides = rows[:, n + 4] * constants.inside + rows[:, n + 5] * constants.between
    return blocks + np.maximum(0.0, hides - constants.hidden * behind_s)


def _slowest(per_rank: Floats, of: Table) -> Whole:
    """The first of each step's slowest ranks."""
    highest = np.maximum.reduceat(per_rank, of.first_rank)
    places = np.arange(len(per_rank))
    places = np.where(per_rank >= highest[of.step], places, len(per_rank))
    return np.minimum.reduceat(places, of.first_rank)
