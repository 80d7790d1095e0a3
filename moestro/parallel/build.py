"""A rank's part of the model: its pipeline stages, cut by tensor and expert parallelism, with their initial weights."""

import torch
from torch import nn

from moestro.config import Config
from moestro.model.mlp import SwiGLU
from moestro.model.transformer import Transformer, initial_value
from moestro.parallel.experts import ExpertMix, build_expert_mix
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


def build_stages(config: Config, mesh: Mesh, device: torch.device) -> tuple[list[Transformer], dict[str, Part]]:
    """The stages of this rank in the order of their layers, and which part of each parameter they hold.

    No rank ever holds a whole model: parameters are made one at a time, and only the part is kept.
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
        parts |= _fill(stage, config, mesh, device)
        _connect(stage, mesh, mix)
        stages.append(stage)
    return stages, parts


def _needs_mix(config: Config, mesh: Mesh) -> bool:
    """Whether a layer's experts are not all here, or not all tokens pass them at once."""
    whole = mesh.layout.ep == mesh.layout.tp == 1 and config.train.expert_chunks == 1
    return config.model.moe is not None and not (whole and not config.train.expert_recompute)


@torch.no_grad()
def _fill(stage: Transformer, config: Config, mesh: Mesh, device: torch.device) -> dict[str, Part]:
    """Give every parameter this rank's part of its initial value."""
    parts = {}
    for name, parameter in list(stage.named_parameters()):
        part = part_of(name, parameter.shape, mesh.layout, mesh.place)
        whole = initial_value(name, parameter.shape, config.model, config.run.seed)
        module, _, attribute = name.rpartition(".")
        value = part.of(whole).to(device, copy=part.size != part.shape).contiguous()
        setattr(stage.get_submodule(module), attribute, nn.Parameter(value))
        parts[name] = part
    for layer in stage.moe_layers():
        layer.router.reset_balance(device)
    return parts


def _connect(stage: Transformer, mesh: Mesh, mix: ExpertMix | None) -> None:
    """Tell the modules that compute on a part where the rest is."""
    tp = TensorRanks(mesh.tp) if mesh.tp is not None else None
    for block in stage.blocks():
        block.self_attn.tp = tp
        if isinstance(block.mlp, SwiGLU):
            block.mlp.tp = tp
            continue
        if block.mlp.shared_experts is not None:
            block.mlp.shared_experts.tp = tp
        if mix is not None:
            block.mlp.mix = mix


def buffers(stages: list[Transformer]) -> dict[str, LogicalTensor]:
    """The state of balancing, alike on all ranks that have the layer, under its checkpoint names."""
    found = {}
    for stage in stages:
        for name, buffer in stage.named_buffers():
            chunk = Chunk((0,) * buffer.dim(), buffer)
            found[f"model.{name}"] = LogicalTensor(tuple(buffer.shape), [chunk])
    return found
