"""What the passes of a step graph cost on a machine, before any constant of training is put in.

Pricing walks every kernel once; putting constants in is then a few multiplications, which is what fitting them and
searching plans need.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from moestro.graph.words import Collective, Kernel, Node, Piece, Run, StepGraph
from moestro.predict.constants import Constants
from moestro.predict.kernels import KernelPricer
from moestro.predict.network import NetworkPricer

KERNEL_CLASSES = ("gemm", "gemm_low", "grouped", "grouped_low", "attention", "memory", "optimizer")
LOW = ("fp8", "mxfp8", "fp8_block", "nvfp4", "fp4", "int8")


@dataclass
class Cost:
    """Seconds by class of kernel; seconds of collectives, (dimension, between nodes, may hide) -> seconds; counts."""

    kernels: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)  # of the model -> seconds of kernels
    collectives: dict[tuple[str, bool, bool], float] = field(default_factory=dict)
    launches: float = 0.0
    num_collectives: float = 0.0

    def add(self, other: "Cost", times: float) -> None:
        if not times:
            return
        for name, seconds in other.kernels.items():
            self.kernels[name] = self.kernels.get(name, 0.0) + times * seconds
        for name, seconds in other.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + times * seconds
        for key, seconds in other.collectives.items():
            self.collectives[key] = self.collectives.get(key, 0.0) + times * seconds
        self.launches += times * other.launches
        self.num_collectives += times * other.num_collectives

    def compute_s(self, constants: Constants) -> float:
        return sum(seconds * getattr(constants, name) for name, seconds in self.kernels.items())

    def host_s(self, constants: Constants) -> float:
        return self.launches * constants.launch_s + self.num_collectives * constants.collective_host_s

    def communication_s(self, constants: Constants, hides: bool) -> float:
        """Of the collectives that may hide, or of those that may not."""
        return sum(
            seconds * (constants.between if between else constants.inside)
            for (_, between, may_hide), seconds in self.collectives.items()
            if may_hide == hides
        )

    def seconds(self, constants: Constants) -> float:
        """Of the whole: kernels or the host, whichever is slower, what blocks, and what cannot hide."""
        compute, host = self.compute_s(constants), self.host_s(constants)
        hides = self.communication_s(constants, hides=True)
        hidden = min(hides, constants.hidden * compute)
        compute += constants.contention * hidden
        return max(compute, host) + self.communication_s(constants, hides=False) + hides - hidden


@dataclass(frozen=True)
class StageCost:
    rank: int
    forward: Cost
    backward: Cost  # recomputation included
    weight: Cost
    send_s: float


@dataclass(frozen=True)
class StepCost:
    """once: of each pipeline rank (gather, reduction, update)."""

    stages: tuple[StageCost, ...]
    once: tuple[tuple[Cost, Cost, Cost], ...]
    micro_batches: int


def price(graph: StepGraph, kernels: KernelPricer, network: NetworkPricer) -> StepCost:
    """Every piece is priced once, and stages that are made of the same pieces too."""
    pieces: dict[Piece, tuple[Cost, Cost, Cost, Cost]] = {}
    stages: dict[tuple[Run, ...], tuple[Cost, Cost, Cost]] = {}
    found = []
    for stage in graph.stages:
        if stage.pieces not in stages:
            forward, backward, weight = Cost(), Cost(), Cost()
            for run in stage.pieces:
                if run.piece not in pieces:
                    parts = (run.piece.forward, run.piece.recompute, run.piece.backward, run.piece.weight)
                    f, r, b, w = (_cost(nodes, kernels, network) for nodes in parts)
                    pieces[run.piece] = (f, r, b, w)
                f, r, b, w = pieces[run.piece]
                forward.add(f, run.times)
                backward.add(r, run.recomputed)
                backward.add(b, run.times)
                weight.add(w, run.times)
            stages[stage.pieces] = (forward, backward, weight)
        found.append(StageCost(stage.rank, *stages[stage.pieces], network.send_s(stage.send_bytes)))
    ranks: dict[tuple[object, ...], tuple[Cost, Cost, Cost]] = {}
    once = []
    for rank in graph.ranks:
        key = (id(rank.before), id(rank.gradients), id(rank.update))
        if key not in ranks:
            before, reduce, update = (_cost(x, kernels, network) for x in (rank.before, rank.gradients, rank.update))
            ranks[key] = (before, reduce, update)
        once.append(ranks[key])
    return StepCost(tuple(found), tuple(once), graph.micro_batches)


def _cost(nodes: Iterable[Node], kernels: KernelPricer, network: NetworkPricer) -> Cost:
    cost = Cost()
    for node in nodes:
        if isinstance(node, Kernel):
            seconds = kernels.seconds(node) * node.times
            name = kernel_class(node)
            cost.kernels[name] = cost.kernels.get(name, 0.0) + seconds
            cost.parts[node.part] = cost.parts.get(node.part, 0.0) + seconds
            cost.launches += node.launches * node.times
        else:
            _collective(cost, node, network)
    return cost


def _collective(cost: Cost, node: Collective, network: NetworkPricer) -> None:
    key = (node.dimension, network.between(node), node.overlap)
    cost.collectives[key] = cost.collectives.get(key, 0.0) + network.seconds(node) * node.times
    cost.num_collectives += node.times


def kernel_class(node: Kernel) -> str:
    """The one of Constants that applies."""
    if node.part == "optimizer":
        return "optimizer"
    if node.op == "grouped_gemm":
        return "grouped_low" if node.dtype in LOW else "grouped"
    if node.op == "gemm":
        return "gemm_low" if node.dtype in LOW else "gemm"
    if node.op in ("attention", "attention_backward"):
        return "attention"
    return node.op
