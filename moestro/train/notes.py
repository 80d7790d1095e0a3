"""What a run tells of itself besides its figures: its layout, its budget, and the facts of environment.json."""

from typing import Any

import torch
import torch.distributed as dist

from moestro.config import Counts
from moestro.data.batches import TrainStream, ValidationStream
from moestro.data.prepare import PreparedData
from moestro.hardware.device import device_name
from moestro.optim.update import Update
from moestro.parallel.comm import all_reduce
from moestro.parallel.experts import ExpertMix
from moestro.train.engine import Engine
from moestro.train.folder import environment


def layout_notes(engine: Engine, update: Update) -> list[str]:
    layout = engine.mesh.layout
    if layout.world_size == 1:
        return []
    extra = update.exchange_bytes
    muon = f"; Muon's exchange of cut matrices takes {extra / 2**20:.1f} MiB on this rank" if extra else ""
    return [f"{layout.world_size} ranks: {layout.describe()}{muon}"]


def over_budget_notes(engine: Engine) -> list[str]:
    """Of expert_chunks = "auto": layers that did not fit in the most chunks it may take. All ranks call it."""
    mixes = {layer.mix for model in engine.models for layer in model.moe_layers()}
    here = sum(mix.over_budget for mix in mixes if isinstance(mix, ExpertMix))
    over = int(all_reduce(torch.tensor(here), engine.mesh.world, dist.ReduceOp.MAX))
    return (
        [f"{over} times a layer's experts exceeded train.expert_memory_mib even in 8 chunks; raise it"] if over else []
    )


def environment_record(
    engine: Engine, update: Update, counts: Counts, data: dict[str, Any], peak_flops: float, peak_dtype: str
) -> dict[str, Any]:
    """environment.json of a run. peak_flops: measured, of products of `peak_dtype`, FLOP/s."""
    return environment(device_name(engine.device)) | {
        "device": str(engine.device),
        "world_size": engine.mesh.layout.world_size,
        "layout": engine.mesh.layout.describe(),
        "muon_exchange_bytes": update.exchange_bytes,
        "peak_flops_measured": peak_flops,
        "peak_dtype": peak_dtype,
        "total_params": counts.total_params,
        "active_params": counts.active_params,
        "flops_per_token": counts.train_flops_per_token,
        "data": data,
    }


def data_record(
    prepared: PreparedData, notices: list[str], stream: TrainStream, validation: ValidationStream
) -> dict[str, Any]:
    return {
        "notices": notices,
        "skipped": prepared.skipped,
        "train_tokens": stream.tokens,
        "validation_bytes": validation.bytes,
        "fill": stream.fill,
    }
