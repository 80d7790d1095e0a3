"""The best circuits for an exchange over an optical switch, by an integer program: what greedy ones are held to."""

import numpy as np

from moestro.errors import MoestroError
from moestro.hardware.curves.optical import Counts, Floats, OpticalTier
from moestro.plan.ilp.program import Program


def best_circuits(demand: Floats, tier: OpticalTier, limit_s: float = 20.0) -> Counts:
    """Circuits between the servers of a region, [servers, servers], symmetric, of the least hardware.curves.optical
    circuit_s. A variable for each pair and number of circuits: a dozen servers.

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
    return counts
