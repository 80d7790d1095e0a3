"""Memory of many plans at once: predict.memory over arrays."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moestro.config.plan import Plan, Workload
from moestro.graph.tape import activation_bytes
from moestro.graph.words import Parameters, Piece
from moestro.plan.frame import Floats, Frame
from moestro.plan.space import Family
from moestro.predict.constants import generation
from moestro.predict.memory import FRAGMENTATION, GATHERED

NOTHING = Parameters()


class Passing(NamedTuple):
    """[signatures], bytes: what a micro-batch leaves behind, and what comes and goes while it passes."""

    activations: Floats
    transient: Floats


def passing_bytes(
    workload: Workload,
    plan: Plan,
    frame: Frame,
    pieces: Sequence[Piece | None],
    counts: Floats,
    again: Floats,
    besides: Floats,
) -> Passing:
    """pieces: of a kind each; counts, again: [signatures, kinds], how often a stage has and recomputes each. besides:
    [signatures], bytes that a stage keeps for a micro-batch besides its pieces."""
    saved = np.array([0.0 if p is None else p.saved for p in pieces])
    spared = np.array([0.0 if p is None else p.saved - p.kept for p in pieces])
    last = np.zeros(len(counts))
    last[frame.last_signature] = 1.0
    activations = besides + counts @ saved - again @ spared - last * logits_spared(workload, plan)
    return Passing(activations, _transient(workload, plan, pieces, counts, again, last))


def held_bytes(
    frame: Frame,
    counts: Floats,
    passing: Passing,
    kept: Mapping[int, Sequence[Floats]],
    outside: Mapping[int, float],
    offload: Sequence[bool],
) -> tuple[Floats, Floats]:
    """[pipelines, variants]: what the fullest device must have, and what it holds where there is room.

    kept: by pp, of each variant, bytes through the step of each kind of piece. outside: by pp, bytes outside of the
    allocator. offload: of each variant, whether activations go to the host.
    """
    held = passing.activations[frame.held_signature] * frame.held_count
    flying = np.maximum.reduceat(np.add.reduceat(held, frame.held_first), frame.moment_first)
    one = np.maximum.reduceat(passing.activations[frame.member_signature], frame.member_first)
    brief = np.maximum.reduceat(passing.transient[frame.member_signature], frame.member_first)[:, None]
    sizes = list(kept)
    table = np.array([kept[pp] for pp in sizes])  # [sizes, variants, kinds]
    by_signature = np.einsum("svk,nk->snv", table, counts)
    fixed = np.add.reduceat(by_signature[frame.member_size(sizes), frame.member_signature], frame.member_first)
    acts = np.where(np.array(offload)[None, :], one[:, None], flying[:, None])
    allocated = fixed + acts + brief  # [ranks, variants]
    all_of_it = allocated + FRAGMENTATION[0] * fixed + FRAGMENTATION[1] * acts + FRAGMENTATION[2] * brief
    most = np.maximum.reduceat(all_of_it, frame.first_rank)
    places = np.arange(len(allocated))[:, None]
    full = np.where(all_of_it >= most[frame.rank_pipeline], places, len(places))
    at = np.minimum.reduceat(full, frame.first_rank)
    beside = np.array([outside[p.pp] for p in frame.pipelines])[:, None]
    return np.take_along_axis(allocated, at, axis=0) + beside, most + beside


def _transient(
    workload: Workload, plan: Plan, pieces: Sequence[Piece | None], counts: Floats, again: Floats, last: Floats
) -> Floats:
    """[signatures]: predict.memory's rule for what comes and goes in a pass."""
    numbers = [NOTHING if p is None else p.parameters for p in pieces]
    width, trains = activation_bytes(workload), workload.adapter_rank is None
    layers = counts[:, : len(pieces) - 5]  # without embedding, heads, and blocks ahead
    totals, dense = (np.array([getattr(n, name) for n in numbers], dtype=np.float64) for name in ("total", "dense"))
    present = layers > 0
    if plan.zero == 3 and plan.shard_ranks > 1 and plan.pp == 1:
        reduced = 4 if plan.gradient_dtype == "fp32" else width
        need = (present * totals[: layers.shape[1]]).max(axis=1) * float(2 * width + reduced * trains)
    elif generation(workload) == "eager":
        need = counts @ np.array([n.trained for n in numbers], dtype=np.float64) * width
    else:
        need = (present * dense[: layers.shape[1]]).max(axis=1) * float(width * trains)
    brief = np.array([0.0 if p is None else p.transient for p in pieces])
    spared = np.array([0.0 if p is None else p.saved - p.kept for p in pieces])
    computed_again = spared + brief * (workload.trainer == "moestro")
    need = need + np.maximum(((counts > 0) * brief).max(axis=1), ((again > 0) * computed_again).max(axis=1))
    tokens = plan.micro_batch_size * workload.seq_len // plan.cp
    if plan.tp > 1 and plan.sequence_parallel:
        need = need + GATHERED * tokens * workload.model.hidden_size * width
    if not workload.fused_loss:
        heads = counts[:, -3:-1] @ dense[-3:-1]
        need = need + last * heads * width * trains
    return need


def logits_spared(workload: Workload, plan: Plan | Family) -> float:
    """Of logits that are whole in memory only the fp32 ones are left when memory is fullest."""
    if workload.fused_loss or activation_bytes(workload) == 4:
        return 0.0
    tokens = plan.micro_batch_size * workload.seq_len // plan.cp
    depth = workload.model.mtp.depth if workload.model.mtp else 0
    return 2.0 * tokens * (workload.model.vocab_size or 0) / plan.tp * (1 + depth)
