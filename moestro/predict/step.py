"""The time of one step: priced kernels and collectives, the pipeline around them, and what hides behind what."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from moestro.config.plan import Plan, Workload
from moestro.graph.count import count_step
from moestro.graph.words import Collective, Kernel, Node, Stage, StepGraph
from moestro.hardware.devices import Device
from moestro.predict.kernels import DeviceConstants, KernelPricer
from moestro.predict.network import NetworkPricer
from moestro.predict.schedule import simulate_pipeline
from moestro.predict.words import TimeBreakdown


@dataclass
class Cost:
    """Of some nodes: seconds of kernels, of collectives that block, and of collectives that may hide."""

    compute: float = 0.0
    host: float = 0.0  # to launch all of it
    blocking: float = 0.0
    hideable: float = 0.0

    @property
    def seconds(self) -> float:
        """Alone: the device works, or waits for the host; what may hide does so behind the kernels."""
        return max(self.compute, self.host) + self.blocking + max(0.0, self.hideable - self.compute)


def predict_time(
    workload: Workload,
    plan: Plan,
    device: Device,
    node_size: int,
    constants: DeviceConstants = DeviceConstants(),
    graph: StepGraph | None = None,
) -> TimeBreakdown:
    graph = graph or count_step(workload, plan)
    kernels = KernelPricer(device, None, workload.routing, plan.ep, constants)
    network = NetworkPricer(device, plan, node_size)
    forward, backward, weight, costs = [], [], [], []
    for stage in graph.stages:
        f = cost(stage.forward, kernels, network, constants)
        b = cost((*stage.recompute, *stage.backward), kernels, network, constants)
        w = cost(stage.weight, kernels, network, constants)
        costs.append((f, b, w))
        forward.append(f.seconds)
        backward.append(b.seconds)
        weight.append(w.seconds)
    sends = [network.send_s(stage.send_bytes) for stage in graph.stages]
    split = plan.schedule if plan.pp > 1 else "1f1b"
    vpp = plan.vpp if plan.pp > 1 else 1
    if plan.pp == 1:
        total = graph.micro_batches * (sum(forward) + sum(backward) + sum(weight))
        bubble = 0.0
        rank = 0
    else:
        result = simulate_pipeline(split, plan.pp, vpp, graph.micro_batches, forward, backward, weight, sends)
        total = result.total_s
        rank = max(range(plan.pp), key=lambda r: result.busy_s[r])
        bubble = total - result.busy_s[rank]
    once = graph.ranks[rank]
    reduce = cost(once.gradients, kernels, network, constants)
    update = cost(once.update, kernels, network, constants)
    gather = cost(once.before, kernels, network, constants)
    own = [i for i, stage in enumerate(graph.stages) if stage.rank == rank]
    last_backward = sum(backward[i] + weight[i] for i in own)
    first_forward = sum(forward[i] for i in own)
    exposed_reduce = reduce.blocking + max(0.0, reduce.hideable - 0.7 * last_backward)
    exposed_gather = gather.blocking + max(0.0, gather.hideable - 0.7 * first_forward)
    compute = graph.micro_batches * sum(f.compute + b.compute + w.compute for i in own for f, b, w in [costs[i]])
    busy = total - bubble
    waits = sum(max(0.0, part.host - part.compute) * graph.micro_batches for i in own for part in costs[i])
    communication = max(0.0, busy - compute - waits) + exposed_reduce + exposed_gather
    return TimeBreakdown(
        compute=compute,
        host=waits,
        communication=communication,
        bubble=bubble,
        optimizer=update.seconds,
    )


def cost(nodes: Iterable[Node], kernels: KernelPricer, network: NetworkPricer, constants: DeviceConstants) -> Cost:
    total = Cost()
    for node in nodes:
        if isinstance(node, Kernel):
            total.compute += kernels.seconds(node) * node.times
            total.host += constants.launch_s * node.launches * node.times
        elif node.overlap:
            total.hideable += network.seconds(node) * node.times
        else:
            total.blocking += network.seconds(node) * node.times
    return total
