"""FLOPs of a step as publications count them, which differs by metric, year and kind of run.

Each habit shows in rows that publish a rate in FLOPs beside the time of the same run.
"""

import re

from moestro.config.counts import count
from moestro.config.plan import Plan, Workload
from moestro.predict.public_rows import Row, whole

OTHER_GATES = ("gptoss",)  # gated by another function than SiLU


def published_flops(row: Row, workload: Workload, plan: Plan) -> float:
    """Attention in full until mid-2025, its causal half since; without it where short sequences are packed (tuning).

    Megatron's rates of hardware FLOPs ("TFLOP/s" until 2023) hold the second forward pass of recomputation. Its rates
    of model FLOPs took a feed-forward for gated only with SiLU, and windows for whole sequences, until mid-2026.
    """
    model, year, metric = workload.model, whole(row, "year") or 0, row["metric"]
    name = re.sub(r"[^a-z0-9]", "", row["model"].lower())
    ungated = 0.0
    if metric == "model_tflops_per_gpu" and any(known in name for known in OTHER_GATES) and _stack(row) < "26.06":
        model = model.model_copy(update={"sliding_window": None, "layer_types": None})
        ungated = count(model, workload.seq_len).part("experts").train_flops_per_token / 3
    counts = count(model, workload.seq_len)
    per_token = counts.train_flops_per_token - ungated
    if year and _stack(row) < "25.07":
        packed = "sft" in name
        per_token += (-3 if packed else 3) * counts.attention_flops_per_token
    hardware = "recompute" in row.get("notes", "") or (metric == "tflops_per_gpu" and 0 < year <= 2023)
    if hardware and plan.recompute == "block":
        per_token *= 4 / 3
    return per_token * workload.tokens


def _stack(row: Row) -> str:
    """Year and month of the software's release; or the year alone, which sorts before its months."""
    found = re.search(r"(\d\d\.\d\d)[\d.]* \w+ container", row.get("source", "") + row.get("notes", ""), re.IGNORECASE)
    return found[1] if found else row.get("year", "")[2:]
