"""The time of one step: priced passes, the pipeline around them, and what hides behind what."""

from dataclasses import dataclass, replace

from moestro.config.plan import Plan, Workload
from moestro.graph.count import count_step
from moestro.hardware.devices import Device
from moestro.predict.constants import Constants
from moestro.predict.costs import Cost, StageCost, StepCost, price, pricer_of
from moestro.predict.curves import published_curves
from moestro.predict.network import around
from moestro.predict.schedule import simulate_pipeline
from moestro.predict.warmup import orders_of
from moestro.predict.words import TimeBreakdown


@dataclass(frozen=True)
class Place:
    """Where a step runs. node_size: devices that the fast links join (a scale-up domain), not the chassis."""

    device: Device
    node_size: int

    @staticmethod
    def of(device: Device, devices_per_node: int) -> "Place":
        domain = device.links[0].devices if device.links else None
        return Place(device, max(devices_per_node, domain or 0))


def cost_step(workload: Workload, plan: Plan, place: Place) -> StepCost:
    """Count and price; no constants yet."""
    curves = published_curves(place.device.id)
    pricer = pricer_of(curves, workload.routing, plan, place.node_size, around(workload))
    return price(count_step(workload, plan), pricer)


def step_time(costs: StepCost, plan: Plan, constants: Constants, exact: bool = False) -> TimeBreakdown:
    """Put the constants in. exact: simulate the pipeline instead of the closed form."""
    forward, backward, weight, busy_s = pass_seconds(costs, plan, constants)
    sends = [stage.send_s * constants.between + stage.latency_s + stage.line_s for stage in costs.stages]
    per_rank = _by_rank(costs, plan, busy_s)
    slowest = max(range(plan.pp), key=per_rank.__getitem__)
    m, busy = costs.micro_batches, costs.micro_batches * per_rank[slowest]
    if plan.pp == 1:
        bubble = 0.0
    elif exact or plan.in_flight is not None or any(stage.line_s for stage in costs.stages):
        bubble = _simulated_s(costs, plan, forward, backward, weight, busy_s, sends) - busy
    else:
        others, back, fill = (
            sum(ranks) - ranks[slowest]
            for ranks in (per_rank, _by_rank(costs, plan, backward), _by_rank(costs, plan, weight))
        )
        bubble = bubble_s(plan, others, back, fill) + 2 * sum(sends[: plan.pp - 1])
    held = shares(plan, slowest)
    own = [(stage, m * held[stage.rank]) for stage in costs.stages if stage.rank in held]
    gather, reduce, update = costs.once[slowest]
    passes = [(cost, times) for stage, times in own for cost in (stage.forward, stage.backward, stage.weight)]
    last = sum(c.compute_s(constants) * times / m for stage, times in own for c in (stage.backward, stage.weight))
    first = sum(stage.forward.compute_s(constants) * times / m for stage, times in own)
    exposed = exposed_s(reduce, last, constants) + exposed_s(gather, first, constants)
    compute = sum(times * cost.compute_s(constants) for cost, times in passes)
    waits = [times * max(0.0, c.host_s(constants) - c.compute_s(constants)) for s, times in own for c in units(s, plan)]
    host = sum(waits) + constants.step_s
    once = update.seconds(constants)
    communication = max(0.0, busy - compute - host + constants.step_s) + exposed
    sent = [(unit, times, unit.compute_s(constants)) for stage, times in own for unit in units(stage, plan)]
    return TimeBreakdown(
        compute=compute, host=host, communication=communication, bubble=max(0.0, bubble), optimizer=once,
        by_part=_parts(passes, constants),
        by_dimension=_dimensions([*passes, (gather, 1), (reduce, 1)], constants),
        exposed_by_dimension=_exposed([*sent, (reduce, 1, last), (gather, 1, first)], constants),
        exposed_once=exposed, rank=slowest,
    )  # fmt: skip


def units(stage: StageCost, plan: Plan) -> tuple[Cost, ...]:
    """What a rank runs of a stage as one: communication of a unit may hide behind all of its computation."""
    if joins(plan.schedule, plan):
        return (_sum(stage.forward, stage.backward, stage.weight),)
    return stage.forward, stage.backward, stage.weight


def joins(schedule: str, plan: Plan) -> bool:
    """Whether `schedule` (plan.schedule, or another for the same plan) runs the forward pass of a micro-batch and the
    backward pass of another as one: DualPipe's, but not under ZeRO-3, which gathers weights between them."""
    return schedule in ("dualpipe", "dualpipev") and plan.overlap_dispatch and plan.zero != 3


def _sum(*costs: Cost) -> Cost:
    total = Cost()
    for cost in costs:
        total.add(cost, 1)
    return total


def pass_seconds(
    costs: StepCost, plan: Plan, constants: Constants
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Of each stage, one micro-batch: forward, backward, weight, and all three as the rank runs them (`units`).

    Equal stages share their costs.
    """
    seen: dict[tuple[int, int, int], tuple[float, float, float, float]] = {}
    found = []
    for stage in costs.stages:
        key = id(stage.forward), id(stage.backward), id(stage.weight)
        if key not in seen:
            f, b, w = (cost.seconds(constants) for cost in (stage.forward, stage.backward, stage.weight))
            joined = units(stage, plan)[0].seconds(constants) if joins(plan.schedule, plan) else f + b + w
            seen[key] = f, b, w, joined
        found.append(seen[key])
    forward, backward, weight, whole = (list(values) for values in zip(*found, strict=True))
    return forward, backward, weight, whole


def shares(plan: Plan, rank: int) -> dict[int, float]:
    """Whose stages a rank runs, and the share of the micro-batches that it runs them for.

    DualPipe's ranks hold the stage of their own place and that of its mirror image, each for half of the micro-batches.
    """
    if plan.schedule != "dualpipe":
        return {rank: 1.0}
    mirror = plan.pp - 1 - rank
    return {rank: 1.0} if mirror == rank else {rank: 0.5, mirror: 0.5}


def _by_rank(costs: StepCost, plan: Plan, values: list[float]) -> list[float]:
    """Of stages, added up by rank."""
    found = [0.0] * plan.pp
    for stage, value in zip(costs.stages, values, strict=True):
        found[stage.rank] += value
    if plan.schedule == "dualpipe":
        return [(a + b) / 2 for a, b in zip(found, reversed(found), strict=True)]
    return found


def exposed_s(cost: Cost, behind_s: float, constants: Constants) -> float:
    """Of collectives, the seconds that a computation of `behind_s` does not hide."""
    hides = cost.communication_s(constants, hides=True)
    return cost.communication_s(constants, hides=False) + max(0.0, hides - constants.hidden * behind_s)


def _simulated_s(
    costs: StepCost, plan: Plan, forward: list[float], backward: list[float], weight: list[float],
    busy: list[float], sends: list[float],
) -> float:  # fmt: skip
    """All passes, one by one. A line between regions passes micro-batches one after the other, which takes at least
    what the first takes through all stages and back, and the others over the line."""
    m, line_s = costs.micro_batches, max(stage.line_s for stage in costs.stages)
    orders = orders_of(plan, m)
    result = simulate_pipeline(
        plan.schedule, plan.pp, plan.vpp, m, forward, backward, weight, sends, pair_s=busy, orders=orders
    )
    if not line_s:
        return result.total_s
    first = sum(forward) + sum(backward) + sum(weight) + 2 * sum(sends[: plan.pp - 1])
    return max(result.total_s, first + (m - 1) * line_s)


def bubble_s(plan: Plan, others: float, back: float, fill: float) -> float:
    """Seconds that the slowest rank waits for computation, in closed form: a micro-batch (or a chunk of it) passes all
    others. others: one micro-batch on all other ranks; back, fill: of it gradients of inputs, and of weights, which
    fill what they can. zbv: Zero Bubble (arXiv 2401.10241, §6); dualpipe, dualpipev: DeepSeek-V3 (arXiv 2412.19437,
    table 2).
    """
    match plan.schedule:
        case "gpipe":
            return others
        case "zero_bubble":
            return max(0.0, (others - 2 * fill) / plan.vpp)
        case "zbv":
            return max(back / 2, back - fill)
        case "dualpipev":
            return max(0.0, (others + back - 2 * fill) / 2)
        case "dualpipe":
            return max(0.0, (plan.pp / 2 - 1) / (plan.pp - 1) * (others + back - 2 * fill))
    return others / plan.vpp


def _parts(passes: list[tuple[Cost, float]], constants: Constants) -> dict[str, float]:
    parts: dict[str, float] = {}
    for cost, times in passes:
        for (name, kind), seconds in cost.parts.items():
            parts[name] = parts.get(name, 0.0) + times * seconds * float(getattr(constants, kind))
    return parts


def _exposed(sent: list[tuple[Cost, float, float]], constants: Constants) -> dict[str, float]:
    """Of each dimension, the seconds that nothing hides. Collectives that may hide are hidden alike. host: waits
    for copies. sent: a cost, how often, and the seconds of computation that it may hide behind."""
    found: dict[str, float] = {}
    for cost, times, behind_s in sent:
        hides = cost.communication_s(constants, hides=True)
        open_share = 1 - min(hides, constants.hidden * behind_s) / hides if hides else 0.0
        for (dimension, between, may_hide), seconds in cost.collectives.items():
            factor = (constants.between if between else constants.inside) * (open_share if may_hide else 1.0)
            found[dimension] = found.get(dimension, 0.0) + times * seconds * factor
        copies_s = max(cost.to_host_s, cost.from_host_s)
        if copies_s:
            alone_s = replace(cost, to_host_s=0.0, from_host_s=0.0).seconds(constants)
            found["host"] = found.get("host", 0.0) + times * max(0.0, copies_s - alone_s)
    return found


def _dimensions(costs: list[tuple[Cost, float]], constants: Constants) -> dict[str, float]:
    """Seconds of all collectives of a dimension, and of copies to and from the host, hidden or not."""
    found: dict[str, float] = {}
    for cost, times in costs:
        for (dimension, between, _), seconds in cost.collectives.items():
            factor = constants.between if between else constants.inside
            found[dimension] = found.get(dimension, 0.0) + times * seconds * factor
        if cost.to_host_s or cost.from_host_s:
            found["host"] = found.get("host", 0.0) + times * (cost.to_host_s + cost.from_host_s)
    return found
