"""How wide experts should be: training throughput against decoding latency, and what granularity costs in bytes.

All choices have the active parameters of the preset: a token meets top_k experts of width F with top_k · F fixed. Finer
experts make smaller products and send a token to more ranks; coarser ones learn less for their FLOPs (2506.02890),
which is not predicted. More experts of one width are more parameters at the same work, and more bytes to read when a
batch decodes: E · (1 - (1 - k/E)^B) of them.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil, log2

from pydantic import ValidationError

from moestro.config.counts import count
from moestro.config.model import ModelConfig
from moestro.config.moe import GATED
from moestro.config.plan import Plan, Workload, misfits
from moestro.errors import MoestroError
from moestro.graph.feedforward import distinct_ranks
from moestro.plan.alignment import RULE, Alignment, price_shape
from moestro.plan.shapes import changed
from moestro.predict.predict import device_bytes
from moestro.predict.service import FULL, WIDTHS
from moestro.predict.serving import decode_step
from moestro.predict.target import Target

SPLITS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of an expert in so many
EXPERTS = (0.5, 1.0, 2.0)  # times as many parameters in experts
RANKS = 8  # of expert parallelism that bytes are told for where the plan has none
COPY_BYTES = 2.0  # of a number that is sent
ALIKE = 0.01  # choices that differ by less are equal


@dataclass(frozen=True)
class Choice:
    """decode_s: a step of the batch, experts priced as products. tokens_per_expert: of a micro-batch.

    of_peak: rate of the experts' products over the device's peak, forward. ranks_reached: by a token of `ranks`, on
    average over even choices; dispatch_bytes: that it takes there and back in one layer, once a rank. best: no other
    choice is as large, trains as fast, decodes as soon and is better in one of them.
    """

    experts: int
    top_k: int
    width: int
    model: ModelConfig
    total_params: int
    active_params: int
    tokens_per_s: float  # a device
    mfu: float | None
    tokens_per_expert: float
    of_peak: float
    decode_s: float
    experts_touched: float
    ranks_reached: float
    dispatch_bytes: float
    best: bool = False


@dataclass(frozen=True)
class Widths:
    """replica: devices that decode together, the fewest that hold the largest choice. ranks: of expert parallelism."""

    choices: tuple[Choice, ...]
    chosen: Choice | None
    why: str
    batch: int
    context: int
    replica: int
    ranks: int


def choose_width(
    workload: Workload, plan: Plan, target: Target, batch: int = 16, context: int = 4096,
    most_decode_s: float | None = None, alignment: Alignment = RULE,
) -> Widths:  # fmt: skip
    """batch: sequences that decode together, with `context` tokens each. most_decode_s: what a step may take.

    Raises:
        MoestroError: a model without experts or with several numbers of chosen ones, or no choice fits the plan.
    """
    moe = workload.model.moe
    if moe is None or not isinstance(moe.top_k, int) or moe.expert_groups is not None:
        raise MoestroError("widths are chosen for one kind of experts with one moe.top_k; this model has none such")
    models = [m for split in SPLITS for more in EXPERTS if (m := _of(workload.model, split, more)) is not None]
    models = [m for m in models if not misfits(workload.model_copy(update={"model": m}), plan)]
    if not models:
        raise MoestroError("no width fits the plan: " + "; ".join(misfits(workload, plan)))
    replica = _replica(workload, target, models)
    ranks = plan.ep if plan.ep > 1 else RANKS
    choices = [_choice(workload, plan, target, m, batch, context, replica, ranks, alignment) for m in models]
    front = _front(choices)
    chosen, why = _chosen(workload.model, front, most_decode_s)
    return Widths(tuple(front), chosen, why, batch, context, replica, ranks)


def _of(model: ModelConfig, split: float, more: float) -> ModelConfig | None:
    """The same active parameters in experts of width / split, with `more` times the parameters in all of them."""
    moe = model.moe
    assert moe is not None
    assert isinstance(moe.top_k, int)
    experts, top_k = moe.resolved_num_experts * split * more, moe.top_k * moe.granularity * split
    width, shared = moe.resolved_expert_hidden_size / split, moe.num_shared_experts * moe.granularity * split
    if any(number != int(number) for number in (experts, top_k, width, shared)) or not 1 <= top_k < experts:
        return None
    if moe.router.num_groups > 1 and experts % moe.router.num_groups:
        return None
    values = {
        "num_experts": int(experts),
        "top_k": int(top_k),
        "expert_hidden_size": int(width),
        "num_shared_experts": int(shared),
        "granularity": 1,
    }
    with suppress(ValidationError):
        return changed(model, {"moe": type(moe).model_validate({**dict(moe), **values})})
    return None


def _replica(workload: Workload, target: Target, models: Sequence[ModelConfig]) -> int:
    there = device_bytes(target, 1)
    if there is None or target.host_computes:
        return 1
    largest = max(count(model, 1).total_params for model in models) * WIDTHS.get(workload.precision, 2.0)
    return int(2 ** ceil(log2(max(1.0, largest / (FULL * there)))))


def _choice(
    workload: Workload, plan: Plan, target: Target, model: ModelConfig, batch: int, context: int, replica: int,
    ranks: int, alignment: Alignment,
) -> Choice:  # fmt: skip
    own = workload.model_copy(update={"model": model})
    priced = price_shape(own, plan, target, alignment)
    moe, layer, counts = model.moe, model.moe_blocks.index(True), count(model, workload.seq_len)
    assert moe is not None
    experts, top_k, width = moe.resolved_num_experts, model.top_k_of_layer(layer), moe.resolved_expert_hidden_size
    outer = moe.latent_size or model.hidden_size
    tokens = plan.micro_batch_size * workload.seq_len / plan.cp
    rows = tokens * top_k * plan.ep / (plan.tp if plan.etp == 1 else 1) / experts
    matrices = 3 if moe.activation in GATED else 2
    local = experts / plan.ep
    seconds = _experts_s(target, workload.precision, local, rows, outer, width, matrices)
    peak = target.curves.product(workload.precision).peak_flops
    decode_s, touched = decode(own, target, batch, context, replica)
    reached = distinct_ranks(experts, top_k, ranks, moe.router.num_groups, moe.router.top_groups)
    return Choice(
        experts, top_k, width, model, counts.total_params, counts.active_params, priced.tokens_per_s_per_device,
        priced.mfu, rows, 2.0 * matrices * local * rows * outer * width / seconds / peak, decode_s, touched, reached,
        2 * COPY_BYTES * outer * reached,
    )  # fmt: skip


def decode(
    workload: Workload, target: Target, batch: int, context: int, replica: int = 1
) -> tuple[float, float]:  # fmt: skip
    """Seconds of a decoding step of `batch` sequences on `replica` devices, and experts touched in a layer.

    Experts are priced as products of few rows by the device's curve; the other weights and the caches are read at its
    nominal bandwidth, and what the devices send each other is left out. So it is nearer the truth than a floor where
    experts are small and many, and still a lower bound.

    Raises:
        MoestroError: the device's memory bandwidth is not known.
    """
    memory, model = target.place.device.memory.gbps, workload.model
    gbps = memory.nominal or memory.achieved
    if gbps is None:
        raise MoestroError(f"nobody knows the memory bandwidth of {target.place.device.id}; measure it there")
    bytes_per_s, weight = replica * gbps * 1e9, WIDTHS.get(workload.precision, 2.0)
    step = decode_step(model, batch, bytes_per_s, context, weight)
    moe = model.moe
    if moe is None:
        return step.floor_s, 0.0
    layers = sum(model.moe_layers)
    outer, width = moe.latent_size or model.hidden_size, moe.resolved_expert_hidden_size
    matrices = 3 if moe.activation in GATED else 2
    experts_bytes = weight * layers * step.experts_touched * matrices * outer * width
    top_k = model.top_k_of_layer(model.moe_blocks.index(True))
    rows = batch * top_k / step.experts_touched
    each = _experts_s(target, workload.precision, step.experts_touched / replica, rows, outer, width, matrices)
    return step.floor_s - experts_bytes / bytes_per_s + layers * each, step.experts_touched


def _experts_s(
    target: Target, dtype: str, experts: float, rows: float, outer: int, width: int, matrices: int
) -> float:  # fmt: skip
    """Forward: both grouped products of `experts` experts with `rows` rows each, as the pricer of kernels has them."""
    model, rows = target.curves.product(dtype).model, max(1.0, rows)
    return model.seconds(rows, (matrices - 1) * width, outer, experts) + model.seconds(rows, outer, width, experts)


def _front(choices: Sequence[Choice]) -> list[Choice]:
    """With `best` told, in the order of the experts' number and width."""

    def beaten(one: Choice) -> bool:
        for other in choices:
            gains = (
                other.total_params / one.total_params,
                other.tokens_per_s / one.tokens_per_s,
                one.decode_s / other.decode_s,
            )
            if min(gains) >= 1 - ALIKE and max(gains) > 1 + ALIKE:
                return True
        return False

    ordered = sorted(choices, key=lambda one: (-one.width, one.experts))
    return [replace(one, best=not beaten(one)) for one in ordered]


def _chosen(model: ModelConfig, choices: Sequence[Choice], most_decode_s: float | None) -> tuple[Choice | None, str]:
    """Of as many parameters as the preset, the fastest to train that decodes soon enough."""
    total = count(model, 1).total_params
    alike = [one for one in choices if abs(one.total_params / total - 1) < ALIKE]
    soon = [one for one in alike if most_decode_s is None or one.decode_s <= most_decode_s]
    if not soon:
        least = min(alike, key=lambda one: one.decode_s, default=None)
        found = "" if least is None else f"; the soonest takes {least.decode_s * 1e3:.3g} ms"
        return None, f"no width of as many parameters decodes in {(most_decode_s or 0) * 1e3:.3g} ms{found}"
    fastest = max(soon, key=lambda one: one.tokens_per_s)
    near = [one for one in soon if one.tokens_per_s >= 0.98 * fastest.tokens_per_s]
    chosen = min(near, key=lambda one: one.width)  # the finest that costs nothing: it learns more
    limit = "" if most_decode_s is None else f" of those that decode in {most_decode_s * 1e3:.3g} ms"
    why = (
        f"the finest{limit} within 2 % of the fastest to train: {chosen.tokens_per_expert:,.0f} tokens an expert run "
        f"at {chosen.of_peak:.0%} of the peak; decoding touches {chosen.experts_touched:.1f} of {chosen.experts} "
        "experts a layer"
    )
    return chosen, why
