"""A run folder as a trainer would leave it: plausible curves, made up from a seed."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

CONFIG = """description = "Eight small experts on tales: does bias balancing hold without an auxiliary loss?"

[model]
vocab_size = 4096
hidden_size = 256
num_layers = 5
num_heads = 4

[model.moe]
num_experts = 8
top_k = 2
expert_hidden_size = 384
first_k_dense = 1

[model.moe.balance]
aux_coef = 0.01

[data]
seq_len = 256

[train]
steps = {steps}
global_batch_size = 32
grad_clip = 1.0
eval_every = 25

[optim]
# Muon for the matrices, AdamW for the rest
name = "muon"

[run]
name = "tales-8x2"
"""

ENVIRONMENT: dict[str, Any] = {
    "moestro": "0.1.0",
    "python": "3.11.9",
    "torch": "2.11.0",
    "device": "cpu",
    "device_name": "AMD EPYC 9654, 2 threads",
    "num_threads": 2,
    "hostname": "bench-03",
    "git_commit": "be486ae0c1d24f7f9a54a8b2b3f3c09f6f0a7f11",
    "git_dirty": True,
    "started_at": "2025-03-04T09:12:44+00:00",
    "command": "moestro train sotu-tiny run.name=tales-8x2",
    "peak_flops_measured": 118.4e9,
    "peak_dtype": "fp32",
    "total_params": 12_943_104,
    "active_params": 5_865_216,
    "flops_per_token": 38_200_000,
    "data": {
        "notices": ["Grimm's Fairy Tales, Project Gutenberg, public domain in the USA", "Andersen, CC BY 4.0"],
        "skipped": {"empty": 3, "not UTF-8": 1},
        "train_tokens": 1_840_233,
        "validation_bytes": 402_118,
        "fill": 0.994,
    },
}
REFERENCES = {"xz -9": 2.31, "zstd -19": 2.42, "5-gram Kneser-Ney": 2.07}


def train_record(step: int, steps: int, layers: int = 4, experts: int = 8, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng([seed, step])
    progress = step / max(1, steps)
    step_s = 0.31 * float(rng.lognormal(0, 0.06))
    return {
        "kind": "train",
        "step": step,
        "loss": 2.9 + 5.4 * math.exp(-9 * progress) - 0.5 * progress + float(rng.normal(0, 0.07)),
        "aux_loss": 1 + 0.6 * math.exp(-12 * progress) + abs(float(rng.normal(0, 0.01))) if layers else 0.0,
        "z_loss": 0.0,
        "lr": 3e-3 * min(1, step / (0.1 * steps + 1)) * 0.5 * (1 + math.cos(math.pi * progress)),
        "grad_norm": 0.35 + 3.2 * math.exp(-14 * progress) + float(rng.gamma(2, 0.06)),
        "tokens": step * 8192,
        "tokens_per_s": 8192 / step_s,
        "mfu": 38.2e6 * 8192 / step_s / 118.4e9 * 0.04,
        "step_s": step_s,
        "time_s": 0.34 * step,
        "layers": [_layer(i + 1, progress, experts, rng) for i in range(layers)],
        "from_a_later_version": "ignored",
    }


def _layer(layer: int, progress: float, experts: int, rng: np.random.Generator) -> dict[str, Any]:
    taste = np.random.default_rng([77, layer]).normal(0, 1, experts)  # what each expert would get without balancing
    logits = taste * (0.75 * math.exp(-6 * progress) + 0.08) + rng.normal(0, 0.05, experts)
    load = np.exp(logits) / np.exp(logits).sum()
    return {
        "layer": layer,
        "load": [round(float(x), 5) for x in load],
        "load_entropy": float(-(load * np.log(load)).sum() / math.log(experts)),
        "max_over_mean": float(load.max() * experts),
        "dropped": 0.0,
        "token_entropy": 0.98 - (0.25 + 0.08 * layer) * (1 - math.exp(-4 * progress)) + float(rng.normal(0, 0.004)),
    }


def eval_record(step: int, steps: int) -> dict[str, Any]:
    loss = 2.95 + 5.3 * math.exp(-9 * step / steps) - 0.45 * step / steps
    return {
        "kind": "eval",
        "step": step,
        "loss": loss,
        "bits_per_byte": loss / 1.94,
        "tokens": 144_000,
        "bytes": 402_118,
    }


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def write_run(
    folder: Path,
    steps: int = 300,
    *,
    layers: int = 4,
    experts: int = 8,
    eval_every: int | None = 25,
    log_every: int = 1,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    metrics: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = [{"time": 1741079564.0, "event": "start", "step": 0, "seed": 0}]
    for step in range(1, steps + 1):
        if step % log_every == 0 or steps == 1:
            metrics.append(train_record(step, steps, layers, experts))
        if eval_every and (step % eval_every == 0 or step == steps):
            metrics.append(eval_record(step, steps))
        if step % max(1, steps // 3) == 0:
            name = f"checkpoints/step-{step:06d}"
            events.append({"time": 1741079564 + 0.34 * step, "event": "checkpoint", "step": step, "path": name})
    events.append({"time": 1741079565 + 0.34 * steps, "event": "finish", "step": steps})
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "events.jsonl", events)
    write_lines(folder / "samples.jsonl", _samples(steps))
    (folder / "config.toml").write_text(CONFIG.replace("{steps}", str(steps)), encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT), encoding="utf-8")
    (folder / "references.json").write_text(json.dumps(REFERENCES), encoding="utf-8")
    return folder


def _samples(steps: int) -> list[dict[str, Any]]:
    tale = " there was a king who had three daughters, and the youngest of them would not\nspeak to the wind."
    return [
        {
            "step": steps // 2 or 1,
            "prompt": "Once upon a time",
            "text": " the the king",
            "temperature": 0.8,
            "top_p": 0.95,
        },
        {"step": steps, "prompt": "Once upon a time", "text": tale, "temperature": 0.8, "top_p": 0.95},
        {
            "step": steps,
            "prompt": "<b>bold</b> & ",
            "text": "<script>alert('x')</script>",
            "temperature": 1,
            "top_p": 1,
        },
    ]
