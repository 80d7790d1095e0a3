"""Combinations that single fields cannot rule out, and what follows from the fields."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from moestro.config import DataConfig, ModelConfig, MoEConfig, OptimConfig, RopeConfig, TokenizerConfig, TrainConfig

DENSE = {"hidden_size": 8, "num_layers": 4, "num_heads": 2, "intermediate_size": 16}
MOE = {"num_experts": 4, "expert_hidden_size": 4}


@pytest.mark.parametrize(
    ("section", "settings", "says"),
    [
        (ModelConfig, DENSE | {"num_heads": 3}, "hidden_size = 8 is not divisible by num_heads = 3"),
        (ModelConfig, DENSE | {"head_dim": 3}, "head_dim = 3, of which 1.0 is rotated, must be even"),
        (ModelConfig, DENSE | {"hidden_size": 6}, "head_dim = 3, of which 1.0 is rotated, must be even"),
        (ModelConfig, DENSE | {"num_heads": 4, "num_kv_heads": 3}, "num_heads = 4 is not divisible by num_kv_heads"),
        (ModelConfig, DENSE | {"num_kv_heads": 4}, "num_heads = 2 is not divisible by num_kv_heads = 4"),
        (ModelConfig, DENSE | {"intermediate_size": None}, "intermediate_size is needed"),
        (
            ModelConfig,
            DENSE | {"intermediate_size": None, "moe": MOE | {"first_k_dense": 1}},
            "intermediate_size is needed",
        ),
        (ModelConfig, DENSE | {"moe": MOE | {"first_k_dense": 4}}, "no layer is MoE: num_layers = 4"),
        (ModelConfig, DENSE | {"moe": MOE | {"every_n_layers": 5}}, "no layer is MoE"),
        (ModelConfig, DENSE | {"moe": MOE | {"top_k": [2, 3]}}, "moe.top_k lists 2 values for 4 MoE layers"),
        (ModelConfig, DENSE | {"moe": MOE | {"top_k": []}}, "moe.top_k lists 0 values for 4 MoE layers"),
        (
            MoEConfig,
            MOE | {"top_k": 1, "num_experts": 1, "null_experts": 1},
            "top_k = 1 with router.renormalize or router.top_k_before_score makes every weight 1",
        ),
        (MoEConfig, MOE | {"top_k": 1, "router": {"selection": "k_top_1"}}, "top_k = 1 with router.renormalize"),
        (MoEConfig, MOE | {"router": {"selection": "dense", "num_groups": 2, "top_groups": 2}}, "router.num_groups"),
        (MoEConfig, MOE | {"router": {"selection": "sam", "num_groups": 2, "top_groups": 2}}, "router.top_groups"),
        (MoEConfig, MOE | {"router": {"selection": "sam", "top_k_before_score": True}}, "router.top_k_before_score"),
        (MoEConfig, MOE | {"top_k": 1, "router": {"selection": "base", "scaling_factor": 2}}, "router.scaling_factor"),
        (
            MoEConfig,
            MOE | {"router": {"selection": "expert_choice", "eval_capacity_factor": 2}},
            "router.eval_capacity_factor",
        ),
        (MoEConfig, MOE | {"router": {"selection": "expert_choice", "min_expert_capacity": 2}}, "router.min_expert"),
        (MoEConfig, MOE | {"balance": {"alignment_coef": 0.1}}, "balance.alignment_coef does nothing"),
        (
            MoEConfig,
            MOE | {"router": {"selection": "dense_to_sparse", "temperature": 0.05}},
            "router.temperature = 0.05 lies below router.min_temperature = 0.1",
        ),
        (
            RopeConfig,
            {"scaling": "llama3", "original_max_seq_len": 8, "high_freq_factor": 1},
            "high_freq_factor must exceed low_freq_factor = 1.0",
        ),
        (RopeConfig, {"scaling": "yarn", "original_max_seq_len": 8, "theta": 1}, "needs theta above 1"),
        (MoEConfig, MOE | {"top_k": 5}, "top_k = 5 must lie between 1 and num_experts = 4"),
        (MoEConfig, MOE | {"top_k": 0}, "top_k = 0 must lie between 1 and num_experts = 4"),
        (MoEConfig, MOE | {"top_k": [4, 5]}, "top_k = 5 must lie between 1 and num_experts = 4"),
        (
            TrainConfig,
            {"steps": 1, "global_batch_size": 4, "micro_batch_size": 3},
            "global_batch_size = 4 is not a multiple of micro_batch_size = 3",
        ),
        (OptimConfig, {"betas": (0.9, 1.0)}, "betas must lie in [0, 1), got 1.0"),
        (OptimConfig, {"betas": (-0.1, 0.9)}, "betas must lie in [0, 1), got -0.1"),
        (TokenizerConfig, {"kind": "file"}, 'path and kind = "file" go together'),
        (TokenizerConfig, {"kind": "bpe", "path": "t.json"}, 'path and kind = "file" go together'),
        (DataConfig, {"sources": [], "seq_len": 4}, "at least 1 item"),
    ],
)
def test_impossible_combinations(section: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(says)):
        section.model_validate(settings)


@pytest.mark.parametrize(
    ("moe", "expected"),
    [
        (None, "dddd"),
        ({}, "mmmm"),
        ({"first_k_dense": 1}, "dmmm"),
        ({"every_n_layers": 2}, "dmdm"),
        ({"first_k_dense": 1, "every_n_layers": 2}, "ddmd"),
        ({"first_k_dense": 3, "every_n_layers": 1}, "dddm"),
        ({"every_n_layers": 4}, "dddm"),
    ],
)
def test_which_layers_are_moe(moe: dict[str, int] | None, expected: str) -> None:
    config = ModelConfig.model_validate(DENSE | {"moe": None if moe is None else MOE | moe})
    assert "".join("m" if is_moe else "d" for is_moe in config.moe_layers) == expected


def test_top_k_of_each_layer_skips_dense_layers() -> None:
    moe = MOE | {"first_k_dense": 1, "top_k": [2, 3, 4]}
    config = ModelConfig.model_validate(DENSE | {"moe": moe})
    assert [config.top_k_of_layer(layer) for layer in (1, 2, 3)] == [2, 3, 4]
    with pytest.raises(AssertionError):
        config.top_k_of_layer(0)


def test_one_top_k_holds_for_all_layers() -> None:
    config = ModelConfig.model_validate(DENSE | {"moe": MOE | {"top_k": 3}})
    assert [config.top_k_of_layer(layer) for layer in range(4)] == [3] * 4


def test_resolved_sizes() -> None:
    config = ModelConfig.model_validate(DENSE)
    assert (config.resolved_head_dim, config.resolved_num_kv_heads) == (4, 2)
    config = ModelConfig.model_validate(DENSE | {"head_dim": 6, "num_kv_heads": 1})
    assert (config.resolved_head_dim, config.resolved_num_kv_heads) == (6, 1)
    assert TrainConfig(steps=1, global_batch_size=6).resolved_micro_batch_size == 6
    assert TrainConfig(steps=1, global_batch_size=6, micro_batch_size=2).resolved_micro_batch_size == 2


def test_head_dim_frees_hidden_size_from_the_number_of_heads() -> None:
    assert ModelConfig.model_validate(DENSE | {"num_heads": 3, "head_dim": 4}).resolved_head_dim == 4
