"""One side of a comparison of steps: its time as named parts that add up to it, and the work behind each."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moestro.config.plan import Plan, Workload
from moestro.graph.count import count_step
from moestro.graph.words import Kernel, Node, StepGraph
from moestro.predict.step import shares
from moestro.predict.target import Target
from moestro.predict.words import Prediction, TimeBreakdown

Level = Literal["parts", "phases", "whole"]
LEVELS: tuple[Level, ...] = ("parts", "phases", "whole")  # the finest first
# Phases of a step: all that is known of the time of most runs.
PASSES, REDUCE, UPDATE, WHOLE = "forward and backward", "gradients exchanged", "optimizer", "the step"
REST, SLOWED = "rest", "computation slowed by communication"
SMALLEST = 1e-9  # of a step: what adding up numbers leaves


@dataclass(frozen=True)
class Part:
    """seconds: of a step. work: what is done in them, in `unit`. busy_s: what that takes, where some of it is hidden.
    spread_s: half of the middle half of all steps that were measured."""

    seconds: float
    work: float = 0.0
    unit: str = ""
    busy_s: float | None = None
    spread_s: float | None = None


@dataclass(frozen=True)
class Side:
    """levels: parts by name, each level adding up to step_s; a run has only coarse ones. around: seconds a step that
    are spent outside of steps. settings: by section (model, batch, plan …), what it is a step of. low_s, high_s: of a
    prediction its interval."""

    name: str
    kind: Literal["predicted", "measured"]
    basis: str
    step_s: float
    tokens: int  # positions of a global batch
    devices: int
    levels: Mapping[Level, Mapping[str, Part]]
    settings: Mapping[str, Mapping[str, Any]]
    mfu: float | None = None
    peak_flops: float | None = None  # measured: what the devices of a run reached together when it began
    memory_bytes: float | None = None  # of the fullest device
    around: Mapping[str, Part] = field(default_factory=dict)
    low_s: float | None = None
    high_s: float | None = None
    notes: tuple[str, ...] = ()


def predicted_side(name: str, workload: Workload, plan: Plan, found: Prediction, target: Target | None = None) -> Side:
    """Of a prediction of `plan`. target: what it was predicted for; None where only its name is left, in `profile`.

    Raises:
        MoestroError: the plan does not fit the workload.
    """
    graph, time = count_step(workload, plan), found.time
    work = work_of(graph, plan, time.rank)
    parts, phases = _parts(time, work), _phases(time, work)
    machine, peak_flops = {"priced by": found.profile}, None
    if target is not None:
        machine = {"device": target.place.device.name, **machine}
        peak_flops = target.peak_flops if plan.world_size == 1 else None  # a measured machine's own
    return Side(
        name=name,
        kind="predicted",
        basis=f"predicted, priced by {found.profile}",
        step_s=time.total,
        tokens=workload.tokens,
        devices=plan.world_size,
        levels={
            "parts": _with_rest(parts, time.total),
            "phases": _with_rest(phases, time.total),
            "whole": {WHOLE: Part(time.total, work.flops, "FLOPs")},
        },
        settings={**settings_of(workload, plan), "machine": machine},
        mfu=found.mfu,
        peak_flops=peak_flops,
        memory_bytes=found.memory.total,
        low_s=found.step_s.low,
        high_s=found.step_s.high,
        notes=found.notes,
    )


@dataclass
class Work:
    """What one pipeline rank does in a step: FLOPs of products and bytes moved by part, bytes sent by dimension."""

    flops_by_part: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    moved_by_part: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sent_once: float = 0.0
    updated: float = 0.0  # bytes that the optimizer moves
    launches: float = 0.0

    @property
    def flops(self) -> float:
        return sum(self.flops_by_part.values())

    def add(self, node: Node, times: float) -> None:
        times *= node.times
        if not isinstance(node, Kernel):
            self.sent[node.dimension] += times * node.bytes
            return
        self.launches += times * node.launches
        self.moved_by_part[node.part] += times * node.bytes_moved
        if node.op != "memory":
            self.flops_by_part[node.part] += times * node.flops


def work_of(graph: StepGraph, plan: Plan, rank: int) -> Work:
    """Of one pipeline rank (under DualPipe, of both stages that it holds by halves)."""
    found, held = Work(), shares(plan, rank)
    for stage in graph.stages:
        times = graph.micro_batches * held.get(stage.rank, 0.0)
        for run in stage.pieces if times else ():
            for node in (*run.piece.forward, *run.piece.backward, *run.piece.weight):
                found.add(node, times * run.times)
            for node in run.piece.recompute:
                found.add(node, times * run.recomputed)
    once = graph.ranks[rank]
    for node in (*once.before, *once.gradients):
        found.add(node, 1)
        found.sent_once += 0.0 if isinstance(node, Kernel) else node.bytes * node.times
    found.updated = sum(node.bytes_moved * node.times for node in once.update if isinstance(node, Kernel))
    return found


def settings_of(workload: Workload, plan: Plan) -> dict[str, dict[str, Any]]:
    """Sections of what a step is of, the most telling first."""
    tree = workload.model_dump(mode="json")
    model = tree.pop("model")
    software = {
        name: tree.pop(name) for name in ("trainer", "software", "attention_kernel", "fused_kernels", "fused_loss")
    }
    return {"model": model, "batch": tree, "plan": plan.model_dump(mode="json"), "software": software}


def _parts(time: TimeBreakdown, work: Work) -> dict[str, Part]:
    """All that a prediction tells apart."""
    parts = {name: _computed(seconds, name, work) for name, seconds in time.by_part.items()}
    if not time.by_part:
        parts["computation"] = Part(time.compute, work.flops, "FLOPs")
    parts["host"] = Part(time.host, work.launches, "launches")
    for name, seconds in time.exposed_by_dimension.items():
        label = "copies to the host" if name == "host" else f"communication {name}"
        parts[label] = Part(seconds, work.sent.get(name, 0.0), "bytes sent", time.by_dimension.get(name))
    slowed = time.communication - sum(time.exposed_by_dimension.values())
    if abs(slowed) > SMALLEST * time.total:
        parts[SLOWED if time.exposed_by_dimension else "communication"] = Part(slowed)
    parts["bubble"] = Part(time.bubble)
    parts[UPDATE] = Part(time.optimizer, work.updated, "bytes moved")
    return parts


def _computed(seconds: float, name: str, work: Work) -> Part:
    flops = work.flops_by_part.get(name, 0.0)
    return Part(seconds, flops, "FLOPs") if flops else Part(seconds, work.moved_by_part.get(name, 0.0), "bytes moved")


def _phases(time: TimeBreakdown, work: Work) -> dict[str, Part]:
    """What a run can tell apart, too."""
    passes = time.compute + time.host + time.bubble + time.communication - time.exposed_once
    return {
        PASSES: Part(passes, work.flops, "FLOPs"),
        REDUCE: Part(time.exposed_once, work.sent_once, "bytes sent"),
        UPDATE: Part(time.optimizer, work.updated, "bytes moved"),
    }


def _with_rest(parts: Mapping[str, Part], step_s: float) -> dict[str, Part]:
    """With what the parts leave of the step, if they do."""
    rest = step_s - sum(part.seconds for part in parts.values())
    found = {name: part for name, part in parts.items() if part.seconds or part.work}
    return {**found, REST: Part(rest)} if abs(rest) > SMALLEST * step_s else found
