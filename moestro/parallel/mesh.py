"""The process groups of a layout, and this rank's place among them."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moestro.parallel.comm import Group, rank_in
from moestro.parallel.layout import Layout, Place


@dataclass(frozen=True)
class Mesh:
    """Groups are None where they would have one member."""

    layout: Layout
    place: Place
    world: Group
    pp: Group
    data: Group  # dp · fsdp · cp: the same part of the dense model, other tokens
    tp: Group
    cp: Group
    sequence: Group  # cp · tp: parts of the same sequences, in order of position ranks (cp, tp)
    tokens: Group  # data · tp: all ranks of a pipeline rank
    ep: Group
    edp: Group  # data ranks with the same experts
    ends: Group  # the first and the last pipeline rank, if this is one of them and they are two
    shard: DeviceMesh | None  # (dp, fsdp · cp) or (fsdp · cp): FSDP2's mesh of the dense model, with fsdp > 1
    expert_shard: DeviceMesh | None  # the same for the experts

    @property
    def rank(self) -> int:
        return rank_in(self.world)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the run's files and the terminal."""
        return self.rank == 0


def build_mesh(layout: Layout, device: torch.device) -> Mesh:
    """The groups of `layout` among the ranks of the default process group (none is needed for one rank).

    Every rank must call it: creating a group is collective.
    """
    if layout.world_size == 1:
        return Mesh(
            layout, layout.place(0), world=None, pp=None, data=None, tp=None, cp=None, sequence=None, tokens=None,
            ep=None, edp=None, ends=None, shard=None, expert_shard=None,
        )  # fmt: skip
    ranks = torch.arange(layout.world_size)
    dense = ranks.view(layout.pp, layout.dp, layout.fsdp, layout.cp, layout.tp)
    expert = ranks.view(layout.pp, layout.data_ranks // layout.ep, layout.ep, layout.tp)
    shards, efsdp = layout.fsdp * layout.cp, layout.efsdp
    sharded = dense.reshape(layout.pp, layout.dp, shards, layout.tp)
    expert_sharded = ranks.view(layout.pp, layout.data_ranks // layout.ep // efsdp, efsdp, layout.ep, layout.tp)
    groups = Groups()
    rank = dist.get_rank()
    device_type = device.type
    mesh = Mesh(
        layout,
        layout.place(rank),
        world=dist.group.WORLD,
        pp=groups.along(dense, 0),
        data=groups.along(dense, 1, 2, 3),
        tp=groups.along(dense, 4),
        cp=groups.along(dense, 3),
        sequence=groups.along(dense, 3, 4),
        tokens=groups.along(dense, 1, 2, 3, 4),
        ep=groups.along(expert, 2),
        edp=groups.along(expert, 1),
        ends=groups.ends(dense),
        shard=None,
        expert_shard=None,
    )
    if layout.fsdp == 1:
        return mesh
    shard = groups.device_mesh(sharded, 1, 2, device_type)
    expert_shard = groups.device_mesh(expert_sharded, 1, 2, device_type)
    return replace(mesh, shard=shard, expert_shard=expert_shard)


class Groups:
    """Creates each distinct group once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def along(self, grid: torch.Tensor, *dims: int) -> Group:
        """This rank's group among those that differ in `dims` of the grid of ranks; None for groups of one."""
        others = [d for d in range(grid.dim()) if d not in dims]
        rows = grid.permute(*others, *dims).reshape(-1, int(torch.tensor([grid.shape[d] for d in dims]).prod()))
        if rows.shape[1] == 1:
            return None
        mine = None
        for row in rows.tolist():
            key = tuple(row)
            if key not in self._made:
                self._made[key] = dist.new_group(row)
            if dist.get_rank() in row:
                mine = self._made[key]
        return mine

    def ends(self, grid: torch.Tensor) -> Group:
        """This rank's group among those of the first and the last row of the grid."""
        pairs = torch.stack([grid[0].flatten(), grid[-1].flatten()]).t().tolist() if len(grid) > 1 else []
        for pair in pairs:
            if tuple(pair) not in self._made:
                self._made[tuple(pair)] = dist.new_group(pair)
        return next((self._made[tuple(pair)] for pair in pairs if dist.get_rank() in pair), None)

    def device_mesh(self, grid: torch.Tensor, replicate: int, shard: int, device_type: str) -> DeviceMesh:
        """FSDP2's mesh: one axis to split, and before it one to replicate if that has more than one rank."""
        rank = dist.get_rank()
        others = [d for d in range(grid.dim()) if d not in (replicate, shard)]
        planes = grid.permute(*others, replicate, shard).reshape(-1, grid.shape[replicate], grid.shape[shard])
        plane = next(p for p in planes if (p == rank).any())
        split = self.along(grid, shard) or self._alone(grid)
        if plane.shape[0] == 1:
            return DeviceMesh.from_group(split, device_type, mesh_dim_names=("fsdp",))
        copies = self.along(grid, replicate)
        assert copies is not None
        return DeviceMesh.from_group([copies, split], device_type, mesh=plane, mesh_dim_names=("dp", "fsdp"))

    def _alone(self, grid: torch.Tensor) -> dist.ProcessGroup:
        """A group of this rank only, which FSDP2 wants where we say None."""
        for rank in grid.flatten().tolist():
            if (rank,) not in self._made:
                self._made[(rank,)] = dist.new_group([rank])
        return self._made[(dist.get_rank(),)]
