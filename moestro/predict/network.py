"""Seconds of a collective, by where its ranks lie: inside a node, or over several."""

from dataclasses import dataclass, field
from typing import NamedTuple

from moestro.config.plan import Plan
from moestro.graph.words import Collective
from moestro.hardware.curves.network import CollectiveModel


class Span(NamedTuple):
    """ranks on how many nodes."""

    ranks: int
    nodes: int


def span(plan: Plan, dimension: str, ranks: int, node_size: int) -> Span:
    """Where ranks of a dimension lie, with tp innermost, then cp, dp (its ep part innermost), and pp outermost."""
    strides = {
        "tp": 1,
        "etp": 1,
        "cp": plan.tp,
        "dp": plan.tp,
        "ep": plan.tp if plan.etp == plan.tp and plan.tp > 1 else 1,
        "edp": plan.ep * plan.etp,
        "pp": plan.tp * plan.cp * plan.dp,
        "world": 1,
    }
    if dimension == "ep_between":  # one rank of every node
        return Span(ranks, ranks)
    stride = strides[dimension]
    extent = (ranks - 1) * stride + 1
    if extent <= node_size:
        return Span(ranks, 1)
    inside = max(1, node_size // stride)
    return Span(ranks, -(-ranks // inside))


@dataclass
class NetworkPricer:
    model: CollectiveModel
    plan: Plan
    node_size: int
    _seen: dict[tuple[object, ...], float] = field(default_factory=dict)

    def seconds(self, node: Collective) -> float:
        key = (node.op, node.dimension, node.ranks, node.bytes)
        found = self._seen.get(key)
        if found is None:
            place = span(self.plan, node.dimension, node.ranks, self.node_size)
            time = self.model.seconds(node.op, max(1.0, node.bytes), place.ranks, place.nodes)
            found = self._seen[key] = time.seconds
        return found

    def between(self, node: Collective) -> bool:
        """Whether it leaves the node."""
        return span(self.plan, node.dimension, node.ranks, self.node_size).nodes > 1

    def send_s(self, size: float) -> float:
        """To the next pipeline rank."""
        if self.plan.pp == 1 or size == 0:
            return 0.0
        nodes = span(self.plan, "pp", 2, self.node_size).nodes
        return self.model.seconds("send_recv", size, 2, nodes).seconds
