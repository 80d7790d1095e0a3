"""The best circuits for an exchange over optical switches, by an integer program: what greedy ones are held to."""

from dataclasses import dataclass

import numpy as np

from moestro.errors import MoestroError
from moestro.hardware.curves.optical import (
    Counts,
    Floats,
    OpticalTier,
    circuit_s,
    circuits,
    even_circuits,
    packet_s,
)
from moestro.plan.ilp.program import Program


@dataclass(frozen=True)
class Laid:
    """counts: circuits between servers, [servers, servers]. The seconds are of one exchange.

    even_s, greedy_s: over even circuits, and over those that a controller lays greedily. bound_s: no circuits are
    faster. unblocked_s: over a packet network that never blocks, with as many ports.
    """

    counts: Counts
    seconds: float
    bound_s: float
    even_s: float
    greedy_s: float
    unblocked_s: float

    @property
    def gap(self) -> float:
        """How far from the best it may be, as a share of the bound."""
        return max(0.0, self.seconds / self.bound_s - 1) if self.bound_s else 0.0


def lay_circuits(demand: Floats, tier: OpticalTier, limit_s: float = 20.0) -> Laid:
    """Of all regions, `region_size` servers in turn each; what goes from one to another is sent in packets.

    Args:
        demand: [servers, servers] bytes from row to column.
        limit_s: for each region's program; what is then not proven to be the best says its bound.

    Raises:
        MoestroError: demand that is not square or below zero, or zero everywhere.
    """
    sent = np.asarray(demand, dtype=np.float64)
    if sent.ndim != 2 or sent.shape[0] != sent.shape[1] or not (np.isfinite(sent) & (sent >= 0)).all():
        raise MoestroError(f"a demand is square, [servers, servers], in bytes of zero or more, not {list(sent.shape)}")
    sent = sent * (1 - np.eye(len(sent)))
    if not sent.any():
        raise MoestroError("no server sends another anything: there is nothing to lay circuits for")
    laid, even, greedy = (np.zeros(sent.shape, dtype=np.int64) for _ in range(3))
    bound_s = 0.0
    for first in range(0, len(sent), tier.region_size):
        part = slice(first, first + tier.region_size)
        inside = sent[part, part]
        even[part, part], greedy[part, part] = (
            even_circuits(len(inside), tier.ocs_ports),
            circuits(inside, tier.ocs_ports),
        )
        if len(inside) > 1:
            laid[part, part], own_s = solve_circuits(inside, tier, limit_s)
            bound_s = max(bound_s, own_s)
    ways = {circuit_s(sent, one, tier): one for one in (even, greedy, laid)}  # of equal ones the program's
    seconds = min(ways)
    unblocked_s = packet_s(sent, (tier.ocs_ports + tier.eps_ports) * tier.port_bytes_per_s)
    return Laid(
        ways[seconds], seconds, min(bound_s, seconds), circuit_s(sent, even, tier), circuit_s(sent, greedy, tier),
        unblocked_s,
    )  # fmt: skip


def solve_circuits(demand: Floats, tier: OpticalTier, limit_s: float = 20.0) -> tuple[Counts, float]:
    """Circuits between the servers of a region, [servers, servers], symmetric, of the least hardware.curves.optical
    circuit_s; and seconds that no circuits are below. A variable for each pair and number of circuits: a dozen servers.

    Args:
        demand: [servers, servers] bytes from row to column.

    Raises:
        MoestroError: demand that is not square or below zero; or time ran out.
    """
    if demand.ndim != 2 or demand.shape[0] != demand.shape[1] or not (np.isfinite(demand) & (demand >= 0)).all():
        raise MoestroError(f"a demand is square, [servers, servers], in bytes of zero or more, not {demand.shape}")
    servers = len(demand)
    unit = float(demand.max()) or 1.0
    program = Program()
    longest = program.number(cost=1.0)  # in seconds of `unit` bytes over one port
    laid = {(a, b): [program.integer(1) for _ in range(tier.ocs_ports + 1)]
            for a in range(servers) for b in range(a + 1, servers)}  # fmt: skip
    for (a, b), choice in laid.items():
        program.row([(v, 1) for v in choice], 1, 1)
        most = float(max(demand[a, b], demand[b, a])) / unit
        program.row([(longest, 1), *((v, -most / n) for n, v in enumerate(choice) if n)], 0)
    for server in range(servers):
        own = {pair: choice for pair, choice in laid.items() if server in pair}
        program.row([(v, n) for choice in own.values() for n, v in enumerate(choice)], most=tier.ocs_ports)
        others = [(a + b - server, choice[0]) for (a, b), choice in own.items()]
        for sent in (demand[server], demand[:, server]):
            rest = [(v, -float(sent[other]) / unit / tier.eps_ports) for other, v in others]
            program.row([(longest, 1), *rest], 0)
    found = program.solve(limit_s)
    assert found is not None, "no circuit at all is a choice"
    counts = np.zeros((servers, servers), dtype=np.int64)
    for (a, b), choice in laid.items():
        counts[a, b] = counts[b, a] = sum(n * found.count(v) for n, v in enumerate(choice))
    return counts, found.bound * unit / tier.port_bytes_per_s
