"""Of a measured CPU, what holds for a step with several processes: they share its cores, and exchange by gloo."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from moestro.config import load_config
from moestro.graph.convert import plan_of, workload_of
from moestro.graph.count import count_step
from moestro.graph.words import Collective, Node, StepGraph
from moestro.hardware.profile import MachineProfile, Sample
from moestro.predict.constants import Constants
from moestro.predict.costs import KERNEL_CLASSES, Cost, Pricer, StepCost, pricer_of
from moestro.predict.curves import DeviceCurves
from moestro.predict.words import TimeBreakdown

# On a CPU every call of the framework takes host time: how many our trainer makes, views included, for one counted
# kernel, and for one group of a product of experts, which run one by one there. Counted on models of 2 to 6 layers and
# 8 to 32 experts (1,704 to 7,332 calls a step, within 4 %).
CALLS, CALLS_OF_GROUP = 7.0, 8.7
# Around an exchange: buffers, copies into and out of the order that is sent, sums. Counted in 14 layouts of 2 and 4
# processes, whose calls are then right within 10 %; without, those of tensor parallelism are up to a quarter too few.
CALLS_OF_EXCHANGE = 15.0
TO_ALL = 2  # exchanges of a few bytes a step, among all processes

STEP = "train_step"
LEAST, MOST = 0.5, 3.0  # what the step that was measured may change the constants by: beyond it something is wrong
# On a CPU the trainer sends messages up to this size by all-to-all, whatever the exchange (`parallel/comm.py`).
SHORT_BYTES = 2**18
ALIKE = ("all_reduce", "all_gather", "reduce_scatter")


def of_processes(profile: MachineProfile, processes: int) -> tuple[MachineProfile, int]:
    """The profile as `processes` at once see it, and the threads of each in what was measured.

    Operations are those of the largest number of processes at once that was measured and is not more. The step's own
    processes beyond that share what those have: see `Target.constants_for`.
    """
    machine = profile.machine
    known = {int(sample.number("processes")) for sample in profile.at_once if sample.op != STEP}
    at_once = max((number for number in known if number <= processes), default=1)
    # Experts run one by one: as products, and their calls are counted with the host's.
    samples = [sample for sample in profile.samples if sample.op != "moe_experts"]
    threads = machine.threads or 1
    if at_once > 1:
        together = [s for s in profile.at_once if s.number("processes") == at_once and s.op != STEP]
        replaced = {sample.op for sample in together}
        samples = [sample for sample in samples if sample.op not in replaced] + together
        threads = max(1, (machine.cores or 1) // at_once)
    samples = _exchanged(samples, processes)
    return profile.model_copy(update={"samples": tuple(samples)}), threads


def in_steps(profile: MachineProfile, processes: int, curves: DeviceCurves, constants: Constants) -> Constants:
    """The constants with what operations and the host took in the training step that the profile holds over what its
    parts say: operands that are not in the cache, operations that nobody counts, what processes take from each other.

    As they are where the profile holds no step.
    """
    steps = [s for s in profile.at_once if s.op == STEP and s.number("processes") <= processes]
    if not steps:
        return constants
    most = max(sample.number("processes") for sample in steps)
    took = {str(s.case["what"]): s for s in steps if s.number("processes") == most}
    sample = next(iter(took.values()))
    batch = f"train.global_batch_size={int(sample.number('batch'))}"
    config = load_config(str(sample.case["preset"]), (batch,)).config
    workload, plan = workload_of(config), plan_of(config, int(most), int(most))
    graph = count_step(workload, plan)
    stage = graph.stages[0]
    nodes = (*stage.forward, *stage.recompute, *stage.backward, *stage.weight, *graph.ranks[0].update)
    kernels = [node for node in nodes if not isinstance(node, Collective)]
    sent = [
        node for node in (*nodes, *graph.ranks[0].before, *graph.ranks[0].gradients) if isinstance(node, Collective)
    ]
    exchanges = sum(node.times for node in sent) + (TO_ALL if most > 1 else 0)
    alone = pricer_of(curves, workload.routing, plan, int(most)).nodes(kernels)
    cost = _with_calls(replace(alone, num_collectives=exchanges), kernels)
    operations = _ratio(took.get("operations"), cost.compute_s(constants))
    host = _ratio(took.get("host"), cost.host_s(constants))
    slower = {name: operations * getattr(constants, name) for name in KERNEL_CLASSES}
    return constants.model_copy(update={**slower, "launch_s": host * constants.launch_s})


def _ratio(took: Sample | None, expected_s: float) -> float:
    return min(max(took.median_s / expected_s, LEAST), MOST) if took is not None and expected_s > 0 else 1.0


def _exchanged(samples: list[Sample], processes: int) -> list[Sample]:
    """Exchanges within groups: while all groups exchange, where there are several; short ones by all-to-all."""
    groups = defaultdict[tuple[str, int], list[Sample]](list)
    others = []
    for sample in samples:
        if "ranks" in sample.case and "world" in sample.case:
            groups[sample.op, int(sample.number("ranks"))].append(sample)
        else:
            others.append(sample)
    kept: dict[tuple[str, int], list[Sample]] = {}
    for (op, ranks), some in groups.items():
        wanted = "all" if ranks < processes else "one"
        kept[op, ranks] = [s for s in some if s.case.get("groups") == wanted] or some
    return [*others, *(s for (op, ranks), some in kept.items() for s in _short(op, ranks, some, kept))]


def _short(op: str, ranks: int, samples: list[Sample], known: dict[tuple[str, int], list[Sample]]) -> list[Sample]:
    """The samples of an exchange, those of short messages with the time of the all-to-all that takes its place."""
    to_all = known.get(("all_to_all", ranks))
    if op not in ALIKE or not to_all:
        return samples
    points = sorted((sample.number("bytes"), sample.median_s) for sample in to_all)
    sizes, seconds = (np.log([point[i] for point in points]) for i in (0, 1))

    def by_all_to_all(sample: Sample) -> Sample:
        size = sample.number("bytes")
        sent = size * ranks if op == "all_reduce" else size  # a sum is made of everyone's whole buffer
        if size > SHORT_BYTES:
            return sample
        return sample.model_copy(update={"median_s": float(np.exp(np.interp(np.log(sent), sizes, seconds)))})

    return [by_all_to_all(sample) for sample in samples]


def on_processes(costs: StepCost, graph: StepGraph, pricer: Pricer) -> StepCost:
    """The costs with what only a CPU notices: each expert's product is a call of its own, an exchange several calls,
    and exchanges of a few bytes take as long as those of many. Of these the trainer makes two a step among all, and
    one before each dispatch.
    """
    stages = tuple(
        replace(
            cost,
            forward=_with_calls(_sum(cost.forward, pricer.nodes(_sizes(stage.forward))), stage.forward),
            backward=_with_calls(cost.backward, (*stage.recompute, *stage.backward)),
            weight=_with_calls(cost.weight, stage.weight),
        )
        for cost, stage in zip(costs.stages, graph.stages, strict=True)
    )
    if graph.world_size == 1:
        return replace(costs, stages=stages)
    counts = _FEW_BYTES._replace(op="all_reduce", dimension="world", ranks=graph.world_size, times=TO_ALL)
    few = pricer.nodes([counts])
    once = []
    for gather, reduce, update in costs.once:
        reduce = _sum(reduce, few)
        exchanges = gather.num_collectives + reduce.num_collectives + update.num_collectives
        launches = update.launches + exchanges * CALLS_OF_EXCHANGE / CALLS
        once.append((gather, reduce, replace(update, launches=launches)))
    return replace(costs, stages=stages, once=tuple(once))


def waits_s(time: TimeBreakdown, pp: int, turns: float) -> float:
    """Seconds that the slowest pipeline rank waits for the others, where `turns` processes share a core and take turns.

    time: with all operations `turns` times slower, as if all processes always had something to do. But while one
    waits, others have its core. Cores are idle only when fewer pipeline ranks work than fill them, as in a pipeline of
    so many ranks; and no step is shorter than one with a core for each process.
    """
    if pp == 1 or turns <= 1:
        return time.bubble
    busy_s, alone_s = time.total - time.bubble, time.bubble / turns
    idle_s = alone_s * max(0.0, pp / turns - 1) / (pp - 1)
    return max(idle_s, alone_s - busy_s * (1 - 1 / turns))


_FEW_BYTES = Collective("all_to_all", "dispatch", "sizes", "ep", 1, 64.0, "int64")


def _sizes(nodes: Iterable[Node]) -> list[Collective]:
    """Before tokens go to other ranks' experts, these are told how many."""
    sent = [node for node in nodes if isinstance(node, Collective) and node.name == "dispatch"]
    return [_FEW_BYTES._replace(ranks=node.ranks, times=node.times) for node in sent if node.dimension == "ep"]


def _with_calls(cost: Cost, nodes: Iterable[Node]) -> Cost:
    groups = sum(n.dims[0] * n.times for n in nodes if not isinstance(n, Collective) and n.op == "grouped_gemm")
    calls = groups * CALLS_OF_GROUP + cost.num_collectives * CALLS_OF_EXCHANGE
    return replace(cost, launches=cost.launches + calls / CALLS)


def _sum(a: Cost, b: Cost) -> Cost:
    total = Cost()
    total.add(a, 1)
    total.add(b, 1)
    return total
