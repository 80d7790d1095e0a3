"""What needs no training of Uni-MoE (arXiv 2405.11273): sizes, gates, the losses, batches by modality."""

import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moestro.config import (
    BalanceConfig,
    Counts,
    DataConfig,
    EncoderConfig,
    ModelConfig,
    MoEConfig,
    RouterConfig,
    count,
    load_config,
)
from moestro.data.batches import Batch, TrainStream
from moestro.data.mixture import BatchMixture
from moestro.data.prepare import prepare
from moestro.model.moe.balance import balance_loss
from moestro.model.moe.router import Router, TokenGroups
from papers.result import Check, verdict_of

SIZES = {  # (experts, one MoE layer in so many): total and active parameters in 1e9
    (4, 1): (19.7, 11.1),
    (8, 1): (37.0, 11.1),
    (4, 2): (13.2, 8.9),
    (8, 2): (21.9, 8.9),
}
EXPERTS, HIDDEN = 4, 16
PRIOR_STEPS, SPLIT_STEPS = 60, 5
TOLERANCE = 1e-6


# Sizes.


def sizes(experts: int, every: int) -> Counts:
    """The preset's decoder, without encoders; every layer or every second one has experts."""
    model = load_config(f"uni-moe-{experts}e", [f"model.moe.every_n_layers={every}", "model.intermediate_size=11008"])
    return count(model.config.model.model_copy(update={"encoders": ()}), 2048)


def check_sizes() -> Check:
    found, parts = [], []
    for (experts, every), published in SIZES.items():
        counts = sizes(experts, every)
        ours = counts.total_params / 1e9, counts.active_params / 1e9
        found.append(f"{ours[0]:.1f}/{ours[1]:.1f}")
        parts += [f"{a:.1f}" == f"{b:.1f}" for a, b in zip(ours, published, strict=True)]
    return Check(
        claim="Sizes from LLaMA-7B's shape: experts in every layer, or in every second",
        published="; ".join(f"{e} experts, 1/{n}: {a}/{b} B" for (e, n), (a, b) in SIZES.items()),
        ours=", ".join(found) + " B",
        how="computed",
        verdict=verdict_of(parts),
        note="Total and active with top-2, from the presets without their encoders. The figures to meet were "
        "worked out by hand from the shapes in the released code.",
    )


# Gates and losses.


def router_of(top_k: int = 2, types: int = 2, **balance: float) -> Router:
    """Uni-MoE's: linear without a bias, softmax over the chosen. Random weights; `types` types of tokens."""
    moe = MoEConfig(
        num_experts=EXPERTS,
        top_k=top_k,
        expert_hidden_size=1,
        router=RouterConfig(top_k_before_score=True),
        balance=BalanceConfig.model_validate({"aux_coef": 0.0, **balance}),
    )
    model = ModelConfig(
        hidden_size=HIDDEN, num_layers=1, num_heads=1, moe=moe, token_types=tuple(range(8, 8 * types, 8))
    )
    router = Router(model, 0)
    with torch.no_grad():
        router.weight.copy_(_normal(EXPERTS, HIDDEN, seed=0) * HIDDEN**-0.5)
    return router


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens_of(types: int = 2, each: int = 64) -> tuple[Tensor, TokenGroups]:
    """Random tokens [T, D] of each type; a type has a mean of its own."""
    kinds = torch.arange(types).repeat_interleave(each)
    x = _normal(types * each, HIDDEN, seed=1) + _normal(types, HIDDEN, seed=2)[kinds]
    return x, TokenGroups(len(x), token_types=kinds)


def check_gate() -> Check:
    x, groups = tokens_of()
    router = router_of()
    routing = router(x, groups)[0]
    logits = x @ router.weight.t()
    best = logits.topk(2, -1)
    over_two = (routing.weights - best.values.softmax(-1)).abs().max().item()
    shares = logits.softmax(-1).gather(1, best.indices)
    renormalized = (routing.weights - shares / shares.sum(1, keepdim=True)).abs().max().item()
    same = torch.equal(routing.expert_ids, best.indices)
    return Check(
        claim="Gates are the softmax over the two chosen logits",
        published="top-2 of the logits, softmax over the selected two",
        ours=f"at most {over_two:.0e} from it by hand, {renormalized:.0e} from a softmax over all, its two best "
        "divided by their sum",
        how="computed",
        verdict=verdict_of([same, over_two < TOLERANCE, renormalized < TOLERANCE]),
        note="router.top_k_before_score; 128 tokens, 4 experts, fp32. The two readings are the same function.",
    )


def check_balance() -> Check:
    shares = _normal(256, EXPERTS, seed=3).double().softmax(-1)
    ids = shares.argsort(-1, descending=True)[:, :2]
    mean_share = shares.mean(0)

    def theirs(chosen: Tensor) -> float:
        """E² mean_i(f_i P_i) with f the share of the choices."""
        f = torch.bincount(chosen.flatten(), minlength=EXPERTS) / chosen.numel()
        return (EXPERTS**2 * (f * mean_share).mean()).item()

    def ours(chosen: Tensor) -> float:
        return balance_loss(shares, chosen, "micro_batch", 256, None, None, torch.zeros(EXPERTS)).item()

    first, both = ids[:, :1], ids
    errors = [abs(theirs(chosen) - ours(chosen)) for chosen in (first, both)]
    return Check(
        claim="The auxiliary loss is E² · mean(f P), 1 when all is even",
        published="on the first choice, summed over layers",
        ours=f"E Σ f P is the same to {max(errors):.0e}: {ours(first):.4f} with f of the first choice, "
        f"{ours(both):.4f} with f of both",
        how="computed",
        verdict=verdict_of(error < TOLERANCE for error in errors),
        note="In a layer with top-2 moestro's f counts both choices, which is another loss, 1 too when all is "
        "even, and layers are averaged: the coefficient of a sum over 32 layers is 32 times as large.",
    )


def mean_gates(router: Router, x: Tensor, groups: TokenGroups) -> Tensor:
    """[types, E] the mean softmax of each type's tokens."""
    shares, types = (x @ router.weight.t()).softmax(-1), groups.types()
    return torch.stack([shares[types == kind].mean(0) for kind in types.unique()])


def descend(router: Router, x: Tensor, groups: TokenGroups, steps: int) -> None:
    """Gradient steps on the router's other losses alone, with the memory that training would keep."""
    for _ in range(steps):
        stats = router(x, groups)[0].stats
        (gradient,) = torch.autograd.grad(stats.other_loss, router.weight)
        with torch.no_grad():
            router.weight.sub_(0.5 * gradient)
        router.update_balance(stats.load, stats.sums)


def check_prior() -> Check:
    """Type 0 has experts 0 and 1, type 1 has 2 and 3."""
    x, groups = tokens_of()
    router = router_of(modality_prior_coef=1.0)
    target = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]])
    shares = (x @ router.weight.t()).softmax(-1)
    by_hand = (shares - target[groups.types()]).abs().sum(1).mean().item()
    error = abs(router(x, groups)[0].stats.other_loss.item() - by_hand)
    before = own_share(mean_gates(router, x, groups))
    descend(router, x, groups, PRIOR_STEPS)
    after = own_share(mean_gates(router, x, groups))
    return Check(
        claim="The prior's loss draws a modality's gates to its own experts",
        published="L1 between gate probabilities and a target set of experts, token-weighted",
        ours=f"{error:.0e} from the formula; gates on their own experts {before:.0%} → {after:.0%}",
        how="computed",
        verdict=verdict_of([error < TOLERANCE, after > before + 0.2, after > 0.9]),
        note=f"balance.modality_prior_coef; two types with two experts each, {PRIOR_STEPS} gradient steps on this loss "
        "alone. An expert's target is an equal part of its set's.",
    )


def own_share(gates: Tensor) -> float:
    """Of mean gates [2, 4], what lies on experts 0 and 1 for type 0 and on the others for type 1."""
    return ((gates[0, :2].sum() + gates[1, 2:].sum()) / 2).item()


def divergence(gates: Tensor) -> float:
    """Mean KL divergence of the rows [2, E], in both orders, in nats."""
    logs = gates.log()
    return ((gates[0] - gates[1]) * (logs[0] - logs[1])).sum().item() / 2


def check_split() -> Check:
    x, groups = tokens_of()
    router = router_of(modality_split_coef=1.0)
    stats = router(x, groups)[0].stats
    router.update_balance(stats.load, stats.sums)  # so that the memory is that of these tokens
    before = divergence(mean_gates(router, x, groups))
    error = abs(router(x, groups)[0].stats.other_loss.item() - (1 - before))
    descend(router, x, groups, SPLIT_STEPS)
    after = divergence(mean_gates(router, x, groups))
    return Check(
        claim="The split loss pushes the modalities' mean gates apart",
        published="1 − KL between modalities' mean gates",
        ours=f"{error:.0e} from the formula; KL {before:.2f} → {after:.2f} nats",
        how="computed",
        verdict=verdict_of([error < TOLERANCE, after > 2 * before]),
        note=f"balance.modality_split_coef; mean of both orders, {SPLIT_STEPS} gradient steps on this loss alone. The "
        "other modalities' means are those of the step before, so that no cut of the batch matters. The loss has no "
        "lower bound.",
    )


# Batches.

IMAGE = EncoderConfig(name="image", input_size=2, max_patches=1, hidden_size=2, num_layers=0, num_tokens=1)
SOUND = IMAGE.model_copy(update={"name": "sound"})
DOCUMENTS, BATCH_SIZE, SEQ_LEN = 40, 4, 12
FIRST = ord("!")  # the letter of text number 0; captions hold none of these


def media_stream(folder: Path) -> TrainStream:
    """Documents with an image, with a sound, and of text; each tells its number in its patches or its letters."""
    sources = []
    for name in ("image", "sound", "text"):
        lines: list[dict[str, object]] = []
        for i in range(DOCUMENTS):
            if name == "text":
                lines.append({"text": chr(FIRST + i) * 6})
                continue
            np.save(folder / f"{name}{i}.npy", np.full((1, 2), i, dtype=np.float32))
            lines.append({"text": f"<{name}>" + "a" * (3 + i % 5), "media": [f"{name}{i}.npy"]})
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        sources.append({"path": str(path), "format": "text" if name == "text" else "media"})
    config = DataConfig.model_validate({
        "seq_len": SEQ_LEN, "tokenizer": {"kind": "byte"}, "cache_dir": str(folder / "cache"), "holdout_every": 20,
        "batch_by": "modality", "sources": sources,
    })  # fmt: skip
    data = prepare(config, progress=False, encoders=(IMAGE, SOUND))
    return TrainStream(data, config, seed=0, batch_size=BATCH_SIZE)


def contents(batch: Batch) -> list[tuple[str, float]]:
    """What each row holds, and of which number."""
    found: list[tuple[str, float]] = []
    for media in batch.media:
        found += [(("image", "sound")[media.encoder], number) for number in media.patches[:, 0, 0].tolist()]
    for row in batch.input_ids:
        found += [("text", letter) for letter in set(row[(row >= FIRST) & (row < FIRST + DOCUMENTS)].tolist())]
    return found


def check_batches(batches: int = 60) -> Check:
    """Long enough for every source to have been seen whole: its sequences come in epochs."""
    with tempfile.TemporaryDirectory() as folder:
        stream = media_stream(Path(folder))
        parts = [contents(stream.batch(i * BATCH_SIZE, BATCH_SIZE)) for i in range(batches)]
    mixed = sum(len({kind for kind, _ in part}) != 1 for part in parts)
    seen = Counter(item for part in parts for item in part)
    held_out = DOCUMENTS // 20
    counts = {kind: [n for (k, _), n in seen.items() if k == kind] for kind in ("image", "sound", "text")}
    missing = sum(DOCUMENTS - held_out - len(numbers) for numbers in counts.values())
    uneven = max(max(numbers) - min(numbers) for numbers in counts.values())
    without_gap = no_gap()
    return Check(
        claim="Batches by modality never mix, and an epoch loses no sample",
        published='batches grouped by modality ("modality-level data parallelism")',
        ours=f"{mixed} of {batches} batches mixed; {missing} of {3 * (DOCUMENTS - held_out)} documents missing",
        how="computed",
        verdict=verdict_of([mixed == 0, missing == 0, uneven <= 1, without_gap]),
        note=f'data.batch_by = "modality", with images, sounds and texts of {DOCUMENTS} documents each on disk; no '
        "document comes twice more often than another of its source. Batches of one modality may mix sources. Length, "
        "by which theirs are grouped too, is dealt with by packing.",
    )


def no_gap(batches: int = 300) -> bool:
    """Five sources of three kinds and odd weights: each batch has one kind, and each source's stream no gap."""
    kinds, size = ["a", "b", "a", "c", "c"], 6
    source, index = BatchMixture([3.0, 1.0, 1.5, 2.0, 0.7], kinds, size, 0).locate(np.arange(batches * size))
    one_kind = all(len({kinds[j] for j in row}) == 1 for row in source.reshape(-1, size).tolist())
    return one_kind and all(
        np.array_equal(index[source == j], np.arange(int((source == j).sum()))) for j in range(len(kinds))
    )
