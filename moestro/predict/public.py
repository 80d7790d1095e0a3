"""Reads public training runs: a CSV of shapes, layouts and measured figures, as people publish them.

What a row leaves out is filled by rules that look at the row alone, never at who published it; each rule that was used
is named in the run's `assumed`.
"""

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moestro.config.model import ModelConfig
from moestro.config.plan import Plan, Precision, Workload, misfits
from moestro.graph.count import count_step
from moestro.hardware.catalog import find_device
from moestro.hardware.compare import native_dtypes
from moestro.hardware.devices import Device
from moestro.hardware.published.table import read_table
from moestro.predict.memory import fits, memory_of
from moestro.predict.public_flops import published_flops
from moestro.predict.public_layouts import layout_of, sequence_length
from moestro.predict.public_models import model_of
from moestro.predict.public_rows import Row, Unusable, number, whole

SHIPPED = Path(__file__).parent / "published" / "training_runs.csv.xz"
REQUIRED = ("model", "layers", "hidden", "heads", "hardware", "gpus", "metric", "value")
Quantity = Literal["step_s", "tokens_per_s", "flops_per_s", "mfu", "bytes"]

# What a metric's name says it is, and the factor to SI units. Rates are of one device unless "total" or listed here.
METRICS: dict[str, tuple[Quantity, float, bool]] = {
    "step_time_ms": ("step_s", 1e-3, False),
    "step_time_s": ("step_s", 1.0, False),
    "step_time_s_median": ("step_s", 1.0, False),
    "step_time(as printed s)": ("step_s", 1.0, False),
    "tokens_per_s_per_gpu": ("tokens_per_s", 1.0, True),
    "tokens_per_s": ("tokens_per_s", 1.0, False),
    "tokens_per_s_total": ("tokens_per_s", 1.0, False),
    "tflops_per_gpu": ("flops_per_s", 1e12, True),
    "model_tflops_per_gpu": ("flops_per_s", 1e12, True),
    "tflops_per_chip": ("flops_per_s", 1e12, True),
    "mfu_percent": ("mfu", 1e-2, True),
    "peak_alloc_gib_per_gpu": ("bytes", 2.0**30, True),
    "peak_reserved_gib_per_gpu": ("bytes", 2.0**30, True),
    "peak_memory_gib_per_gpu": ("bytes", 2.0**30, True),
    "peak_memory_gib_max_rank": ("bytes", 2.0**30, True),
    "max_memory(as printed, GB)": ("bytes", 1e9, True),
    "max_memory_gb_first_last_stage": ("bytes", 1e9, True),
    "peak_memory_mib": ("bytes", 2.0**20, True),
}
PRECISIONS: tuple[tuple[str, Precision], ...] = (
    ("nvfp4", "nvfp4"),
    ("mxfp8", "mxfp8"),
    ("fp8-mx", "mxfp8"),
    ("float8", "fp8"),
    ("fp8", "fp8"),
    ("bf16", "bf16"),
    ("fp16", "fp16"),
    ("fp32", "fp32"),
)


@dataclass(frozen=True)
class PublicRun:
    """measured: seconds of a step, or bytes on the fullest device."""

    row: int
    source: str
    model: str
    workload: Workload
    plan: Plan
    device: str
    num_devices: int
    devices_per_node: int
    interconnect: str
    quantity: Literal["step_s", "bytes"]
    measured: float
    metric: str
    complete: bool  # every column of shape and layout was there
    is_moe: bool
    year: int
    assumed: tuple[str, ...]
    notes: str


def parse_runs(path: Path | None = None) -> tuple[list[PublicRun], Counter[str]]:
    """The usable rows of a CSV (None: the shipped one; .xz is read too), and why others are not.

    Raises:
        MoestroError: no such file, or columns are missing.
    """
    runs, unusable = [], Counter[str]()
    for line, row in enumerate(read_table(path or SHIPPED, REQUIRED, "runs"), start=2):
        try:
            runs.append(_run(line, row))
        except Unusable as reason:
            unusable[str(reason)] += 1
    return runs, unusable


def _run(line: int, row: Row) -> PublicRun:
    quantity, factor, each = _metric(row)
    device = find_device(row["hardware"])
    if device is None:
        raise Unusable("device not in the catalog")
    assumed: list[str] = []
    value, count = number(row, "value"), whole(row, "gpus")
    if not value:
        raise Unusable("no value")
    if not count:
        raise Unusable("no number of devices")
    model = model_of(row, assumed)
    seq_len = sequence_length(row)
    fused = _fused(row, assumed)
    per_node = whole(row, "gpus_per_node") or device.devices_per_node or min(count, 8)
    domain = max(per_node, (device.links[0].devices or 0) if device.links else 0)
    plan, batch = layout_of(row, count, seq_len, fused, domain, assumed)
    workload = _workload(row, model, seq_len, batch, fused, native_dtypes([device]), assumed)
    wrong = misfits(workload, plan)
    if wrong:
        raise Unusable(f"its layout does not fit the model: {wrong[0].split(' = ')[0]}")
    if not row.get("recompute") and fused:
        plan = _made_to_fit(workload, plan, device, assumed)
    measured = value * factor
    if quantity != "bytes":
        measured = _step_seconds(row, quantity, measured, each, workload, plan, count, device.id, assumed)
    needed = ("layers", "hidden", "heads", "seq", "gpus", "tp", "pp", "global_batch", "hardware")
    return PublicRun(
        row=line,
        source=row.get("source", ""),
        model=row["model"],
        workload=workload,
        plan=plan,
        device=device.id,
        num_devices=count,
        devices_per_node=per_node,
        interconnect=row.get("interconnect", ""),
        quantity="bytes" if quantity == "bytes" else "step_s",
        measured=measured,
        metric=row["metric"],
        complete=all(row.get(name) for name in needed),
        is_moe=model.moe is not None,
        year=whole(row, "year") or 0,
        assumed=tuple(assumed),
        notes=row.get("notes", ""),
    )


def _made_to_fit(workload: Workload, plan: Plan, device: Device, assumed: list[str]) -> Plan:
    """The run did fit: where it would not with all activations kept, the cheap ones were recomputed."""
    memory, _ = memory_of(count_step(workload, plan), workload, plan, device)
    if fits(memory, device) is not False:
        assumed.append("nothing recomputed")
        return plan
    assumed.append("norms and activations recomputed")
    return plan.model_copy(update={"recompute": "selective"})


def _metric(row: Row) -> tuple[Quantity, float, bool]:
    name = row["metric"]
    if name not in METRICS:
        raise Unusable(f"metric {name.split('(')[0]}")
    return METRICS[name]


def _workload(
    row: Row, model: ModelConfig, seq_len: int, batch: int, fused: bool, native: Collection[str], assumed: list[str]
) -> Workload:
    text = row.get("precision", "").lower()
    precision = next((ours for theirs, ours in PRECISIONS if theirs in text), None)
    if "nf4" in text or "lora" in row["model"].lower():
        raise Unusable("a quantised base with adapters")
    if precision is None:
        # A number published without its precision is the best one: 8 bits where the device of that year had them.
        low = (whole(row, "year") or 0) >= 2025 and "fp8" in native
        precision = "fp8" if low else "bf16"
        assumed.append(precision)
    return Workload(
        model=model,
        seq_len=seq_len,
        global_batch_size=batch,
        precision=precision,
        attention_kernel="flash" if fused else "math",
        fused_loss=False,
        software=_software(row),
    )


def _fused(row: Row, assumed: list[str]) -> bool:
    """Whether attention is one kernel (FlashAttention and its kin)."""
    flash, year = row.get("flash_attn", "").lower(), whole(row, "year") or 2024
    if not flash:
        assumed.append("fused attention" if year >= 2023 else "attention's scores in memory")
    return flash.startswith("yes") if flash else year >= 2023


def _software(row: Row) -> str:
    """Year and stack where the row names them; curves of that time are taken, where known."""
    match = re.search(r"container (\d\d\.\d\d)", row.get("source", "") + row.get("notes", ""))
    return match[1] if match else row.get("year", "")


def _step_seconds(
    row: Row, quantity: Quantity, value: float, each: bool, workload: Workload, plan: Plan, count: int, device: str,
    assumed: list[str],
) -> float:  # fmt: skip
    if quantity == "step_s":
        return value
    devices = count if each else 1
    if quantity == "tokens_per_s":
        return workload.tokens / (value * devices)
    flops = published_flops(row, workload, plan)
    assumed.append("FLOPs by our count")
    if quantity == "mfu":
        from moestro.hardware.catalog import load_device

        peak = load_device(device).peak_flops("bf16" if workload.precision in ("bf16", "fp16") else workload.precision)
        if peak is None:
            raise Unusable("MFU of a peak that the catalog does not know")
        value *= peak
    return flops / (value * devices)
