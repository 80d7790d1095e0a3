"""Reads public training runs: a CSV of shapes, layouts and measured figures, as people publish them.

What a row leaves out is filled by rules that look at the row alone, never at who published it; each rule that was used
is named in the run's `assumed`.
"""

import csv
import io
import lzma
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from moestro.config.attention import MLAConfig
from moestro.config.counts import count
from moestro.config.model import ModelConfig, MTPConfig
from moestro.config.moe import MoEConfig
from moestro.config.plan import Plan, Precision, Schedule, Workload
from moestro.errors import MoestroError
from moestro.hardware.catalog import find_device
from moestro.hardware.compare import native_dtypes

SHIPPED = Path(__file__).parent / "published" / "training_runs.csv.xz"
Row = dict[str, str]
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
# Attention that a row's columns cannot say, by the published architecture. (name, query rank or None.)
# Names are compared in small letters and digits alone: "DeepSeek-V3 (w/o MTP)" is "deepseekv3womtp".
LATENT = (("deepseekv3", 1536), ("deepseekv2lite", None), ("deepseekv2", 1536), ("kimik2", 1536))
DENSE_LAYERS = (("deepseekv3", 3), ("deepseekv2", 1), ("kimik2", 1))
HEAD_DIMS = (("qwen3", 128), ("gptoss", 64), ("gemma", 256))
USUAL_VOCABULARY = 51200  # of GPT-2's tokens, filled up
USUAL_TOKENS = 16384  # of a micro-batch
GATED_NAMES = ("llama", "qwen", "deepseek", "mixtral", "mistral", "kimi", "gptoss", "internlm", "gemma", "phi")


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


class _Unusable(Exception):
    """The reason why a row says nothing that can be predicted."""


def parse_runs(path: Path | None = None) -> tuple[list[PublicRun], Counter[str]]:
    """The usable rows of a CSV (None: the shipped one; .xz is read too), and why others are not.

    Raises:
        MoestroError: no such file, or columns are missing.
    """
    runs, unusable = [], Counter[str]()
    for number, row in enumerate(_rows(path or SHIPPED), start=2):
        try:
            runs.append(_run(number, row))
        except _Unusable as reason:
            unusable[str(reason)] += 1
    return runs, unusable


def _rows(path: Path) -> list[Row]:
    try:
        packed = path.read_bytes()
        text = (lzma.decompress(packed) if path.suffix == ".xz" else packed).decode("utf-8")
        reader = csv.DictReader(io.StringIO(text))
        rows = [{key: (value or "").strip() for key, value in row.items() if key} for row in reader]
        names = reader.fieldnames or []
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise MoestroError(f"cannot read {path}: {error}") from error
    missing = [
        name for name in ("model", "layers", "hidden", "hardware", "gpus", "metric", "value") if name not in names
    ]
    if missing:
        raise MoestroError(f"{path} has no column {', '.join(missing)}; see docs/predicting.md for the format")
    return rows


def _run(number: int, row: Row) -> PublicRun:
    quantity, factor, each = _metric(row)
    device = find_device(row["hardware"])
    if device is None:
        raise _Unusable("device not in the catalog")
    assumed: list[str] = []
    value, count = _number(row, "value"), _whole(row, "gpus")
    if value is None or value <= 0:
        raise _Unusable("no value")
    if count is None:
        raise _Unusable("no number of devices")
    model = _model(row, assumed)
    seq_len = _sequence(row)
    fused = _fused(row, assumed)
    per_node = _whole(row, "gpus_per_node") or device.devices_per_node or min(count, 8)
    domain = max(per_node, (device.links[0].devices or 0) if device.links else 0)
    plan, batch = _layout(row, count, seq_len, fused, domain, assumed)
    workload = _workload(row, model, seq_len, batch, fused, native_dtypes([device]), assumed)
    measured = value * factor
    if quantity != "bytes":
        measured = _step_seconds(row, quantity, measured, each, workload, plan, count, device.id, assumed)
    needed = ("layers", "hidden", "heads", "seq", "gpus", "tp", "pp", "global_batch", "hardware")
    return PublicRun(
        row=number,
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
        year=_whole(row, "year") or 0,
        assumed=tuple(assumed),
        notes=row.get("notes", ""),
    )


def _metric(row: Row) -> tuple[Quantity, float, bool]:
    name = row["metric"]
    if name not in METRICS:
        raise _Unusable(f"metric {name.split('(')[0]}")
    return METRICS[name]


def _model(row: Row, assumed: list[str]) -> ModelConfig:
    shape = tuple(row.get(name, "") for name in _SHAPE)
    try:
        model, rules = _model_of(re.sub(r"[^a-z0-9]", "", row["model"].lower()), shape)
    except ValidationError as error:
        raise _Unusable("its shapes contradict each other") from error
    assumed += rules
    return model


_SHAPE = (
    "layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq", "experts", "topk", "expert_ffn", "shared_experts",
    "params_total_b",
)  # fmt: skip


@lru_cache(maxsize=1024)
def _model_of(name: str, shape: tuple[str, ...]) -> tuple[ModelConfig, tuple[str, ...]]:
    row, rules = dict(zip(_SHAPE, shape, strict=True)), []
    layers, hidden, heads = (_whole(row, key) for key in ("layers", "hidden", "heads"))
    if layers is None or hidden is None or heads is None:
        raise _Unusable("no layers, hidden size or heads")
    if "lora" in name or "vision" in name or "visual" in name:
        raise _Unusable("adapters or images: shapes of the trained part are not in the row")
    experts, vocab, ffn = _whole(row, "experts"), _whole(row, "vocab"), _whole(row, "ffn")
    gated = any(known in name for known in GATED_NAMES)
    vocab_given = vocab is not None
    if vocab is None:
        vocab = USUAL_VOCABULARY
        rules.append("vocabulary of 51,200")
    if ffn is None:
        ffn = 4 * hidden
        rules.append("feed-forward of 4 times the hidden size")
    moe = None
    if experts:
        expert_ffn = _whole(row, "expert_ffn") or ffn
        moe = MoEConfig(
            num_experts=experts,
            top_k=_whole(row, "topk") or 1,
            expert_hidden_size=expert_ffn,
            num_shared_experts=_whole(row, "shared_experts") or 0,
            first_k_dense=_dense_layers(name, layers),
        )
    mla = None
    rank = _latent_rank(name)
    if rank != 0:
        mla = MLAConfig(q_rank=rank, kv_rank=512, rope_head_dim=64, nope_head_dim=128, v_head_dim=128)
        rules.append("latent attention of the model's name")
    head_dim = next((dim for known, dim in HEAD_DIMS if known in name), None)
    if head_dim is None and hidden % heads:
        head_dim = max(2, hidden // heads // 2 * 2)
        rules.append(f"head size of {head_dim}")
    model = ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=None if mla else _whole(row, "kv_heads"),
        head_dim=head_dim,
        mla=mla,
        intermediate_size=ffn,
        activation="swiglu" if gated or experts else "gelu",
        moe=moe,
        max_seq_len=10**7,
        sliding_window=128 if "gptoss" in name else None,
        layer_types=("sliding", "full") if "gptoss" in name else None,
        tie_embeddings=not gated and not experts,
        mtp=MTPConfig() if "deepseekv3" in name and "womtp" not in name and "truncated" not in name else None,
    )
    if not gated and not experts:
        rules.append("two matrices and GELU in the feed-forward, tied embeddings")
    larger = None if vocab_given else _vocabulary(row["params_total_b"], model)
    if larger is not None:
        model = model.model_copy(update={"vocab_size": larger})
        rules = [f"vocabulary of {larger:,}, what the number of parameters leaves for it", *rules[1:]]
    return model, tuple(rules)


def _dense_layers(name: str, layers: int) -> int:
    """Leading layers without experts. A model cut down to a few layers for a test keeps one of them."""
    usual = next((n for known, n in DENSE_LAYERS if known in name), 0)
    return min(usual, 1 if "truncated" in name else layers - 1)


def _vocabulary(total_b: str, model: ModelConfig) -> int | None:
    """What the published number of parameters leaves for the embedding, unless its last digit allows the usual one."""
    try:
        total = float(total_b) * 1e9
    except ValueError:
        return None
    counts = count(model, 1024)
    each = counts.part("embedding").total // USUAL_VOCABULARY * (1 if model.tie_embeddings else 2)
    unsure = 0.5e9 * 10.0 ** -len(total_b.partition(".")[2])
    excess = total - counts.total_params
    if excess <= unsure:
        return None
    return round((USUAL_VOCABULARY + excess / each) / 128) * 128


def _latent_rank(name: str) -> int | None:
    """The query rank of latent attention, None where queries have no latent; 0: another attention."""
    return next((rank for known, rank in LATENT if known in name), 0)


def _sequence(row: Row) -> int:
    text = row.get("seq", "")
    match = re.fullmatch(r"(\d+)\s*[kK]", text)
    if match:
        return int(match[1]) * 1024
    length = _whole(row, "seq")
    if length is None:
        raise _Unusable("no sequence length")
    return length


def _layout(row: Row, count: int, seq_len: int, fused: bool, domain: int, assumed: list[str]) -> tuple[Plan, int]:
    """The plan and the global batch in sequences."""
    tp, pp, cp, ep = (_whole(row, name) or 1 for name in ("tp", "pp", "cp", "ep"))
    zero, shard = _zero(row, assumed)
    if not row.get("tp") and not row.get("pp") and count > 1 and zero != 3:
        zero, shard = 3, None
        assumed.append("weights split over all devices: no layout given")
    if count % (tp * pp * cp):
        raise _Unusable("tp · pp · cp does not divide the devices")
    dp = count // (tp * pp * cp)
    if shard is not None and (dp * cp) % shard:
        shard = None
    micro = _whole(row, "micro_batch")
    batch = _batch(row, seq_len)
    notes = row.get("notes", "")
    accumulated = re.search(r"(?:micro_num|gradient_accumulation_steps)\s*=\s*(\d+)", notes)
    if batch is None:
        if micro is None or accumulated is None:
            raise _Unusable("no global batch")
        batch = micro * dp * int(accumulated[1])
    if micro is None:
        each = max(1, batch // dp)  # sequences of a data rank
        if accumulated:
            micro = max(1, each // int(accumulated[1]))
        else:  # without a pipeline, as much at once as is usual
            micro = 1 if pp > 1 else min(each, max(1, USUAL_TOKENS // seq_len))
        assumed.append(f"micro-batch of {micro}")
    if batch % dp:
        raise _Unusable("the global batch is not a multiple of the data ranks")
    while batch % (dp * micro):
        micro -= 1
    if pp > 1 and micro > 1 and micro * dp == batch:
        micro = 1
        assumed.append("a data rank's batch cut into single sequences for the pipeline")
    vpp, schedule = _schedule(row, pp, batch // (dp * micro), fused, assumed)
    recompute = row.get("recompute", "").lower()
    if not recompute:
        recompute = "none" if fused else "full"
        assumed.append("nothing recomputed" if fused else "all layers recomputed")
    # Stacks from before fused attention cut no activations along the sequence, and reduced gradients after backward.
    together = fused or zero == 3
    try:
        plan = Plan(
            pp=pp, dp=dp, cp=cp, tp=tp, ep=min(ep, dp * cp * tp), micro_batch_size=micro, schedule=schedule, vpp=vpp,
            zero=zero if dp * cp > 1 else 0, shard=shard,
            dispatch="two_hop" if fused and ep > domain else "all_to_all",
            ranks_per_node=domain if fused and ep > domain else None,
            overlap_dispatch=fused and ep > domain,
            sequence_parallel=fused, overlap_gradients=together, overlap_parameters=together,
            recompute="block" if recompute.startswith("full") else "selective" if _some(recompute) else "none",
        )  # fmt: skip
    except ValidationError as error:
        raise _Unusable("its layout contradicts itself") from error
    return plan, batch


def _some(recompute: str) -> bool:
    return "selective" in recompute or "norm" in recompute or "minimal" in recompute


def _schedule(row: Row, pp: int, micro_batches: int, fused: bool, assumed: list[str]) -> tuple[int, Schedule]:
    text, notes = row.get("vpp", ""), row.get("notes", "").lower()
    vpp = 2 if text == "interleaved" else _whole(row, "vpp") or 1
    layers = _whole(row, "layers") or 1
    if pp == 1:
        return 1, "1f1b"
    if not text and fused and micro_batches < 4 * pp and micro_batches % pp == 0 and layers >= 2 * pp:
        vpp = min(8, layers // pp)  # nobody would leave such a bubble
        assumed.append(f"{vpp} interleaved chunks")
    while vpp > 1 and pp * vpp > layers:
        vpp -= 1
    if "dualpipe" in notes:
        return 1, "dualpipe"
    if "zbv" in notes or "zero-bubble v" in notes:
        return 2, "zbv"
    if "zero bubble" in notes or "zero-bubble" in notes or "zb" in notes.split():
        return vpp, "zero_bubble"
    return vpp, "interleaved" if vpp > 1 else "1f1b"


def _zero(row: Row, assumed: list[str]) -> tuple[Literal[0, 1, 2, 3], int | None]:
    text = row.get("zero", "").lower()
    group = re.search(r"(?:group|fsdp2?)\s+(-?\d+)", text)
    shard = int(group[1]) if group and int(group[1]) > 1 else None
    if "fsdp 0" in text or text in ("", "y", "n", "no"):
        if text in ("", "no"):
            assumed.append("optimizer state split over the data ranks")
        return 1, None
    if "shard_grad_op" in text or "zero-2" in text:
        return 2, None
    if "fsdp" in text or "hsdp" in text or text == "3":
        return 3, shard
    if text.endswith("0"):
        return 0, None
    return 1, shard


def _batch(row: Row, seq_len: int) -> int | None:
    text = row.get("global_batch", "")
    match = re.match(r"([\d.]+)\s*M tokens", text)
    if match:
        return max(1, round(float(match[1]) * 2**20 / seq_len))
    match = re.match(r"(\d+)", text)
    return int(match[1]) if match else None


def _workload(
    row: Row, model: ModelConfig, seq_len: int, batch: int, fused: bool, native: Collection[str], assumed: list[str]
) -> Workload:
    text = row.get("precision", "").lower()
    precision = next((ours for theirs, ours in PRECISIONS if theirs in text), None)
    if "nf4" in text or "lora" in row["model"].lower():
        raise _Unusable("a quantised base with adapters")
    if precision is None:
        # A number published without its precision is the best one: 8 bits where the device of that year had them.
        low = (_whole(row, "year") or 0) >= 2025 and "fp8" in native
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
    flash, year = row.get("flash_attn", "").lower(), _whole(row, "year") or 2024
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
    flops = published_flops(workload, plan, hardware="recompute" in row.get("notes", ""), year=_whole(row, "year") or 0)
    assumed.append("FLOPs by our count")
    if quantity == "mfu":
        from moestro.hardware.catalog import load_device

        peak = load_device(device).peak_flops("bf16" if workload.precision in ("bf16", "fp16") else workload.precision)
        if peak is None:
            raise _Unusable("MFU of a peak that the catalog does not know")
        value *= peak
    return flops / (value * devices)


def published_flops(workload: Workload, plan: Plan, hardware: bool, year: int) -> float:
    """FLOPs of a step as publications count them: attention in full until 2024, its causal half since.

    hardware: with the second forward pass of recomputation (Megatron's first tables).
    """
    counts = count(workload.model, workload.seq_len)
    per_token = counts.train_flops_per_token
    if year and year < 2025:
        per_token += 3 * counts.attention_flops_per_token
    if hardware and plan.recompute == "block":
        per_token *= 4 / 3
    return per_token * workload.tokens


def _number(row: Row, name: str) -> float | None:
    try:
        return float(row.get(name, "").replace(",", ""))
    except ValueError:
        return None


def _whole(row: Row, name: str) -> int | None:
    value = _number(row, name)
    return None if value is None else int(value)
