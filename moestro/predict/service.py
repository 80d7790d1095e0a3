"""What a model takes to serve on the devices of a target: the first token, the ones after it, dollars; and by width.

Prompts are computed one at a time as a forward pass of training without the head, and go before decoding. All sequences
decode together in what time is left. Decoding is told as a floor: weights and caches read once a step at the nominal
bandwidth, and what tensor ranks send; published servers take 2 to 4 times as long (arXiv 2605.25645).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from moestro.config.counts import count
from moestro.config.model import ModelConfig
from moestro.config.plan import Plan, RoutingConfig, Workload
from moestro.errors import MoestroError
from moestro.graph.count import count_step
from moestro.graph.words import Collective
from moestro.predict.cost import HOUR_S, rented
from moestro.predict.predict import device_bytes, predict_step, price_step, target_pricer
from moestro.predict.serving import DecodeStep, decode_step, queue_time
from moestro.predict.target import Target

FULL = 0.9  # of a device's memory that weights and caches may take
WIDTHS = {"fp32": 4.0, "tf32": 4.0, "fp8": 1.0, "mxfp8": 1.0, "nvfp4": 0.5}  # bytes of a weight; others: 2
CACHE_WIDTH = 2.0  # bytes of a cached number
ALL_REDUCES = 2  # of a layer, among tensor ranks: after attention, after the feed-forward
ROUNDS = 40  # of bisection


@dataclass(frozen=True)
class Demand:
    """Requests that come at random, all alike. tokens of the prompt, and of the answer."""

    requests_per_s: float
    prompt: int
    output: int

    def __post_init__(self) -> None:
        if not (0 < self.requests_per_s < math.inf and self.prompt >= 1 and self.output >= 1):
            raise MoestroError("serving needs requests a second above 0, and prompts and answers of a token or more")


@dataclass(frozen=True)
class Load:
    """One replica under a demand. batch: sequences that decode together. used: share of the time that prompts take."""

    used: float
    batch: int
    first_token_s: float  # mean, waiting included
    token_s: float  # each further one: a floor
    step: DecodeStep


@dataclass(frozen=True)
class Service:
    """tp: devices of a replica. load: None: there is more demand than it can serve. most_batch: by memory.

    prefill_s: of one prompt alone. most_requests_per_s: of all replicas together, if decoding kept to its floor.
    """

    demand: Demand
    replicas: int
    tp: int
    prefill_s: float
    weight_bytes: float  # of a replica
    cache_bytes: float  # of a whole sequence, on all of its devices
    most_batch: int
    load: Load | None
    most_requests_per_s: float
    usd_per_million: float | None  # tokens of answers, at this demand
    least_usd_per_million: float | None  # at the most requests
    notes: tuple[str, ...] = ()

    @property
    def request_s(self) -> float | None:
        if self.load is None:
            return None
        return self.load.first_token_s + (self.demand.output - 1) * self.load.token_s


@dataclass(frozen=True)
class Width:
    """The same parameters, all and active, in experts of another width. None: that layout does not fit it."""

    experts: int
    top_k: int
    expert_hidden_size: int
    prefill_s: float
    token_s: float  # floor at the batch of the model's own width
    training_s: float | None  # of a step


def parse_demand(text: str) -> tuple[Demand, int | None]:
    """ "4:4096:512", or with the devices of a replica "4:4096:512:8".

    Raises:
        MoestroError: it is something else.
    """
    parts = text.split(":")
    try:
        if len(parts) not in (3, 4):
            raise ValueError
        numbers = [int(part) for part in parts[1:]]
        return Demand(float(parts[0]), numbers[0], numbers[1]), numbers[2] if len(parts) == 4 else None
    except ValueError as error:
        raise MoestroError(
            f"--serving {text}: give requests a second, tokens of a prompt and of an answer, as in 4:4096:512 "
            "(and the devices of a replica, as in 4:4096:512:8)"
        ) from error


def serve(
    workload: Workload, target: Target, devices: int, demand: Demand, tp: int | None = None,
    usd_per_hour: float | None = None,
) -> Service:  # fmt: skip
    """On `devices`. workload: its model and precision count. tp: None: the fewest that hold the weights and a sequence.

    Raises:
        MoestroError: replicas that do not fit the model or the devices; a CPU or unlike devices; a device of unknown
            bandwidth.
    """
    if target.host_computes or target.parts:
        raise MoestroError("--serving is for accelerators of one kind; name one with --hardware")
    tp = tp or _fewest(workload, target, devices, demand)
    if devices % tp:
        raise MoestroError(f"replicas of {tp} devices do not share out {devices}")
    replicas = devices // tp
    prefill_s = prefill(workload, target, demand.prompt, tp)
    whole = count(workload.model, demand.prompt).total_params * _weight_width(workload)
    cache = _decode(workload, target, demand, tp, 1, demand.prompt + demand.output).cache_bytes
    room = _room(target, tp) - whole
    most_batch = max(0, int(room // cache))

    def at(requests_per_s: float) -> Load | None:
        return _load(workload, target, replace(demand, requests_per_s=requests_per_s), tp, prefill_s, most_batch)

    load = at(demand.requests_per_s / replicas)
    most = replicas * _most(at, 1 / prefill_s)
    price = None
    if usd_per_hour is not None or target.place.device.price.usd_per_hour_low:
        price = rented(target.place.device, usd_per_hour).usd_per_hour * devices / HOUR_S / demand.output * 1e6
    notes = [] if most_batch else [f"does not fit: {whole / 1e9:.0f} GB of weights on {tp} devices, and a sequence"]
    if load is None and most_batch:
        notes.append(f"more than it can serve: at most {most:.3g} requests a second")
    return Service(
        demand, replicas, tp, prefill_s, whole, cache, most_batch, load, most,
        None if price is None or load is None else price / demand.requests_per_s,
        None if price is None or not most else price / most,
        tuple(notes),
    )  # fmt: skip


def prefill(workload: Workload, target: Target, prompt: int, tp: int) -> float:
    """Seconds of one prompt's forward pass, without the head, by the prices and constants of training."""
    model, tokens = workload.model, -(-prompt // tp) * tp
    experts = model.moe.resolved_num_experts if model.moe is not None else 1
    model = model.model_copy(update={"max_seq_len": max(model.max_seq_len, tokens), "mtp": None})
    changes = {"model": model, "seq_len": tokens, "global_batch_size": 1, "routing": RoutingConfig(), "media_items": ()}
    asked = workload.model_copy(update=changes)
    plan = Plan(tp=tp, ep=math.gcd(tp, experts), etp=tp // math.gcd(tp, experts) if model.moe is not None else 1)
    graph = count_step(asked, plan)
    stage = graph.stages[0]
    kept = tuple(run for run in stage.pieces if not any(node.part == "head" for node in run.piece.forward))
    costs = price_step(replace(graph, stages=(replace(stage, pieces=kept),)), asked, plan, target)
    forward, constants = costs.stages[0].forward, target.constants_for(asked, tp)
    return forward.seconds(constants)


def decode_floor(workload: Workload, target: Target, demand: Demand, tp: int, batch: int) -> tuple[DecodeStep, float]:
    """A step of a replica with answers half done, and its seconds with what tensor ranks send."""
    step = _decode(workload, target, demand, tp, batch, demand.prompt + demand.output // 2)
    if tp == 1:
        return step, step.floor_s
    size = 2.0 * batch * workload.model.hidden_size
    node = Collective("all_reduce", "attention", "decode", "tp", tp, size, "bf16")
    plan = Plan(tp=tp, ep=1)
    each = target_pricer(workload, plan, target).network.seconds(node)
    return step, step.floor_s + ALL_REDUCES * workload.model.num_layers * each


def widths(workload: Workload, plan: Plan, target: Target, service: Service) -> list[Width]:
    """Twice as wide, as it is, half as wide: where numbers stay whole. Empty without experts.

    Routed evenly, a batch touches the same share of the weights at every width: what changes is the size of products.
    """
    batch = service.load.batch if service.load else 1
    found = []
    for finer in (-2, 1, 2):
        model = _of_width(workload.model, finer)
        if model is None or model.moe is None:
            continue
        changed = workload.model_copy(update={"model": model})
        try:
            prefill_s = prefill(changed, target, service.demand.prompt, service.tp)
            token_s = decode_floor(changed, target, service.demand, service.tp, batch)[1]
        except MoestroError:  # too few experts for the layout
            continue
        try:
            training_s = predict_step(changed, plan, target).step_s.value
        except MoestroError:
            training_s = None
        moe, layer = model.moe, model.moe_blocks.index(True)
        found.append(
            Width(moe.resolved_num_experts, model.top_k_of_layer(layer), moe.resolved_expert_hidden_size,
                  prefill_s, token_s, training_s)
        )  # fmt: skip
    return found


def _of_width(model: ModelConfig, finer: int) -> ModelConfig | None:
    """finer 2: twice as many experts of half the width, of which a token takes twice as many; -2: the reverse."""
    moe = model.moe
    if moe is None:
        return None
    if finer == 1:
        return model
    if moe.expert_groups is not None:
        return None

    def scaled(number: int) -> int | None:
        return number * finer if finer > 0 else number // -finer if number % -finer == 0 else None

    top_ks = [moe.top_k] if isinstance(moe.top_k, int) else list(moe.top_k)
    number, shared, taken = scaled(moe.num_experts), scaled(moe.num_shared_experts), [scaled(k) for k in top_ks]
    width = moe.expert_hidden_size / finer if finer > 0 else moe.expert_hidden_size * -finer
    if number is None or shared is None or None in taken or width % moe.granularity:
        return None
    top_k = taken[0] if isinstance(moe.top_k, int) else tuple(taken)
    changes = {"num_experts": number, "top_k": top_k, "num_shared_experts": shared, "expert_hidden_size": int(width)}
    return model.model_copy(update={"moe": moe.model_copy(update=changes)})


def _load(
    workload: Workload, target: Target, demand: Demand, tp: int, prefill_s: float, most_batch: int
) -> Load | None:
    """By Little's law the batch is as large as sequences begin while one decodes. None: it never settles."""
    used = demand.requests_per_s * prefill_s
    if used >= 1 or most_batch < 1:
        return None

    def token_s(batch: int) -> float:
        return decode_floor(workload, target, demand, tp, batch)[1] / (1 - used)

    def enough(batch: int) -> bool:
        return demand.requests_per_s * demand.output * token_s(batch) <= batch

    if not enough(most_batch):
        return None
    low, high = 0, most_batch  # the smallest batch that keeps up
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    step, _ = decode_floor(workload, target, demand, tp, high)
    return Load(used, high, queue_time(demand.requests_per_s, prefill_s), token_s(high), step)


def _most(at: Callable[[float], Load | None], bound: float) -> float:
    """The most requests a second of one replica, by bisection."""
    low, high = 0.0, bound
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle) is not None else (low, middle)
    return low


def _fewest(workload: Workload, target: Target, devices: int, demand: Demand) -> int:
    """Powers of two that divide the heads and the devices; the largest where none is enough."""
    whole = count(workload.model, demand.prompt).total_params * _weight_width(workload)
    tp = 1
    while True:
        cache = _decode(workload, target, demand, tp, 1, demand.prompt + demand.output).cache_bytes
        if whole + cache <= _room(target, tp) or devices % (2 * tp) or workload.model.num_heads % (2 * tp):
            return tp
        tp *= 2


def _decode(workload: Workload, target: Target, demand: Demand, tp: int, batch: int, context: int) -> DecodeStep:
    memory = target.place.device.memory.gbps
    gbps = memory.nominal or memory.achieved
    if gbps is None:
        raise MoestroError(f"nobody knows the memory bandwidth of {target.place.device.id}; --serving cannot tell more")
    # Tensor ranks share out heads of keys and values; what is left to share they each keep, as MLA's latents.
    heads = 1 if workload.model.mla is not None else workload.model.resolved_num_kv_heads
    kept = CACHE_WIDTH * max(1.0, tp / heads)
    return decode_step(workload.model, batch, tp * gbps * 1e9, context, _weight_width(workload), kept)


def _room(target: Target, tp: int) -> float:
    there = device_bytes(target, tp)
    return math.inf if there is None else FULL * tp * there


def _weight_width(workload: Workload) -> float:
    return WIDTHS.get(workload.precision, 2.0)
