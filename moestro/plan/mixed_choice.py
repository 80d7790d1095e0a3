"""Two kinds of devices and one model: attention on the ones and experts on the others, against the ways that do not.

After HeterMoE (arXiv 2504.03871). Its rival ways are here too: expert parallelism over all devices, which the slower
kind paces; the same with every kind's share of the work as large as its speed, which nobody's kernels do exactly; and a
pipeline, each kind with as many layers as its speed deserves. All are of layers, exchanges, embedding and head of a
step; optimizer, reduction of gradients and the host are left out. Exchanges go over each device's NICs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, floor

from moestro.config.counts import count
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.tape import activation_bytes
from moestro.graph.words import Parameters
from moestro.hardware.fits import SHARE, usable_bytes
from moestro.plan.ilp.regions import Group, layers_over
from moestro.plan.mixed import BACKWARD, Mixed, Sides, offloads, sides_of, simulate
from moestro.predict.memory import kept_bytes, outside_bytes
from moestro.predict.pools import Part
from moestro.predict.schedule import simulate_pipeline
from moestro.predict.target import Target

TOGETHER = (2, 4, 8, 16)  # micro-batches that go through the layers together, of each attention device
EVERY = 64  # choices of experts to give over that are all tried; beyond, they are changed one by one
TRIES = 300  # of such changes
LOOKED_AT = 3  # splits of the devices, the fastest by the paper's rule, whose experts are then chosen with more care


@dataclass(frozen=True)
class Kind:
    """Devices of one pool. sides: of one sequence on one of them; sent_s: its tokens to their experts over the device's
    NICs. room_bytes: of its memory for states and activations, None where its size is not known."""

    name: str
    devices: int
    node_size: int
    sides: Sides
    sent_s: float
    room_bytes: float | None


@dataclass(frozen=True)
class Apart:
    """Attention on some devices of one kind, experts on some of another. given: of each layer, the experts that every
    expert device gives over. micro_batches: that go through together. attention, experts: busy shares."""

    attention_on: str
    experts_on: str
    mixed: Mixed
    micro_batches: int
    given: tuple[int, ...]
    step_s: float
    attention: float
    experts: float


@dataclass(frozen=True)
class Choice:
    """Seconds of a step. apart: fastest first. uniform_s: expert parallelism over all. ideal_s: with work by speed.
    pipeline_s, layers: of stages by kind, in the kinds' order. alone_s: of each kind by itself."""

    kinds: tuple[Kind, ...]
    apart: tuple[Apart, ...]
    uniform_s: float
    ideal_s: float
    pipeline_s: float
    layers: tuple[int, ...]
    alone_s: tuple[float, ...]


def choose(workload: Workload, target: Target) -> Choice:
    """Every number of devices for attention and for experts, either way round.

    Raises:
        MoestroError: not two kinds of devices, a model without experts, NICs that nobody knows the rate of, or nothing
            that fits.
    """
    if workload.model.moe is None:
        raise MoestroError("attention and experts on devices of their own: the model has no experts")
    if len({part.name for part in target.parts}) != 2 or len(target.parts) != 2:
        names = ", ".join(part.name for part in target.parts) or target.place.device.id
        raise MoestroError(f"this takes a cluster with two pools of unlike devices, not {names}")
    kinds = tuple(_kind(workload, target, part) for part in target.parts)
    apart = [found for one, other in (kinds, kinds[::-1]) for found in _every(workload, one, other)]
    apart.sort(key=lambda one: one.step_s)
    apart[:LOOKED_AT] = [_with_care(workload, kinds, one) for one in apart[:LOOKED_AT]]
    if not apart:
        raise MoestroError(
            "no split of the devices fits: one side's number must divide the other's, experts share out over theirs, "
            "and weights and states fit in memory"
        )
    pipeline_s, layers = _pipeline(workload, kinds)
    alone = [_together_s(workload, [kind]) for kind in kinds]
    return Choice(
        kinds, tuple(sorted(apart, key=lambda one: one.step_s)), _together_s(workload, kinds),
        _by_speed_s(workload, kinds), pipeline_s, layers, tuple(alone),
    )  # fmt: skip


def best_offloads(
    mixed: Mixed, layers: int, micro_batches: int, most: int | None = None, least: int = 0
) -> tuple[int, ...]:
    """Of each layer, the experts that every expert device gives over so that `simulate` of both passes is shortest.

    All choices where there are few; else from the paper's rule, and from as few as may be, one layer's number or two
    layers' numbers are changed as long as that helps. most, least: in all layers, as `plan.mixed.offloads`.

    Raises:
        MoestroError: attention devices would have to take more than they can hold.
    """
    steps = range(0, mixed.per_device + 1, mixed.given)
    high = len(steps) * mixed.given * layers if most is None else most

    def allowed(given: Sequence[int]) -> bool:
        return least <= sum(given) <= high

    few = len(steps) ** layers <= EVERY
    choices = _vectors(list(steps), layers) if few else iter(_starts(mixed, layers, most, least))
    found = [(_whole_s(mixed, layers, micro_batches, given), given) for given in choices if allowed(given)]
    if not found:
        raise MoestroError(f"expert devices must give up {least} experts, and attention devices can take {high}")
    now, best = min(found)
    left = 0 if few else TRIES
    while left:
        for one in filter(allowed, _near(best, mixed)):
            left -= 1
            then = _whole_s(mixed, layers, micro_batches, one)
            if then < now or not left:
                break
        else:
            return best
        if then < now:
            now, best = then, one
    return best


def _whole_s(mixed: Mixed, layers: int, micro_batches: int, given: tuple[int, ...]) -> float:
    return simulate(mixed, layers, micro_batches, given, backward=True).total_s


def _starts(mixed: Mixed, layers: int, most: int | None, least: int) -> list[tuple[int, ...]]:
    """As few given over as may be, evenly, and as many as the paper's rule says; those within both limits."""
    chunks, more = divmod(ceil(least / mixed.given), layers)
    few = tuple(mixed.given * (chunks + (layer < more)) for layer in range(layers))
    found = [few] if max(few) <= mixed.per_device else []
    if most is None or least <= most:
        found.append(offloads(mixed, layers, most, least))
    return [given for given in found if least <= sum(given) and (most is None or sum(given) <= most)]


def _vectors(steps: list[int], layers: int) -> Iterator[tuple[int, ...]]:
    if not layers:
        yield ()
        return
    for rest in _vectors(steps, layers - 1):
        for step in steps:
            yield (*rest, step)


def _near(given: tuple[int, ...], mixed: Mixed) -> Iterator[tuple[int, ...]]:
    """One layer's number a chunk up or down; then one up and another down."""

    def changed(*changes: tuple[int, int]) -> tuple[int, ...] | None:
        found = list(given)
        for layer, by in changes:
            found[layer] += by * mixed.given
        return tuple(found) if all(0 <= n <= mixed.per_device for n in found) else None

    single = [((layer, by),) for layer in range(len(given)) for by in (1, -1)]
    double = [((a, 1), (b, -1)) for a in range(len(given)) for b in range(len(given)) if a != b]
    yield from (one for changes in (*single, *double) if (one := changed(*changes)) is not None)


def _every(workload: Workload, attention: Kind, experts: Kind) -> Iterator[Apart]:
    """Of the two kinds, every number of devices of each that can work together and fits."""
    assert workload.model.moe is not None
    num_experts = workload.model.moe.resolved_num_experts
    for m in range(1, attention.devices + 1):
        for n in range(1, experts.devices + 1):
            if (m % n and n % m) or num_experts % n:
                continue
            found = _apart(workload, attention, experts, m, n)
            if found is not None:
                yield found


def _apart(workload: Workload, attention: Kind, experts: Kind, m: int, n: int) -> Apart | None:
    """None: it does not fit, however few micro-batches go through together."""
    assert workload.model.moe is not None
    each, layers = m / n, workload.model.num_layers
    sent_s = max(attention.sent_s, experts.sent_s * each)
    mixed = Mixed(
        attention.sides.attention_s, experts.sides.experts_s * each, attention.sides.experts_s * each, m, n,
        workload.model.moe.resolved_num_experts, sent_s,
    )  # fmt: skip
    found = []
    for micro_batches in TOGETHER:
        room = _room(workload, attention, experts, mixed, micro_batches)
        for given in _starts(mixed, layers, *room) if room is not None else ():
            one = Apart(attention.name, experts.name, mixed, micro_batches, given, 0.0, 0.0, 0.0)
            found.append(_timed(workload, attention, one))
    return min(found, key=lambda one: one.step_s, default=None)


def _with_care(workload: Workload, kinds: Sequence[Kind], apart: Apart) -> Apart:
    """With the experts that are given over chosen by simulation."""
    one, other = kinds if kinds[0].name == apart.attention_on else kinds[::-1]
    room = _room(workload, one, other, apart.mixed, apart.micro_batches)
    assert room is not None
    given = best_offloads(apart.mixed, workload.model.num_layers, apart.micro_batches, *room)
    return min(apart, _timed(workload, one, replace(apart, given=given)), key=lambda some: some.step_s)


def _timed(workload: Workload, attention: Kind, apart: Apart) -> Apart:
    """With the time of a step: all micro-batches, so many at a time, and embedding and head."""
    mixed, layers = apart.mixed, workload.model.num_layers
    sequences = ceil(workload.global_batch_size / mixed.attention_devices)
    whole, rest = divmod(sequences, apart.micro_batches)
    found = simulate(mixed, layers, apart.micro_batches, apart.given, backward=True)
    step_s = whole * found.total_s + (_whole_s(mixed, layers, rest, apart.given) if rest else 0.0)
    step_s += sequences * attention.sides.ends_s * (1 + BACKWARD)
    return replace(apart, step_s=step_s, attention=found.attention, experts=found.experts)


def _room(
    workload: Workload, attention: Kind, experts: Kind, mixed: Mixed, micro_batches: int
) -> tuple[int | None, int] | None:  # fmt: skip
    """Experts that an expert device may give up at most, and must at least; None: attention alone does not fit.

    Held: weights, gradients and states, and of each layer and micro-batch what goes in (all else is recomputed).
    """
    model = workload.model
    layers = sum(model.moe_layers)
    dense, expert = _parameters(workload)
    inputs = float(micro_batches * model.num_layers * workload.seq_len * model.hidden_size * activation_bytes(workload))
    one = _states(workload, expert=expert)
    most: int | None = None
    least = 0
    if attention.room_bytes is not None:
        spare = attention.room_bytes - _states(workload, dense=dense) - 2 * inputs
        if spare < 0:
            return None
        most = floor(spare / (one * mixed.taken / mixed.given))
    if experts.room_bytes is not None:
        copies = model.largest_top_k * mixed.attention_devices / mixed.expert_devices
        least = max(0, ceil((mixed.per_device * layers * one + inputs * copies - experts.room_bytes) / one))
    return (most, least) if least <= mixed.per_device * layers else None


def _parameters(workload: Workload) -> tuple[int, int]:
    """Of all that is no routed expert, and of one expert of one layer."""
    moe = workload.model.moe
    assert moe is not None
    counts = count(workload.model, workload.seq_len)
    experts = counts.part("experts").total
    one = experts // (sum(workload.model.moe_layers) * moe.resolved_num_experts)
    return counts.total_params - experts, one


def _states(workload: Workload, dense: int = 0, expert: int = 0) -> float:
    numbers = Parameters(dense=dense, expert=expert, trained=dense + expert)
    return sum(kept_bytes(workload, Plan(), numbers))


def _sent_s(workload: Workload, bytes_per_s: float) -> float:
    """A sequence's tokens, a copy for each of their experts, one way."""
    model = workload.model
    size = workload.seq_len * model.largest_top_k * model.hidden_size * activation_bytes(workload)
    return float(size) / bytes_per_s


def _all_to_all_s(kinds: Sequence[Kind]) -> float:
    """Of one sequence a device among all of these devices: what leaves a node; links inside one cost nothing."""
    devices = sum(kind.devices for kind in kinds)
    leaving = ((1 - min(kind.node_size, kind.devices) / devices, kind) for kind in kinds)
    return max(share * kind.sent_s for share, kind in leaving)


def _together_s(workload: Workload, kinds: Sequence[Kind]) -> float:
    """Expert parallelism: all wait for the slowest, at attention and at experts."""
    rounds = ceil(workload.global_batch_size / sum(kind.devices for kind in kinds))
    sent_s = 2 * _all_to_all_s(kinds)
    attention = max(kind.sides.attention_s for kind in kinds)
    experts = max(kind.sides.experts_s for kind in kinds)
    ends = max(kind.sides.ends_s for kind in kinds)
    layer_s = (attention + experts) * (1 + BACKWARD) + 2 * sent_s  # there and back, in either pass
    return rounds * (layer_s * workload.model.num_layers + ends * (1 + BACKWARD))


def _by_speed_s(workload: Workload, kinds: Sequence[Kind]) -> float:
    """As _together_s, where every device gets as much as it can do in the same time."""
    rounds = workload.global_batch_size / sum(kind.devices for kind in kinds)
    sent_s = 2 * _all_to_all_s(kinds)

    def mean(name: str) -> float:
        speed = sum(kind.devices / getattr(kind.sides, name) for kind in kinds if getattr(kind.sides, name))
        return sum(kind.devices for kind in kinds) / speed if speed else 0.0

    layer_s = (mean("attention_s") + mean("experts_s")) * (1 + BACKWARD) + 2 * sent_s
    return rounds * (layer_s * workload.model.num_layers + mean("ends_s") * (1 + BACKWARD))


def _pipeline(workload: Workload, kinds: Sequence[Kind]) -> tuple[float, tuple[int, ...]]:
    """A stage of each kind, expert-parallel in itself, a micro-batch a sequence for each device of the smaller kind."""
    sequences = min(kind.devices for kind in kinds)
    micro_batches = ceil(workload.global_batch_size / sequences)
    shares = [sequences / kind.devices for kind in kinds]  # of a micro-batch, sequences on a device
    work_s = [
        share * (kind.sides.attention_s + kind.sides.experts_s) for share, kind in zip(shares, kinds, strict=True)
    ]
    sent_s = [2 * share * _all_to_all_s([kind]) for share, kind in zip(shares, kinds, strict=True)]  # in either pass
    best: tuple[float, tuple[int, ...]] | None = None
    for order in ((0, 1), (1, 0)):
        ends = [0.0, kinds[order[1]].sides.ends_s * shares[order[1]]]
        each_s = [(1 + BACKWARD) * work_s[k] + 2 * sent_s[k] for k in order]
        groups = [Group(1, own, extra_s=(1 + BACKWARD) * end) for own, end in zip(each_s, ends, strict=True)]
        sizes = layers_over(groups, workload.model.num_layers)
        forward, backward = (
            [
                size * (times * work_s[k] + sent_s[k]) + times * end
                for size, k, end in zip(sizes, order, ends, strict=True)
            ]
            for times in (1.0, BACKWARD)
        )
        total = simulate_pipeline("1f1b", 2, 1, micro_batches, forward, backward, [0.0, 0.0]).total_s
        if best is None or total < best[0]:
            best = total, sizes if order == (0, 1) else sizes[::-1]
    assert best is not None
    return best


def _kind(workload: Workload, target: Target, part: Part) -> Kind:
    own = replace(target, place=part.place, curves=part.curves, fabric=part.fabric, parts=(), lines=(), devices=1)
    gbit = part.place.device.nic.per_device_gbit.best
    if not gbit:
        raise MoestroError(f"the rate of {part.name}'s NICs is not known: give nics and nic_gbit of its pool's nodes")
    size = usable_bytes(part.place.device)
    room = None if size is None else SHARE * size - sum(outside_bytes(Plan(), workload, part.place.device))
    sides = sides_of(workload, own)
    support = part.place.device.support.get("bf16")
    if support is not None and support.how != "native":
        # FlashAttention 2 needs the matrix units of devices that have bf16; on others scores are written to memory.
        written = sides_of(workload.model_copy(update={"attention_kernel": "math"}), own)
        sides = replace(sides, attention_s=max(sides.attention_s, written.attention_s))
    return Kind(part.name, part.devices, part.place.node_size, sides, _sent_s(workload, gbit / 8 * 1e9), room)
