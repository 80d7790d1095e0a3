"""The time of one step: priced passes, the pipeline around them, and what hides behind what."""

from dataclasses import dataclass

from moestro.config.plan import Plan, Workload
from moestro.graph.count import count_step
from moestro.hardware.devices import Device
from moestro.predict.constants import Constants, generation, load_calibration
from moestro.predict.costs import Cost, StepCost, price, pricer_of
from moestro.predict.curves import published_curves
from moestro.predict.network import around
from moestro.predict.schedule import simulate_pipeline
from moestro.predict.warmup import orders_of
from moestro.predict.words import TimeBreakdown

# Schedules that enter the pipeline from both ends leave about a quarter of 1F1B's bubble: half the depth, and weight
# gradients fill half of the rest.
HALVED = {"zbv": 0.25, "dualpipe": 0.25, "dualpipev": 0.25}


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
    forward, backward, weight = pass_seconds(costs, constants)
    sends = [stage.send_s * constants.between + stage.latency_s + stage.line_s for stage in costs.stages]
    ranks = [stage.rank for stage in costs.stages]
    per_rank = [
        sum(forward[i] + backward[i] + weight[i] for i, r in enumerate(ranks) if r == rank) for rank in range(plan.pp)
    ]
    slowest = max(range(plan.pp), key=per_rank.__getitem__)
    busy = costs.micro_batches * per_rank[slowest]
    if plan.pp == 1:
        bubble = 0.0
    elif exact or plan.in_flight is not None or any(stage.line_s for stage in costs.stages):
        bubble = _simulated_s(costs, plan, forward, backward, weight, sends) - busy
    else:
        bubble = bubble_s(plan, weight, ranks, sends, per_rank, slowest)
    own = [stage for stage in costs.stages if stage.rank == slowest]
    gather, reduce, update = costs.once[slowest]
    passes = [cost for stage in own for cost in (stage.forward, stage.backward, stage.weight)]
    last = sum(c.compute_s(constants) for stage in own for c in (stage.backward, stage.weight))
    first = sum(stage.forward.compute_s(constants) for stage in own)
    exposed = exposed_s(reduce, last, constants) + exposed_s(gather, first, constants)
    m = costs.micro_batches
    compute = m * sum(c.compute_s(constants) for c in passes)
    host = m * sum(max(0.0, c.host_s(constants) - c.compute_s(constants)) for c in passes) + constants.step_s
    once = update.seconds(constants)
    communication = max(0.0, busy - compute - host + constants.step_s) + exposed
    return TimeBreakdown(
        compute=compute, host=host, communication=communication, bubble=max(0.0, bubble), optimizer=once,
        by_part=_parts(passes, m),
        by_dimension=_dimensions([*passes], [gather, reduce], m, constants),
    )  # fmt: skip


def pass_seconds(costs: StepCost, constants: Constants) -> tuple[list[float], list[float], list[float]]:
    """Of each stage, one micro-batch: forward, backward, weight. Equal stages share their costs."""
    all_passes = [cost for stage in costs.stages for cost in (stage.forward, stage.backward, stage.weight)]
    seconds = {id(cost): cost.seconds(constants) for cost in {id(cost): cost for cost in all_passes}.values()}
    found = [seconds[id(cost)] for cost in all_passes]
    return found[0::3], found[1::3], found[2::3]


def predict_time(
    workload: Workload, plan: Plan, place: Place, constants: Constants | None = None, exact: bool = False
) -> TimeBreakdown:
    if constants is None:
        constants = load_calibration().of(place.device.id, generation(workload))
    return step_time(cost_step(workload, plan, place), plan, constants, exact)


def exposed_s(cost: Cost, behind_s: float, constants: Constants) -> float:
    """Of collectives, the seconds that a computation of `behind_s` does not hide."""
    hides = cost.communication_s(constants, hides=True)
    return cost.communication_s(constants, hides=False) + max(0.0, hides - constants.hidden * behind_s)


def _simulated_s(
    costs: StepCost, plan: Plan, forward: list[float], backward: list[float], weight: list[float], sends: list[float]
) -> float:  # fmt: skip
    """All passes, one by one. A line between regions passes micro-batches one after the other, which takes at least
    what the first takes through all stages and back, and the others over the line."""
    m, line_s = costs.micro_batches, max(stage.line_s for stage in costs.stages)
    orders = orders_of(plan, m)
    result = simulate_pipeline(plan.schedule, plan.pp, plan.vpp, m, forward, backward, weight, sends, orders=orders)
    if not line_s:
        return result.total_s
    first = sum(forward) + sum(backward) + sum(weight) + 2 * sum(sends[: plan.pp - 1])
    return max(result.total_s, first + (m - 1) * line_s)


def bubble_s(
    plan: Plan, weight: list[float], ranks: list[int], sends: list[float], per_rank: list[float], slowest: int
) -> float:  # fmt: skip
    """Seconds that the slowest rank waits, in closed form: a micro-batch (or a chunk of it) passes all others."""
    others = sum(per_rank) - per_rank[slowest]
    wait = others if plan.schedule == "gpipe" else others / plan.vpp
    if plan.schedule == "zero_bubble":  # weight gradients fill what they can
        fill = sum(weight) - sum(w for w, rank in zip(weight, ranks, strict=True) if rank == slowest)
        wait = max(0.0, wait - 2 * fill / plan.vpp)
    return wait * HALVED.get(plan.schedule, 1.0) + 2 * sum(sends[: plan.pp - 1])


def _parts(passes: list[Cost], m: int) -> dict[str, float]:
    parts: dict[str, float] = {}
    for cost in passes:
        for name, seconds in cost.parts.items():
            parts[name] = parts.get(name, 0.0) + m * seconds
    return parts


def _dimensions(passes: list[Cost], once: list[Cost], m: int, constants: Constants) -> dict[str, float]:
    """Seconds of all collectives of a dimension, hidden or not."""
    found: dict[str, float] = {}
    for times, costs in ((m, passes), (1, once)):
        for cost in costs:
            for (dimension, between, _), seconds in cost.collectives.items():
                factor = constants.between if between else constants.inside
                found[dimension] = found.get(dimension, 0.0) + times * seconds * factor
    return found
