"""Collectives over several nodes as their steps: inside each node, between nodes on every NIC at once, inside again.

The equations are those of Primus's performance projection (github AMD-AGI/Primus, read in its code), whose constants
AMD calibrated on MI325X. They ask for no measurement, so they serve clusters that nobody has measured; where series
exist, curves.network knows better.
"""

import math
from dataclasses import dataclass

from moestro.errors import MoestroError
from moestro.hardware.catalog import load_device
from moestro.hardware.curves.wire import EFFICIENCY
from moestro.hardware.devices import Cluster, Device, Link, Pool
from moestro.hardware.figures import Figure

OVERLAP = 0.9  # of the shorter of the two levels that the longer one hides, from OVERLAP_BYTES for each device on
OVERLAP_BYTES = RAMP_BYTES = 32 * 2**20
LAUNCH_S = 2.8e-6
OVERHEAD_S = {"all_reduce": 200e-6, "all_gather": 200e-6, "reduce_scatter": 200e-6, "all_to_all": 150e-6}
RAMP_S = 260e-6  # of a NIC with little to send, with every doubling of the nodes
PEER_S = 0.45e-6  # of an all-to-all, for each rank on another node
MESH_CONTENTION = 0.12  # of an all-to-all on all links of a mesh at once
NODE_CONTENTION = 0.04  # of an all-to-all, with every further node ...
CONTENDING_NODES = 16  # ... up to here, the most that Primus measures; its straight line would stop all at 26
MESSAGE_GAIN = 0.8 / EFFICIENCY  # of a single stream, to or from one device, over a collective

# Of a protocol: start-ups for each step, bytes of payload in a packet, bytes of the packet.
PROTOCOLS = {"simple": (3, 0, 0), "ll": (1, 4, 8), "ll64": (1, 56, 64), "ll128": (1, 120, 128)}
SIMPLE_HEADER = 8


@dataclass(frozen=True)
class Fabric:
    """Equal nodes and what joins them. Rates are those that collectives reach, in bytes/s in one direction.

    inside_bytes_per_s: of one device towards all others of its node. nic_bytes_per_s: of each of the node's `nics`; 0:
    unknown, so that nothing can be said of several nodes.
    message_gain: by how much one stream between two devices is faster than that.
    """

    node_size: int
    inside_bytes_per_s: float
    nic_bytes_per_s: float
    nics: int
    mesh: bool = False
    inside_latency_s: float = 0.45e-6
    nic_latency_s: float = 2e-6
    message_gain: float = MESSAGE_GAIN

    def __post_init__(self) -> None:
        if not (self.node_size >= 1 and self.nics >= 1 and self.inside_bytes_per_s > 0 and self.nic_bytes_per_s >= 0):
            raise MoestroError(f"a fabric has devices, NICs and links with a rate, not {self}")

    def inside_rate(self, ranks: int, exchange: bool = False) -> float:
        """Bytes/s of each of `ranks` devices of a node: in a mesh, of the links to the others of the group.

        exchange: in an all-to-all, where all links of a mesh are busy at once.
        """
        reach = (ranks - 1) / (self.node_size - 1) if self.mesh and 1 < ranks < self.node_size else 1.0
        busy = MESH_CONTENTION * ((ranks - 1) / (self.node_size - 1)) ** 2 if self.mesh and exchange else 0.0
        return self.inside_bytes_per_s * reach * (1 - busy)

    def active_nics(self, ranks: int) -> float:
        """NICs of a node with `ranks` devices in the collective: those of these devices."""
        return max(1.0, self.nics * ranks / self.node_size)


@dataclass(frozen=True)
class HierarchicalTime:
    """inside_s, between_s: of the two levels. overlap: the share of the shorter one that the longer one hides."""

    inside_s: float
    between_s: float
    overlap: float
    overhead_s: float
    protocol: str

    @property
    def seconds(self) -> float:
        long, short = max(self.inside_s, self.between_s), min(self.inside_s, self.between_s)
        return long + (1 - self.overlap) * short + self.overhead_s


def hierarchical(op: str, size_bytes: float, fabric: Fabric, ranks: int, nodes: int = 1) -> HierarchicalTime:
    """The time of one collective, with the protocol that is fastest.

    all_reduce: reduce-scatter inside, all-reduce of each device's share over its NIC, all-gather inside. reduce_scatter
    and all_gather: half of that. all_to_all: what stays in the node and what leaves it, at the same time. send_recv:
    between two devices, on one node or on two.

    Args:
        op, size_bytes: as curves.busbw defines them; no broadcast, reduce or ring.
        ranks, nodes: all ranks, equally many on each node.

    Raises:
        MoestroError: another operation, no bytes, or ranks that do not fill `nodes` nodes evenly.
    """
    if op not in (*OVERHEAD_S, "send_recv"):
        raise MoestroError(f"no steps are known for '{op}': {', '.join(OVERHEAD_S)}, send_recv")
    here = ranks // nodes if nodes >= 1 else 0
    if not (ranks >= 2 and nodes >= 1 and here * nodes == ranks and here <= fabric.node_size):
        raise MoestroError(f"{ranks} ranks do not lie evenly on {nodes} nodes of {fabric.node_size} devices")
    if not size_bytes > 0:
        raise MoestroError(f"a collective needs more than {size_bytes:g} bytes")
    if nodes > 1 and fabric.nic_bytes_per_s == 0:
        raise MoestroError("how fast the NICs are is unknown, so nothing can be said of several nodes")
    if op == "send_recv":
        return _message(size_bytes, fabric, ranks, nodes)
    time = _exchange if op == "all_to_all" else _reduction
    return min(
        (time(op, size_bytes, fabric, here, nodes, protocol) for protocol in PROTOCOLS), key=lambda one: one.seconds
    )


def _reduction(op: str, size: float, fabric: Fabric, here: int, nodes: int, protocol: str) -> HierarchicalTime:
    passes = 2 if op == "all_reduce" else 1
    inside_s, between_s, overhead_s = 0.0, 0.0, OVERHEAD_S[op] + LAUNCH_S
    if here > 1:
        start_s, sent = _packed(size * (here - 1) / here, fabric.inside_latency_s, protocol)
        inside_s = passes * (sent / fabric.inside_rate(here) + start_s * math.ceil(math.log2(here)))
    if nodes > 1:
        nics, steps = fabric.active_nics(here), math.ceil(math.log2(nodes))
        start_s, sent = _packed(size / nics * (nodes - 1) / nodes, fabric.nic_latency_s, protocol)
        between_s = passes * (sent / fabric.nic_bytes_per_s + start_s * steps)
        full = min(1.0, size / (nics * steps) / RAMP_BYTES)
        overhead_s += RAMP_S * steps * (1 - full**2.5)
    return HierarchicalTime(inside_s, between_s, OVERLAP * min(1.0, size / here / OVERLAP_BYTES), overhead_s, protocol)


def _exchange(op: str, size: float, fabric: Fabric, here: int, nodes: int, protocol: str) -> HierarchicalTime:
    ranks = here * nodes
    inside_s, between_s = 0.0, 0.0
    if here > 1:
        start_s, sent = _packed(size * (here - 1) / ranks, fabric.inside_latency_s, protocol)
        inside_s = sent / fabric.inside_rate(here, exchange=True) + start_s
    if nodes > 1:
        leaving = size * (ranks - here) / ranks * here / fabric.active_nics(here)
        start_s, sent = _packed(leaving, fabric.nic_latency_s, protocol)
        contention = 1 - NODE_CONTENTION * (min(nodes, CONTENDING_NODES) - 1)
        between_s = sent / (fabric.nic_bytes_per_s * fabric.message_gain * contention) + start_s
    overhead_s = OVERHEAD_S[op] + LAUNCH_S + PEER_S * (ranks - here)
    return HierarchicalTime(inside_s, between_s, 1.0, overhead_s, protocol)


def _message(size: float, fabric: Fabric, ranks: int, nodes: int) -> HierarchicalTime:
    if ranks != 2:
        raise MoestroError(f"a message goes from one rank to another, not among {ranks}")
    if nodes == 2:
        rate, latency_s = fabric.nic_bytes_per_s * fabric.active_nics(1), fabric.nic_latency_s
    else:
        links = fabric.node_size - 1 if fabric.mesh else 1
        rate, latency_s = fabric.inside_bytes_per_s / links, fabric.inside_latency_s
    seconds = size / (rate * fabric.message_gain) + latency_s
    inside_s, between_s = (0.0, seconds) if nodes == 2 else (seconds, 0.0)
    return HierarchicalTime(inside_s, between_s, 0.0, LAUNCH_S, "simple")


def _packed(size: float, latency_s: float, protocol: str) -> tuple[float, float]:
    """Seconds to start a step, and the bytes that cross the link."""
    starts, payload, packet = PROTOCOLS[protocol]
    sent = size + SIMPLE_HEADER if protocol == "simple" else math.ceil(size / payload) * packet
    return starts * latency_s, sent


def fabric_of(cluster: Cluster) -> Fabric:
    """The first pool of a cluster: measured rates where the catalog has them, else 0.7 of the nominal ones.

    Devices that reach each other through the host only get the rate of the narrowest link on the way. Nodes of which
    the cluster's file tells no NICs get the device's usual ones.

    Raises:
        MoestroError: a pool of unlike devices, or one whose links the catalog does not know.
    """
    pool = cluster.pools[0]
    if len(pool.node.devices) != 1:
        raise MoestroError(f"the nodes of {cluster.name} mix devices; a fabric has equal ones")
    ((device_id, node_size),) = pool.node.devices.items()
    device = load_device(device_id)
    named = [link for link in device.links if link.name == pool.node.link] or list(device.links[:1])
    link = named[0] if named else Link(name="none", topology="none")
    inside = link.peer_gbps if link.topology == "host" and link.peer_gbps.known else link.gbps
    rate = _reached(inside)
    if rate is None:
        raise MoestroError(f"the catalog knows no rate between the devices of a node of {cluster.name}")
    nics, nic_rate, measured = _nics(pool, device, node_size)
    latency_us, nic_latency_us = link.latency_us.best, device.nic.latency_us.best
    return Fabric(
        node_size=node_size,
        inside_bytes_per_s=rate,
        nic_bytes_per_s=nic_rate,
        nics=nics,
        mesh=link.topology == "mesh",
        inside_latency_s=Fabric.inside_latency_s if latency_us is None else latency_us * 1e-6,
        nic_latency_s=Fabric.nic_latency_s if nic_latency_us is None else nic_latency_us * 1e-6,
        message_gain=1.0 if measured else MESSAGE_GAIN,
    )


def _nics(pool: Pool, device: Device, node_size: int) -> tuple[int, float, bool]:
    """NICs of a node, bytes/s that each reaches (0: unknown), and whether that was measured."""
    nics = pool.node.nics or device.nic.per_node or node_size
    level = pool.levels[0].gbps if pool.levels else None
    if level is not None and level.achieved is not None:  # of one device
        return nics, level.achieved * 1e9 * node_size / nics, True
    gbit = pool.node.nic_gbit if pool.node.nic_gbit.known else device.nic.per_device_gbit
    reached = _reached(gbit)
    return nics, 0.0 if reached is None else reached / 8, gbit.achieved is not None


def _reached(figure: Figure) -> float | None:
    """Units per second from a figure in 10⁹ of them: the achieved one, or EFFICIENCY of the nominal."""
    if figure.achieved is not None:
        return figure.achieved * 1e9
    return None if figure.nominal is None else figure.nominal * 1e9 * EFFICIENCY


def nic_warning(fabric: Fabric, seen: int) -> str:
    """What it costs that the ranks of a node see `seen` of its NICs; empty when they see all.

    A ring with several channels and a hierarchical collective both keep every NIC of a node busy, so one that carries
    the whole payload alone is a fault, not a model.
    """
    if seen >= fabric.nics:
        return ""
    return (
        f"the ranks of a node see {seen} of {fabric.nics} NICs: collectives between nodes take "
        f"{fabric.nics / max(seen, 1):.3g} times as long. Check NIC affinity and the library's list of NICs."
    )
