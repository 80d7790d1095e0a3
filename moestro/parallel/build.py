"""A rank's part of the model: its pipeline stages, cut by tensor and expert parallelism, with their initial weights."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moestro.config import Config
from moestro.model.initial import initial_value
from moestro.model.mlp import FeedForward
from moestro.model.transformer import Transformer
from moestro.parallel.experts import ExpertMix, build_expert_mix
from moestro.parallel.fsdp import shard_of, shard_start
from moestro.parallel.layout import ONE
from moestro.parallel.logical import Chunk, LogicalTensor
from moestro.parallel.mesh import Mesh
from moestro.parallel.parts import Part, part_of
from moestro.parallel.tensor import TensorRanks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def build_model(config: Config, device: torch.device) -> Transformer:
    """The whole model with its initial weights, in one piece."""
    model = Transformer(config.model, DTYPES[config.train.dtype], recompute=config.train.recompute == "block")
    model.init_weights(config.run.seed)
    return model.to(device)


def whole_parts(model: Transformer) -> dict[str, Part]:
    """For a model in one piece: every parameter is all of itself."""
    return {name: part_of(name, value.shape, ONE, ONE.place(0)) for name, value in model.named_parameters()}


def build_stages(config: Config, mesh: Mesh) -> tuple[list[Transformer], dict[str, Part]]:
    """The stages of this rank in the order of their layers, and which part of each parameter they hold.

    Their parameters have shapes but no memory yet, so that FSDP2 may cut them before `fill_stage` gives them values.
    """
    layout, parts = mesh.layout, dict[str, Part]()
    mix = build_expert_mix(mesh, config) if _needs_mix(config, mesh) else None
    stages = []
    for number in layout.stages_of(mesh.place.pp):
        with torch.device("meta"):
            stage = Transformer(
                config.model,
                DTYPES[config.train.dtype],
                recompute=config.train.recompute == "block",
                layers=layout.stages[number],
            )
        for name, parameter in list(stage.named_parameters()):
            parts[name] = part_of(name, parameter.shape, layout, mesh.place)
            _replace(stage, name, torch.empty(parts[name].size, dtype=parameter.dtype, device="meta"))
        _connect(stage, mesh, mix)
        stages.append(stage)
    return stages, parts


def _needs_mix(config: Config, mesh: Mesh) -> bool:
    """Whether a layer's experts are not all here, or not all tokens pass them at once."""
    train, layout = config.train, mesh.layout
    cut = layout.ep > 1 or layout.tp > 1 or train.expert_chunks != 1 or train.expert_recompute
    return config.model.moe is not None and cut


@torch.no_grad()
def fill_stage(stage: Transformer, parts: dict[str, Part], config: Config, device: torch.device) -> None:
    """Give every parameter this rank's part (under FSDP2, its shard of the part) of its initial value.

    Parameters are made one at a time, on the host, so no rank ever holds more of the model than its share.
    """
    if any(isinstance(parameter, DTensor) for parameter in stage.parameters()):
        stage.to_empty(device=device)
    for name, parameter in list(stage.named_parameters()):
        part = parts[name]
        value = part.of(initial_value(name, part.shape, config.model, config.run.seed))
        if isinstance(parameter, DTensor):
            shard, (_, axis) = parameter.to_local(), shard_of(parameter)
            if shard.numel() > 0:
                shard.copy_(value.narrow(axis, shard_start(parameter), shard.shape[axis]))
        else:
            _replace(stage, name, value.to(device, copy=part.size != part.shape).contiguous())
    for layer in stage.moe_layers():
        layer.router.reset_balance(device)
    for attention in stage.head_experts().values():
        attention.reset_shares(device)


def _replace(stage: Transformer, name: str, value: Tensor) -> None:
    module, _, attribute = name.rpartition(".")
    setattr(stage.get_submodule(module), attribute, nn.Parameter(value))


def _connect(stage: Transformer, mesh: Mesh, mix: ExpertMix | None) -> None:
    """Tell the modules that compute on a part where the rest is."""
    tp = TensorRanks(mesh.tp) if mesh.tp is not None else None
    for block in stage.all_blocks():
        block.self_attn.tp = tp
        if isinstance(block.mlp, FeedForward):
            block.mlp.tp = tp
            continue
        if block.mlp.shared_experts is not None:
            block.mlp.shared_experts.tp = tp
        if mix is not None:
            block.mlp.mix = mix
        experts = block.mlp.experts
        if experts.down_bias is not None:
            experts.down_bias_start = mesh.place.tp * experts.down_bias.shape[1]


def buffers(stages: list[Transformer]) -> dict[str, LogicalTensor]:
    """The state of balancing, alike on all ranks that have the layer, under its checkpoint names."""
    found = {}
    for stage in stages:
        for name, buffer in stage.named_buffers():
            chunk = Chunk((0,) * buffer.dim(), buffer)
            found[f"model.{name}"] = LogicalTensor(tuple(buffer.shape), [chunk])
    return found
