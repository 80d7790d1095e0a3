"""Layouts to compare with one process: generated, so that every pair of choices occurs, and the toy they all train."""

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from moestro.config import Config
from moestro.data.batches import IGNORE, Batch
from moestro.errors import MoestroError
from moestro.parallel.layout import Layout, resolve_layout

SEQ_LEN, BATCH, STEPS, VOCAB = 32, 4, 10, 61
MESH = ("pp", "dp", "fsdp", "cp", "tp", "ep")

# What a layout can choose besides its sizes. Each value must make a difference only to how, never to what.
CHOICES: dict[str, tuple[Any, ...]] = {
    "schedule": ("1f1b", "gpipe", "interleaved", "zero_bubble", "zbv", "dualpipev"),
    "context": ("all_gather", "ring"),
    "dispatch": ("all_to_all", "all_gather", "leader", "two_hop"),
    "zero": (None, 0, 1, 2, 3),
    "expert_chunks": (1, 2, 3),
    "expert_recompute": (False, True),
    "expert_overlap": (False, True),
    "recompute": ("none", "block"),
    "optimizer": ("adamw", "muon"),
    "model": ("lagged", "groups", "bias"),
}

# Models that between them use every way in which a token's routing depends on others.
MODELS: dict[str, dict[str, Any]] = {
    "lagged": {"balance": {"aux_coef": 0.1, "z_loss_coef": 0.01}, "num_shared_experts": 1},
    "groups": {
        "balance": {"aux_coef": 0.1, "aux_scope": "sequence", "bias_rule": "sign"},
        "router": {"capacity_factor": 1.0, "jitter": 0.05},
    },
    "bias": {
        "balance": {"aux_coef": 0.02, "aux_scope": "micro_batch", "bias_rule": "adamw", "bias_lr": 0.01},
        "router": {"score": "sigmoid"},
        "top_k": 3,
    },
}


@dataclass(frozen=True)
class Case:
    world_size: int
    sizes: tuple[tuple[str, int], ...]
    choices: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        plain = {name: values[0] for name, values in CHOICES.items()}
        parts = [f"{n}{v}" for n, v in self.sizes if v > 1]
        return "-".join(parts + [f"{n}={v}" for n, v in self.choices if v != plain[n]])

    @property
    def reference(self) -> tuple[str, str]:
        """What the result depends on: model and optimizer."""
        choices = dict(self.choices)
        return choices["model"], choices["optimizer"]

    def config(self) -> Config:
        choices = dict(self.choices)
        parallel = dict(self.sizes) | {k: choices[k] for k in ("schedule", "context", "dispatch", "zero")}
        if parallel["pp"] > 1 and choices["schedule"] == "1f1b":
            parallel["layers_per_stage"] = {2: [3, 1], 4: [1, 1, 1, 1]}[parallel["pp"]]
        train = {k: choices[k] for k in ("expert_chunks", "expert_recompute", "expert_overlap", "recompute")}
        return make_config(*self.reference, parallel=parallel | {"ranks_per_node": 2}, train=train)

    def layout(self) -> Layout:
        return resolve_layout(self.config(), self.world_size)


def make_config(model: str, optimizer: str, **sections: dict[str, Any]) -> Config:
    moe = {"num_experts": 8, "top_k": 2, "expert_hidden_size": 16, "first_k_dense": 2} | MODELS[model]
    return Config.model_validate({
        "model": {
            "vocab_size": VOCAB, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2,
            "qk_norm": "head", "intermediate_size": 40, "max_seq_len": SEQ_LEN, "moe": moe,
            "tie_embeddings": model == "groups",
        },
        "data": {"sources": [{"path": "unused"}], "seq_len": SEQ_LEN},
        "optim": {"name": optimizer, "lr": 3e-3, "muon_lr": 3e-3, "eps": 1e-6},
        "parallel": sections.get("parallel", {}),
        "train": {"steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": 1, **sections.get("train", {})},
    })  # fmt: skip


def global_batch(step: int) -> Batch:
    """BATCH sequences of packed documents and padding of very different lengths; some positions are not predicted."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randint(VOCAB, (BATCH, SEQ_LEN), generator=generator)
    labels = torch.randint(VOCAB, (BATCH, SEQ_LEN), generator=generator)
    labels[torch.rand(BATCH, SEQ_LEN, generator=generator) < 0.1] = IGNORE
    documents, positions = torch.full((BATCH, SEQ_LEN), -1, dtype=torch.int32), torch.zeros_like(inputs)
    for row in range(BATCH):
        end, number = 0, 0
        limit = int(torch.randint(SEQ_LEN // 4, SEQ_LEN + 1, (1,), generator=generator)) if row % 3 else SEQ_LEN
        while end < limit and (row != 1 or number == 0):
            length = min(int(torch.randint(1, SEQ_LEN, (1,), generator=generator)), limit - end)
            documents[row, end : end + length] = number
            positions[row, end : end + length] = torch.arange(length)
            end, number = end + length, number + 1
        labels[row, end:] = IGNORE
    return Batch(inputs, labels, documents, positions, torch.arange(BATCH) + step * BATCH)


@cache
def generate(world_size: int) -> list[Case]:
    """Few layouts of `world_size` ranks in which every possible pair of choices occurs (greedily, in a fixed order)."""
    possible = {case: _pairs(case) for case in _all(world_size) if _fits(case)}
    wanted = set().union(*possible.values())
    chosen: list[Case] = []
    while wanted:
        best = max(possible, key=lambda case: len(possible[case] & wanted))
        wanted -= possible[best]
        chosen.append(best)
    return chosen


def _all(world_size: int) -> list[Case]:
    sizes = []
    for pp, dp, fsdp, cp, tp, ep in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 4)):
        if pp * dp * fsdp * cp * tp == world_size:
            sizes.append(dict(zip(MESH, (pp, dp, fsdp, cp, tp, ep), strict=True)))
    generator = torch.Generator().manual_seed(world_size)
    cases = []
    for size in sizes:
        for _ in range(60):  # a sample of the product, which is too long to list
            pick = {n: v[int(torch.randint(len(v), (1,), generator=generator))] for n, v in CHOICES.items()}
            cases.append(Case(world_size, tuple(size.items()), tuple(_relevant(size, pick).items())))
    return list(dict.fromkeys(cases))


def _relevant(size: dict[str, int], pick: dict[str, Any]) -> dict[str, Any]:
    """Without choices that this layout would ignore, so that a pair counts only where both do something."""
    ignored = {"schedule": size["pp"] == 1, "context": size["cp"] == 1, "dispatch": size["ep"] == 1}
    if pick["expert_chunks"] == 1 or size["ep"] == 1 or pick["dispatch"] != "all_to_all":
        ignored["expert_overlap"] = True
    return {n: CHOICES[n][0] if ignored.get(n) else v for n, v in pick.items()}


def _fits(case: Case) -> bool:
    try:
        case.layout()
    except (MoestroError, ValueError):
        return False
    return True


def _pairs(case: Case) -> set[Any]:
    used = [(n, True) for n, v in case.sizes if v > 1] + list(case.choices)
    return set(itertools.combinations(used, 2))
