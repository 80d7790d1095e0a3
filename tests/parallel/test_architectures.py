"""Every architecture in every dimension of the mesh equals one process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks

from moestro.config import Config
from moestro.errors import MoestroError
from moestro.parallel.layout import resolve_layout
from parallel.cases import BATCH, SEQ_LEN, VOCAB
from parallel.test_equal import differences, reference_of

STEPS = 2
LIMIT = 5e-5  # of first moments: a key temperature is one small sum of large terms
MOE = {"num_experts": 8, "top_k": 2, "expert_hidden_size": 16}
# Each a mixture of options that a published family has together, and one of the rest.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "deepseek": {
        "mla": {"q_rank": 12, "kv_rank": 16, "nope_head_dim": 6, "rope_head_dim": 4, "v_head_dim": 8},
        "mtp": {"depth": 2},
        "moe": MOE
        | {
            "first_k_dense": 1,
            "num_shared_experts": 1,
            "router": {"score": "sigmoid", "num_groups": 4, "top_groups": 2, "scaling_factor": 2.5},
            "balance": {"bias_rule": "sign", "aux_scope": "sequence", "aux_coef": 0.1},
        },
    },
    "zaya": {
        "cca": {},
        "rope": {"fraction": 0.5},
        "residual_scaling": "released",
        "residual_fp32": True,
        "tie_embeddings": True,
        "moe": MOE
        | {
            "top_k": 1,
            "null_experts": 2,
            "null_bias": -0.05,
            "null_output": "input",
            "null_ends_choice": True,
            "router": {
                "kind": "zaya",
                "hidden_size": 12,
                "renormalize": False,
                "noise": "gumbel",
                "noise_scale": 0.1,
            },
            "balance": {"bias_rule": "adamw", "aux_coef": 0.0, "mi_coef": 0.05},
        },
    },
    "gpt_oss": {
        "attention_sinks": True,
        "attention_bias": "all",
        "sliding_window": 7,
        "layer_types": ["sliding", "full"],
        "rope": {"scaling": "yarn", "factor": 4, "original_max_seq_len": 16, "truncate": False},
        "moe": MOE
        | {
            "expert_bias": True,
            "activation": "clamped_swiglu",
            "router": {"bias": True, "top_k_before_score": True, "renormalize": False},
        },
    },
    "olmoe": {
        "qk_norm": "projection",
        "head_fp32": True,
        "residual_scaling": "output",
        "moe": MOE | {"granularity": 2, "latent_size": 12, "balance": {"aux_coef": 0.1, "z_loss_coef": 0.01}},
    },
    "moma": {
        "norm_position": "post",
        "token_types": [VOCAB // 2],
        "moe": MOE
        | {
            "expert_groups": [5, 3],
            "router": {"selection": "expert_choice", "score": "sigmoid", "renormalize": False},
            "balance": {"aux_coef": 0.0, "modality_prior_coef": 0.02, "modality_split_coef": 0.02},
        },
    },
    "ds_moe": {
        "attention_experts": {"num_experts": 2, "mi_coef": 0.01},
        "moe": MOE
        | {
            "activation": "gelu",
            "router": {"selection": "dense", "renormalize": False},
            "balance": {"mi_coef": 0.01, "aux_coef": 0.0},
        },
    },
    "sam": {
        "activation": "relu2",
        "residual_scaling": "input",
        "moe": MOE
        | {
            "every_n_layers": 2,
            "router": {"kind": "hybrid", "selection": "sam", "num_groups": 2, "hidden_size": 8, "noise_scale": 0.1},
            "balance": {"alignment_coef": 0.1, "bias_rule": "none"},
        },
    },
    "base": {
        "moe": MOE
        | {
            "top_k": 1,
            "router": {"selection": "base", "kind": "mlp", "hidden_size": 8},
            "balance": {"aux_coef": 0.0, "mi_coef": 0.1},
        },
    },
    "sparse": {
        "moe": MOE
        | {
            "router": {"selection": "dense_to_sparse", "kind": "attention", "hidden_size": 8, "temperature": 2.0},
            "balance": {"aux_coef": 0.02},
        },
    },
    "hash": {
        "attention_experts": {"num_experts": 4, "mi_coef": 0.1},
        "mtp": {"depth": 1},
        "moe": MOE | {"activation": "geglu", "router": {"kind": "hash"}, "balance": {"aux_coef": 0.0}},
    },
    "k_top_1": {"moe": MOE | {"router": {"selection": "k_top_1", "renormalize": False}, "balance": {"aux_coef": 0.1}}},
    "quantile": {
        "moe": MOE
        | {
            "router": {"score": "sigmoid", "kind": "mlp_hadamard", "hidden_size": 8},
            "balance": {"bias_rule": "quantile", "aux_coef": 0.0},
        },
    },
}
# ep takes its ranks from the others, here dp.
SIZES = ({"pp": 2}, {"fsdp": 2}, {"cp": 2}, {"tp": 2}, {"dp": 2, "ep": 2})
# Whose keys and values travel in a ring under cp, not all at once.
RING = ("deepseek", "gpt_oss", "k_top_1")
# What `resolve_layout` refuses, with the words that say so.
REFUSED = {
    ("zaya", "tp"): "cca",
    ("ds_moe", "tp"): "attention_experts",
    ("hash", "tp"): "attention_experts",
}


@dataclass(frozen=True)
class Architecture:
    """As `parallel.cases.Case`: an architecture in a layout of two ranks."""

    model: str
    sizes: tuple[tuple[str, int], ...]
    world_size: int = 2

    @property
    def name(self) -> str:
        return f"{self.model} {dict(self.sizes)}"

    def config(self) -> Config:
        return make_config(self.model, dict(self.sizes))


def make_config(model: str, parallel: dict[str, int]) -> Config:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "intermediate_size": 40,
        "max_seq_len": SEQ_LEN,
    }
    return Config.model_validate({
        "model": sizes | ARCHITECTURES[model],
        "data": {"sources": [{"path": "unused"}], "seq_len": SEQ_LEN},
        "optim": {"name": "muon", "lr": 3e-3, "muon_lr": 3e-3, "eps": 1e-6},
        "parallel": parallel | ({"context": "ring"} if model in RING else {}),
        "train": {"steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": 2},
    })  # fmt: skip


def cases(quick: bool) -> list[Architecture]:
    """quick: each architecture in three of the five dimensions, by turns; else in the other two."""
    return [
        Architecture(model, tuple(sizes.items()))
        for i, model in enumerate(ARCHITECTURES)
        for j, sizes in enumerate(SIZES)
        if (model, [*sizes][-1]) not in REFUSED and ((i + j) % len(SIZES) in (0, 2, 3)) == quick
    ]


def check_all(rank: int, quick: bool, file: str) -> None:
    references = torch.load(file)
    failures = [line for case in cases(quick) for line in differences(case, references[case.model], STEPS, LIMIT)]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, failures)
    failures = sorted({line for lines in everywhere for line in lines})
    assert not failures, f"{len(failures)} differences:\n" + "\n".join(failures[:40])


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_all_equal_one_process(quick: bool, tmp_path: Path) -> None:
    references = {model: reference_of(make_config(model, {}), STEPS) for model in ARCHITECTURES}
    torch.save(references, tmp_path / "references.pt")
    run_ranks(check_all, 2, quick, str(tmp_path / "references.pt"), timeout_s=600)


@pytest.mark.parametrize(("model", "size"), REFUSED)
def test_what_cannot_be_split_is_refused(model: str, size: str) -> None:
    with pytest.raises(MoestroError, match=REFUSED[model, size]):
        resolve_layout(make_config(model, {size: 2}), 2)
