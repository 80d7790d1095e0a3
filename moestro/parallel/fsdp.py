"""FSDP2 over a stage: one unit a block, the experts of a block in a unit of their own, the rest in the root's."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from moestro.model.moe.layer import MoELayer
from moestro.model.transformer import Transformer
from moestro.parallel.comm import Group, rank_in, size_of
from moestro.parallel.mesh import Mesh


def shard_stage(root: nn.Module, stage: Transformer, mesh: Mesh, free_after_forward: bool) -> None:
    """Split the weights of `stage`, a submodule of `root`, over mesh.shard and those of experts over mesh.expert_shard.

    free_after_forward: gather the weights again in backward instead of keeping them (ZeRO-3 rather than ZeRO-2).
    Experts must be apart from their block: their weights have other replicas, and a unit's collectives may not fall
    between the two all-to-alls of its experts' backward.
    """
    for block in stage.all_blocks():
        if isinstance(block.mlp, MoELayer):
            experts = block.mlp.experts
            _shard(experts, mesh.expert_shard, free_after_forward, _expert_axis(mesh.layout.efsdp))
        _shard(block, mesh.shard, free_after_forward, None)
    _shard(root, mesh.shard, False, None)  # gathered first and needed last
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Gradients are sums of token gradients over a global count: nothing is averaged. The forced sum also
            # keeps to operations that gloo has.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _shard(module: nn.Module, mesh: Any, free_after_forward: bool, axis: Any) -> None:
    fully_shard(module, mesh=mesh, reshard_after_forward=free_after_forward, shard_placement_fn=axis)


def _expert_axis(ranks: int) -> Any:
    """By whole experts where they divide evenly, else along the hidden size: padding experts would waste ranks."""

    def placement(parameter: nn.Parameter) -> Shard:
        # gate_up_proj [E, 2, H, D], down_proj [E, D, H], down_bias [E, D]; gate_up_bias [E, 2, H] has but its pair.
        hidden = 3 if parameter.dim() == 4 else 1
        if parameter.shape[0] % ranks and parameter.shape[hidden] % ranks == 0:
            return Shard(hidden)
        return Shard(0)

    return placement


def shard_of(parameter: DTensor) -> tuple[Group, int]:
    """The ranks among which FSDP2 splits a parameter, and the axis along which it does."""
    for mesh_axis, placement in enumerate(parameter.placements):
        if isinstance(placement, Shard):
            return parameter.device_mesh.get_group(mesh_axis), placement.dim
    raise AssertionError(f"not sharded: {parameter.placements}")


def shard_start(parameter: DTensor) -> int:
    """Where this rank's shard begins along its axis. All shards have the same length, but for the last ones."""
    group, axis = shard_of(parameter)
    return rank_in(group) * -(-parameter.shape[axis] // size_of(group))
