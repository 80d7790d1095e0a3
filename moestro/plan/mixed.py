"""Attention on fast devices and experts on slow ones, after HeterMoE (arXiv 2504.03871).

M attention devices hold attention, gate and embeddings, N expert devices the experts; tokens go over and back in every
layer ("zebra parallelism": while experts work on a micro-batch, attention works on the next). Where experts are the
slower side, attention devices take some of them ("asymmetric expert assignment"), a few layers' worth as it comes out:
they work on these after the attention of all micro-batches of a layer. Times are of one layer and micro-batch.
"""

from dataclasses import dataclass
from math import ceil, floor

from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.predict.predict import predict_step
from moestro.predict.target import Target

BACKWARD = 2.0  # a backward pass over a forward pass
EXPERTS, ENDS = ("experts", "shared experts", "dense"), ("embedding", "head", "loss")  # parts of a model
NEAR = 1e-9  # below which a count of chunks that falls short is rounding


@dataclass(frozen=True)
class Mixed:
    """Seconds of a forward pass. send_s: of a micro-batch's tokens, either way.

    experts_s: on an expert device that holds its even share of the layer's experts. experts_on_attention_s: what an
    attention device would take in its place, for that many tokens.
    """

    attention_s: float
    experts_s: float
    experts_on_attention_s: float
    attention_devices: int
    expert_devices: int
    num_experts: int
    send_s: float = 0.0

    def __post_init__(self) -> None:
        m, n = self.attention_devices, self.expert_devices
        if min(m, n) < 1 or (m % n and n % m):
            raise MoestroError(f"{m} devices for attention and {n} for experts: one must divide the other")
        if self.num_experts % n:
            raise MoestroError(f"{self.num_experts} experts do not share out over {n} devices")

    @property
    def taken(self) -> int:
        """Experts that an attention device takes in a chunk."""
        return max(1, self.expert_devices // self.attention_devices)

    @property
    def given(self) -> int:
        """Experts that an expert device gives up in a chunk."""
        return self.taken * self.attention_devices // self.expert_devices

    @property
    def per_device(self) -> int:
        """Experts of a layer on an expert device."""
        return self.num_experts // self.expert_devices

    @property
    def chunk_s(self) -> float:
        """By how much a chunk brings both sides together.

        An expert device saves a share of its time for each expert that it gives up, an attention device pays for each
        that it takes. (The paper's line has the two counts the other way round, against its own prose; with as many
        devices of either kind they are equal.)
        """
        share = self.expert_devices / self.num_experts
        return share * (self.experts_s * self.given + self.experts_on_attention_s * self.taken)


def offloads(mixed: Mixed, layers: int, most: int | None = None, least: int = 0) -> tuple[int, ...]:
    """Of each layer, how many experts every expert device gives up.

    most: experts in all layers that an attention device has memory for, given up by an expert device; None: any number.
    least: that an expert device must give up to hold the others.

    Raises:
        MoestroError: attention devices would have to take more than they can hold.
    """
    if most is not None and most < least:
        raise MoestroError(f"expert devices must give up {least} experts, and attention devices can take {most}")
    gap = max(0.0, mixed.experts_s - mixed.attention_s)
    if not gap and not least:
        return (0,) * layers
    chunk, given = mixed.chunk_s, mixed.given
    wanted = layers * gap / chunk  # chunks in all layers
    if most is not None:
        wanted = min(wanted, floor(most / given))
    wanted = max(wanted, ceil(least / given))
    found, owed = [], 0.0
    for _ in range(layers):
        owed += wanted / layers
        chunks = min(floor(owed + NEAR), mixed.per_device // given)
        owed -= chunks
        found.append(chunks * given)
    return tuple(found)


@dataclass(frozen=True)
class Zebra:
    """Of one step's forward passes, or of both: busy shares of a device of either kind."""

    total_s: float
    attention: float
    experts: float


def simulate(
    mixed: Mixed, layers: int, micro_batches: int, given: tuple[int, ...] = (), backward: bool = False
) -> Zebra:  # fmt: skip
    """Forward layer by layer, in each all micro-batches in turn, which the paper proves to be the best order; backward
    the same way in reverse. At the last layer a micro-batch's backward pass follows its forward pass at once. The way
    there and the way back carry one micro-batch at a time each.

    given: of each layer the experts that an expert device gives up; (): none.
    """
    offloaded = given or (0,) * layers
    if len(offloaded) != layers or any(not 0 <= n <= mixed.per_device for n in offloaded):
        raise MoestroError(f"offloads are of each of {layers} layers, 0 to {mixed.per_device} experts a device")
    clock = dict.fromkeys(("A", "E", "out", "back"), 0.0)
    busy = dict.fromkeys(clock, 0.0)

    def run(side: str, seconds: float, ready: float) -> float:
        clock[side] = max(clock[side], ready) + seconds
        busy[side] += seconds
        return clock[side]

    def served(seconds: float, ready: float) -> float:
        """By the experts, there and back."""
        if not mixed.send_s:
            return run("E", seconds, ready)
        return run("back", mixed.send_s, run("E", seconds, run("out", mixed.send_s, ready)))

    def times(layer: int, factor: float) -> tuple[float, float, float]:
        """Attention; experts that stay; those that attention devices took."""
        share = offloaded[layer] / mixed.per_device
        taken = offloaded[layer] * mixed.taken / mixed.given if offloaded[layer] else 0.0
        own = mixed.experts_on_attention_s * taken * mixed.expert_devices / mixed.num_experts
        return mixed.attention_s * factor, mixed.experts_s * (1 - share) * factor, own * factor

    ready = [0.0] * micro_batches
    for layer in range(layers):
        attention, experts, own = times(layer, 1.0)
        there = [run("A", attention, ready[j]) for j in range(micro_batches)]
        here = [run("A", own, there[j]) if own else there[j] for j in range(micro_batches)]
        last = backward and layer == layers - 1
        for j in range(micro_batches):
            ready[j] = max(here[j], served(experts, there[j]))
            if last:  # the loss's gradient turns round at once
                ready[j] = served(BACKWARD * experts, ready[j])
    for layer in reversed(range(layers)) if backward else ():
        attention, experts, own = times(layer, BACKWARD)
        if layer < layers - 1:
            ready = [served(experts, ready[j]) for j in range(micro_batches)]
        if own:
            ready = [max(ready[j], run("A", own, ready[j])) for j in range(micro_batches)]
        ready = [run("A", attention, ready[j]) for j in range(micro_batches)]
    total = max(clock.values())
    return Zebra(total, busy["A"] / total, busy["E"] / total)


def no_overlap_s(mixed: Mixed, layers: int, micro_batches: int, backward: bool = False) -> float:
    """One side waits while the other works."""
    once = mixed.attention_s + mixed.experts_s + 2 * mixed.send_s
    return layers * micro_batches * once * (1 + BACKWARD if backward else 1)


def mixed_of(
    workload: Workload, attention: Target, experts: Target, attention_devices: int, expert_devices: int
) -> Mixed:  # fmt: skip
    """Predicted times of one layer and one sequence on each attention device, without what is sent.

    Embedding and head are on the attention devices in any case, and not in it.

    Raises:
        MoestroError: a model without experts, or counts that do not fit.
    """
    if workload.model.moe is None:
        raise MoestroError("attention and experts on devices of their own: the model has no experts")
    fast, slow = sides_of(workload, attention), sides_of(workload, experts)
    per_device = attention_devices / expert_devices  # sequences that an expert device gets at a time
    return Mixed(
        fast.attention_s, slow.experts_s * per_device, fast.experts_s * per_device, attention_devices, expert_devices,
        workload.model.moe.resolved_num_experts,
    )  # fmt: skip


@dataclass(frozen=True)
class Sides:
    """Seconds of one sequence's forward pass on one device: a layer's attention, its experts; embedding and head."""

    attention_s: float
    experts_s: float
    ends_s: float


def sides_of(workload: Workload, target: Target) -> Sides:
    """Predicted. Norms, routers and the way of tokens to their experts are attention's, shared experts and dense layers
    the experts'."""
    alone = workload.model_copy(update={"global_batch_size": 1})
    parts = predict_step(alone, Plan(), target).time.by_part
    experts, ends = (sum(parts.get(name, 0.0) for name in names) for names in (EXPERTS, ENDS))
    layers, whole = workload.model.num_layers, 1 + BACKWARD
    return Sides((sum(parts.values()) - experts - ends) / whole / layers, experts / whole / layers, ends / whole)
