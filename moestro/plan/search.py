"""Finds the best plans of a space: all of them in closed form, the best few again pass by pass."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.plan.candidates import Best, Candidate, Found, Tally, front_of, least_of, weigh
from moestro.plan.evaluate import Evaluator, Group
from moestro.plan.ilp.balance import balance
from moestro.plan.objective import DAY_S, TIME, Goal
from moestro.plan.rules import Bounds, bounds_of, rule_out
from moestro.plan.space import Family, Space, plan_of
from moestro.plan.workers import Progress, Told, in_processes
from moestro.predict.predict import device_bytes, predict_step
from moestro.predict.target import Target
from moestro.predict.words import Prediction

SIMULATED = 8  # at least, of those kept: the first by the closed form alone may be 5% slower (test_exhaustive.py)
TIE = 5e-4  # of a score: closer than any prediction is
PARALLEL_FROM = 400  # families, from which several processes are worth their start
AT_ONCE = 256  # families whose plans are sorted together


def search(
    workload: Workload, target: Target, devices: int, space: Space, keep: int = 20, exact: int = 8, workers: int = 1,
    goal: Goal = TIME, progress: Progress | None = None,
) -> Found:  # fmt: skip
    """The best plans of those that fit in memory, by default those of the shortest steps.

    keep: how many by the closed form; exact: how many to tell once they are simulated. progress: is told how many
    families of how many are done.

    Raises:
        MoestroError: no plan fits the workload and the devices, none fits in memory, or none keeps to the goal; it says
            what comes nearest.
    """
    families = list(space.families(workload))
    told = Told(len(families), progress)
    if target.host_computes or target.parts:
        found = _one_by_one(workload, target, devices, space, keep, families, goal, told)
    elif workers > 1 and len(families) >= PARALLEL_FROM:
        found = _spread(workload, target, devices, space, keep, families, workers, goal, told)
    else:
        found = sweep(workload, target, devices, space, keep, families, goal, told)
    _check(found, target, devices, goal)
    few = found.best[: max(exact, SIMULATED)]
    simulated = [(one.plan, predict_step(workload, one.plan, target, exact=True)) for one in few]
    weighed = [weigh(workload, plan, one, goal) for plan, one in simulated]
    order = sorted(range(len(weighed)), key=lambda i: (weighed[i].overrun > 1, weighed[i].score))
    if weighed[order[0]].overrun > 1:  # none of the best few keeps to the goal once it is simulated
        raise MoestroError(_too_much(weighed[order[0]], devices, goal))
    found.exact = [simulated[i] for i in _simplest_first(order, weighed)][:exact]
    return found


def _simplest_first(order: list[int], weighed: list[Candidate]) -> list[int]:
    """Of plans that no prediction tells apart from the best, that first which cuts the work among fewest ranks."""
    best = weighed[order[0]].score
    near = [i for i in order if weighed[i].overrun <= 1 and weighed[i].score - best <= TIE * abs(best)]
    first = min(near, key=lambda i: _cuts(weighed[i].plan))
    return [first, *(i for i in order if i != first)]


def _cuts(plan: Plan) -> int:
    """Ranks among which a sequence, a layer, the experts or the layers are cut."""
    return plan.cp * plan.tp * plan.ep * plan.pp


def leaner(
    found: Found, workload: Workload, target: Target, goal: Goal, most: int = 8
) -> list[tuple[Plan, Prediction]]:
    """The fastest plans with less memory than the choice, simulated as it is, so that they compare: none of them is
    beaten in both. One that turns out better than the choice becomes it."""
    simulated = dict(found.exact)
    near = [c for c in found.front if c.overrun <= 1 and c.total_bytes < found.exact[0][1].memory.total][:most]
    for plan in dict.fromkeys(c.plan for c in near):
        if plan not in simulated:
            simulated[plan] = predict_step(workload, plan, target, exact=True)
    first = weigh(workload, *found.exact[0], goal)
    weighed = [weigh(workload, plan, one, goal) for plan, one in simulated.items()]
    better = min((c for c in weighed if c.overrun <= 1), key=lambda c: c.score, default=first)
    if better.score < first.score - TIE * abs(first.score):
        rest = [pair for pair in found.exact if pair[0] != better.plan]
        found.exact[:] = [(better.plan, simulated[better.plan]), *rest]
        first = better
    smaller = [c for c in weighed if c.total_bytes < first.total_bytes and c.overrun <= 1]
    return [(c.plan, simulated[c.plan]) for c in front_of(smaller)][:most]


def balance_choice(found: Found, workload: Workload, target: Target, goal: Goal) -> bool:
    """Put the choice with its layers and recomputation shared out anew (plan.ilp) first, and say whether it is better:
    by the goal's score, within its limits."""
    plan, before = found.exact[0]
    if plan.pp == 1:
        return False
    limit = goal.limit(device_bytes(target, plan.world_size))
    kept_free = bool(goal.free_bytes or goal.free_share)
    try:
        balanced = balance(workload, plan, target, limit if kept_free else None)
    except MoestroError:  # the choice fills the last hundredths of the memory, which no placement may
        return False
    after = predict_step(workload, balanced, target, exact=True)
    weighed = weigh(workload, balanced, after, goal)
    keeps = weighed.overrun <= 1 and weighed.total_bytes <= limit  # fragments too, as of every plan of the search
    least = weigh(workload, plan, before, goal).score
    better = keeps and weighed.score < least - TIE * abs(least)
    if better:
        found.exact.insert(0, (balanced, after))
    return better


def sweep(
    workload: Workload, target: Target, devices: int, space: Space, keep: int, families: Sequence[Family],
    goal: Goal = TIME, told: Callable[[], None] | None = None, rules: bool = True,
) -> Found:  # fmt: skip
    """In this process. told: called after each family. rules: leave out what need not be evaluated (plan.rules).

    The most promising come first among some families of all sorts, so that the rules soon have something to compare
    with. Families that differ in recomputation only stay together: most of their work is the same.
    """
    limit = goal.limit(device_bytes(target, devices))
    evaluator, found = Evaluator(workload, target, devices, goal.details), Best(keep, target, devices, goal)
    alike = list(_alike(families).values())
    rounds = -(-len(families) // AT_ONCE)
    for number in range(rounds):
        groups = list[tuple[Bounds, Group]]()
        for family in chain.from_iterable(alike[number::rounds]):
            own = evaluator.groups(family, space)
            groups += zip(bounds_of(evaluator, own), own, strict=True)
            found.tally.families += 1
            if told is not None:
                told()
        for least, group in sorted(groups, key=lambda pair: pair[0].step_s):
            rule = rule_out(least, found, limit) if rules else None
            if rule is None:
                found.add(evaluator.batch(group), limit)
            else:
                found.tally.skip(rule, group.plans)
    return found.result()


def _alike(families: Iterable[Family]) -> dict[Family, list[Family]]:
    """Families that differ in recomputation only, together."""
    found: dict[Family, list[Family]] = {}
    for family in families:
        found.setdefault(family._replace(recompute="none"), []).append(family)
    return found


def _spread(
    workload: Workload, target: Target, devices: int, space: Space, keep: int, families: list[Family], workers: int,
    goal: Goal, told: Told,
) -> Found:  # fmt: skip
    """Over processes."""
    parts: list[list[Family]] = [[] for _ in range(workers)]
    for number, group in enumerate(_alike(families).values()):
        parts[number % workers] += group
    found = in_processes(partial(_part, workload, target, devices, space, keep, goal), parts, told)
    whole = Found()
    for part in found:
        whole.best += part.best
        whole.front += part.front
        whole.tally.add(part.tally)
    best = sorted(whole.best, key=lambda one: one.score)[:keep]
    faster = least_of([part.faster for part in found], lambda one: one.step_s)
    least = least_of([part.least for part in found], lambda one: one.total_bytes)
    missed = least_of([part.missed for part in found], lambda one: one.overrun)
    return replace(whole, best=best, front=front_of(whole.front), faster=faster, least=least, missed=missed)


def _part(
    workload: Workload, target: Target, devices: int, space: Space, keep: int, goal: Goal, families: list[Family],
    told: Told,
) -> Found:  # fmt: skip
    return sweep(workload, target, devices, space, keep, families, goal, told)


def _one_by_one(
    workload: Workload, target: Target, devices: int, space: Space, keep: int, families: list[Family], goal: Goal,
    told: Told,
) -> Found:  # fmt: skip
    """By `predict_step`: a CPU, whose host computes, and unlike devices have no closed form over arrays."""
    found, tally = [], Tally()
    limit = goal.limit(device_bytes(target, devices))
    for family in families:
        told()
        tally.families += 1
        for pipeline in space.pipelines(family, workload, devices):
            for variant in space.variants(family, workload, pipeline):
                plan = plan_of(family, pipeline, variant, target.place.node_size)
                tally.plans += 1
                tally.evaluated += 1
                found.append(weigh(workload, plan, predict_step(workload, plan, target), goal))
    fit = [one for one in found if one.total_bytes <= limit]
    tally.too_big = len(found) - len(fit)
    best = sorted((one for one in fit if one.overrun <= 1), key=lambda one: one.score)[:keep]
    return Found(
        best=best,
        front=front_of(fit),
        faster=least_of((one for one in found if one.total_bytes > limit), lambda one: one.step_s),
        least=least_of(found, lambda one: one.total_bytes),
        missed=least_of((one for one in fit if one.overrun > 1), lambda one: one.overrun),
        tally=tally,
    )


def _check(found: Found, target: Target, devices: int, goal: Goal) -> None:
    if found.best:
        return
    if not found.tally.plans:
        raise MoestroError(
            f"no plan of the search uses {devices} devices: their number must divide into pp · dp · cp · tp, and the "
            "batch into dp · micro-batches; change train.global_batch_size or --devices, or fix fewer of plan.*"
        )
    if found.missed is not None:
        raise MoestroError(_too_much(found.missed, devices, goal))
    there = device_bytes(target, devices) or 0.0
    assert found.least is not None
    left = there - goal.limit(there)
    if left >= there:
        raise MoestroError(
            f"--headroom: a device has {there / 1e9:.1f} GB, and {left / 1e9:.1f} GB of it cannot stay free"
        )
    kept = f", of which {left / 1e9:.1f} GB stay free," if left else ","
    raise MoestroError(
        f"none of {found.tally.plans:,} plans fits: a device has {there / 1e9:.1f} GB{kept} and the smallest plan "
        f"needs {found.least.total_bytes / 1e9:.1f} GB; take more devices, or another device"
    )


def _too_much(nearest: Candidate, devices: int, goal: Goal) -> str:
    """That nothing keeps to the deadline and the budget, and by how much the nearest plan misses them."""
    limits = []
    if goal.deadline_s is not None:
        limits.append(f"--deadline of {goal.deadline_s / DAY_S:.4g} days")
    if goal.budget_usd is not None:
        limits.append(f"--budget of ${goal.budget_usd:,.0f}")
    plan = nearest.plan
    degrees = f"pp={plan.pp} dp={plan.dp} cp={plan.cp} tp={plan.tp} ep={plan.ep}"
    return (
        f"no plan on {devices:,} devices keeps to the {' and the '.join(limits)}: the nearest takes "
        f"{nearest.overrun:.3g} times as much (a step of {nearest.step_s:.4g} s: {degrees}); train on fewer tokens, or "
        "give other --devices or a larger limit"
    )
