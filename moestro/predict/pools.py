"""A step over pools of unlike devices, or of several regions: every pipeline stage lies in one pool.

Ranks take the devices in the order of the pools, and pipeline ranks are the outermost, so that stage after stage fills
one pool and then the next. A stage is priced by its own devices' curves; between regions sends take the line's time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.words import Collective, Node, StepGraph
from moestro.hardware.curves.hierarchical import Fabric
from moestro.hardware.fits import usable_bytes
from moestro.predict.constants import Constants, generation, load_calibration
from moestro.predict.costs import Cost, Pricer, StageCost, StepCost, pricer_of
from moestro.predict.curves import DeviceCurves
from moestro.predict.network import around
from moestro.predict.step import Place, pass_seconds, step_time
from moestro.predict.warmup import in_flight_over_links


@dataclass(frozen=True, eq=False)
class Part:
    """The devices of one pool."""

    name: str
    place: Place
    curves: DeviceCurves
    devices: int
    region: str = ""
    fabric: Fabric | None = None


@dataclass(frozen=True)
class Line:
    """What joins two regions; bytes_per_s: of the whole of it, in one direction."""

    regions: frozenset[str]
    bytes_per_s: float
    latency_s: float


def parts_of_ranks(plan: Plan, parts: Sequence[Part]) -> list[Part]:
    """Where each pipeline rank lies.

    Raises:
        MoestroError: a pipeline rank whose devices are of two pools, or more devices than there are.
    """
    each = plan.world_size // plan.pp
    owners = [index for index, part in enumerate(parts) for _ in range(part.devices)]
    if plan.world_size > len(owners):
        raise MoestroError(f"the plan needs {plan.world_size} devices, and the pools have {len(owners)}")
    found = []
    for rank in range(plan.pp):
        own = {owners[device] for device in range(rank * each, (rank + 1) * each)}
        if len(own) > 1:
            sizes = ", ".join(f"{part.devices} {part.name}" for part in parts)
            raise MoestroError(
                f"pipeline rank {rank} would lie in several pools ({sizes}): choose plan.pp so that the "
                f"dp · cp · tp = {each} devices of a rank divide the devices of every pool"
            )
        found.append(parts[own.pop()])
    return found


def price_parts(
    graph: StepGraph, workload: Workload, plan: Plan, parts: Sequence[Part], lines: Sequence[Line]
) -> StepCost:  # fmt: skip
    """As costs.price, each stage by its own pool. Costs are such that the constants of the first pool's device make
    them right, as far as those are factors.

    Raises:
        MoestroError: as parts_of_ranks; regions that no line joins.
    """
    own = parts_of_ranks(plan, parts)
    pricers = {part: part_pricer(part, workload, plan) for part in own}
    stages = []
    for stage, following in zip(graph.stages, (*graph.stages[1:], None), strict=True):
        part = own[stage.rank]
        forward, backward, weight = (
            _rescaled(cost, part, parts[0], workload) for cost in pricers[part].stage(stage.pieces)
        )
        send_s, latency_s, line_s = 0.0, 0.0, 0.0
        if following is not None and stage.send_bytes:
            after = own[following.rank]
            if part.region == after.region:
                send_s = max(pricers[one].network.send_s(stage.send_bytes) for one in (part, after))
            else:
                line = line_between(part.region, after.region, lines)
                latency_s = line.latency_s
                line_s = plan.world_size // plan.pp * stage.send_bytes / line.bytes_per_s
        stages.append(StageCost(stage.rank, forward, backward, weight, send_s, latency_s, line_s))
    crossed_s = max((line.latency_s for line in lines if line.regions <= {part.region for part in own}), default=0.0)
    once = []
    for rank in graph.ranks:
        part = own[rank.rank]
        costs = [pricers[part].nodes(nodes) for nodes in (rank.before, rank.gradients, rank.update)]
        costs = [_rescaled(cost, part, parts[0], workload) for cost in costs]
        _add_crossings(costs[2], rank.update, crossed_s)
        once.append((costs[0], costs[1], costs[2]))
    return StepCost(tuple(stages), tuple(once), graph.micro_batches)


def line_between(one: str, other: str, lines: Sequence[Line]) -> Line:
    """Raises MoestroError where the cluster's file names none."""
    found = next((line for line in lines if line.regions == {one, other}), None)
    if found is None:
        raise MoestroError(f"no [[wan]] joins the regions '{one}' and '{other}'; stages that follow each other need it")
    return found


def part_pricer(part: Part, workload: Workload, plan: Plan) -> Pricer:
    return pricer_of(part.curves, workload.routing, plan, part.place.node_size, around(workload, part.fabric))


def _rescaled(cost: Cost, part: Part, first: Part, workload: Workload) -> Cost:
    """In units in which the first pool's constants give what the part's own would."""
    ours, reference = part_constants(part, workload), part_constants(first, workload)
    if ours == reference:
        return replace(cost, collectives=dict(cost.collectives))
    kernels = {name: seconds * _ratio(ours, reference, name) for name, seconds in cost.kernels.items()}
    collectives = {
        key: seconds * _ratio(ours, reference, "between" if key[1] else "inside")
        for key, seconds in cost.collectives.items()
    }
    return replace(
        cost,
        kernels=kernels,
        collectives=collectives,
        launches=cost.launches * _ratio(ours, reference, "launch_s"),
        num_collectives=cost.num_collectives * _ratio(ours, reference, "collective_host_s"),
    )


def part_constants(part: Part, workload: Workload) -> Constants:
    return load_calibration().of(part.place.device.id, generation(workload))


def _ratio(ours: Constants, reference: Constants, name: str) -> float:
    there = float(getattr(reference, name))
    return float(getattr(ours, name)) / there if there else 1.0


def _add_crossings(cost: Cost, nodes: Sequence[Node], latency_s: float) -> None:
    """What all ranks agree on (norms of gradients) crosses to the farthest region and back."""
    times = sum(node.times for node in nodes if isinstance(node, Collective) and node.dimension == "world")
    if latency_s and times:
        key = ("world", True, False)
        cost.collectives[key] = cost.collectives.get(key, 0.0) + 2 * latency_s * times


def pool_notes(costs: StepCost, plan: Plan, parts: Sequence[Part], constants: Constants) -> list[str]:
    """Which ranks lie where, what the way between regions takes, and what more micro-batches in flight would save.

    None where all devices are alike and in one place.
    """
    if not parts:
        return []
    own = parts_of_ranks(plan, parts)
    notes = []
    for part in dict.fromkeys(own):
        ranks = [rank for rank, other in enumerate(own) if other is part]
        numbers = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        notes.append(f"pipeline {numbers} on {part.name}{f' in {part.region}' if part.region else ''}")
    for number, stage in enumerate(costs.stages):
        if stage.line_s:
            notes.append(
                f"stages {number} and {number + 1} are in different regions: a micro-batch takes "
                f"{stage.line_s * 1e3:.3g} ms of the line and {stage.latency_s * 1e3:.3g} ms on the way"
            )
    return notes + _deeper(costs, plan, constants)


def _deeper(costs: StepCost, plan: Plan, constants: Constants) -> list[str]:
    """How plan.in_flight would hide the way between regions, where that saves a hundredth of the step."""
    if plan.in_flight is not None or plan.schedule != "1f1b" or not any(stage.line_s for stage in costs.stages):
        return []
    held = deep_in_flight(costs, plan, constants)
    now = step_time(costs, plan, constants).total
    then = step_time(costs, plan.model_copy(update={"in_flight": held}), constants).total
    if then > 0.99 * now:
        return []
    numbers = ",".join(map(str, held))
    return [f"plan.in_flight=[{numbers}] would make it {1 - then / now:.0%} shorter, for the memory of those in flight"]


def deep_in_flight(costs: StepCost, plan: Plan, constants: Constants) -> tuple[int, ...]:
    """Micro-batches for each pipeline rank to hold, so that nobody waits for the way between regions (1F1B)."""
    forward, backward, weight, _ = pass_seconds(costs, plan, constants)
    links = [stage.send_s * constants.between + stage.latency_s + stage.line_s for stage in costs.stages]
    held = in_flight_over_links(forward, [b + w for b, w in zip(backward, weight, strict=True)], links)
    return tuple(min(count, costs.micro_batches) for count in held)


def memory_notes(by_rank: Sequence[float], plan: Plan, parts: Sequence[Part]) -> list[str]:
    """Of pipeline ranks that need more bytes than a device of their pool has."""
    notes = []
    for rank, (needed, part) in enumerate(zip(by_rank, parts_of_ranks(plan, parts), strict=True)):
        there = usable_bytes(part.place.device)
        if there is not None and needed > there:
            notes.append(
                f"does not fit: pipeline rank {rank} needs {needed / 1e9:.1f} GB, and {part.name} has {there / 1e9:.1f}"
            )
    return notes
