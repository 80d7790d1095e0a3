"""What leaves a device for its host's memory and comes back: optimizer state once a step, or every micro-batch's
activations. Copies go both ways at once, beside all else; a pass or an update takes as long as the slower of it and its
copies (the exposed part of MoFa, arXiv 2511.09837: max(0, bytes ÷ rate - what hides them)).
"""

from dataclasses import replace

from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.words import Parameters, StepGraph
from moestro.hardware.devices import Device
from moestro.predict.costs import Cost, StageCost, StepCost
from moestro.predict.memory import kept_bytes, passing_bytes

REACHED = 0.87  # of a link's nominal rate where nobody measured it: what one was seen to reach (H200, PCIe 5)


def host_rate(device: Device) -> float | None:
    """Bytes per second between device and host, one direction. None: unknown, or there is no other memory to go to."""
    link = device.host_link_gbps
    if device.memory.unified or device.kind == "cpu" or link.best is None:
        return None
    return 1e9 * (link.best if link.achieved is not None else REACHED * link.best)


def needed_rate(device: Device) -> float:
    """Raises MoestroError where offloading has no price."""
    rate = host_rate(device)
    if rate is None:
        why = "shares its memory with the host" if device.memory.unified else "has no link to a host that we know of"
        raise MoestroError(f"{device.name} {why}: there is nothing to offload to; leave plan.offload out")
    return rate


def optimizer_bytes(workload: Workload, plan: Plan, numbers: Parameters) -> float:
    """Of the optimizer, on a rank that holds these parameters: what `offload = "optimizer"` takes off the device."""
    return kept_bytes(workload, plan.model_copy(update={"offload": "none"}), numbers)[2]


def with_copies(costs: StepCost, graph: StepGraph, workload: Workload, plan: Plan, device: Device) -> StepCost:
    """The costs with the plan's copies beside them.

    Activations of every micro-batch go after its forward pass and come back for its backward pass; state comes for the
    update and goes again while it runs, as there is no room for it before.

    Raises:
        MoestroError: the device has no link to a host.
    """
    if plan.offload == "none":
        return costs
    rate = needed_rate(device)
    if plan.offload == "activations":
        sizes = [passing_bytes(workload, plan, stage, len(graph.stages))[0] for stage in graph.stages]
        stages = [_copied(cost, size / rate) for cost, size in zip(costs.stages, sizes, strict=True)]
        return replace(costs, stages=tuple(stages))
    held = [0.0] * plan.pp
    for stage in graph.stages:
        held[stage.rank] += optimizer_bytes(workload, plan, stage.parameters)
    once = tuple(
        (gather, reduce, replace(update, to_host_s=size / rate, from_host_s=size / rate))
        for (gather, reduce, update), size in zip(costs.once, held, strict=True)
    )
    return replace(costs, once=once)


def _copied(stage: StageCost, seconds: float) -> StageCost:
    forward: Cost = replace(stage.forward, to_host_s=seconds)
    return replace(stage, forward=forward, backward=replace(stage.backward, from_host_s=seconds))


def offload_notes(plan: Plan, device: Device) -> list[str]:
    """How much goes to the host, and by which rate."""
    if plan.offload == "none":
        return []
    what = "optimizer state once a step" if plan.offload == "optimizer" else "activations of every micro-batch"
    known = "measured" if device.host_link_gbps.achieved is not None else f"{REACHED:.0%} of the catalog's link"
    rate = f"{needed_rate(device) / 1e9:.0f} GB/s a device, {known}"
    return [f"to the host and back ({rate}): {what}"]
