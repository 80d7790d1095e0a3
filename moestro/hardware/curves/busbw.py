"""Bandwidths of collectives: algbw = bytes / time, and busbw = algbw · f(ranks), which can be held against a link.

What `bytes` means, for each rank (the convention of the NCCL and RCCL tests):

    all_reduce                      the buffer
    reduce_scatter                  the whole input, which is `ranks` times the output
    all_gather                      the whole output, which is `ranks` times the input
    all_to_all, all_to_all_uneven   everything that a rank sends, its own part included; uneven: of the busiest rank
    broadcast, reduce, send_recv    the message
    ring                            the message to the next rank, while one comes from the rank before
"""

from moestro.errors import MoestroError, nearest

OPS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_to_all_uneven",
    "broadcast",
    "reduce",
    "send_recv",
    "ring",
)
_SPLIT = ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_uneven")  # a rank keeps 1/ranks of the bytes


def bus_factor(op: str, ranks: int) -> float:
    """f(ranks) of busbw = algbw · f: the share of the bytes that crosses the link of each rank. 0 for one rank alone.

    2(n-1)/n for all_reduce, (n-1)/n for the operations that split their bytes over the ranks, else 1.

    Raises:
        MoestroError: an operation that is not in OPS, or fewer than one rank.
    """
    if op not in OPS:
        raise MoestroError(f"'{op}' is not a collective: {', '.join(OPS)}.{nearest(op, OPS)}")
    if ranks < 1:
        raise MoestroError(f"a collective needs at least one rank, not {ranks}")
    if ranks == 1:
        return 0.0
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in _SPLIT else 1.0


def algbw(size_bytes: float, seconds: float) -> float:
    """Bytes per second as the caller sees them. Raises MoestroError unless the time is above zero."""
    if not seconds > 0:
        raise MoestroError(f"a time must be above zero, not {seconds:g} s")
    return size_bytes / seconds


def busbw(op: str, ranks: int, size_bytes: float, seconds: float) -> float:
    """Bytes per second over the link of each rank. In-switch reduction can lift it above the wire's own speed."""
    return algbw(size_bytes, seconds) * bus_factor(op, ranks)


def per_nic_gbps(bus_gbps: float, nodes: int, ranks: int) -> float:
    """What a ring over `nodes` nodes asks of each NIC, one for each rank: busbw · (nodes-1)/(ranks-1).

    busbw is no wire speed for a run over several nodes: 377 GB/s at 4 nodes of 8 are 36.5 GB/s for each NIC.

    Raises:
        MoestroError: fewer than one node, or fewer ranks than nodes.
    """
    if nodes < 1 or ranks < nodes:
        raise MoestroError(f"{ranks} ranks cannot fill {nodes} nodes")
    return 0.0 if nodes == 1 else bus_gbps * (nodes - 1) / (ranks - 1)
