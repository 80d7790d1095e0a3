"""What a collective should take on a link that the catalog or a few measurements describe: α + S·f/(0.7·B).

This is the ground on which curves of measured series stand (curves.series), and what is left for a device without any.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.errors import MoestroError
from moestro.hardware.curves.busbw import bus_factor
from moestro.hardware.devices import Device

Floats = NDArray[np.float64]

# Of the public series in one node (NCCL on NVLink and PCIe), in round numbers: a measured series corrects them.
EFFICIENCY = (
    0.7  # of the nominal link that large messages reach; also what Primus assumes and arXiv 2510.27583 measures
)
ALPHA_S = 8e-6  # of two ranks
ALPHA_PER_DOUBLING = 0.25  # of ALPHA_S, with every doubling of the ranks
ALPHA_NODES_S = 30e-6  # with every doubling of the nodes
NIC_GBIT = 400.0  # for each rank, where the catalog knows none
_FAR = 20.0  # times off: measured so far from the catalog, a device is taken to have used another path


@dataclass(frozen=True)
class Wire:
    """bytes_per_s: one direction, of one rank inside the node; nic_bytes_per_s: between nodes, of each rank.

    topology: in a "mesh" of `node_size` devices n ranks have n-1 of the node_size-1 links.
    """

    bytes_per_s: float
    nic_bytes_per_s: float
    alpha_s: float = ALPHA_S
    node_size: int = 8
    topology: str = ""

    def bus_bytes_per_s(self, op: str, ranks: int, nodes: int) -> float:
        """The busbw at which the links, or the NICs if the ranks are on several nodes, are full."""
        here = ranks / nodes
        inside = self.bytes_per_s
        if self.topology == "mesh" and 1 < here < self.node_size:
            inside *= (here - 1) / (self.node_size - 1)
        if nodes == 1:
            return inside
        if op in ("all_to_all", "all_to_all_uneven"):
            between = (
                self.nic_bytes_per_s * (ranks - 1) / max(ranks - here, 1)
            )  # each rank sends ranks - here parts out
        elif op in ("send_recv", "ring"):
            between = self.nic_bytes_per_s
        else:
            between = self.nic_bytes_per_s * (ranks - 1) / (nodes - 1)  # busbw.per_nic_gbps: every NIC works
        return between if here < 2 else min(inside, between)

    def seconds(self, op: str, ranks: int, nodes: int, sizes_bytes: Floats) -> Floats:
        alpha = self.alpha_s * (1 + ALPHA_PER_DOUBLING * math.log2(ranks)) + ALPHA_NODES_S * math.log2(nodes)
        return alpha + sizes_bytes * bus_factor(op, ranks) / (EFFICIENCY * self.bus_bytes_per_s(op, ranks, nodes))


def wire_of(device: Device) -> Wire:
    """Raises MoestroError when the catalog knows no bandwidth between such devices."""
    link = device.links[0] if device.links else None
    gbps = device.host_link_gbps.nominal if link is None else link.gbps.nominal or link.peer_gbps.nominal
    if gbps is None:
        raise MoestroError(
            f"the catalog knows no link of {device.id or device.name}, so collectives on it cannot be timed; "
            "measure them there with `moestro measure`"
        )
    size = (link.devices if link is not None else None) or device.devices_per_node or 8
    nic = (device.nic.per_device_gbit.nominal or NIC_GBIT) / 8
    return Wire(gbps * 1e9, nic * 1e9, node_size=size, topology=link.topology if link is not None else "host")


def measured_wire(known: Wire | None, bus_bytes_per_s: float, alpha_s: float) -> Wire:
    """The wire of a device with measurements: `known`, where its best busbw and shortest time agree with it.

    Where they are far off (another transport, as gloo between processes), or nothing is known, they replace it.
    """
    bandwidth = bus_bytes_per_s / EFFICIENCY
    if known is None:
        return Wire(bandwidth, NIC_GBIT / 8 * 1e9, alpha_s)
    return Wire(
        bandwidth if _far(bandwidth, known.bytes_per_s) else known.bytes_per_s,
        known.nic_bytes_per_s,
        alpha_s if _far(alpha_s, known.alpha_s) else known.alpha_s,
        known.node_size,
        known.topology,
    )


def _far(a: float, b: float) -> bool:
    return max(a / b, b / a) > _FAR
