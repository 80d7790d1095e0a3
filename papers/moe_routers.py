"""Optimizing MoE Routers: Design, Implementation, and Evaluation in Transformer Models (Harvey, Weale, Yilmaz;
arXiv 2506.16419).

The claim, from the abstract: of six routers (linear, attention, MLP, hybrid, hash, MLP-Hadamard) the linear one is the
fastest, MLP and attention are more expressive, and the new MLP-Hadamard routes in a structured, sparse way. The paper's
formulas and figures could not be read, so that none are cited, and MLP-Hadamard is what its name says: the product of
two projections before the last matrix.

What is reproduced here, on CPU, through `moestro analyze routers`:

* measured: a router's time alone, all six in turn; entropies and loads after a short training of a small model on the
  State of the Union addresses, from three seeds;
* exact: parameters by formula, a swap that copies the linear router's weights, what hash makes of uniform and of skewed
  token ids.

What is not: the swap into a quantised Qwen1.5-MoE, which takes its weights. No quality is compared: a hundred steps of
a small model rank no router. Expressiveness is given only what it costs.
"""

import math
from statistics import mean, median

import torch
from torch import Tensor

from moestro.analyze.routers import RouterFigures, compare_routers, forward_times, router_of, router_params, variant
from moestro.config import Config, load_config
from moestro.model.moe.groups import TokenGroups
from moestro.model.transformer import Transformer
from papers.result import Check, PaperResult, Progress, verdict_of

KINDS = ("hash", "linear", "mlp", "attention", "hybrid", "mlp_hadamard")
SEEDS = (0, 1, 2)
STEPS = 120
ROUNDS = 41
EQUAL, SLOWER = 1.05, 1.2  # as long as, and longer, of a median ratio of times

Times = dict[str, list[float]]


def shape(**model: int) -> Config:
    """The demo's model in another shape, with softmax scores. Routers' own width is their default, 256."""
    model = {"vocab_size": 257} | model
    changes = ["data.tokenizer.kind=byte", "data.seq_len=128", "train.global_batch_size=4", "run.device=cpu"]
    changes += ["model.moe.router.score=softmax", "model.moe.balance.bias_rule=none"]
    if model.get("moe.top_k") == 1:
        changes.append("model.moe.router.renormalize=false")
    return load_config("sotu-tiny", [*changes, *(f"model.{key}={value}" for key, value in model.items())]).config


# In which the time is taken, of 2,048 tokens: the demo's shape, and a wide one with 64 experts, 8 of them chosen.
TIMED: dict[str, dict[str, int]] = {
    "narrow": {"num_layers": 1},
    "wide": {"hidden_size": 1024, "num_heads": 8, "num_layers": 1, "moe.num_experts": 64, "moe.top_k": 8},
}
TRAINED = {"hidden_size": 64, "num_heads": 2, "num_layers": 2, "moe.num_experts": 8, "moe.expert_hidden_size": 32}


def run(progress: Progress) -> PaperResult:
    """Everything; about 60 s of CPU time in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # CPU time adds up threads, and these products are small
    try:
        times = {name: time_routers(shape(**sizes)) for name, sizes in TIMED.items()}
        progress(1, len(SEEDS) * len(KINDS) + 2, "routers timed")
        trained = compare_routers(
            shape(**TRAINED), KINDS, SEEDS, STEPS, lambda done, total, what: progress(1 + done, total + 2, what)
        )
    finally:
        torch.set_num_threads(threads)
    checks = (
        check_fastest(times),
        check_order(times),
        check_parameters(),
        check_hash(),
        check_swap(),
        check_range(trained),
        check_sparse(trained),
    )
    progress(len(SEEDS) * len(KINDS) + 2, len(SEEDS) * len(KINDS) + 2, "checks")
    figures = {
        f"CPU microseconds: {kind}, {name}": round(median(values), 1)
        for name, by_kind in times.items()
        for kind, values in by_kind.items()
    }
    for f in trained:
        for key in ("token_entropy", "load_entropy", "max_over_mean", "gini", "active_share"):
            for seed, value in zip(SEEDS, getattr(f, key), strict=True):
                figures[f"{key}: {f.name} seed={seed}"] = round(value, 5)
    return PaperResult(checks, figures)


# Measured.


def time_routers(config: Config) -> Times:
    return forward_times({kind: variant(config, kind) for kind in KINDS}, torch.device("cpu"), ROUNDS)


def ratio(times: Times, fast: str, slow: str) -> float:
    """Median over rounds of slow / fast."""
    return median(b / a for a, b in zip(times[fast], times[slow], strict=True))


def check_fastest(times: dict[str, Times]) -> Check:
    others = ("mlp", "attention", "hybrid", "mlp_hadamard")
    ratios = {name: [ratio(by_kind, "linear", kind) for kind in others] for name, by_kind in times.items()}
    parts = [f"{name} {' / '.join(f'{value:.2f}' for value in values)}" for name, values in ratios.items()]
    micros = [
        f"{name}: {', '.join(f'{kind} {median(by_kind[kind]):,.0f}' for kind in KINDS)}"
        for name, by_kind in times.items()
    ]
    return Check(
        claim="The linear router is the fastest of those that learn",
        published="linear is the fastest; the figures could not be read",
        ours=f"MLP / attention / hybrid / MLP-Hadamard take so many times as long: {'; '.join(parts)}",
        how="measured",
        verdict=verdict_of(value >= SLOWER for values in ratios.values() for value in values),
        note=f"CPU µs of a router alone in training, without backward, {'; '.join(micros)}. Medians of {ROUNDS} rounds "
        f"in which all take turns, one thread; at least {SLOWER - 1:.0%} longer counts. 2,048 tokens; narrow: 192 "
        "numbers, 8 experts, top-2; wide: 1,024, 64, top-8; width 256. With scores, selection and statistics, which "
        "all have.",
    )


def check_order(times: dict[str, Times]) -> Check:
    pairs = (("hash", "linear"), ("mlp", "hybrid"))
    ratios = {(name, slow, fast): ratio(t, fast, slow) for name, t in times.items() for fast, slow in pairs}
    parts = ", ".join(f"{ratio(t, 'attention', 'hybrid'):.2f} ({name})" for name, t in times.items())
    return Check(
        claim="Hash takes no longer than linear, MLP no longer than hybrid",
        published="compared by latency; the figures could not be read",
        ours=", ".join(f"{slow} / {fast} {value:.2f} ({name})" for (name, slow, fast), value in ratios.items()),
        how="measured",
        verdict=verdict_of(value >= 1 / EQUAL for value in ratios.values()),
        note=f"Up to {EQUAL - 1:.0%} longer counts as no longer. Both depend on the shape: a hash is a few operations "
        "on whole numbers for each expert, a linear router a product that grows with the width; a hybrid has a linear "
        f"part where an MLP has a GELU. How finely to read this: hybrid / attention, which is a part of it, {parts}.",
    )


def check_range(trained: list[RouterFigures]) -> Check:
    shares = [value for f in trained for value in (*f.token_entropy, *f.load_entropy, *f.active_share)]
    fine = all(math.isfinite(v) and -1e-6 <= v <= 1 + 1e-6 for v in shares)
    fine = fine and all(1 - 1e-6 <= v <= 8 for f in trained for v in f.max_over_mean)
    parts = [f"{f.name} {mean(f.token_entropy):.2f}, {mean(f.load_entropy):.2f}" for f in trained]
    return Check(
        claim="Entropy of scores and of load, and utilisation, after training",
        published="compared by entropy and utilisation; the figures could not be read",
        ours=f"entropy of scores and of load, over ln E: {'; '.join(parts)}",
        how="measured",
        verdict="holds" if fine else "does not hold",
        note=f"All finite and within [0, 1], max / mean load within [1, E]; active experts "
        f"{min(min(f.active_share) for f in trained):.0%} at least. {STEPS} steps, {len(SEEDS)} seeds, 8 experts, "
        "top-2, softmax, balance loss 0.01. Nothing is ranked.",
    )


def check_sparse(trained: list[RouterFigures]) -> Check:
    by_name = {f.name: f.token_entropy for f in trained}
    below = [a < b for a, b in zip(by_name["mlp_hadamard"], by_name["linear"], strict=True)]
    return Check(
        claim="MLP-Hadamard's scores are more decided than the linear router's",
        published="structured, sparse routing",
        ours=f"entropy of scores, by seed: {_list(by_name['mlp_hadamard'])} against {_list(by_name['linear'])}",
        how="measured",
        verdict=verdict_of(below),
        note=f"Lower for {sum(below)} of {len(below)} seeds. What the paper calls sparse could not be read, nor its "
        f"formula: this is our reading of both, after {STEPS} steps of a small model. Another seed was looked at "
        "before, after 4 steps only, when it was the other way round (0.92 against 0.88).",
    )


# Exact.


def formulas(hidden: int, experts: int, width: int) -> dict[str, int]:
    attention = hidden * width + experts * width
    return {
        "hash": 0,
        "linear": hidden * experts,
        "mlp": hidden * width + width * experts,
        "attention": attention,
        "hybrid": hidden * experts + attention + 1,
        "mlp_hadamard": 2 * hidden * width + width * experts,
    }


def check_parameters() -> Check:
    """In three shapes."""
    shapes = ((64, 8, 256), (1024, 64, 256), (192, 5, 24))
    same = []
    for hidden, experts, width in shapes:
        sizes = {"hidden_size": hidden, "num_heads": 2, "moe.num_experts": experts, "moe.router.hidden_size": width}
        config = shape(**sizes)
        same += [router_params(variant(config, k).model) == n for k, n in formulas(hidden, experts, width).items()]
    d, e, m = shapes[1]
    return Check(
        claim="Parameters: 0 hash, dE linear, dm + mE MLP and attention, their sum and 1 hybrid, 2dm + mE MLP-Hadamard",
        published="compared by parameters; the figures could not be read",
        ours=", ".join(f"{kind} {number:,}" for kind, number in formulas(d, e, m).items()) + f" (d={d}, E={e}, m={m})",
        how="computed",
        verdict="holds" if all(same) else "does not hold",
        note=f"Formulas against built routers in {len(shapes)} shapes, {sum(same)} of {len(same)} equal. The hybrid "
        "has a learned share of its two parts.",
    )


def check_hash() -> Check:
    """Top-1 over 16 experts of a vocabulary of 8,192; skewed ids are Zipf's."""
    experts, vocab, count = 16, 8192, 2**15
    config = shape(**{"hidden_size": 8, "num_heads": 2, "vocab_size": vocab, "moe.num_experts": 16, "moe.top_k": 1})
    router = router_of(variant(config, "hash").model)
    owner = hashed(router, torch.arange(vocab))
    frequency = 1 / torch.arange(1, vocab + 1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    peaks, errors = {}, []
    for name, weights in (("uniform", torch.ones(vocab, dtype=torch.float64)), ("Zipf", frequency)):
        ids = torch.multinomial(weights, count, replacement=True, generator=generator)
        load = torch.bincount(hashed(router, ids), minlength=experts) / count
        expected = torch.zeros(experts, dtype=torch.float64).index_add(0, owner, weights / weights.sum())
        peaks[name] = load.max().item() * experts
        deviation = (expected / count).sqrt()  # of a binomial count, over the number of tokens
        errors.append(((load - expected).abs() / deviation).max().item())
    even, skewed = peaks["uniform"] < 1.2, peaks["Zipf"] > 2
    return Check(
        claim="Hash: near even load for uniform token ids, the skew of the unigrams otherwise",
        published="hash routing has no parameters; the figures could not be read",
        ours=f"max / mean load {peaks['uniform']:.2f} for uniform ids, {peaks['Zipf']:.2f} for Zipf's",
        how="computed",
        verdict=verdict_of((even, skewed and max(errors) < 5)),
        note=f"{experts} experts, {vocab:,} ids, {count:,} tokens. An expert's load is the sum of its ids' "
        f"frequencies, to {max(errors):.1f} standard deviations of the sample at most.",
    )


def hashed(router: torch.nn.Module, ids: Tensor) -> Tensor:
    """[T] the expert of each token id."""
    x = torch.zeros(len(ids), 8)
    routing, _ = router(x, TokenGroups(len(ids), token_ids=ids))
    experts: Tensor = routing.expert_ids[:, 0]
    return experts


def check_swap() -> Check:
    """W x by each router that can be made to say it: attention with the keys 1 · sqrt(m), hybrid with all of its share
    on the linear part."""
    config = shape(**TRAINED | {"moe.router.hidden_size": 8})
    ids = torch.randint(257, (4, 128), generator=torch.Generator().manual_seed(0))
    outputs = {}
    for kind in ("linear", "attention", "hybrid"):
        model = Transformer(variant(config, kind).model)
        model.init_weights(0)
        for layer in model.moe_layers():
            linear = router_of(variant(config, "linear").model).weight.detach()
            with torch.no_grad():
                if kind == "attention":
                    layer.router.query.weight.copy_(linear)
                    layer.router.keys.copy_(torch.eye(8) * 8**0.5)
                else:
                    layer.router.weight.copy_(linear)
                if kind == "hybrid":
                    layer.router.mix_bias.fill_(50)
            with torch.no_grad():
                outputs[kind] = model(ids).hidden
    errors = {kind: ((outputs[kind] - outputs["linear"]).norm() / outputs["linear"].norm()).item() for kind in outputs}
    return Check(
        claim="A router swapped in with the linear router's weights leaves the model's function as it is",
        published="routers are swapped into a trained model, then fine-tuned",
        ours=f"outputs differ by {errors['attention']:.1e} (attention), {errors['hybrid']:.1e} (hybrid)",
        how="computed",
        verdict="holds" if max(errors.values()) < 1e-5 else "does not hold",
        note="Relative norms over a model of two layers. Attention with as many dimensions as experts, the weights as "
        "queries and unit keys; hybrid with its share at 1. MLP and MLP-Hadamard cannot repeat a linear map exactly: "
        "their activation and product are in between.",
    )


def _list(values: list[float]) -> str:
    return " / ".join(f"{value:.3f}" for value in values)
