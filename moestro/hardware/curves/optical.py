"""An exchange between servers over optical circuits that are laid anew for its demand, beside a packet network.

The scheme is MixNet's (arXiv 2501.03905): of a server's ports some lead to an optical switch that joins the servers of
a region, the others to the packet network. A controller lays circuits between the pairs with the most to send; a pair
without a circuit sends packets. Laying them takes time, in which the region's exchanges stand still.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moestro.errors import MoestroError

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

# greedy: laid for the demand. even: equally many between all servers, laid for it too. fixed: even ones that stay.
How = Literal["greedy", "even", "fixed", "packets"]


@dataclass(frozen=True)
class OpticalTier:
    """Ports are of one server, port_bytes_per_s of each of them in one direction."""

    region_size: int  # servers that one optical switch joins
    ocs_ports: int
    eps_ports: int
    port_bytes_per_s: float
    delay_s: float

    def __post_init__(self) -> None:
        if not (self.region_size >= 2 and self.ocs_ports >= 1 and self.eps_ports >= 1 and self.port_bytes_per_s > 0):
            raise MoestroError(
                f"an optical tier joins two servers or more, each with ports of both kinds that have a rate, not {self}"
            )


@dataclass(frozen=True)
class Exchange:
    seconds: float
    how: How


def circuits(demand: Floats, ports: int) -> Counts:
    """Circuits between servers, [servers, servers], symmetric, no more than `ports` of any server: greedily.

    The pair with the largest demand for each circuit it has (and the one asked for) gets the next one, until no pair
    with demand has ports left.

    Args:
        demand: [servers, servers] bytes from row to column; both directions of a pair count together.

    Raises:
        MoestroError: demand that is not square or below zero.
    """
    both = _checked(demand) + demand.T
    found = np.zeros(both.shape, dtype=np.int64)
    free = np.full(len(both), ports)
    waiting = np.where(np.eye(len(both), dtype=bool) | (ports < 1), 0.0, both)
    while waiting.any():
        a, b = np.unravel_index(int(waiting.argmax()), waiting.shape)
        found[a, b] += 1
        found[b, a] += 1
        free[[a, b]] -= 1
        waiting[a, b] = waiting[b, a] = both[a, b] / (found[a, b] + 1)
        full = free < 1
        waiting[full, :] = 0.0
        waiting[:, full] = 0.0
    return found


def even_circuits(servers: int, ports: int) -> Counts:
    """Circuits that suit no demand in particular: to the next server round the circle, to the one after it, and so on.

    A port that no round of all servers can use stays free.
    """
    found = np.zeros((servers, servers), dtype=np.int64)
    left, step = ports, 0
    while servers > 1:
        step = step % (servers // 2) + 1
        ends = 1 if 2 * step == servers else 2  # the one opposite is reached both ways round
        if ends > left:
            return found
        for server in range(servers):
            found[server, (server + step) % servers] += 1
            if ends == 2:
                found[(server + step) % servers, server] += 1
        left -= ends
    return found


def packet_s(demand: Floats, bytes_per_s: float) -> float:
    """Of an exchange over a network that never blocks: its busiest server's, sending or receiving.

    bytes_per_s: of one server, in one direction.
    """
    sent = _checked(demand) * (1 - np.eye(len(demand)))
    return float(max(sent.sum(axis=0).max(), sent.sum(axis=1).max())) / bytes_per_s


def circuit_s(demand: Floats, laid: Counts, tier: OpticalTier) -> float:
    """Of an exchange over circuits, the longest of any pair, and at the same time packets where there is no circuit."""
    own = (laid > 0) & ~np.eye(len(demand), dtype=bool)
    direct = float((demand[own] / laid[own]).max()) if own.any() else 0.0
    packets = packet_s(np.where(own, 0.0, demand), tier.eps_ports * tier.port_bytes_per_s)
    return max(direct / tier.port_bytes_per_s, packets)


def exchange(demand: Floats, tier: OpticalTier, window_s: float) -> Exchange:
    """The time of an exchange between servers, of which each `region_size` in turn are a region.

    Circuits are laid behind `window_s` of computation; where the delay is longer they stay as they are. Greedy circuits
    leave ports stranded where pairs ask for the same, so even ones are taken where those are faster.

    Args:
        demand: [servers, servers] bytes from row to column.

    Raises:
        MoestroError: demand that is not square or below zero.
    """
    _checked(demand)
    fixed = _by_region(demand, tier, greedy=False)
    even_s = circuit_s(demand, fixed, tier)
    if tier.delay_s > window_s:
        return Exchange(even_s, "fixed")
    greedy_s = circuit_s(demand, _by_region(demand, tier, greedy=True), tier)
    return Exchange(greedy_s, "greedy") if greedy_s < even_s else Exchange(even_s, "even")


def _by_region(demand: Floats, tier: OpticalTier, greedy: bool) -> Counts:
    found = np.zeros(demand.shape, dtype=np.int64)
    for first in range(0, len(demand), tier.region_size):
        part = slice(first, first + tier.region_size)
        inside = demand[part, part]
        found[part, part] = circuits(inside, tier.ocs_ports) if greedy else even_circuits(len(inside), tier.ocs_ports)
    return found


def _checked(demand: Floats) -> Floats:
    if demand.ndim != 2 or demand.shape[0] != demand.shape[1] or not (np.isfinite(demand) & (demand >= 0)).all():
        raise MoestroError(f"a demand is square, [servers, servers], in bytes of zero or more, not {demand.shape}")
    return demand
