"""What a step runs on: this rank's stages, their optimizers, and where the rank stands among the others."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moestro.config import Config
from moestro.data.batches import Batch
from moestro.model.transformer import Transformer, shares_embedding
from moestro.optim.update import Update
from moestro.parallel.build import build_stages, fill_stage
from moestro.parallel.context import SequenceSlices
from moestro.parallel.fsdp import shard_stage
from moestro.parallel.layout import ONE, Layout
from moestro.parallel.mesh import Mesh, build_mesh
from moestro.parallel.parts import Part
from moestro.train.stage import MicroBatch, Stage, micro_batch

if TYPE_CHECKING:
    from moestro.parallel.pipeline import Pipeline


@dataclass(frozen=True)
class Engine:
    stages: list[Stage]
    mesh: Mesh
    device: torch.device
    slices: SequenceSlices | None  # with cut sequences
    pipeline: "Pipeline | None"
    seed: int

    @property
    def models(self) -> list[Transformer]:
        return [stage.model for stage in self.stages]

    def micro_batches(self, batches: list[Batch], shares: list[float], loss_scale: float) -> list[MicroBatch]:
        mtp = self.models[0].config.mtp
        depth = mtp.depth if mtp is not None else 0
        return [
            micro_batch(batch, self.slices, self.device, self.seed, share, loss_scale, depth)
            for batch, share in zip(batches, shares, strict=True)
        ]

    def run(self, micro_batches: list[MicroBatch], backward: bool) -> None:
        """Forward, and backward if wanted, of all micro-batches; what came out is in the stages' `outcomes`."""
        for stage in self.stages:
            stage.micro_batches = micro_batches
            stage.outcomes.clear()
        if self.pipeline is not None:
            self.pipeline.run(torch.cat([m.input_ids for m in micro_batches]), backward)
            return
        for number, micro in enumerate(micro_batches):
            loss: Tensor = self.stages[0](micro.input_ids, torch.tensor([number]))
            if backward:
                loss.sum().backward()

    def train(self, mode: bool = True) -> None:
        for stage in self.stages:
            stage.train(mode)


def alone(model: Transformer, seed: int = 0) -> Engine:
    """The engine of one process around a model that is there already."""
    device = next(model.parameters()).device
    stage = Stage(model, None).train(model.training)
    return Engine([stage], build_mesh(ONE, device), device, None, None, seed)


def build_engine(config: Config, layout: Layout, device: torch.device) -> tuple[Engine, dict[str, Part]]:
    """The engine of this rank, with initial weights, and which parts of the parameters it holds.

    Every rank of the default process group must call it.
    """
    mesh = build_mesh(layout, device)
    models, parts = build_stages(config, mesh)
    slices = _slices(mesh, config, device)
    stages = [Stage(model, slices) for model in models]
    if layout.fsdp > 1:
        for stage in stages:
            shard_stage(stage, stage.model, mesh, free_after_forward=layout.zero == 3)
    for model in models:
        fill_stage(model, parts, config, device)
    pipeline = _pipeline(stages, mesh, config, device)
    return Engine(stages, mesh, device, slices, pipeline, config.run.seed), parts


def change_engine(engine: Engine, config: Config, layout: Layout) -> Engine:
    """The engine with the same weights on the same ranks, for another sequence length, batch or rotary embedding."""
    mesh = replace(engine.mesh, layout=layout)
    slices = _slices(mesh, config, engine.device)
    for stage in engine.stages:
        stage.slices = slices
        stage.model.set_rope(config.model.rope)
    return replace(engine, mesh=mesh, slices=slices, pipeline=_pipeline(engine.stages, mesh, config, engine.device))


def _slices(mesh: Mesh, config: Config, device: torch.device) -> SequenceSlices | None:
    if mesh.layout.sequence_ranks == 1:
        return None
    return SequenceSlices(mesh, config.data.seq_len, config.parallel.context, device)


def _pipeline(stages: list[Stage], mesh: Mesh, config: Config, device: torch.device) -> "Pipeline | None":
    if mesh.layout.pp == 1:
        return None
    from moestro.parallel.pipeline import Pipeline  # costs two seconds, which other layouts need not wait

    return Pipeline(stages, mesh, config, device, stages[0].model.stream_dtype)


def build_update(config: Config, engine: Engine, parts: dict[str, Part]) -> Update:
    tied = engine.mesh.ends if shares_embedding(config.model) else None
    return Update(engine.models, config.optim, engine.mesh, parts, config.parallel.muon_exchange, tied)
