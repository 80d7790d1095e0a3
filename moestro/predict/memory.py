"""Memory of one device at its peaks: what is held through the step, what passes leave behind, what comes and goes.

Allocated memory is the framework's tensors; reserved memory is what its allocator took for them; the device's total
adds what lies outside of the allocator: libraries and communicators.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from moestro.config.counts import matrices_of
from moestro.config.plan import Plan, Workload
from moestro.graph.step import STATE_BYTES
from moestro.graph.tape import activation_bytes, expert_shards, weight_bytes
from moestro.graph.words import Parameters, Run, Stage, StepGraph
from moestro.hardware.devices import Device
from moestro.hardware.fits import SHARE, usable_bytes
from moestro.predict.constants import generation
from moestro.predict.orders import Order, pipeline_orders
from moestro.predict.schedule import PipelineResult
from moestro.predict.words import MemoryBreakdown

GIB = 2.0**30
# Outside of the allocator: contexts, kernels' code, library workspaces (recalled; drivers report 0.5 to 2 GiB).
FRAMEWORK_BYTES = {"gpu": 1.2 * GIB, "superchip": 1.2 * GIB, "npu": 1.2 * GIB}
OTHER_FRAMEWORK_BYTES = 0.3 * GIB  # processes on CPUs and all others
# Of one communicator of a GPU: channels with their buffers (recalled: 4 MiB for each of about 16 channels and its
# neighbours, with those of the small-message protocols).
COMMUNICATOR_BYTES = 0.15 * GIB
# Reserved beyond allocated: shares of what is held through the step, of activations, and of what comes and goes. Fitted
# on public runs that print both.
FRAGMENTATION = (0.03, 0.14, 0.32)
# Of tokens gathered from the tensor ranks: a region's input and the sum that leaves it, and the gradients of both.
GATHERED = 4
EXCLUDED = (
    "data loading and evaluation",
    "temporary tensors of an optimizer that is not fused",
)


@dataclass(frozen=True)
class MemoryPeaks:
    """Bytes on the fullest device. init: weights and gradients are made, before the first pass. first_step: optimizer
    state is made at its end."""

    init: float
    first_step: float
    steady: float


@dataclass(frozen=True)
class _Held:
    """Of one pipeline rank, bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    transient: float

    @property
    def fixed(self) -> float:
        """Held through the step."""
        return self.weights + self.gradients + self.optimizer

    @property
    def allocated(self) -> float:
        return self.fixed + self.activations + self.transient


def memory_of(
    graph: StepGraph, workload: Workload, plan: Plan, device: Device | None = None
) -> tuple[MemoryBreakdown, tuple[float, ...]]:
    """The breakdown of the fullest pipeline rank, and all bytes of each. device None: a GPU."""
    ranks = memory_of_ranks(graph, workload, plan, device)
    totals = tuple(rank.total for rank in ranks)
    return ranks[max(range(plan.pp), key=totals.__getitem__)], totals


def memory_of_ranks(
    graph: StepGraph, workload: Workload, plan: Plan, device: Device | None = None
) -> tuple[MemoryBreakdown, ...]:
    """Of every pipeline rank, as memory_of."""
    framework, communication = outside_bytes(plan, workload, device)
    excluded = EXCLUDED if workload.model.moe is None else (*EXCLUDED, _uneven(workload, plan))
    return tuple(
        MemoryBreakdown(
            weights=held.weights,
            gradients=held.gradients,
            optimizer=held.optimizer,
            activations=held.activations,
            transient=held.transient,
            communication=communication,
            framework=framework,
            fragmentation=_fragmentation(held),
            excluded=excluded,
        )
        for held in _ranks(graph, workload, plan)
    )


def allocated_by_rank(graph: StepGraph, workload: Workload, plan: Plan) -> tuple[float, ...]:
    """Bytes of tensors on each pipeline rank, at its worst moment."""
    return tuple(rank.allocated for rank in _ranks(graph, workload, plan))


def memory_peaks(memory: MemoryBreakdown, workload: Workload, plan: Plan) -> MemoryPeaks:
    """Before the first step, in it (the optimizer makes its moments when it first needs them) and in all later ones."""
    master = _master_bytes(workload, plan)
    share = master / (master + STATE_BYTES[workload.optimizer]) if master else 0.0
    init = memory.weights + memory.gradients + share * memory.optimizer + memory.communication + memory.framework
    passing = memory.activations + memory.transient + memory.fragmentation
    return MemoryPeaks(init, max(init + passing, memory.total - passing), memory.total)


def fits(memory: MemoryBreakdown, device: Device, share: float = SHARE) -> bool | None:
    """Whether what is needed is within `share` of the device's memory. None: its size is not known."""
    there = usable_bytes(device)
    return None if there is None else memory.needed <= share * there


def memory_timeline(
    graph: StepGraph, workload: Workload, plan: Plan, result: PipelineResult
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """(seconds, bytes of tensors from then on) of each pipeline rank through a simulated step.

    Activations come when a forward pass starts and go when the last backward pass of the micro-batch ends; what is held
    through the step is always there, and what comes and goes inside a pass is left out.
    """
    saved = [_saved(workload, plan, stage, len(graph.stages)) for stage in graph.stages]
    split = any(event.work.kind == "W" for event in result.events)
    held = _ranks(graph, workload, plan)
    lines = []
    for rank in range(plan.pp):
        changes = [(0.0, 0.0)]
        for event in result.events:
            size = saved[event.work.stage % len(saved)]
            if event.rank == rank and event.work.kind == "F":
                changes.append((event.start_s, size))
            elif event.rank == rank and event.work.kind == ("W" if split else "B"):
                changes.append((event.end_s, -size))
        now = held[rank].fixed
        line = []
        for time, change in sorted(changes):
            now += change
            line.append((time, now))
        lines.append(tuple(line))
    return tuple(lines)


def in_flight(schedule: str, pp: int, vpp: int, micro_batches: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """How many micro-batches each rank holds of each of its stages, (stage, how many), when it holds most passes."""
    of_ranks = most_held(schedule, pp, vpp, micro_batches)
    return tuple(max(moments, key=lambda counts: sum(count for _, count in counts)) for moments in of_ranks)


@lru_cache(maxsize=4096)
def most_held(
    schedule: str, pp: int, vpp: int, micro_batches: int
) -> tuple[tuple[tuple[tuple[int, int], ...], ...], ...]:  # fmt: skip
    """Of each rank, the moments at which it holds most: micro-batches of its stages, (stage, how many).

    A moment is left out where another has as many of every stage; with unequal stages it depends on their sizes which
    of the others is the worst. All follow from the order of the rank's passes, however long they take.
    """
    if schedule == "1f1b":
        return tuple((((rank, min(micro_batches, pp - rank)),),) for rank in range(pp))
    if schedule == "interleaved" and micro_batches % pp:  # no order that we know: the next smaller number has one
        micro_batches = max(pp, micro_batches - micro_batches % pp)
    m = enough(schedule, micro_batches, pp, vpp)
    return tuple(_moments(order) for order in pipeline_orders(schedule, pp, vpp, m))


def published_bytes(memory: MemoryBreakdown, metric: str) -> float:
    """What a published figure of this name speaks of: tensors ("alloc"), the allocator's blocks, or all of the device
    ("ram", "max_memory")."""
    if "alloc" in metric:
        return memory.allocated
    return memory.total if "ram" in metric or "max_memory" in metric else memory.reserved


def routed_row_bytes(workload: Workload, plan: Plan) -> float:
    """Bytes kept for a token copy in one layer of experts: its input, the experts' inner tensors, its output."""
    moe = workload.model.moe
    if moe is None:
        return 0.0
    outer = moe.latent_size or workload.model.hidden_size
    inner = matrices_of(moe.activation) * moe.resolved_expert_hidden_size // plan.etp
    kept = 2 * outer if plan.expert_recompute else 2 * outer + inner
    return float(kept * activation_bytes(workload))


def routing_margin(workload: Workload, plan: Plan, max_over_mean: float | None = None) -> float:
    """Bytes that one layer of experts takes beyond its even share when a rank gets `max_over_mean` times the mean of
    tokens; None: all that can reach it, ep · local · min(top_k, its experts) (MemFine, 2511.21431, mended)."""
    model, moe = workload.model, workload.model.moe
    if moe is None:
        return 0.0
    local = plan.micro_batch_size * workload.seq_len // (plan.cp * (plan.tp if plan.sequence_parallel else 1))
    even = local * model.largest_top_k
    worst = plan.ep * local * min(model.largest_top_k, moe.resolved_num_experts // plan.ep)
    rows = worst if max_over_mean is None else min(worst, even * max_over_mean)
    return max(0.0, rows - even) * plan.etp * routed_row_bytes(workload, plan) / plan.expert_chunks


def _uneven(workload: Workload, plan: Plan) -> str:
    """In words, what activations of experts leave out: they are counted as if routing were balanced."""
    worst = routing_margin(workload, plan)
    more = f": at the very most {worst / 1e9:.3g} GB more in a layer of experts" if worst else ""
    return f"uneven routing{more}"


def _ranks(graph: StepGraph, workload: Workload, plan: Plan) -> list[_Held]:
    """Of every pipeline rank, at its worst moment."""
    seen: dict[tuple[tuple[Run, ...], bool], _Held] = {}

    def held(number: int) -> _Held:
        stage = graph.stages[number % len(graph.stages)]
        key = stage.pieces, stage is graph.stages[-1]
        if key not in seen:
            seen[key] = _stage(workload, plan, stage, len(graph.stages))
        return seen[key]

    found = []
    for moments in moments_of(graph, plan):
        stages = [[(held(number), count) for number, count in counts] for counts in moments]
        found.append(_together(max(stages, key=lambda some: sum(n * one.activations for one, n in some)), plan))
    return found


def moments_of(graph: StepGraph, plan: Plan) -> Sequence[tuple[tuple[tuple[int, int], ...], ...]]:
    """Of each pipeline rank, as most_held."""
    if plan.pp == 1:
        return [(tuple((stage.index, 1) for stage in graph.stages),)]
    if plan.in_flight is not None:
        return [(((rank, min(graph.micro_batches, held)),),) for rank, held in enumerate(plan.in_flight)]
    return most_held(plan.schedule, plan.pp, plan.vpp, graph.micro_batches)


def _together(stages: list[tuple[_Held, int]], plan: Plan) -> _Held:
    """A rank of its stages, each with how many micro-batches are in flight."""
    activations = sum(count * stage.activations for stage, count in stages)
    if plan.offload == "activations":  # those of the micro-batch in work stay
        activations = max(stage.activations for stage, _ in stages)
    return _Held(
        weights=sum(stage.weights for stage, _ in stages),
        gradients=sum(stage.gradients for stage, _ in stages),
        optimizer=sum(stage.optimizer for stage, _ in stages),
        activations=activations,
        transient=max(stage.transient for stage, _ in stages),
    )


def _stage(workload: Workload, plan: Plan, stage: Stage, num_stages: int) -> _Held:
    """Of one stage with one micro-batch."""
    kept, passing = kept_bytes(workload, plan, stage.parameters), passing_bytes(workload, plan, stage, num_stages)
    return _Held(*kept, *passing)


def kept_bytes(workload: Workload, plan: Plan, numbers: Parameters) -> tuple[float, float, float]:
    """Weights, gradients and optimizer state of parameters.

    With weights split (ZeRO-3) the fp32 shard is the weight. In a pipeline they are gathered once a step, not for every
    micro-batch, and gradients are summed whole. Our trainer's weights are fp32 (copies in 16 bits are among what passes
    leave behind), and ZeRO-2 gathers them from shards for both passes.
    """
    width = weight_bytes(workload)
    reduced = 4 if plan.gradient_dtype == "fp32" else 2
    weights = gradients = optimizer = 0.0
    ours = workload.trainer == "moestro" and plan.zero == 2 and plan.shard_ranks > 1
    whole = (plan.zero == 3 or ours) and plan.pp > 1 and plan.shard_ranks > 1
    trained = numbers.trained / numbers.total if numbers.total else 0.0
    states = moment_bytes(workload.optimizer, numbers)
    groups = ((numbers.dense, plan.shard_ranks, states[0]), (numbers.expert, expert_shards(workload, plan), states[1]))
    for held, split, state in groups:
        if whole or ours:
            weights += held * width
        if whole:
            gradients += held * trained * reduced
        if plan.zero == 3 or ours:
            weights += held * (4 * trained + width * max(0.0, 1 - trained)) / split
        else:
            weights += held * width
        gradients += held * trained * reduced / (split if plan.zero >= 2 else 1)
        if plan.offload != "optimizer":
            optimizer += held * trained * (state + _master_bytes(workload, plan)) / split
    return weights, gradients, optimizer


def passing_bytes(workload: Workload, plan: Plan, stage: Stage, num_stages: int) -> tuple[float, float]:
    """Activations that a micro-batch leaves behind, and what comes and goes in a pass."""
    return _saved(workload, plan, stage, num_stages), _transient(workload, plan, stage, num_stages)


def _master_bytes(workload: Workload, plan: Plan) -> int:
    """Of a weight's fp32 copy beside the one that is computed with."""
    alone = weight_bytes(workload) == 4 or plan.zero == 3 or workload.optimizer == "none"
    return 0 if alone else 4


def moment_bytes(optimizer: str, numbers: Parameters) -> tuple[float, float]:
    """Of one dense and of one expert parameter. Muon's one moment is of matrices; what is none has AdamW's two."""
    state = float(STATE_BYTES[optimizer])
    if optimizer != "muon" or not numbers.dense:
        return state, state
    matrices = max(0, numbers.matrices - numbers.expert) / numbers.dense
    return state * matrices + STATE_BYTES["adamw"] * (1 - matrices), state


def _saved(workload: Workload, plan: Plan, stage: Stage, num_stages: int) -> float:
    """Of logits that are whole in memory only the fp32 ones are left when memory is fullest."""
    if stage.index < num_stages - 1 or workload.fused_loss or activation_bytes(workload) == 4:
        return stage.saved.kept
    tokens = plan.micro_batch_size * workload.seq_len // plan.cp
    logits = tokens * (workload.model.vocab_size or 0) / plan.tp
    return stage.saved.kept - 2 * logits * (1 + (workload.model.mtp.depth if workload.model.mtp else 0))


def _transient(workload: Workload, plan: Plan, stage: Stage, num_stages: int) -> float:
    """The largest further need while a pass runs; at the end of the model the head's gradient is part of it.

    A layer's weights have gradients in 16 bits before these are added to the fp32 sums, or before they are scattered;
    ZeRO-3 has gathered weights of this layer and of the next. Software until 2023 ("eager") keeps 16-bit gradients of
    all weights beside the sums.
    """
    width = activation_bytes(workload)
    trains = workload.adapter_rank is None
    layers, after = _layers(stage)
    if plan.zero == 3 and plan.shard_ranks > 1 and plan.pp == 1:
        reduced = 4 if plan.gradient_dtype == "fp32" else width
        need = max((layer.total for layer in layers), default=0) * float(2 * width + reduced * trains)
    elif generation(workload) == "eager":
        need = float(stage.parameters.trained * width)
    else:
        need = max((layer.dense for layer in layers), default=0) * float(width * trains)
    need += stage.saved.transient
    if plan.tp > 1 and plan.sequence_parallel:
        tokens = plan.micro_batch_size * workload.seq_len // plan.cp
        need += GATHERED * tokens * workload.model.hidden_size * width
    if stage.index == num_stages - 1 and not workload.fused_loss:  # a fused loss keeps it: it is among the activations
        need += (after[0].dense if after else 0) * width * trains
    return need


def _layers(stage: Stage) -> tuple[list[Parameters], list[Parameters]]:
    """Parameters of the stage's layers (each kind once) and of what comes after them."""
    runs, layers, left = list(stage.pieces), [], len(stage.layers)
    if stage.index == 0:
        runs.pop(0)
    while runs and left > 0:
        run = runs.pop(0)
        layers.append(run.piece.parameters)
        left -= run.times
    return layers, [run.piece.parameters for run in runs]


def _fragmentation(held: _Held) -> float:
    still, passing, brief = FRAGMENTATION
    return still * held.fixed + passing * held.activations + brief * held.transient


def outside_bytes(plan: Plan, workload: Workload, device: Device | None) -> tuple[float, float]:
    """Framework and communicators."""
    kind = "gpu" if device is None else device.kind
    framework = FRAMEWORK_BYTES.get(kind, OTHER_FRAMEWORK_BYTES)
    if kind not in FRAMEWORK_BYTES:
        return framework, 0.0
    groups = [plan.tp, plan.cp, plan.pp, plan.ep, plan.etp, plan.dp * plan.cp, plan.world_size]
    if workload.model.moe is not None:
        groups.append(plan.expert_data_ranks)
    return framework, COMMUNICATOR_BYTES * sum(ranks > 1 for ranks in groups)


def enough(schedule: str, micro_batches: int, pp: int, vpp: int) -> int:
    """As many as show the peak; more add steady time only. GPipe holds them all."""
    if schedule in ("gpipe", "interleaved"):
        return micro_batches if schedule == "gpipe" else min(micro_batches, 4 * pp)
    m = min(micro_batches, max(4 * pp * vpp, 2 * pp))
    return m + (micro_batches - m) % 2


def _moments(order: Order) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Held from the start of a forward pass to the end of the last backward pass of its micro-batch."""
    last = "W" if any(work.kind == "W" for work in order) else "B"
    now = dict.fromkeys(sorted({work.stage for work in order}), 0)
    peaks: set[tuple[int, ...]] = set()
    for work, following in zip(order, [*order[1:], None], strict=True):
        if work.kind == "F":
            now[work.stage] += 1
            if following is None or following.kind != "F":
                peaks.add(tuple(now.values()))
        elif work.kind == last:
            now[work.stage] -= 1
    most = [one for one in peaks if not any(_covers(other, one) for other in peaks if other != one)]
    return tuple(tuple(zip(now, counts, strict=True)) for counts in sorted(most))


def _covers(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))
