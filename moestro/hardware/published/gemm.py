"""Public measurements of compute and memory as samples: `gemm.csv.xz`, or another file with its columns.

FLOPs of a sample are counted in one way whatever its source did: a product 2·m·n·k; causal attention half of the
square (2·batch·seq²·heads·(head_dim + v_head_dim) / 2 forward, 2.5 times that backward); gated experts 6·hidden·ffn
for each of the tokens·top_k/ep rows that a rank computes. A rate is turned into a time by the count that the source
used: one source of attention rows divides by the whole square although its kernels are causal, as its rates above the
peak show and its benchmark script says. Experts without a gate (the source does not tell) have two thirds of the FLOPs
stated here.
"""

import math
import re
from collections import Counter
from pathlib import Path

from moestro.hardware.catalog import find_device
from moestro.hardware.devices import DTYPE_BYTES
from moestro.hardware.profile import Sample, Value
from moestro.hardware.published.table import read_table

SHIPPED = Path(__file__).parent / "gemm.csv.xz"
REQUIRED = ("source", "hardware", "op", "dtype", "m", "n", "k", "tflops", "time_us")

_DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "float64": "fp64",
    "double": "fp64", "float8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "float8_e4m3fn": "fp8", "w8a8_fp8": "fp8",
    "mxfp4": "fp4", "float4": "fp4",
}  # fmt: skip
_WHOLE_SQUARE = "attention fwd", "attention bwd"  # operations whose rates count the square that is not computed, too
_STREAM_ARRAYS = {"copy": 2, "mul": 2, "scale": 2, "add": 3, "triad": 3, "dot": 2}  # arrays that each touches


def read_gemm(path: Path | None = None) -> tuple[list[Sample], dict[str, int]]:
    """The rows of a file (the shipped one by default) as samples, and why others are of no use: reason → rows.

    Operations: gemm, batched_gemm, grouped_gemm, moe_experts, attention, copy, scale, add, triad, dot. A case also
    holds the device (an id of the catalog, else the source's own words).

    Raises:
        MoestroError: no such file, or a column of REQUIRED is missing.
    """
    samples: list[Sample] = []
    unusable = Counter[str]()
    for row in read_table(path or SHIPPED, REQUIRED, "products"):
        sample = _sample(row)
        if isinstance(sample, Sample):
            samples.append(sample)
        else:
            unusable[sample] += 1
    return samples, dict(unusable)


def _sample(row: dict[str, str]) -> Sample | str:
    """The row as a sample, or why it is none."""
    op = row["op"].lower()
    if op.startswith("memory"):
        return _memory(row, op)
    if "per device; a chip exposes" in row["hardware"]:  # what the catalog calls a device is the whole chip
        return "of a part of a device"
    dtype = row["dtype"].lower()
    dtype = _DTYPES.get(dtype, dtype)
    if dtype not in DTYPE_BYTES:
        return "no dtype" if not dtype else f"unknown dtype {dtype}"
    if op.startswith("moe experts"):
        parsed = _experts(row)
    elif op.startswith("attention"):
        parsed = _attention(row, op)
    elif op.startswith(("grouped gemm", "batched gemm", "gemm")):
        parsed = _product(row, op)
    else:
        return f"unknown operation {op or '(none)'}"
    if isinstance(parsed, str):
        return parsed
    name, case, flops, counted = parsed
    seconds = _seconds(row, counted)
    if seconds is None:
        return "neither a time nor a rate"
    return _made(row, name, {**case, "dtype": dtype}, seconds, flops=flops)


def _made(
    row: dict[str, str],
    op: str,
    case: dict[str, Value],
    seconds: float,
    flops: float | None = None,
    moved: float | None = None,
) -> Sample:
    device = find_device(row["hardware"])
    named: dict[str, Value] = {"device": row["hardware"] if device is None else device.id}
    return Sample(
        op=op,
        case=named | case,
        median_s=seconds,
        flops=flops,
        bytes_moved=moved,
        source=row["source"],
        software=row.get("software", ""),
    )


Parsed = (
    tuple[str, dict[str, Value], float, float] | str
)  # operation, case, FLOPs, FLOPs as the source counts; or why not


def _product(row: dict[str, str], op: str) -> Parsed:
    m, n, k = (_whole(row[column]) for column in ("m", "n", "k"))
    many = _whole(row.get("batch_or_groups", ""))
    if m is None or n is None or k is None:
        return "size missing"
    case: dict[str, Value] = {"m": m, "n": n, "k": k}
    layout = _layout(row, op)
    if layout:
        case["layout"] = layout
    flops = 2.0 * m * n * k * (many or 1)
    if op.startswith("grouped"):
        return ("grouped_gemm", case | {"groups": many}, flops, flops) if many else "number of groups missing"
    if many is not None and many > 1:
        return "batched_gemm", case | {"batch": many}, flops, flops
    return "gemm", case, flops, flops


def _layout(row: dict[str, str], op: str) -> str:
    """What the row says of how it was run: a stage or layout, the kind of grouping, or that it is a sweep's best."""
    kind = re.search(r"\((\w+) layout\)", op)
    best = "best of a sweep" if "best shape" in row["source"].lower() else ""
    return " ".join(part for part in (row.get("layout_or_stage", ""), kind.group(1) if kind else "", best) if part)


def _experts(row: dict[str, str]) -> Parsed:
    tokens, ffn, hidden = (_whole(row[column]) for column in ("m", "n", "k"))
    experts = _whole(row.get("batch_or_groups", ""))
    stage = _stage(row)
    top_k, ep = _whole(stage.get("topk", "")), _whole(stage.get("ep", "1"))
    if tokens is None or ffn is None or hidden is None or experts is None:
        return "size missing"
    if top_k is None or ep is None:
        return "top_k or ep missing"
    routing = stage.get("routing", "balanced")
    case: dict[str, Value] = {
        "experts": experts, "top_k": top_k, "tokens": tokens, "ffn": ffn, "hidden": hidden, "ep": ep, "routing": routing
    }  # fmt: skip
    flops = 6.0 * tokens * top_k / ep * hidden * ffn
    return "moe_experts", case, flops, flops


def _attention(row: dict[str, str], op: str) -> Parsed:
    seq, heads, head_dim = (_whole(row[column]) for column in ("m", "n", "k"))
    if seq is None or heads is None or head_dim is None:
        return "size missing"
    note = row.get("notes", "")
    stage = _stage(row)
    kv_heads = (
        _whole(stage.get("kv_heads", "") or _named(note, "kv_head_num")) or heads
    )  # 0 stands for as many as heads
    v_head_dim = _whole(_named(note, "v_head_dim")) or head_dim
    batch = _whole(row.get("batch_or_groups", "")) or 1
    phase = "bwd" if "bwd" in op else "fwd"
    case: dict[str, Value] = {
        "batch": batch, "seq": seq, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "causal": 1,
        "phase": phase,
    }  # fmt: skip
    if v_head_dim != head_dim:
        case["v_head_dim"] = v_head_dim
    if "qkv_contiguous=False" in note:
        case["layout"] = "strided"
    flops = 1.0 * batch * seq**2 * heads * (head_dim + v_head_dim) * (2.5 if phase == "bwd" else 1.0)
    return "attention", case, flops, 2.0 * flops if op in _WHOLE_SQUARE else flops


def _memory(row: dict[str, str], op: str) -> Sample | str:
    kind = op.split(":")[-1].split()[-1]
    arrays, size, gbps = _STREAM_ARRAYS.get(kind), _whole(row["m"]), _number(row.get("memory_gbps", ""))
    if arrays is None:
        return f"unknown operation {op}"
    if size is None:
        return "memory rate without the size of its arrays"
    if gbps is None:
        return "neither a time nor a rate"
    moved = float(arrays * size)
    name = "scale" if kind == "mul" else kind
    return _made(row, name, {"bytes": size}, moved / (gbps * 1e9), moved=moved)


def _seconds(row: dict[str, str], counted: float) -> float | None:
    time_us, tflops = _number(row["time_us"]), _number(row["tflops"])
    if time_us is not None:
        return time_us * 1e-6
    return None if tflops is None else counted / (tflops * 1e12)


def _stage(row: dict[str, str]) -> dict[str, str]:
    """ "topk=8 ep=1 routing=balanced" → its parts."""
    return dict(part.split("=", 1) for part in row.get("layout_or_stage", "").split() if "=" in part)


def _named(note: str, key: str) -> str:
    found = re.search(rf"\b{key}=(\d+)", note)
    return found.group(1) if found else ""


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _whole(text: str) -> int | None:
    value = _number(text)
    return round(value) if value is not None and value >= 1 else None
