"""Routers against each other: each in the same model, on the same data, from the same other weights.

What is compared is the cost of a router (parameters, latency) and what it does (scores' entropy, experts' load), with
the spread over seeds. Loss is shown too, but a hundred steps of a small model rank no router by quality.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moestro.config import Config, ModelConfig, parse_config
from moestro.data.batches import TrainStream
from moestro.data.prepare import PreparedData, prepare
from moestro.errors import MoestroError, nearest
from moestro.hardware.device import resolve_device, synchronize
from moestro.model.initial import initial_value
from moestro.model.moe.router import Router, TokenGroups
from moestro.model.transformer import Transformer
from moestro.optim.build import lr_factor
from moestro.optim.update import Update
from moestro.parallel.build import DTYPES, whole_parts
from moestro.train.begin import with_vocabulary
from moestro.train.engine import alone
from moestro.train.metrics import load_entropy
from moestro.train.step import NonFiniteError, StepResult, train_step

# What each router changes in [model.moe] of the model it is swapped into. The first of them, KINDS, are ways to make
# logits and leave the rest of [model.moe.router] as it is; the others are whole designs, and start from its defaults.
KINDS = ("linear", "mlp", "attention", "hybrid", "mlp_hadamard", "hash")
VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"router": {"kind": "linear"}},
    "mlp": {"router": {"kind": "mlp"}},
    "attention": {"router": {"kind": "attention"}},
    "hybrid": {"router": {"kind": "hybrid"}},
    "mlp_hadamard": {"router": {"kind": "mlp_hadamard"}},
    "hash": {"router": {"kind": "hash"}, "balance": {"bias_rule": "none", "aux_coef": 0.0}},
    "zaya": {
        "top_k": 1,
        "router": {"kind": "zaya", "score": "softmax", "renormalize": False},
        "balance": {"bias_rule": "adamw", "aux_coef": 0.0},
    },
    "switch": {
        "top_k": 1,
        "router": {"score": "softmax", "renormalize": False, "capacity_factor": 1.25, "jitter": 0.01},
        "balance": {"bias_rule": "none", "aux_coef": 0.01},
    },
    "deepseek": {
        "router": {"score": "sigmoid", "num_groups": 4, "top_groups": 2},
        "balance": {"bias_rule": "sign", "aux_coef": 1e-4, "aux_scope": "sequence"},
    },
    "quantile": {"router": {"score": "sigmoid"}, "balance": {"bias_rule": "quantile", "aux_coef": 0.0}},
    "null": {"null_experts": 1, "balance": {"bias_rule": "adamw", "aux_coef": 0.0}},
    "k_top_1": {"router": {"selection": "k_top_1", "score": "softmax"}, "balance": {"bias_rule": "none"}},
    "sam": {
        "router": {"selection": "sam", "num_groups": 2, "score": "softmax"},
        "balance": {"bias_rule": "none", "alignment_coef": 0.01},
    },
    "base": {"top_k": 1, "router": {"selection": "base"}, "balance": {"bias_rule": "none", "aux_coef": 0.0}},
    "expert_choice": {
        "router": {"selection": "expert_choice", "score": "sigmoid", "renormalize": False, "capacity_factor": 1.0},
        "balance": {"bias_rule": "none", "aux_coef": 0.0},
    },
    "dense": {
        "router": {"selection": "dense", "score": "softmax", "renormalize": False},
        "balance": {"bias_rule": "none", "aux_coef": 0.0, "mi_coef": 0.001},
    },
    "dense_to_sparse": {
        "router": {"selection": "dense_to_sparse", "score": "softmax"},
        "balance": {"bias_rule": "none"},
    },
}

LATENCY_TOKENS, LATENCY_ROUNDS = 2048, 15


@dataclass
class RouterFigures:
    """One router; lists have an entry for each seed, latencies one for each round. Loads are means over layers."""

    name: str
    params_per_layer: int
    forward_us: list[float] = field(default_factory=list)  # of LATENCY_TOKENS tokens, without gradients
    loss: list[float] = field(default_factory=list)  # nats, mean of the last tenth of the steps
    token_entropy: list[float] = field(default_factory=list)  # of a token's scores, over ln E
    load_entropy: list[float] = field(default_factory=list)  # of the experts' load, over ln E
    max_over_mean: list[float] = field(default_factory=list)
    gini: list[float] = field(default_factory=list)
    active_share: list[float] = field(default_factory=list)  # experts with at least a hundredth of an even share
    dropped: list[float] = field(default_factory=list)


def compare_routers(
    config: Config,
    names: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    progress: Callable[[int, int, str], None] = lambda *_: None,
) -> list[RouterFigures]:
    """Swap each router into `config`'s model, time it, and train it for `steps` steps from each of `seeds`.

    Raises:
        MoestroError: no such router, a router that the model's other settings exclude, a dense model, or a run that
            diverges.
    """
    variants = {name: variant(config, name) for name in names}
    device = resolve_device(config.run.device)
    prepared = prepare(config.data, progress=False, encoders=config.model.encoders)
    variants = {name: with_vocabulary(changed, prepared) for name, changed in variants.items()}
    times = forward_times(variants, device, LATENCY_ROUNDS)
    found = {name: RouterFigures(name, router_params(v.model), times[name]) for name, v in variants.items()}
    runs = [(seed, name) for seed in seeds for name in variants]
    for number, (seed, name) in enumerate(runs):
        progress(number, len(runs), f"{name}, seed {seed}")
        _train(variants[name], prepared, seed, steps, device, found[name])
    return list(found.values())


def variant(config: Config, name: str) -> Config:
    """`config` with the router `name` in its model."""
    if name not in VARIANTS:
        raise MoestroError(f"no router '{name}'.{nearest(name, list(VARIANTS))} Routers: {', '.join(VARIANTS)}")
    if config.model.moe is None:
        raise MoestroError("the model has no [model.moe], so there is no router to compare")
    tree, change = config.model_dump(), VARIANTS[name]
    moe = tree["model"]["moe"]
    router = moe["router"] if name in KINDS else {"hidden_size": moe["router"]["hidden_size"]}
    parts = {"router": router | change["router"] if "router" in change else router}
    parts["balance"] = moe["balance"] | change.get("balance", {})
    tree["model"]["moe"] = moe | change | parts
    try:
        return parse_config(tree, f"router '{name}'")
    except MoestroError as error:
        raise MoestroError(f"this router does not fit the model. {error}") from error


def fitting(config: Config) -> tuple[list[str], list[str]]:
    """Names of the routers that fit `config`'s model, and why each of the others does not."""
    names, reasons = [], []
    for name in VARIANTS:
        try:
            variant(config, name)
            names.append(name)
        except MoestroError as error:
            reasons.append(str(error))
    return names, reasons


def router_of(model: ModelConfig) -> Router:
    """That of the last MoE layer, which has all that a router can have, with the weights it has at the start."""
    layer = max(i for i, is_moe in enumerate(model.moe_layers) if is_moe)
    router = Router(model, layer)
    for name, parameter in router.named_parameters():
        value = initial_value(f"layers.{layer}.mlp.router.{name}", parameter.shape, model, seed=0)
        parameter.data.copy_(value)
    return router


def router_params(model: ModelConfig) -> int:
    with torch.device("meta"):
        layer = max(i for i, is_moe in enumerate(model.moe_layers) if is_moe)
        return sum(parameter.numel() for parameter in Router(model, layer).parameters())


@torch.no_grad()
def forward_times(variants: Mapping[str, Config], device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Microseconds that each router takes for LATENCY_TOKENS tokens as in training, without backward.

    All take turns, round after round, so that what else the machine does falls on all of them. On a CPU this is CPU
    time: what other processes take is not in it, and threads add up.
    """
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    routers = {name: router_of(config.model).to(device).train() for name, config in variants.items()}
    inputs = {name: _inputs(config, device) for name, config in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(rounds + 1):
        for name, router in routers.items():
            x, groups, state = inputs[name]
            synchronize(device)
            start = clock()
            router(x, groups, state)
            synchronize(device)
            if round_number:  # the first call of each also allocates
                times[name].append((clock() - start) * 1e6 * LATENCY_TOKENS / len(x))
    return times


def _inputs(config: Config, device: torch.device) -> tuple[Tensor, TokenGroups, Tensor | None]:
    """About LATENCY_TOKENS random tokens in whole sequences, and what the layer before hands on."""
    generator = torch.Generator().manual_seed(0)
    seq_len = min(config.data.seq_len, LATENCY_TOKENS)
    tokens = LATENCY_TOKENS // seq_len * seq_len
    x = torch.randn(tokens, config.model.hidden_size, generator=generator).to(device)
    ids = torch.randint(config.model.vocab_size or 2, (tokens,), generator=generator).to(device)
    seeds = torch.arange(tokens // seq_len, device=device)
    groups = TokenGroups(seq_len, noise_seeds=seeds, token_ids=ids, token_types=torch.zeros_like(ids))
    router = config.model.moe.router if config.model.moe else None
    carries = router is not None and router.kind == "zaya" and router.carry_state
    state = torch.zeros(tokens, router.hidden_size, device=device) if router is not None and carries else None
    return x, groups, state


def _train(
    config: Config, prepared: PreparedData, seed: int, steps: int, device: torch.device, into: RouterFigures
) -> None:
    model = Transformer(config.model, DTYPES[config.train.dtype])
    model.init_weights(seed)
    model.to(device).train()
    engine = alone(model, seed)
    update = Update([model], config.optim, engine.mesh, whole_parts(model), "auto")
    stream = TrainStream(prepared, config.data, seed)
    size, micro = config.train.global_batch_size, config.train.resolved_micro_batch_size
    results = []
    for step in range(steps):
        update.set_learning_rate(lr_factor(step, steps, config.optim))
        first = step * size
        batches = [stream.batch(i, micro) for i in range(first, first + size, micro)]
        try:
            results.append(train_step(engine, update, batches, config.train.grad_clip))
        except NonFiniteError as error:
            raise MoestroError(
                f"router '{into.name}' diverged at step {step + 1} of seed {seed} ({error}); lower optim.lr or set "
                "train.grad_clip"
            ) from error
    _add(into, results[-max(1, steps // 10) :])


def _add(into: RouterFigures, results: list[StepResult]) -> None:
    """A run's last steps."""
    layers = [layer for result in results for layer in result.layers]
    loads = torch.stack([layer.load for layer in layers]).cpu()
    into.loss.append(float(torch.stack([result.loss for result in results]).mean()))
    into.token_entropy.append(float(torch.stack([layer.token_entropy for layer in layers]).mean()))
    into.dropped.append(float(torch.stack([layer.dropped for layer in layers]).mean()))
    into.load_entropy.append(statistics.fmean(load_entropy(load.tolist()) for load in loads))
    into.max_over_mean.append(float((loads.amax(1) * loads.shape[1]).mean()))
    into.gini.append(float(torch.stack([gini(load) for load in loads]).mean()))
    into.active_share.append(float((loads * loads.shape[1] >= 0.01).float().mean()))


def gini(load: Tensor) -> Tensor:
    """Gini coefficient of a load [E]: 0 when even, 1 - 1/E when one expert has all."""
    ordered = load.double().sort().values
    ranks = torch.arange(1, len(load) + 1, dtype=torch.float64)
    return ((2 * ranks - len(load) - 1) @ ordered / (len(load) * ordered.sum().clamp_min(1e-30))).float()
