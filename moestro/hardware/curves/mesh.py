"""What a group smaller than the node gets of its links: all behind a switch, its share of them in a mesh."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moestro.errors import MoestroError
from moestro.hardware.curves.busbw import busbw
from moestro.hardware.profile import Sample

# Of the links' sum that collectives reach on a mesh of MI300X (arXiv 2510.27583; Primus assumes the same).
EXPECTED = 0.7


def mesh_bandwidth(ranks: int, node_size: int, link_gbps: float) -> float:
    """GB/s into each of `ranks` devices of a full mesh: (ranks - 1) links, those to the others of the group.

    With the nominal link (MI300X: 64) this is the ceiling, 64, 192, 448 for 2, 4, 8; EXPECTED of it is what to plan
    with. With the link's achieved rate (48) it is what the ZAYA1 report (arXiv 2511.17127) measures: 48, 144, 336.

    Raises:
        MoestroError: a group that does not fit the node, or a link without bandwidth.
    """
    if not 1 <= ranks <= node_size or not link_gbps > 0:
        raise MoestroError(f"no group of {ranks} in a mesh of {node_size} devices with links of {link_gbps:g} GB/s")
    return (ranks - 1) * link_gbps


@dataclass(frozen=True)
class Derate:
    """Whether small groups are starved.

    busbw_gbps: by ranks. share: of the largest group's, by ranks. mesh_error, switch_error: root mean square
    of log(measured / expected) over the smaller groups, if shares go with the links in reach, or do not change.
    """

    topology: Literal["mesh", "switch", "unknown"]
    node_size: int
    busbw_gbps: dict[int, float]
    share: dict[int, float]
    mesh_error: float | None
    switch_error: float | None
    reason: str

    @property
    def warning(self) -> str:
        """What to do about it; empty when nothing."""
        if self.topology != "mesh":
            return ""
        smallest = min(self.share)
        return (
            f"groups smaller than the node are starved: {smallest} ranks get {self.share[smallest]:.0%} of the "
            f"bandwidth of {max(self.share)}. Use the full node for every collective (data, expert or context "
            f"parallelism of {self.node_size}) rather than tensor parallelism over few."
        )


def detect_derate(samples: Sequence[Sample], op: str = "all_reduce") -> Derate:
    """Judge from collectives in one node over several group sizes.

    The busbw of n ranks goes with n-1 on a mesh (half the group, less than half the bandwidth) and hardly changes
    behind a switch. The closer of the two, in the logarithm, if it is at least twice as close as the other. Compared is
    the largest message that all group sizes have, or the best of each.

    Args:
        samples: of a machine. Those of `op` in one node with nothing else under way are used.
        op: of those that busbw compares over group sizes.

    Returns:
        topology "unknown" with fewer than two group sizes, or when neither expectation is near.
    """
    rates: dict[int, dict[float, float]] = {}  # GB/s by ranks and size
    for s in samples:
        if s.op != op or s.case.get("nodes", 1) != 1 or s.case.get("groups") == "all" or s.number("ranks") < 2:
            continue
        ranks, size = round(s.number("ranks")), s.number("bytes")
        by_size = rates.setdefault(ranks, {})
        by_size[size] = max(by_size.get(size, 0.0), busbw(op, ranks, size, s.median_s) / 1e9)
    common = set[float].intersection(*(set(by_size) for by_size in rates.values())) if rates else set[float]()
    if common:
        return judge_derate({ranks: by_size[max(common)] for ranks, by_size in rates.items()})
    return judge_derate({ranks: max(by_size.values()) for ranks, by_size in rates.items()})


def judge_derate(busbw_gbps: Mapping[int, float]) -> Derate:
    """As detect_derate, from the busbw by ranks."""
    best = dict(sorted(busbw_gbps.items()))
    node = max(best, default=0)
    share = {ranks: rate / best[node] for ranks, rate in best.items()}
    if len(best) < 2:
        return Derate("unknown", node, best, share, None, None, "one group size only; measure groups of 2, 4 and all")
    smaller = [ranks for ranks in best if ranks < node]
    mesh = _rms([math.log(share[ranks] * (node - 1) / (ranks - 1)) for ranks in smaller])
    switch = _rms([math.log(share[ranks]) for ranks in smaller])
    topology: Literal["mesh", "switch", "unknown"] = "unknown"
    if min(mesh, switch) <= 0.5 * max(mesh, switch):
        topology = "mesh" if mesh < switch else "switch"
    rates = ", ".join(f"{rate:.3g} with {ranks}" for ranks, rate in best.items())
    links = ", ".join(f"{best[node] * (ranks - 1) / (node - 1):.3g}" for ranks in best)
    reason = f"busbw in GB/s: {rates}; a mesh would give {links}, a switch {best[node]:.3g} throughout"
    return Derate(topology, node, best, share, mesh, switch, reason)


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))
