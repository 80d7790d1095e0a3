"""Seconds of a collective, by where its ranks lie: inside a node, or over several; and by who sends how much."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from moestro.config.plan import Plan, RoutingConfig, Workload
from moestro.graph.words import Collective
from moestro.hardware.curves.hierarchical import Fabric, hierarchical
from moestro.hardware.curves.network import CollectiveModel
from moestro.hardware.curves.optical import OpticalTier, exchange
from moestro.hardware.curves.wire import EFFICIENCY
from moestro.predict.traffic import demand, hot_rank, rank_shares

# What a time rests on where it is not samples of such a device, to be told beside the prediction.
TOLD = {
    "other device": "another device's, scaled: none measured here",
    "catalog": "the catalog's bandwidth: none measured here",
    "steps": "their steps over the cluster's links and NICs: none measured between such nodes",
    "greedy": "optical circuits, laid for each exchange",
    "even": "optical circuits, equally many between all nodes: none laid for a demand are faster",
    "fixed": "optical circuits that stay as they are: laying them takes longer than the computation before an exchange",
}
UNMEASURED = ("other nodes", "other device", "catalog")  # bases of a model that has no samples between such nodes


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


class Around(NamedTuple):
    """What exchanges depend on beside the curves of a device, the layout and the size of a node.

    experts, top_k: of a layer; 0: routing is even, or nobody asks. fabric: of a cluster, for what was not measured
    between nodes. optical: circuits between the nodes of a region.
    """

    experts: int = 0
    top_k: int = 1
    fabric: Fabric | None = None
    optical: OpticalTier | None = None


EVEN = Around()


def around(workload: Workload, fabric: Fabric | None = None, optical: OpticalTier | None = None) -> Around:
    moe = workload.model.moe
    if moe is None or (workload.routing.kind == "balanced" and optical is None):
        return Around(fabric=fabric, optical=optical)
    return Around(moe.resolved_num_experts, workload.model.largest_top_k, fabric, optical)


class Sent(NamedTuple):
    """Of one collective. between: it leaves the node. basis: what the time rests on."""

    seconds: float
    between: bool
    basis: str


@dataclass
class NetworkPricer:
    model: CollectiveModel
    plan: Plan
    node_size: int
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    around: Around = EVEN
    distinct: bool = False  # dispatch sends one copy of a token to a rank, however many of its experts it goes to
    _seen: dict[tuple[object, ...], Sent] = field(default_factory=dict)

    def of(self, node: Collective, window_s: float = 0.0) -> Sent:
        """window_s: of computation before it, behind which optical circuits can be laid."""
        optical = self.around.optical
        key = (node.op, node.dimension, node.ranks, node.bytes, optical is not None and window_s >= optical.delay_s)
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = self._priced(node, window_s)
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
            found = self._seen[key] = self._timed("send_recv", size, span(self.plan, "pp", 2, self.node_size))
        return found.seconds

    def _priced(self, node: Collective, window_s: float) -> Sent:
        place = span(self.plan, node.dimension, node.ranks, self.node_size)
        size = max(1.0, node.bytes)
        if node.op != "all_to_all" or not self.around.experts or node.ranks == 1:
            return self._timed(node.op, size, place)
        evenly = place.ranks % place.nodes == 0 and self.around.experts % place.ranks == 0
        if self.around.optical is not None and place.nodes > 1 and evenly:
            return self._over_circuits(size, place, self.around.optical, window_s)
        # Of a two-hop exchange the part inside a node is slowest where the busiest rank of all is.
        nodes = node.dimension == "ep_between" and self.around.experts % node.ranks == 0
        ranks = node.ranks if nodes else self.plan.ep
        distinct = self.distinct or nodes
        hot = hot_rank(self.routing, self.around.experts, self.around.top_k, ranks, distinct)
        return self._timed(node.op, size * hot, place)

    def _timed(self, op: str, size: float, place: Span) -> Sent:
        """By samples, or where there are none between such nodes by the steps that the cluster's links ask for."""
        fabric, evenly = self.around.fabric, place.ranks % place.nodes == 0
        time = self.model.seconds(op, size, place.ranks, place.nodes)
        if fabric is None or place.nodes == 1 or time.basis not in UNMEASURED or not evenly or op == "broadcast":
            return Sent(time.seconds, place.nodes > 1, time.basis)
        if place.ranks // place.nodes > fabric.node_size:
            return Sent(time.seconds, True, time.basis)
        return Sent(hierarchical(op, size, fabric, place.ranks, place.nodes).seconds, True, "steps")

    def _over_circuits(self, size: float, place: Span, tier: OpticalTier, window_s: float) -> Sent:
        """All groups whose ranks share these nodes exchange at once, over circuits and, inside nodes, over links."""
        here = place.ranks // place.nodes
        shares = rank_shares(self.routing, self.around.experts, self.around.top_k, place.ranks)
        by_node = shares.reshape(len(shares), place.nodes, here).sum(axis=2)
        reached = replace(tier, port_bytes_per_s=EFFICIENCY * tier.port_bytes_per_s)
        found = [exchange(demand(layer, size * self.node_size), reached, window_s) for layer in by_node]
        between_s = sum(one.seconds for one in found) / len(found)
        inside_s = self.model.seconds("all_to_all", size * here / place.ranks, here).seconds if here > 1 else 0.0
        start_s = self.model.seconds("all_to_all", 1.0, place.ranks, place.nodes).seconds
        hows = [one.how for one in found]
        return Sent(start_s + max(between_s, inside_s), True, max(set(hows), key=hows.count))
