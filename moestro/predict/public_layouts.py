"""The layout that a row of a public table means."""

import re
from typing import Literal

from pydantic import ValidationError

from moestro.config.plan import Plan, Schedule
from moestro.predict.public_rows import Row, Unusable, whole

USUAL_TOKENS = 16384  # of a micro-batch


def sequence_length(row: Row) -> int:
    text = row.get("seq", "")
    match = re.fullmatch(r"(\d+)\s*[kK]", text)
    length = int(match[1]) * 1024 if match else whole(row, "seq")
    if not length:
        raise Unusable("no sequence length")
    return length


def layout_of(row: Row, count: int, seq_len: int, fused: bool, domain: int, assumed: list[str]) -> tuple[Plan, int]:
    """The plan and the global batch in sequences."""
    tp, pp, cp, ep = (whole(row, name) or 1 for name in ("tp", "pp", "cp", "ep"))
    zero, shard = _zero(row, assumed)
    if not row.get("tp") and not row.get("pp") and count > 1 and zero != 3:
        zero, shard = 3, None
        assumed.append("weights split over all devices: no layout given")
    if count % (tp * pp * cp):
        raise Unusable("tp · pp · cp does not divide the devices")
    dp = count // (tp * pp * cp)
    if shard is not None and (dp * cp) % shard:
        shard = None
    micro = whole(row, "micro_batch") or None
    batch = _batch(row, seq_len)
    notes = row.get("notes", "")
    accumulated = re.search(r"(?:micro_num|gradient_accumulation_steps)\s*=\s*([1-9]\d*)", notes)
    if batch is None:
        if micro is None or accumulated is None:
            raise Unusable("no global batch")
        batch = micro * dp * int(accumulated[1])
    if micro is None:
        each = max(1, batch // dp)  # sequences of a data rank
        if accumulated:
            micro = max(1, each // int(accumulated[1]))
        else:  # without a pipeline, as much at once as is usual
            micro = 1 if pp > 1 else min(each, max(1, USUAL_TOKENS // seq_len))
        assumed.append(f"micro-batch of {micro}")
    if batch % dp:
        raise Unusable("the global batch is not a multiple of the data ranks")
    while batch % (dp * micro):
        micro -= 1
    if pp > 1 and micro > 1 and micro * dp == batch:
        micro = 1
        assumed.append("a data rank's batch cut into single sequences for the pipeline")
    vpp, schedule = _schedule(row, pp, batch // (dp * micro), fused, assumed)
    recompute = row.get("recompute", "").lower()
    if not recompute:
        recompute = "none" if fused else "full"
        if not fused:
            assumed.append("all layers recomputed")
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
        raise Unusable("its layout contradicts itself") from error
    return plan, batch


def _some(recompute: str) -> bool:
    return "selective" in recompute or "norm" in recompute or "minimal" in recompute


def _schedule(row: Row, pp: int, micro_batches: int, fused: bool, assumed: list[str]) -> tuple[int, Schedule]:
    text, notes = row.get("vpp", ""), row.get("notes", "").lower()
    vpp = 2 if text == "interleaved" else whole(row, "vpp") or 1
    layers = whole(row, "layers") or 1
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
    match = re.match(r"(\d+(?:\.\d+)?)\s*M tokens", text)
    if match:
        return max(1, round(float(match[1]) * 2**20 / seq_len))
    match = re.match(r"(\d+)", text)
    return int(match[1]) or None if match else None
