"""A prediction of one step: counted, priced, put together, with its memory, its interval and what it leaves out."""

from dataclasses import replace

from moestro.config.plan import Plan, RoutingConfig, Workload
from moestro.errors import MoestroError
from moestro.graph.count import count_step
from moestro.graph.words import Collective, Node, StepGraph
from moestro.hardware.fits import usable_bytes
from moestro.predict.confidence import interval
from moestro.predict.constants import Calibration, Constants, generation, load_calibration
from moestro.predict.costs import Cost, Pricer, StepCost, kernel_class, price, pricer_of
from moestro.predict.memory import memory_of
from moestro.predict.network import TOLD, around
from moestro.predict.offload import offload_notes, with_copies
from moestro.predict.pools import memory_notes, pool_notes, price_parts
from moestro.predict.processes import on_processes, waits_s
from moestro.predict.program import stage_ops
from moestro.predict.step import step_time
from moestro.predict.target import Target
from moestro.predict.timeline import RankClass, Timeline, walk
from moestro.predict.words import Interval, MemoryBreakdown, Prediction, TimeBreakdown

HOST = "host"
NOTED = 0.05  # share of the FLOPs, above which it is told what their price rests on


def predict_step(
    workload: Workload, plan: Plan, target: Target, constants: Constants | None = None, exact: bool = False
) -> Prediction:
    """constants: instead of the target's. exact: simulate the pipeline pass by pass.

    Raises:
        MoestroError: the plan does not fit the workload or the target, or the device cannot compute in the precision.
    """
    if target.devices is not None and plan.world_size > target.devices:
        raise MoestroError(f"the plan needs {plan.world_size} devices, and there are {target.devices}")
    graph = count_step(workload, plan)
    costs = price_step(graph, workload, plan, target)
    constants = constants or target.constants_for(workload, plan.world_size)
    time = compose(costs, plan, target, constants, exact)
    memory, by_rank = memory_of(graph, workload, plan, target.place.device)
    devices = plan.world_size
    peak = peak_flops(workload, target)
    return Prediction(
        step_s=interval_of(time.total, workload, plan, target),
        time=time,
        memory=memory,
        memory_by_rank=by_rank,
        tokens_per_s=graph.tokens / time.total,
        tokens_per_s_per_device=graph.tokens / time.total / devices,
        mfu=None if peak is None else graph.model_flops / (time.total * devices * peak),
        profile=target.profile,
        notes=(
            *target.notes,
            *graph.notes,
            *_notes(costs, workload, target),
            *offload_notes(plan, target.place.device),
            *pool_notes(costs, plan, target.parts, constants),
            *_fit(memory, by_rank, plan, target),
        ),
    )


def predict_traced(graph: StepGraph, target: Target, constants: Constants | None = None) -> TimeBreakdown:
    """The time of a traced program's step, which has no plan that anyone knows: its ranks are taken as lying in order.

    Raises:
        MoestroError: more ranks than devices, or the device cannot compute in the precision.
    """
    if target.devices is not None and graph.world_size > target.devices:
        raise MoestroError(
            f"the program was traced for {graph.world_size} ranks, and there are {target.devices} devices"
        )
    if target.parts:
        raise MoestroError("a traced program is predicted on one kind of device in one place; name that device")
    plan = Plan(dp=graph.world_size)
    costs = price(graph, pricer_of(target.curves, RoutingConfig(), plan, target.place.node_size))
    if constants is None:
        constants = target.constants or load_calibration().of(target.place.device.id, "fused")
    return compose(costs, plan, target, constants)


def target_pricer(workload: Workload, plan: Plan, target: Target) -> Pricer:
    """Raises MoestroError for pools of unlike devices or several regions, which only price_step takes."""
    if target.parts:
        names = " and ".join(dict.fromkeys(part.name for part in target.parts))
        raise MoestroError(
            f"over {names} in several pools only a step is predicted; for this name a device, or a cluster of one kind"
        )
    beside = around(workload, target.fabric, target.optical)
    return pricer_of(target.curves, workload.routing, plan, target.place.node_size, beside)


def price_step(graph: StepGraph, workload: Workload, plan: Plan, target: Target) -> StepCost:
    """Seconds of every pass by the target's curves, without constants."""
    if target.parts:
        if plan.offload != "none":
            raise MoestroError("offloading is priced on one kind of device in one region; leave plan.offload out")
        return price_parts(graph, workload, plan, target.parts, target.lines)
    pricer = target_pricer(workload, plan, target)
    costs = with_copies(price(graph, pricer), graph, workload, plan, target.place.device)
    return on_processes(costs, graph, pricer) if target.host_computes else costs


def slowest_stage(graph: StepGraph, workload: Workload, plan: Plan, target: Target) -> Timeline:
    """The longest timeline of a stage: one micro-batch of it, and what its rank does once a step.

    Raises:
        MoestroError: the target is a CPU, whose host computes: nothing runs beside it; the plan offloads.
    """
    if target.host_computes:
        raise MoestroError("a CPU has no streams beside its host: take --perfetto, or the timeline of an accelerator")
    if plan.offload != "none":
        raise MoestroError("--timeline does not follow copies to the host; leave plan.offload out")
    constants = target.constants_for(workload, plan.world_size)
    pricer = target_pricer(workload, plan, target)

    def seconds(node: Node) -> float:
        if isinstance(node, Collective):
            sent = pricer.network.of(node)
            return sent.seconds * (constants.between if sent.between else constants.inside)
        return float(pricer.kernels.seconds(node) * getattr(constants, kernel_class(node)))

    distinct = {(stage.pieces, id(graph.ranks[stage.rank].update)): stage.index for stage in graph.stages}
    lines = (walk([RankClass("", stage_ops(graph, i, seconds, constants))])[0] for i in distinct.values())
    return max(lines, key=lambda line: line.total_s)


def compose(costs: StepCost, plan: Plan, target: Target, constants: Constants, exact: bool = False) -> TimeBreakdown:
    """The step with constants put in; parts scaled so that they add up to `compute`."""
    if target.host_computes:
        costs = _with_host(costs, constants)
    time = step_time(costs, plan, constants, exact)
    if target.host_computes:
        time = replace(time, bubble=waits_s(time, plan.pp, target.turns(plan.world_size)))
    parts = dict(time.by_part)
    host = parts.pop(HOST, 0.0)
    compute = max(0.0, time.compute - host)
    raw = sum(parts.values())
    scaled = {name: seconds * compute / raw for name, seconds in parts.items()} if raw else {}
    return replace(time, compute=compute, host=time.host + host, by_part=scaled)


def peak_flops(workload: Workload, target: Target) -> float | None:
    """Of one device, in the precision that MFU is told in: 8 and 4 bits count by the peak of bf16, as is usual. Of
    unlike devices the mean."""
    if target.peak_flops is not None:
        return target.peak_flops
    precision = workload.precision if workload.precision in ("fp32", "tf32", "fp16") else "bf16"
    if not target.parts:
        return target.place.device.peak_flops(precision)
    peaks = [(part.place.device.peak_flops(precision), part.devices) for part in target.parts]
    known = [(peak, devices) for peak, devices in peaks if peak is not None]
    return sum(p * n for p, n in known) / sum(n for _, n in known) if len(known) == len(peaks) else None


def device_bytes(target: Target, ranks: int) -> float | None:
    """Memory that one rank can use. Processes of one CPU share what it has."""
    if target.memory_bytes is not None:
        return target.memory_bytes / (ranks if target.host_computes else 1)
    if target.parts:  # of the smallest
        sizes = [usable_bytes(part.place.device) for part in target.parts]
        return min((size for size in sizes if size is not None), default=None)
    return usable_bytes(target.place.device)


def interval_of(step_s: float, workload: Workload, plan: Plan, target: Target) -> Interval:
    """By the errors on public runs. Nobody published runs on a CPU: there it says so."""
    calibration = Calibration() if target.host_computes else load_calibration()
    return interval(step_s, workload, target.place.device.id, plan.world_size, calibration)


def _with_host(costs: StepCost, constants: Constants) -> StepCost:
    """On a CPU nothing is launched ahead: the host's time of every operation comes on top of the operations."""

    def host(cost: Cost) -> Cost:
        seconds = cost.host_s(constants) / constants.memory
        kernels = {**cost.kernels, "memory": cost.kernels.get("memory", 0.0) + seconds}
        return Cost(kernels, {**cost.parts, (HOST, "memory"): seconds}, cost.collectives)

    stages = tuple(
        replace(s, forward=host(s.forward), backward=host(s.backward), weight=host(s.weight)) for s in costs.stages
    )
    once = tuple((host(gather), host(reduce), host(update)) for gather, reduce, update in costs.once)
    return StepCost(stages, once, costs.micro_batches)


def _notes(costs: StepCost, workload: Workload, target: Target) -> list[str]:
    """What the prediction rests on that is less than samples of this very device."""
    notes = []
    device, curves = target.place.device, target.curves
    work: dict[str, float] = {}
    guessed: dict[str, set[str]] = {}
    passes = [cost for stage in costs.stages for cost in (stage.forward, stage.backward, stage.weight)]
    once = [cost for gather, reduce, _ in costs.once for cost in (gather, reduce)]
    for cost in {id(cost): cost for cost in (*passes, *once)}.values():  # equal stages share theirs
        for dtype, flops in cost.flops.items():
            work[dtype] = work.get(dtype, 0.0) + flops
        for basis, dimension in cost.guessed:
            guessed.setdefault(basis, set()).add(dimension)
    for dtype, flops in work.items():
        curve = curves.product(dtype) if flops > NOTED * sum(work.values()) else None
        if curve is not None and not curve.samples:
            notes.append(f"no products measured on {device.id} in {dtype}: {curve.basis}")
    for name, dimensions in sorted(guessed.items()):
        notes.append(f"collectives of {', '.join(sorted(dimensions))} by {TOLD[name]}")
    if target.constants is None:
        notes += _calibration(workload, device.id)
    if workload.model.moe is not None and workload.routing.kind == "balanced":
        notes.append("routing taken as balanced; uneven experts are slower and take more memory")
    return notes


def _calibration(workload: Workload, device_id: str) -> list[str]:
    calibration, name = load_calibration(), generation(workload)
    if name in calibration.devices.get(device_id, {}):
        return []
    if name in calibration.generations:
        return [f"no public training runs on {device_id} ({name} software): constants of all devices together"]
    return ["not calibrated on public training runs: constants are defaults"]


def _fit(memory: MemoryBreakdown, by_rank: tuple[float, ...], plan: Plan, target: Target) -> list[str]:
    if target.parts:
        return memory_notes(by_rank, plan, target.parts)
    there = device_bytes(target, plan.world_size)
    if there is None or memory.total <= there:
        return []
    return [f"does not fit: the fullest device needs {memory.total / 1e9:.1f} GB and has {there / 1e9:.1f} GB"]
