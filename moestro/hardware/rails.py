"""Which ranks share a rail, and whether steps between nodes stay on theirs.

On a rails-only network NIC i of every node is on rail i (modulo the number of rails), and no link joins two rails: a
message to another rail first has to cross a node. So collectives are cut into steps inside a node and steps along a
rail (ZAYA1's cluster, arXiv 2511.17127).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moestro.errors import MoestroError
from moestro.hardware.devices import Cluster

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RailMap:
    """Ranks count the devices of the first node, then those of the second, and so on.

    slice_nodes: nodes below one set of leaf switches; steps between slices go through the spine. None: all.
    """

    nodes: int
    node_size: int
    nics: int
    rails: int
    slice_nodes: int | None = None

    def __post_init__(self) -> None:
        if min(self.nodes, self.node_size, self.nics, self.rails) < 1 or self.slice_nodes == 0:
            raise MoestroError(f"nodes, devices, NICs, rails and slices are 1 or more, not {self}")

    @property
    def ranks(self) -> int:
        return self.nodes * self.node_size

    def node_of(self, rank: int) -> int:
        """Raises MoestroError for a rank that is not there; so do the others."""
        if not 0 <= rank < self.ranks:
            raise MoestroError(f"there is no rank {rank} among {self.ranks}")
        return rank // self.node_size

    def rail_of(self, rank: int) -> int:
        """Of the NIC nearest to the rank's device; devices share NICs evenly, in their order."""
        return (rank - self.node_of(rank) * self.node_size) * self.nics // self.node_size % self.rails

    def slice_of(self, rank: int) -> int:
        return self.node_of(rank) // (self.slice_nodes or self.nodes)


def rail_map(cluster: Cluster) -> RailMap:
    """Of the first pool. Raises MoestroError where the catalog does not know its NICs; one rail if it tells of none."""
    pool = cluster.pools[0]
    if pool.node.nics is None:
        raise MoestroError(f"the catalog does not say how many NICs a node of {cluster.name} has")
    slices = [level.members for level in pool.levels[:1] if level.name == "slice"]
    return RailMap(
        nodes=pool.nodes,
        node_size=sum(pool.node.devices.values()),
        nics=pool.node.nics,
        rails=pool.node.rails or 1,
        slice_nodes=slices[0] if slices else None,
    )


def rail_groups(rails: RailMap, group: Iterable[int]) -> tuple[Groups, Groups]:
    """A group of ranks as groups inside nodes and groups along rails, for a collective in two levels.

    Along a rail there is one rank of each node: the first of the group's ranks on that rail in every node, then the
    second, and so on. Ranks stay in rising order, so that a ring passes from slice to slice as seldom as it can.
    """
    inside: dict[int, list[int]] = {}
    along: dict[tuple[int, int], list[int]] = {}
    for rank in sorted(set(group)):
        node, rail = rails.node_of(rank), rails.rail_of(rank)
        before = [other for other in inside.get(node, []) if rails.rail_of(other) == rail]
        inside.setdefault(node, []).append(rank)
        along.setdefault((rail, len(before)), []).append(rank)
    return tuple(map(tuple, inside.values())), tuple(tuple(along[key]) for key in sorted(along))


def ring_steps(group: Sequence[int]) -> list[tuple[int, int]]:
    """(from, to) of every step of a ring over the group in its order; none for a rank alone."""
    return [] if len(group) < 2 else list(zip(group, (*group[1:], group[0]), strict=True))


def doubling_steps(group: Sequence[int]) -> list[tuple[int, int]]:
    """(from, to) of every step of recursive doubling: partners 1, 2, 4 ... places away."""
    count = len(group)
    strides = [2**i for i in range(max(count - 1, 0).bit_length())]
    return [(group[i], group[i ^ stride]) for stride in strides for i in range(count) if i ^ stride < count]


def between_nodes(rails: RailMap, steps: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(a, b) for a, b in steps if rails.node_of(a) != rails.node_of(b)]


def off_rail(rails: RailMap, steps: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The steps between nodes whose ends are on different rails: each needs a further hop inside a node."""
    return [(a, b) for a, b in between_nodes(rails, steps) if rails.rail_of(a) != rails.rail_of(b)]
