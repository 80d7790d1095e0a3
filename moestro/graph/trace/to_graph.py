"""From what was written down to the words of a StepGraph."""

import re
from collections import Counter
from collections.abc import Callable, Iterable

import torch

from moestro.config import Config
from moestro.config.counts import count, resolved_model
from moestro.graph.trace.ours import RankTrace, StageTrace
from moestro.graph.trace.recorder import Event, Exchange, Op, Place
from moestro.graph.words import (
    Collective,
    Dimension,
    Kernel,
    Node,
    Parameters,
    Piece,
    RankStep,
    Run,
    Saved,
    Stage,
    StepGraph,
)

DTYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
# The part that a module belongs to, by its name or class; the innermost module that says something counts.
PARTS: tuple[tuple[str, str], ...] = (
    (r"router|(^|:)gate:", "router"),
    (r"shared_expert", "shared experts"),
    (r"experts?\b|Experts", "experts"),
    (r"norm|Norm", "norms"),
    (r"attn|attention|Attention", "attention"),
    (r"MoE|moe|SparseM", "dispatch"),
    (r"mlp|MLP|FeedForward|feed_forward|ffn", "dense"),
    (r"embed|wte|wpe|Embedding", "embedding"),
    (r"lm_head|output:Linear", "head"),
    (r"loss|Loss|CrossEntropy", "loss"),
)
# Collectives of the trainer by which a step keeps its books: counts of tokens, losses, loads.
BOOKS = "bookkeeping"


def part_of(place: Place, otherwise: str) -> str:
    """otherwise: where no module around it has a telling name."""
    for module in reversed(place.path):
        for pattern, part in PARTS:
            if re.search(pattern, module):
                return part
    return otherwise


def kernel(op: Op, part: str) -> Kernel:
    name = op.name.split("::")[1]
    dtype = DTYPES.get(op.dtype, str(op.dtype).removeprefix("torch."))
    if op.cost is None:
        return Kernel("memory", part, name, (op.bytes // op.dtype.itemsize,), dtype, 0.0, float(op.bytes))
    return Kernel(op.cost.op, part, name, op.cost.dims, dtype, op.cost.flops, float(op.bytes))


def collective(exchange: Exchange, part: str, dimension: Dimension) -> Collective:
    message = exchange.message
    dtype = DTYPES.get(message.dtype, str(message.dtype).removeprefix("torch."))
    ranks = len(message.group)
    return Collective(
        message.op,
        part,
        f"{part} {message.op}",
        dimension,
        ranks,
        float(message.bytes),
        dtype,
        overlap=not exchange.blocking,
    )


def merged(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Equal nodes in a row as one that is there several times."""
    found: list[Node] = []
    for node in nodes:
        if found and found[-1]._replace(times=1) == node:
            found[-1] = found[-1]._replace(times=found[-1].times + 1)
        else:
            found.append(node)
    return tuple(found)


def graph_of(config: Config, traces: list[RankTrace]) -> StepGraph:
    """One graph of the traces of all unique ranks of a step (see `ours.unique_ranks`)."""
    layout = traces[0].layout
    config = config.in_phase(0)
    stages, ranks = [], []
    for place, trace in enumerate(traces):
        nodes = _Nodes(trace)
        stages += [_stage(nodes, stage, place, config) for stage in trace.stages]
        ranks.append(_rank_step(nodes, place))
    model, tokens = resolved_model(config), config.train.global_batch_size * config.data.seq_len
    return StepGraph(
        world_size=layout.world_size,
        micro_batches=layout.micro_batches,
        tokens=tokens,
        model_flops=count(model, config.data.seq_len).train_flops_per_token * tokens,
        stages=tuple(sorted(stages, key=lambda stage: stage.index)),
        ranks=tuple(ranks),
        notes=("traced: operations of one rank of each pipeline place",),
    )


class _Nodes:
    """Selects among a rank's events and says them in the graph's words."""

    def __init__(self, trace: RankTrace) -> None:
        self.trace = trace

    def select(self, wanted: Callable[[Event], bool], otherwise: str) -> tuple[Node, ...]:
        return merged(self._node(e, otherwise) for e in self.trace.events if wanted(e) and not _is_transfer(e))

    def _node(self, event: Event, otherwise: str) -> Node:
        assert isinstance(event, (Op, Exchange))
        part = part_of(event.place, otherwise)
        if isinstance(event, Op):
            return kernel(event, part)
        if (
            not event.message.dtype.is_floating_point and event.message.dtype != torch.uint8
        ) or event.place.phase == "between":
            part = BOOKS
        elif part == "experts" and event.message.op == "all_to_all":
            part = "dispatch"
        return collective(event, part, self._dimension(event, part))

    def _dimension(self, exchange: Exchange, part: str) -> Dimension:
        """Groups may coincide; then the operation tells them apart."""
        names = self.trace.groups.get(exchange.message.group, [])
        if part == BOOKS or exchange.message.bytes <= 8:
            return "world"
        if exchange.message.op == "all_to_all":
            return "ep" if "ep" in names or not names else "ep_between"
        if part in ("dispatch", "experts") and "tp" in names:
            return "etp"
        known: dict[str, Dimension] = {
            "tp": "tp", "cp": "cp", "data": "dp", "tokens": "dp", "edp": "edp", "ep": "ep", "pp": "pp", "ends": "pp",
            "sequence": "cp", "world": "world",
        }  # fmt: skip
        for name in ("edp", "data") if part == "experts" else ("tp", "cp", "data", "tokens", "edp"):
            if name in names:
                return known[name]
        return known[names[0]] if names else "dp"


def _is_transfer(event: Event) -> bool:
    """Between stages: that is in `send_bytes`."""
    return isinstance(event, Exchange) and event.message.op == "send_recv"


def _stage(nodes: _Nodes, stage: StageTrace, place: int, config: Config) -> Stage:
    """Of the last of its micro-batches, which is like all others."""
    numbers = [e.place.micro[1] for e in nodes.trace.events if _at(e, stage.index)]  # type: ignore[index, union-attr]
    last = max(numbers, default=0)

    def of(phase: str, of_weight: bool = False) -> Callable[[Event], bool]:
        return lambda e: (
            isinstance(e, (Op, Exchange))
            and e.place.micro == (stage.index, last)
            and e.place.phase == phase
            and (isinstance(e, Op) and e.of_weight) == of_weight
        )

    piece = Piece(
        forward=nodes.select(of("forward"), "head"),
        backward=nodes.select(of("backward"), "head"),
        weight=nodes.select(of("backward", True), "head"),
        recompute=nodes.select(of("recompute"), "head"),
        saved=float(stage.saved),
        kept=float(stage.saved),
        parameters=stage.parameters,
    )
    saved = Saved(float(stage.saved), float(stage.saved), 0.0)
    runs = (Run(piece, 1, int(bool(piece.recompute))),)
    return Stage(stage.index, place, stage.layers, stage.parameters, saved, runs, float(stage.stream_bytes))


def _at(event: Event, stage: int) -> bool:
    return isinstance(event, (Op, Exchange)) and event.place.micro is not None and event.place.micro[0] == stage


def _rank_step(nodes: _Nodes, place: int) -> RankStep:
    def gathers(event: Event) -> bool:
        return isinstance(event, Exchange) and event.message.op == "all_gather"

    def during(*phases: str) -> Callable[[Event], bool]:
        return lambda e: isinstance(e, (Op, Exchange)) and e.place.phase in phases

    in_update, in_between = during("update"), during("between")
    return RankStep(
        place,
        before=nodes.select(lambda e: in_update(e) and gathers(e), "weights"),
        gradients=nodes.select(during("gradients"), "gradients"),
        update=nodes.select(lambda e: (in_update(e) and not gathers(e)) or in_between(e), "optimizer"),
    )


def whole_graph(events: list[Event], world_size: int, parameters: Parameters, saved: int) -> StepGraph:
    """Of a program of which nothing else is known: one stage, one micro-batch, all ranks alike."""
    phases: dict[str, list[Node]] = {"forward": [], "recompute": [], "backward": [], "weight": [], "update": []}
    for event in events:
        if not isinstance(event, (Op, Exchange)):
            continue
        phase: str = "weight" if isinstance(event, Op) and event.of_weight else event.place.phase
        part = part_of(event.place, "optimizer" if phase == "update" else "other")
        node = (
            kernel(event, part) if isinstance(event, Op) else collective(event, part, dimension_of(event, world_size))
        )
        phases[phase if phase in phases else "update"].append(node)
    forward, recompute, backward, weight, update = (merged(phases[name]) for name in phases)
    piece = Piece(forward, backward, weight, recompute, float(saved), float(saved), parameters=parameters)
    stage = Stage(0, 0, (), parameters, Saved(float(saved), float(saved), 0.0), (Run(piece, 1, int(bool(recompute))),))
    flops = sum(node.flops * node.times for node in (*forward, *backward, *weight) if isinstance(node, Kernel))
    step = RankStep(0, (), (), update)
    notes = ("traced: all ranks are taken to do what this one does",)
    return StepGraph(world_size, 1, 0, flops * world_size, (stage,), (step,), notes)


# What programs call the dimensions of their meshes, in the labels of groups ("mesh_tp").
NAMES: tuple[tuple[str, Dimension], ...] = (
    ("etp", "etp"), ("tp", "tp"), ("tensor", "tp"), ("cp", "cp"), ("context", "cp"), ("edp", "edp"), ("efsdp", "edp"),
    ("ep", "ep"), ("expert", "ep"), ("pp", "pp"), ("pipe", "pp"), ("dp", "dp"), ("data", "dp"), ("shard", "dp"),
    ("replicate", "dp"),
)  # fmt: skip


def dimension_of(exchange: Exchange, world_size: int) -> Dimension:
    """By the group's label, else by the operation and the group's size."""
    message = exchange.message
    label = message.label.lower()
    for word, dimension in NAMES:
        if word in label:
            return dimension
    if message.op == "send_recv":
        return "pp"
    if message.op == "all_to_all":
        return "ep"
    return "world" if len(message.group) == world_size and message.bytes <= 64 else "dp"


def totals(graph: StepGraph) -> Counter[str]:
    """FLOPs of products and bytes of collectives of one rank of each stage in a step, for a comparison."""
    found: Counter[str] = Counter()
    for node, times in graph.nodes():
        if isinstance(node, Kernel):
            found[node.op] += round(node.flops * times)
        else:
            found[f"{node.op} {node.dimension}"] += round(node.bytes * times)
    return found
