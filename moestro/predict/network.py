"""Seconds of a collective, by where its ranks lie: inside a node, or over several."""

from dataclasses import dataclass, field
from functools import lru_cache

from moestro.config.plan import Plan
from moestro.graph.words import Collective
from moestro.hardware.curves.network import CollectiveModel
from moestro.hardware.devices import Device


@dataclass(frozen=True)
class Span:
    """ranks on how many nodes."""

    ranks: int
    nodes: int


def span(plan: Plan, dimension: str, ranks: int, node_size: int) -> Span:
    """Where `ranks` ranks of a dimension lie, with tp innermost, then cp, dp (its ep part innermost), and pp outermost."""
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
    stride = strides[dimension]
    extent = (ranks - 1) * stride + 1
    if extent <= node_size:
        return Span(ranks, 1)
    inside = max(1, node_size // stride)
    return Span(ranks, -(-ranks // inside))


@dataclass
class NetworkPricer:
    device: Device
    plan: Plan
    node_size: int
    factor: float = 1.0  # in a training step ÷ alone
    _seen: dict[tuple[object, ...], float] = field(default_factory=dict)

    def seconds(self, node: Collective) -> float:
        key = (node.op, node.dimension, node.ranks, node.bytes)
        found = self._seen.get(key)
        if found is None:
            place = span(self.plan, node.dimension, node.ranks, self.node_size)
            model = device_network(self.device.id)
            time = model.seconds(node.op, max(1.0, node.bytes), place.ranks, place.nodes)
            found = self._seen[key] = time.seconds * self.factor
        return found

    def send_s(self, size: float) -> float:
        """To the next pipeline rank."""
        if self.plan.pp == 1 or size == 0:
            return 0.0
        nodes = span(self.plan, "pp", 2, self.node_size).nodes
        return device_network(self.device.id).seconds("send_recv", size, 2, nodes).seconds


@lru_cache(maxsize=32)
def device_network(device_id: str) -> CollectiveModel:
    from moestro.hardware.catalog import load_device
    from moestro.hardware.published.collectives import read_collectives

    samples, _ = _collective_samples()
    return CollectiveModel(samples, load_device(device_id))


@lru_cache(maxsize=1)
def _collective_samples():  # type: ignore[no-untyped-def]
    from moestro.hardware.published.collectives import read_collectives

    return read_collectives()
