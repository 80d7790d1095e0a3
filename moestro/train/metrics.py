"""From tensors of a step to the line in metrics.jsonl, the trackers and the progress bar."""

import math
from typing import Any

from moestro.train.step import LayerLoad, StepResult


def step_record(
    result: StepResult, step: int, lr: float, total_tokens: int, step_s: float, time_s: float, mfu: float
) -> dict[str, Any]:
    """One JSON-ready record. Reading the tensors waits for the device."""
    return {
        "kind": "train",
        "step": step,
        "loss": result.loss.item(),
        "aux_loss": result.aux_loss.item(),
        "z_loss": result.z_loss.item(),
        "other_loss": result.other_loss.item(),
        "mtp_loss": result.mtp_loss.item(),
        "lr": lr,
        "grad_norm": result.grad_norm.item(),
        "tokens": total_tokens,
        "tokens_per_s": result.tokens / step_s,
        "mfu": mfu,
        "step_s": step_s,
        "time_s": time_s,
    }


def layer_record(layer: int, load: LayerLoad) -> dict[str, Any]:
    shares = load.load.tolist()
    return {
        "layer": layer,
        "load": [round(share, 6) for share in shares],
        "load_entropy": load_entropy(shares),
        "max_over_mean": max(shares) * len(shares),
        "dropped": load.dropped.item(),
        "token_entropy": load.token_entropy.item(),
    }


def load_entropy(shares: list[float]) -> float:
    """H(load) / ln E: 1 when every expert gets the same, 0 when one gets all (and for a single expert, 1)."""
    if len(shares) == 1:
        return 1.0
    return -sum(share * math.log(share) for share in shares if share > 0) / math.log(len(shares))


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The flat numbers of a record under the names trackers show."""
    kind = record["kind"]
    flat = {f"{kind}/{k}": float(v) for k, v in record.items() if k not in ("kind", "step", "layers")}
    for layer in record.get("layers", ()):
        for key in ("load_entropy", "max_over_mean", "dropped", "token_entropy"):
            flat[f"router/{key}/layer_{layer['layer']:02d}"] = layer[key]
    return flat
