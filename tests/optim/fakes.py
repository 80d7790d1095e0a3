"""A bag of parameters with a model's names, and gradients that add up exactly in any order."""

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moestro.config import OptimConfig
from moestro.optim.slots import shard_of
from moestro.optim.update import SHARED, Update
from moestro.parallel.comm import Group, rank_in, size_of
from moestro.parallel.layout import Layout
from moestro.parallel.logical import LogicalTensor
from moestro.parallel.mesh import Mesh
from moestro.parallel.parts import Part, part_of

SHAPES = {
    "embed_tokens.weight": (13, 6),
    "layers.0.input_layernorm.weight": (6,),
    "layers.0.self_attn.q_proj.weight": (8, 6),
    "layers.0.self_attn.o_proj.weight": (6, 8),
    "layers.0.mlp.router.weight": (5, 6),
    "layers.0.mlp.experts.gate_up_proj": (4, 2, 4, 6),
    "layers.0.mlp.experts.down_proj": (4, 6, 4),
    "layers.0.mlp.shared_experts.up_proj.weight": (40, 14),
    "norm.weight": (7,),
    "lm_head.weight": (13, 6),
}

MUON = OptimConfig(name="muon", lr=0.01, muon_lr=0.02, weight_decay=0.3, momentum=0.9, newton_schulz_steps=5)
ADAMW = MUON.model_copy(update={"name": "adamw"})


def layout(**sizes: Any) -> Layout:
    settings: dict[str, Any] = {"pp": 1, "dp": 1, "fsdp": 1, "cp": 1, "tp": 1, "ep": 1, "zero": 0}
    others = {"micro_batch_size": 1, "micro_batches": 1, "stages": ((0,),), "schedule": "1f1b", "ranks_per_node": 1}
    return Layout(**settings | others | sizes)


def whole(name: str, shape: tuple[int, ...], key: object) -> Tensor:
    """Sixty-fourths of small integers: sums of a few are exact."""
    seed = int.from_bytes(hashlib.blake2b(f"{name}/{key}".encode(), digest_size=6).digest())
    return torch.randint(-512, 513, shape, generator=torch.Generator().manual_seed(seed)).float() / 64


class Bag(nn.Module):
    """This rank's parts of the parameters, under their names."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], parts: dict[str, Part]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for step in path:
                if step not in module._modules:
                    module.add_module(step, nn.Module())
                module = module.get_submodule(step)
            module.register_parameter(last, nn.Parameter(parts[name].of(whole(name, shape, "weight")).clone()))


def parts_on(mesh: Mesh, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Part]:
    return {name: part_of(name, shape, mesh.layout, mesh.place) for name, shape in shapes.items()}


def contribution(gradient: Tensor, key: str, index: int, count: int) -> Tensor:
    """Number `index` of `count` tensors whose sum is `gradient`."""
    others = [whole(key, tuple(gradient.shape), i) for i in range(count - 1)]
    return others[index] if index < count - 1 else gradient - sum(others, torch.zeros_like(gradient))


def backward(stages: list[nn.Module], mesh: Mesh, parts: dict[str, Part], step: int, tied: Group) -> None:
    """Leave gradients as a backward would, of which each rank of a part's group has a share."""
    seen: list[str] = []
    for name, parameter in (named for stage in stages for named in stage.named_parameters()):
        part, gradient = parts[name], whole(name, parts[name].shape, step)
        end = seen.count(name) + rank_in(tied)
        seen.append(name)
        if name == SHARED and (tied is not None or len(stages) == 2):
            gradient = contribution(gradient, f"{name} {step}", end, 2)
        group = getattr(mesh, part.group)
        if isinstance(parameter, DTensor):  # FSDP2 has added up over its mesh
            group = mesh.tp if part.group == "tokens" else None
        share = part.of(contribution(gradient, f"{name} {step} {end}", rank_in(group), size_of(group)))
        if isinstance(parameter, DTensor):
            parameter.grad = like(parameter, share)
        elif parameter.grad is None:
            parameter.grad = share.clone()
        else:
            parameter.grad += share


def like(parameter: DTensor, values: Tensor) -> DTensor:
    """`values`, the same on all ranks, placed as the parameter is."""
    group, axis = shard_of(parameter)
    chunks = values.split(-(-values.shape[axis] // size_of(group)), axis)
    local: Tensor = chunks[rank_in(group)] if rank_in(group) < len(chunks) else values.narrow(axis, 0, 0)
    return DTensor.from_local(
        local.contiguous(), parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip


def steps(
    update: Update,
    stages: list[nn.Module],
    mesh: Mesh,
    parts: dict[str, Part],
    clip: float | None,
    first: int = 0,
    tied: Group = None,
) -> list[float]:
    """Three training steps; return the gradient norms."""
    norms = []
    for step in range(first, first + 3):
        update.set_learning_rate(1 / (1 + step))
        backward(stages, mesh, parts, step, tied)
        update.reduce_gradients()
        if clip is not None:
            norms.append(update.clip(clip).item())
        update.step()
        update.zero_grad()
    return norms


def local_boxes(tensor: LogicalTensor) -> list[tuple[tuple[int, ...], Tensor]]:
    """Chunks as plain data that can be sent to another rank."""
    return [(chunk.start, chunk.tensor.detach().clone()) for chunk in tensor.chunks]


def assemble(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], Tensor]]) -> Tensor:
    """The whole of all ranks' boxes, which must cover it and agree where they overlap."""
    out = torch.full(shape, float("nan"))
    for start, box in boxes:
        place = tuple(slice(s, s + n) for s, n in zip(start, box.shape, strict=True))
        old = out[place]
        assert torch.equal(torch.where(old.isnan(), box, old), box), "boxes disagree"
        out[place] = box
    assert not out.isnan().any(), "boxes do not cover the whole"
    return out


def gathered(update: Update, alone: bool = False) -> dict[str, Tensor]:
    """Weights and optimizer state, put together from all ranks' boxes."""
    tensors = update.parameters_state() | update.state()
    mine = {name: (tensor.shape, local_boxes(tensor)) for name, tensor in tensors.items()}
    everyone = [mine]
    if not alone:
        everyone = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
    shapes = {name: shape for rank in everyone for name, (shape, _) in rank.items()}
    boxes = {name: [box for rank in everyone if name in rank for box in rank[name][1]] for name in shapes}
    return {name: assemble(shape, boxes[name]) for name, shape in shapes.items()}
