"""Seconds of a collective, by where its ranks lie: inside a node, or over several."""

from dataclasses import dataclass, field
from typing import NamedTuple

from moestro.config.plan import Plan
from moestro.graph.words import Collective
from moestro.hardware.curves.network import Basis, CollectiveModel


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


class Sent(NamedTuple):
    """Of one collective. between: it leaves the node. basis: what the time rests on."""

    seconds: float
    between: bool
    basis: Basis


@dataclass
class NetworkPricer:
    model: CollectiveModel
    plan: Plan
    node_size: int
    _seen: dict[tuple[object, ...], Sent] = field(default_factory=dict)

    def of(self, node: Collective) -> Sent:
        key = (node.op, node.dimension, node.ranks, node.bytes)
        found = self._seen.get(key)
        if found is None:
            place = span(self.plan, node.dimension, node.ranks, self.node_size)
            time = self.model.seconds(node.op, max(1.0, node.bytes), place.ranks, place.nodes)
            found = self._seen[key] = Sent(time.seconds, place.nodes > 1, time.basis)
        return found

    def seconds(self, node: Collective) -> float:
        return self.of(node).seconds

    def between(self, node: Collective) -> bool:
        return self.of(node).between

    def send_s(self, size: float) -> float:
        """To the next pipeline rank."""
        if self.plan.pp == 1 or size == 0:
            return 0.0
        key = ("send_recv", size)
        found = self._seen.get(key)
        if found is None:
            place = span(self.plan, "pp", 2, self.node_size)
            time = self.model.seconds("send_recv", size, place.ranks, place.nodes)
            found = self._seen[key] = Sent(time.seconds, place.nodes > 1, time.basis)
        return found.seconds
