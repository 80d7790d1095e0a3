"""A pipeline over regions that slow lines join: which region comes first, how many stages and layers each has, and how
many micro-batches are in flight.

After DeepCEE (arXiv 2505.15536): what needs fast links stays inside a region, pipeline stages follow each other between
regions, and while a micro-batch is on its way the others go on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

from pydantic import ValidationError

from moestro.config.plan import Plan, Workload, misfits
from moestro.errors import MoestroError
from moestro.graph.count import count_step, split_layers
from moestro.hardware.fits import SHARE, usable_bytes
from moestro.plan.ilp.balance import balance
from moestro.predict.pools import Part, deep_in_flight, parts_of_ranks
from moestro.predict.predict import predict_step, price_step
from moestro.predict.target import Target
from moestro.predict.words import Prediction

MOST_STAGES = 32  # that are tried, where the plan leaves them open
MOST_ORDERS = 120  # of five regions
LOOKED_AT = 3  # orders and numbers of ranks, the fastest with even layers, whose layers are then shared out
TRIES = 60  # of layers moved one by one, that are predicted
NEAR = 1e-6  # of a step, that counts as no shorter
ROUNDS = 2  # of layers for the micro-batches in flight, and these for the layers


@dataclass(frozen=True)
class Placed:
    """One way: regions in the order of the pipeline, and the plan over them. fits: every rank, by the prediction."""

    regions: tuple[str, ...]
    target: Target
    plan: Plan
    prediction: Prediction
    fits: bool

    @property
    def step_s(self) -> float:
        return self.prediction.step_s.value

    def stages(self) -> dict[str, int]:
        """Pipeline ranks of each region."""
        own = [part.region for part in parts_of_ranks(self.plan, self.target.parts)]
        return {region: own.count(region) for region in self.regions}


@dataclass(frozen=True)
class Choice:
    """naive: regions as the cluster lists them, layers even, plain 1F1B, on as many ranks as `best`. deeper: naive with
    more micro-batches in flight. others: the best of every other order and number of ranks, fastest first."""

    naive: Placed | None
    deeper: Placed | None
    best: Placed
    others: tuple[Placed, ...]


def place_regions(
    workload: Workload, plan: Plan, target: Target, stages: Sequence[int] | None = None, limit_s: float = 1.0
) -> Choice:
    """The fastest order of regions, number of pipeline ranks, layers of each and micro-batches in flight that fit.

    Args:
        plan: all that stays as it is; its dp is what the others leave of the devices.
        stages: pipeline ranks to try; None: all up to MOST_STAGES that the pools allow.
        limit_s: for each integer program.

    Raises:
        MoestroError: the target lies in one region, no line joins the regions one after the other, no number of ranks
            suits pools and model, or nothing fits in memory.
    """
    orders = region_orders(target)
    world = sum(part.devices for part in target.parts)
    pairs: list[tuple[Placed, Placed]] = []
    refusal = ""
    for count in stages or range(len(orders[0].parts), MOST_STAGES + 1):
        try:
            base = _over(workload, plan, orders[0], count, world)
        except MoestroError as error:
            refusal = str(error)
            continue
        even = [_placed(workload, base, order) for order in orders]
        pairs += [(one, deepened(workload, one)) for one in even]
    if not pairs:
        raise MoestroError(f"no pipeline over these regions: {refusal}")
    pairs.sort(key=lambda pair: (not pair[1].fits, pair[1].step_s))
    found = [
        (*pair, _balanced(workload, pair[1], limit_s) if n < LOOKED_AT else pair[1]) for n, pair in enumerate(pairs)
    ]
    fitting = sorted((one for three in found for one in three if one.fits), key=lambda one: one.step_s)
    if not fitting:
        raise MoestroError(
            f"no pipeline over these regions fits in memory; take more ranks, a smaller micro-batch or recomputation "
            f"({found[-1][0].prediction.notes[-1]})"
        )
    best = fitting[0]
    naive = next((t for t in found if t[0].regions == _regions(target.parts) and t[0].plan.pp == best.plan.pp), None)
    others, seen = [], {(best.regions, best.plan.pp)}
    for one in fitting:
        if (one.regions, one.plan.pp) not in seen:
            seen.add((one.regions, one.plan.pp))
            others.append(one)
    return Choice(naive[0] if naive else None, naive[1] if naive else None, best, tuple(others))


def region_orders(target: Target) -> list[Target]:
    """The target with its regions in every order in which lines join them one after the other, as listed first.

    Raises:
        MoestroError: fewer than two regions, too many, or no such order.
    """
    regions = _regions(target.parts)
    if len(regions) < 2:
        raise MoestroError(
            "all devices are in one region: nothing to place over regions; `moestro place layers` shares layers out"
        )
    joined = {line.regions for line in target.lines}
    alone = [region for region in regions if not any(region in pair for pair in joined)]
    if alone:
        raise MoestroError(f"no [[wan]] joins '{alone[0]}' to another region: add one to the cluster's file")
    orders = [o for o in permutations(regions) if all(frozenset(pair) in joined for pair in pairwise(o))]
    if not orders:
        raise MoestroError(
            f"no order of the regions {', '.join(regions)} has a [[wan]] between each and the next: add a line"
        )
    return [_reordered(target, order) for order in orders[:MOST_ORDERS]]


def deepened(workload: Workload, placed: Placed) -> Placed:
    """With as many micro-batches in flight as make it shortest and fit; never slower, and no more than that takes."""
    plan = placed.plan
    if plan.schedule != "1f1b" or plan.in_flight is not None:
        return placed
    costs = price_step(count_step(workload, plan), workload, plan, placed.target)
    wanted = deep_in_flight(costs, plan, placed.target.constants_for(workload, plan.world_size))
    counts = _counts(wanted, costs.micro_batches)
    some = [placed, *(_placed(workload, plan.model_copy(update={"in_flight": held}), placed.target) for held in counts)]
    fitting = [one for one in some if one.fits]
    least = min((one.step_s for one in fitting), default=0.0)
    return next((one for one in fitting if one.step_s <= least * (1 + NEAR)), placed)


def _counts(wanted: Sequence[int], micro_batches: int) -> list[tuple[int, ...]]:
    """From 1F1B's own number to what hides all of the way between regions, in fourths, and as far beyond, which helps
    where there are few micro-batches; no rank holds fewer than the next."""
    pp, found = len(wanted), []
    for fourths in range(1, 9):
        least = [min(micro_batches, pp - rank) for rank in range(pp)]
        held = [min(micro_batches, low + (high - low) * fourths // 4) for high, low in zip(wanted, least, strict=True)]
        for rank in reversed(range(pp - 1)):
            held[rank] = max(held[rank], held[rank + 1])
        found.append(tuple(held))
    found.append((*(micro_batches,) * (pp - 1), wanted[-1]))
    return list(dict.fromkeys(found))


def _balanced(workload: Workload, placed: Placed, limit_s: float) -> Placed:
    """With layers by the speed and the memory of each stage's devices, in turns with the micro-batches in flight."""
    best, start = placed, _shared_out(workload, placed, limit_s)
    for _ in range(ROUNDS):
        better = _moved(workload, start)
        free = _placed(workload, better.plan.model_copy(update={"in_flight": None}), better.target)
        some = [one for one in (better, deepened(workload, free)) if one.fits]
        better = min(some, key=lambda one: one.step_s, default=best)
        if best.fits and better.step_s >= best.step_s * (1 - NEAR):
            return best
        best = start = better
    return best


def _shared_out(workload: Workload, placed: Placed, limit_s: float) -> Placed:
    """By the integer program, which knows the memory but not the way between regions."""
    try:
        found = _placed(workload, balance(workload, placed.plan, placed.target, limit_s=limit_s), placed.target)
    except MoestroError:  # nothing fits with so many in flight
        return placed
    return found if found.fits and (not placed.fits or found.step_s < placed.step_s) else placed


def _moved(workload: Workload, placed: Placed) -> Placed:
    """With layers moved one by one to the stage before or after, as long as the step gets shorter and it fits."""
    best, left = placed, TRIES
    while left:
        sizes = [len(layers) for layers in split_layers(workload.model.num_layers, best.plan)]
        for other in _neighbours(sizes):
            left -= 1
            one = _placed(workload, best.plan.model_copy(update={"layers_per_stage": other}), best.target)
            if (one.fits and one.step_s < best.step_s * (1 - NEAR)) or not left:
                break
        else:
            return best
        if one.fits and one.step_s < best.step_s:
            best = one
    return best


def _neighbours(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for stage in range(len(sizes) - 1):
        for by in (1, -1):
            found = [*sizes]
            found[stage] += by
            found[stage + 1] -= by
            if min(found) > 0:
                yield tuple(found)


def _over(workload: Workload, plan: Plan, target: Target, stages: int, world: int) -> Plan:
    """Raises MoestroError where the devices, the pools or the model do not allow so many ranks."""
    if world % (stages * plan.cp * plan.tp):
        raise MoestroError(f"pp · cp · tp = {stages * plan.cp * plan.tp} does not divide {world} devices")
    changes = {"pp": stages, "dp": world // (stages * plan.cp * plan.tp), "layers_per_stage": None, "in_flight": None}
    try:
        found = Plan.model_validate({**dict(plan), **changes})
    except ValidationError as error:
        raise MoestroError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error
    parts_of_ranks(found, target.parts)
    wrong = misfits(workload, found)
    if wrong:
        raise MoestroError(wrong[0])
    return found


def _placed(workload: Workload, plan: Plan, target: Target) -> Placed:
    try:
        found = predict_step(workload, plan, target, exact=True)
    except MoestroError:  # the schedule has no order for so few micro-batches
        found = predict_step(workload, plan, target)
    sizes = [usable_bytes(part.place.device) for part in parts_of_ranks(plan, target.parts)]
    fits = all(size is None or need <= SHARE * size for need, size in zip(found.memory_by_rank, sizes, strict=True))
    return Placed(_regions(target.parts), target, plan, found, fits)


def _regions(parts: Sequence[Part]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.region for part in parts))


def _reordered(target: Target, regions: Sequence[str]) -> Target:
    """Prices are in terms of the first pool's device, which changes with the order."""
    parts = tuple(part for region in regions for part in target.parts if part.region == region)
    first = parts[0]
    return replace(target, parts=parts, place=first.place, curves=first.curves, fabric=first.fabric)
