"""What the passes of a step graph cost on a machine, before any constant of training is put in.

Pricing walks every kernel once; putting constants in is then a few multiplications, which is what fitting them and
searching plans need.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from weakref import WeakKeyDictionary

from moestro.config.plan import Plan, RoutingConfig
from moestro.graph.words import Collective, Kernel, Node, Piece, Run, StepGraph
from moestro.predict.constants import Constants
from moestro.predict.curves import DeviceCurves
from moestro.predict.kernels import KernelPricer, kernel_pricer
from moestro.predict.network import EVEN, TOLD, Around, NetworkPricer

KERNEL_CLASSES = ("gemm", "gemm_low", "grouped", "grouped_low", "attention", "memory", "optimizer")
MOST_STAGES = 4096  # kept by a pricer
REACHED = ("experts", "dispatch")  # parts that come after the dispatch, so that no circuits are laid behind them
LOW = ("fp8", "mxfp8", "fp8_block", "nvfp4", "fp4", "int8")


@dataclass
class Cost:
    """Seconds by class of kernel; seconds of collectives, (dimension, between nodes, may hide) -> seconds; counts.

    flops: by dtype. guessed: (basis, dimension) of collectives whose time rests on no measurement of this device; what
    the bases are, network.TOLD says. to_host_s, from_host_s: of copies beside all else (offload.py).
    """

    kernels: dict[str, float] = field(default_factory=dict)
    parts: dict[tuple[str, str], float] = field(default_factory=dict)  # (part of the model, class) -> seconds
    collectives: dict[tuple[str, bool, bool], float] = field(default_factory=dict)
    launches: float = 0.0
    num_collectives: float = 0.0
    flops: dict[str, float] = field(default_factory=dict)
    guessed: set[tuple[str, str]] = field(default_factory=set)
    to_host_s: float = 0.0
    from_host_s: float = 0.0

    def add(self, other: "Cost", times: float) -> None:
        if not times:
            return
        for name, seconds in other.kernels.items():
            self.kernels[name] = self.kernels.get(name, 0.0) + times * seconds
        for part, seconds in other.parts.items():
            self.parts[part] = self.parts.get(part, 0.0) + times * seconds
        for key, seconds in other.collectives.items():
            self.collectives[key] = self.collectives.get(key, 0.0) + times * seconds
        self.launches += times * other.launches
        self.num_collectives += times * other.num_collectives
        for name, flops in other.flops.items():
            self.flops[name] = self.flops.get(name, 0.0) + times * flops
        self.guessed |= other.guessed
        self.to_host_s += times * other.to_host_s
        self.from_host_s += times * other.from_host_s

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
        """Of the whole: kernels or the host, whichever is slower, what blocks, and what cannot hide; or its copies."""
        compute, host = self.compute_s(constants), self.host_s(constants)
        hides = self.communication_s(constants, hides=True)
        hidden = min(hides, constants.hidden * compute)
        compute += constants.contention * hidden
        own = max(compute, host) + self.communication_s(constants, hides=False) + hides - hidden
        return max(own, self.to_host_s, self.from_host_s)


@dataclass(frozen=True)
class StageCost:
    """latency_s, line_s: of the way to the next stage where that lies in another region; line_s occupies the line."""

    rank: int
    forward: Cost
    backward: Cost  # recomputation included
    weight: Cost
    send_s: float
    latency_s: float = 0.0
    line_s: float = 0.0


@dataclass(frozen=True)
class StepCost:
    """once: of each pipeline rank (gather, reduction, update)."""

    stages: tuple[StageCost, ...]
    once: tuple[tuple[Cost, Cost, Cost], ...]
    micro_batches: int


@dataclass(eq=False)
class Pricer:
    """What a machine asks for pieces under plans whose ranks lie alike. What it has priced it remembers."""

    kernels: KernelPricer
    network: NetworkPricer
    _pieces: WeakKeyDictionary[Piece, tuple[Cost, Cost, Cost, Cost]] = field(default_factory=WeakKeyDictionary)
    _stages: dict[tuple[Run, ...], tuple[Cost, Cost, Cost]] = field(default_factory=dict)

    def stage(self, runs: tuple[Run, ...]) -> tuple[Cost, Cost, Cost]:
        """Forward, backward with what is recomputed, weight of one micro-batch."""
        found = self._stages.get(runs)
        if found is None:
            if len(self._stages) >= MOST_STAGES:
                self._stages.clear()
            forward, backward, weight = Cost(), Cost(), Cost()
            for run in runs:
                f, r, b, w = self.piece(run.piece)
                forward.add(f, run.times)
                backward.add(r, run.recomputed)
                backward.add(b, run.times)
                weight.add(w, run.times)
            found = self._stages[runs] = forward, backward, weight
        return found

    def piece(self, piece: Piece) -> tuple[Cost, Cost, Cost, Cost]:
        """Forward, what recomputation adds, backward, weight."""
        found = self._pieces.get(piece)
        if found is None and piece.base is not None:
            forward, again, backward, weight = self.piece(piece.base)
            if piece.recompute is not piece.base.recompute:
                again = self.nodes(piece.recompute)
            found = self._and_shards(forward, piece.forward), again, self._and_shards(backward, piece.backward), weight
            self._pieces[piece] = found
        if found is None:
            parts = (piece.forward, piece.recompute, piece.backward, piece.weight)
            forward, again, backward, weight = (self.nodes(nodes) for nodes in parts)
            found = self._pieces[piece] = forward, again, backward, weight
        return found

    def _and_shards(self, whole: Cost, nodes: Iterable[Node]) -> Cost:
        cost = self.nodes(node for node in nodes if node.part == "sharding")
        cost.add(whole, 1)
        return cost

    def nodes(self, nodes: Iterable[Node]) -> Cost:
        return _cost(nodes, self.kernels, self.network)


def pricer_of(
    curves: DeviceCurves, routing: RoutingConfig, plan: Plan, node_size: int, around: Around = EVEN
) -> Pricer:  # fmt: skip
    """One for all plans that differ in nothing that a price depends on."""
    distinct = plan.dispatch == "deduplicated"
    return _pricer(curves, routing, node_size, around, distinct, plan.pp, plan.dp, plan.cp, plan.tp, plan.ep, plan.etp)


@lru_cache(maxsize=256)
def _pricer(
    curves: DeviceCurves,
    routing: RoutingConfig,
    node_size: int,
    around: Around,
    distinct: bool,
    pp: int,
    dp: int,
    cp: int,
    tp: int,
    ep: int,
    etp: int,
) -> Pricer:
    plan = Plan(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, etp=etp)
    network = NetworkPricer(curves.network, plan, node_size, routing, around, distinct)
    return Pricer(kernel_pricer(curves, routing, ep), network)


def price(graph: StepGraph, pricer: Pricer) -> StepCost:
    """Pieces and stages that were priced before are not priced again."""
    network = pricer.network
    found = [StageCost(s.rank, *pricer.stage(s.pieces), network.send_s(s.send_bytes)) for s in graph.stages]
    ranks: dict[tuple[object, ...], tuple[Cost, Cost, Cost]] = {}
    once = []
    for rank in graph.ranks:
        key = (id(rank.before), id(rank.gradients), id(rank.update))
        if key not in ranks:
            before, reduce, update = (pricer.nodes(nodes) for nodes in (rank.before, rank.gradients, rank.update))
            ranks[key] = (before, reduce, update)
        once.append(ranks[key])
    return StepCost(tuple(found), tuple(once), graph.micro_batches)


def _cost(nodes: Iterable[Node], kernels: KernelPricer, network: NetworkPricer) -> Cost:
    cost, collectives = Cost(), list[Collective]()
    for node in nodes:
        if isinstance(node, Kernel):
            seconds = kernels.seconds(node) * node.times
            name = kernel_class(node)
            cost.kernels[name] = cost.kernels.get(name, 0.0) + seconds
            cost.parts[node.part, name] = cost.parts.get((node.part, name), 0.0) + seconds
            cost.launches += node.launches * node.times
            cost.flops[node.dtype] = cost.flops.get(node.dtype, 0.0) + node.flops * node.times
        else:
            collectives.append(node)
    window_s = sum(seconds for (part, _), seconds in cost.parts.items() if part not in REACHED)
    for node in collectives:
        _collective(cost, node, network, window_s)
    return cost


def _collective(cost: Cost, node: Collective, network: NetworkPricer, window_s: float) -> None:
    sent = network.of(node, window_s)
    key = (node.dimension, sent.between, node.overlap)
    cost.collectives[key] = cost.collectives.get(key, 0.0) + sent.seconds * node.times
    cost.num_collectives += node.times
    if node.ranks > 1 and sent.basis in TOLD:
        cost.guessed.add((sent.basis, node.dimension))


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
