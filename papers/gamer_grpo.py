"""Can A Gamer Train A Mathematical Reasoning Model? (Shin; arXiv 2506.08935).

The claim: a model of 1.5 billion parameters, trained with adapters (LoRA) and group-relative policy gradients (GRPO) on
one gaming GPU of 16 GB in about a day, does as well in mathematics as models several times larger.

What is reproduced here, by arithmetic and one small simulation: how many parameters the adapters have (paper and code
disagree), what a step needs of the 14 GB in use and what else 16 GB would hold, how many groups of completions have no
gradient at all, and what of the published scores is the training's. What is not: the training itself, which is work for
later versions; the evaluations, which need the model.
"""

import math

import numpy as np
from numpy.typing import NDArray

from moestro.config.adapters import ATTENTION, FEED_FORWARD, adapter_params
from moestro.config.counts import count
from moestro.config.model import ModelConfig
from moestro.config.plan import Plan, Workload
from moestro.graph.count import count_step
from moestro.hardware.catalog import load_device
from moestro.plan.budget import Most, within
from moestro.predict.memory import memory_of
from moestro.predict.target import Target, target_of
from moestro.predict.words import MemoryBreakdown
from papers.result import Check, PaperResult, Progress, verdict_of

# The published configuration of the base model, Qwen2.5-Math-1.5B.
MODEL = ModelConfig(
    vocab_size=151_936,
    hidden_size=1536,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    intermediate_size=8960,
    attention_bias="qkv",
    tie_embeddings=True,
    max_seq_len=4096,
)
RANK, PROMPT, COMPLETION = 16, 128, 150
TOKENS = PROMPT + COMPLETION
PAPER_BATCH, CODE_BATCH, ACCUMULATED = 1, 4, 4
ADAPTERS, ADAPTER_SHARE = 18e6, 0.011
IN_USE, WEIGHTS = 14e9, 3e9  # bytes
CARD_GB = 16.0
CARD = "rtx-3090"  # of the same generation; its memory is set to the card's
GROUP = 2  # completions of a prompt, in the code
OTHER_GROUP = 8
ACCURACIES = (0.3, 0.72, 0.9)
GROUPS = 200_000  # simulated
# GSM8K, the author's prompts.
BASE, TRAINED, LARGER = 0.7165, 0.7369, 0.5838
BASE_REPORTED, TRAINED_BEST = 0.768, 0.7377
PROBLEMS = 1319  # in GSM8K's test set (recalled)


def run(progress: Progress) -> PaperResult:
    """Everything; about a second."""
    memory = {batch: step_memory(batch) for batch in (PAPER_BATCH, CODE_BATCH)}
    progress(1, 2, "memory")
    checks = (
        check_adapters(),
        check_weights(),
        check_in_use(memory),
        check_budget(),
        check_signal(),
        check_signal_simulated(),
        check_gain(),
        check_lead(),
    )
    progress(2, 2, "checks")
    figures = {f"GB in use, batch {batch}": round(found.total / 1e9, 2) for batch, found in memory.items()}
    figures |= {
        f"groups without gradient, {size} completions, p = {p}": round(zero_share(p, size), 4)
        for size in (GROUP, OTHER_GROUP)
        for p in ACCURACIES
    }
    return PaperResult(checks, figures)


def check_adapters() -> Check:
    whole = count(MODEL, TOKENS).total_params
    attention = adapter_params(MODEL, RANK, ATTENTION)
    everything = adapter_params(MODEL, RANK, (*ATTENTION, *FEED_FORWARD))
    graph = count_step(_workload(CODE_BATCH), Plan(micro_batch_size=CODE_BATCH)).stages[0].parameters.trained
    return Check(
        claim="Adapters of rank 16 are about 18 million parameters, 1.1 % of the model",
        published="“≈18M, 1.1 %” on q, k, v and o (paper); on gate, up and down too (code)",
        ours=f"q, k, v, o: {attention:,} ({attention / whole:.2%}); with gate, up, down: {everything:,} "
        f"({everything / whole:.2%})",
        how="computed",
        verdict=verdict_of(abs(numbers / ADAPTERS - 1) <= 0.05 for numbers in (attention, everything)),
        note=f"Of {whole:,} parameters; a setting holds within 5 %. The figure is the code's, and the paper's own "
        f"description does not give it. (`workload.adapter_rank` of a prediction stands for {graph:,}: there, "
        f"projections computed as one share the inner matrix, and the head has one; {graph / everything - 1:+.1%}.)",
    )


def _workload(batch: int) -> Workload:
    return Workload(
        model=MODEL,
        seq_len=TOKENS,
        global_batch_size=batch * ACCUMULATED,
        adapter_rank=RANK,
        precision="fp16",
        fused_kernels=False,
        fused_loss=False,
    )


def step_memory(batch: int) -> MemoryBreakdown:
    """Of one step on `batch` whole sequences, as a plain training step with adapters."""
    workload, plan = _workload(batch), Plan(micro_batch_size=batch)
    return memory_of(count_step(workload, plan), workload, plan, load_device("rtx-3090"))[0]


def logits_bytes(batch: int) -> int:
    """Of one fp32 copy."""
    assert MODEL.vocab_size is not None
    return batch * TOKENS * MODEL.vocab_size * 4


def check_weights() -> Check:
    weights = 2 * count(MODEL, TOKENS).total_params
    return Check(
        claim="The weights are about 3 GB in 16 bits",
        published="≈3 GB of ≈14 GB in use",
        ours=f"{weights / 1e9:.2f} GB; one fp32 copy of the logits {logits_bytes(CODE_BATCH) / 1e9:.2f} GB with the "
        f"code's batch of {CODE_BATCH}, {logits_bytes(PAPER_BATCH) / 1e9:.2f} with the paper's of {PAPER_BATCH}",
        how="computed",
        verdict=verdict_of((abs(weights / WEIGHTS - 1) <= 0.05,)),
        note=f"{MODEL.vocab_size:,} words, {TOKENS} tokens a sequence. The adapters with gradients and optimizer state "
        f"are {adapter_params(MODEL, RANK) * 16 / 1e9:.2f} GB.",
    )


def check_in_use(memory: dict[int, MemoryBreakdown]) -> Check:
    """Which settings the 14 GB belong to, and what a training step explains of them."""
    code = memory[CODE_BATCH]
    rest = (IN_USE - code.total) / logits_bytes(CODE_BATCH)
    return Check(
        claim="A training step explains the memory in use",
        published="≈14 GB",
        ours="; ".join(f"batch of {batch}: {found.total / 1e9:.1f} GB" for batch, found in memory.items()),
        how="simulated",
        verdict=verdict_of((abs(code.total / IN_USE - 1) <= 0.15,)),
        note=f"Held within 15 % with the code's settings. Of them activations {code.activations / 1e9:.1f} GB (logits "
        f"are among them), weights {code.weights / 1e9:.1f}, framework {code.framework / 1e9:.1f}. A plain step of an "
        f"adapter's training; the difference would be {rest:.0f} more fp32 copies of the logits. What GRPO adds, "
        "completions made and logits of the frozen base, and blocks the allocator keeps, are not modelled here.",
    )


def _largest(adapter_rank: int | None, target: Target) -> dict[str, Most]:
    """What fits the card without recomputation, with adapters or (None) with all weights trained."""
    workload = _workload(CODE_BATCH).model_copy(update={"adapter_rank": adapter_rank})
    rows = within(workload, Plan(micro_batch_size=CODE_BATCH), target, CARD_GB).rows
    return {row.what: row for row in rows if row.recompute == "none"}


def check_budget() -> Check:
    target = target_of(CARD)
    adapted, full = _largest(RANK, target), _largest(None, target)
    assert adapted["model"].size

    def told(rows: dict[str, Most]) -> str:
        model = f"{rows['model'].size / 1e9:.1f} B parameters" if rows["model"].size else "no model of the family"
        return f"batch of {rows['batch'].size}, context of {rows['context'].size:,}, {model}"

    return Check(
        claim=f"A card of {CARD_GB:g} GB trains 1.5 B parameters with adapters, and not without",
        published=f"adapters of rank {RANK} on one card of {CARD_GB:g} GB; full training was not tried",
        ours=f"with adapters: {told(adapted)}; all weights: {told(full)}",
        how="simulated",
        verdict=verdict_of((adapted["batch"].size >= CODE_BATCH, full["batch"].size == 0)),
        note="`moestro size budget`: the largest of each with the others as they are (batches of "
        f"{CODE_BATCH}, {TOKENS} tokens, this model; contexts in batches of one), without recomputation; models are "
        "this one's widths and depth scaled. Kernels are not fused. Completions that GRPO makes need memory beside "
        "this.",
    )


# Groups of completions.


def zero_share(accuracy: float, group: int) -> float:
    """Of prompts whose completions are all right or all wrong: every advantage is 0, and so is the gradient."""
    return accuracy**group + (1 - accuracy) ** group


def advantages(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """[prompts, completions]: reward less the group's mean, over its standard deviation (0 where that is 0)."""
    spread = rewards.std(axis=1, keepdims=True)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return np.divide(centred, spread, out=np.zeros_like(centred), where=spread > 0)


def check_signal() -> Check:
    at_base = zero_share(BASE, GROUP)
    return Check(
        claim="Most prompts of two completions give a gradient",
        published=f"{GROUP} completions a prompt (code)",
        ours=f"without any: {_shares(GROUP)} of prompts at accuracies of {', '.join(f'{p:.0%}' for p in ACCURACIES)}",
        how="computed",
        verdict=verdict_of((at_base < 0.5,)),
        note=f"p² + (1 - p)² is never below a half; at the base's {BASE:.1%} it is {at_base:.0%}: more than half of "
        f"the completions are made for nothing. With {OTHER_GROUP} a prompt: {_shares(OTHER_GROUP)}. Correctness alone "
        "is rewarded here; a format reward that varies within groups gives a gradient, of the format.",
    )


def _shares(group: int) -> str:
    return " / ".join(f"{zero_share(p, group):.0%}" for p in ACCURACIES)


def check_signal_simulated() -> Check:
    """Advantages of drawn rewards."""
    rng = np.random.default_rng(0)
    misses, lines = [], []
    for group in (GROUP, OTHER_GROUP):
        for accuracy in ACCURACIES:
            found = advantages((rng.random((GROUPS, group)) < accuracy).astype(float))
            share = float((found == 0).all(axis=1).mean())
            expected = zero_share(accuracy, group)
            misses.append(abs(share - expected) / math.sqrt(expected * (1 - expected) / GROUPS))
            lines.append(f"{share:.1%}")
    return Check(
        claim="Groups without a gradient are p^G + (1 - p)^G of all",
        published="not in the paper",
        ours=f"{' / '.join(lines[:3])} of groups of {GROUP}, {' / '.join(lines[3:])} of {OTHER_GROUP}",
        how="simulated",
        verdict=verdict_of(miss <= 4 for miss in misses),
        note=f"{GROUPS:,} prompts each, advantage = (reward - mean) / standard deviation of the group; within 4 "
        f"standard errors of the formula (the farthest is {max(misses):.1f} off).",
    )


# The published scores.


def check_gain() -> Check:
    error = math.sqrt(sum(p * (1 - p) for p in (BASE, TRAINED)) / PROBLEMS)
    gain = TRAINED - BASE
    return Check(
        claim="Training raises the score by more than the test's sampling error",
        published=f"{BASE:.2%} to {TRAINED:.2%} on GSM8K",
        ours=f"{gain * 100:+.2f} points, {gain / error:.1f} standard errors",
        how="computed",
        verdict=verdict_of((gain > 2 * error,)),
        note=f"Two independent samples of {PROBLEMS:,} problems, standard error {error * 100:.2f} points; the same "
        "problems answered twice would pair better, but single answers per problem were not published. Single runs, "
        f"sampled decoding. The base's own report has {BASE_REPORTED:.1%}, above the best trained {TRAINED_BEST:.1%}.",
    )


def check_lead() -> Check:
    lead, base = TRAINED - LARGER, BASE - LARGER
    return Check(
        claim="The lead over a model of 7 billion parameters is the training's",
        published=f"{TRAINED:.2%} against {LARGER:.2%} (DeepSeekMath-Base-7B)",
        ours=f"{base / lead:.0%} of the lead of {lead * 100:.1f} points is the base model's",
        how="computed",
        verdict=verdict_of((base < lead / 2,)),
        note="That the trained model is ahead under these prompts is what was published; both base models score less "
        "here than their own reports say.",
    )
