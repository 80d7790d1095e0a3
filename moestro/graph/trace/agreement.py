"""Counting held against tracing: the same step of our trainer, from shapes alone and as it runs."""

import random
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from moestro.config import Config, load_config
from moestro.errors import MoestroError
from moestro.graph.convert import plan_of, workload_of
from moestro.graph.count import count_step
from moestro.graph.trace import trace_step
from moestro.graph.trace.to_graph import BOOKS
from moestro.graph.words import Collective, Kernel, Stage, StepGraph

# Groups of one layout may have the same ranks; then nothing tells these apart.
KINDS = {"edp": "dp", "world": "dp", "etp": "tp", "ep_between": "ep"}
LEAST_BYTES = 64  # of a collective; smaller ones are sums of losses and norms
WORLD = 8
BASE = (
    "data.seq_len=128", "train.global_batch_size=32", "train.micro_batch_size=1", "model.max_seq_len=256",
    "train.dtype=bf16", "model.num_layers=4",
)  # fmt: skip
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp": ("parallel.zero=0",),
    "zero1": (),
    "zero2": ("parallel.fsdp=4", "parallel.zero=2"),
    "zero3": ("parallel.fsdp=4", "parallel.ep=2"),
    "ep": ("parallel.ep=4",),
    "all_gather": ("parallel.ep=4", "parallel.dispatch=all_gather"),
    "two_hop": ("parallel.ep=8", "parallel.dispatch=two_hop", "parallel.ranks_per_node=4"),
    "tp": ("parallel.tp=2",),
    "tp·ep": ("parallel.tp=2", "parallel.ep=2"),
    "cp": ("parallel.cp=2",),
    "ring": ("parallel.cp=2", "parallel.context=ring"),
    "1f1b": ("parallel.pp=2",),
    "interleaved": ("parallel.pp=2", "parallel.schedule=interleaved"),
    "zero_bubble": ("parallel.pp=2", "parallel.schedule=zero_bubble"),
    "zbv": ("parallel.pp=2", "parallel.schedule=zbv"),
    "dualpipev": ("parallel.pp=2", "parallel.schedule=dualpipev"),
    "recompute": ("train.recompute=block",),
    "chunks": ("parallel.ep=2", "train.expert_chunks=2", "train.expert_recompute=true"),
    "muon": ("optim.name=muon",),
}
CHOICES: dict[str, tuple[object, ...]] = {
    "parallel.pp": (1, 1, 2),
    "parallel.tp": (1, 1, 2),
    "parallel.cp": (1, 1, 2),
    "parallel.fsdp": (1, 1, 2, 4),
    "parallel.ep": (1, 2, 4),
    "parallel.schedule": ("1f1b", "gpipe", "interleaved", "zero_bubble", "zbv", "dualpipev"),
    "parallel.dispatch": ("all_to_all", "all_to_all", "all_gather"),
    "train.recompute": ("none", "none", "block"),
    "train.expert_chunks": (1, 1, 2, 3),
    "train.micro_batch_size": (1, 2),
    "data.seq_len": (96, 128, 160),
}


class Figure(NamedTuple):
    """A number of a step, traced and counted. `of`: parameters, FLOPs, bytes sent, or bytes kept for backward."""

    of: str
    name: str
    traced: float
    counted: float

    @property
    def ratio(self) -> float:
        """Traced over counted; infinite where nothing was counted."""
        if self.counted:
            return self.traced / self.counted
        return float("inf") if self.traced else 1.0


def drawn(preset: str, number: int, seed: int = 0) -> Iterator[tuple[str, ...]]:
    """`number` layouts that the trainer can do with this preset; a seed gives the same ones again."""
    chance = random.Random(f"{preset} {seed}")
    while number:
        values = {key: chance.choice(choices) for key, choices in CHOICES.items()}
        layout = tuple(f"{key}={value}" for key, value in values.items())
        try:
            plan_of(load_config(preset, [*BASE, *layout]).config, WORLD, WORLD)
        except MoestroError:
            continue
        number -= 1
        yield layout


def compare(preset: str, layout: tuple[str, ...]) -> list[Figure]:
    """All figures of one cell."""
    return figures(load_config(preset, [*BASE, *layout]).config, WORLD)


def figures(config: Config, world_size: int) -> list[Figure]:
    """Of one rank of each pipeline stage in one step.

    Raises:
        MoestroError: the layout does not fit, or nothing counts it.
    """
    ranks_per_node = config.parallel.ranks_per_node or world_size
    traced = trace_step(config, world_size, ranks_per_node=ranks_per_node)
    workload = workload_of(config)
    # Where there is nothing to see, each encoder is still given one empty item.
    workload = workload.model_copy(update={"media_items": (1.0,) * len(workload.model.encoders)})
    counted = count_step(workload, plan_of(config, world_size, ranks_per_node))
    found = []
    for one, other in zip(traced.stages, counted.stages, strict=True):
        label = f"stage {one.index}"
        for kind in ("dense", "expert"):
            found.append(
                Figure("parameters", f"{label} {kind}", getattr(one.parameters, kind), getattr(other.parameters, kind))
            )
        pairs = zip(_passes(one).items(), _passes(other).values(), strict=True)
        found += [Figure("FLOPs", f"{label} {name}", mine, theirs) for (name, mine), theirs in pairs]
        found.append(Figure("sent", f"{label} to the next", one.send_bytes, other.send_bytes))
        found.append(Figure("saved", label, one.saved.kept, other.saved.kept))
    found.append(Figure("FLOPs", "optimizer", _updates(traced), _updates(counted)))
    sent, theirs_sent = _sent(traced), _sent(counted)
    found += [Figure("sent", name, sent[name], theirs_sent[name]) for name in sorted({*sent, *theirs_sent})]
    return [figure for figure in found if figure.traced or figure.counted]


def _passes(stage: Stage) -> dict[str, float]:
    """FLOPs of a micro-batch. The loss makes its gradients in forward, so only all passes together compare."""
    found = dict.fromkeys(("products", "attention", "attention_backward"), 0.0)
    for node in (*stage.forward, *stage.recompute, *stage.backward, *stage.weight):
        if isinstance(node, Kernel) and node.op != "memory":
            found["products" if node.op in ("gemm", "grouped_gemm") else node.op] += node.flops * node.times
    return found


def _updates(graph: StepGraph) -> float:
    """FLOPs of the optimizer on one rank of each pipeline place."""
    nodes = (node for rank in graph.ranks for node in rank.update)
    return sum(n.flops * n.times for n in nodes if isinstance(n, Kernel) and n.op == "gemm")


def _sent(graph: StepGraph) -> defaultdict[str, float]:
    """Bytes by operation, kind of dimension and ranks, in passes and after them. What only keeps books is left out."""
    found: defaultdict[str, float] = defaultdict(float)
    for node, times in graph.nodes():
        if isinstance(node, Collective) and node.part != BOOKS and node.bytes >= LEAST_BYTES:
            found[f"{node.op} {KINDS.get(node.dimension, node.dimension)} {node.ranks}"] += node.bytes * times
    return found
