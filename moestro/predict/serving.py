"""What a model costs at inference: weights that a decoding step reads, and how long requests queue.

Enough to weigh a choice of expert width against; not a serving simulator.
"""

import math
import random
from dataclasses import dataclass
from functools import lru_cache

from moestro.config.counts import count
from moestro.config.model import ModelConfig
from moestro.errors import MoestroError


@dataclass(frozen=True)
class DecodeStep:
    """One token for each of a batch of sequences. floor_s: no step of these bytes can be faster."""

    batch: int
    experts_touched: float  # in each MoE layer, on average
    weight_bytes: float
    cache_bytes: float
    floor_s: float


def experts_touched(experts: int, top_k: int, tokens: int) -> float:
    """Distinct experts that `tokens` tokens use, routed evenly and by themselves: E · (1 - (1 - k/E)^B)."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def decode_step(
    model: ModelConfig,
    batch: int,
    bytes_per_s: float,
    context: int = 0,
    weight_width: float = 2,
    cache_width: float = 2,
) -> DecodeStep:
    """model: vocab_size resolved. bytes_per_s: of all devices together; context: tokens already in each sequence."""
    if batch < 1 or not bytes_per_s > 0:
        raise MoestroError("a decoding step needs a batch of 1 or more and a memory bandwidth above 0")
    fixed, each, layers = _weights(model)
    touched = [experts_touched(number, top_k, batch) for number, top_k in layers]
    weights = weight_width * (fixed + each * sum(touched))
    cache = cache_width * batch * _cached(model, context)
    mean = sum(touched) / len(touched) if touched else 0.0
    return DecodeStep(batch, mean, weights, cache, (weights + cache) / bytes_per_s)


@lru_cache(maxsize=256)
def _weights(model: ModelConfig) -> tuple[int, float, tuple[tuple[int, int], ...]]:
    """Parameters that every step reads; of one expert; and (experts, top_k) of each layer that has some."""
    counts = count(model, 1)
    experts = counts.part("experts")
    fixed = counts.active_params - experts.active
    if not model.tie_embeddings:
        fixed -= counts.embedding_params  # a look-up of a few rows; the head is read whole
    if model.moe is None:
        return fixed, 0.0, ()
    number = model.moe.resolved_num_experts
    layers = [layer for layer, routed in enumerate(model.moe_blocks[: model.num_layers]) if routed]
    each = experts.total / (number * len(layers))
    return fixed, each, tuple((number, model.top_k_of_layer(layer)) for layer in layers)


def queue_time(requests_per_s: float, service_s: float) -> float:
    """Mean time from arrival to the end of service where requests come at random and each takes the same time (M/D/1).

    inf from a load of 1 on.
    """
    load = requests_per_s * service_s
    if load >= 1:
        return math.inf
    return service_s + load * service_s / (2 * (1 - load))


def simulate_queue(requests_per_s: float, service_s: float, requests: int = 500_000, seed: int = 0) -> float:
    """The same by simulation: the mean over `requests`."""
    rng = random.Random(seed)
    arrival = free = total = 0.0
    for _ in range(requests):
        arrival += rng.expovariate(requests_per_s)
        free = max(free, arrival) + service_s
        total += free - arrival
    return total / requests


def prefill_floor(model: ModelConfig, tokens: int, flops_per_s: float) -> float:
    """Seconds for a prompt at the devices' peak: two FLOPs for a weight and token, the head for one token."""
    counts = count(model, max(1, tokens))
    head = counts.embedding_params if model.tie_embeddings else counts.part("head").total
    return 2 * ((counts.matmul_params - head) * tokens + head) / flops_per_s


def _cached(model: ModelConfig, context: int) -> int:
    """Cached numbers of one sequence, all layers; layers with a window keep no more than that."""
    if model.mla is not None:
        each = model.mla.kv_rank + model.mla.rope_head_dim
    else:
        each = 2 * model.resolved_num_kv_heads * model.resolved_head_dim
    kept = 0
    for layer in range(model.num_layers):
        window = model.sliding_window if model.layer_type(layer) == "sliding" else None
        kept += context if window is None else min(context, window)
    return each * kept
