"""config.json of released models, in the older form that they were published in: known to the last parameter."""

from typing import Any

import pytest

from moestro.checkpoint.huggingface.architecture import differences
from moestro.checkpoint.huggingface.exporting import family_of
from moestro.checkpoint.huggingface.families import FAMILIES
from moestro.checkpoint.huggingface.settings import Settings
from moestro.config import ModelConfig, count


def sizes(
    vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, positions: int, eps: float
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": eps,
        "hidden_act": "silu",
    }


YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# Their parameters, without multi-token prediction and selection biases, and their config.json.
RELEASED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Mixtral-8x7B": (
        "mixtral",
        46_702_792_704,
        sizes(32000, 4096, 32, 32, 8, 32768, 1e-5)
        | {"intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6}
        | {"sliding_window": None, "router_aux_loss_coef": 0.02, "tie_word_embeddings": False},
    ),
    "OLMoE-1B-7B": (
        "olmoe",
        6_919_161_856,
        sizes(50304, 2048, 16, 16, 16, 4096, 1e-5)
        | {"intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False}
        | {"clip_qkv": None, "rope_theta": 10000.0, "rope_scaling": None},
    ),
    "Qwen3-30B-A3B": (
        "qwen3_moe",
        30_532_122_624,
        sizes(151936, 2048, 48, 32, 4, 40960, 1e-6)
        | {"head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128}
        | {"num_experts_per_tok": 8, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}
        | {"rope_theta": 1e6, "use_sliding_window": False, "max_window_layers": 48, "sliding_window": None},
    ),
    "Qwen3-0.6B": (
        "qwen3",
        596_049_920,
        sizes(151936, 1024, 28, 16, 8, 40960, 1e-6)
        | {"head_dim": 128, "intermediate_size": 3072, "rope_theta": 1e6, "tie_word_embeddings": True}
        | {"use_sliding_window": False, "max_window_layers": 28, "sliding_window": None},
    ),
    "Llama-3.1-8B": (
        "llama",
        8_030_261_248,
        sizes(128256, 4096, 32, 32, 8, 131072, 1e-5)
        | {"intermediate_size": 14336, "rope_theta": 500000.0, "mlp_bias": False}
        | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}
        | {"tie_word_embeddings": False},
    ),
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        15_706_484_224,
        sizes(102400, 2048, 27, 16, 16, 163840, 1e-6)
        | LATENT
        | {"q_lora_rank": None, "intermediate_size": 10944, "moe_intermediate_size": 1408, "first_k_dense_replace": 1}
        | {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1}
        | {"topk_method": "greedy", "norm_topk_prob": False, "scoring_func": "softmax", "routed_scaling_factor": 1.0}
        | {"rope_theta": 10000, "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, "moe_layer_freq": 1}
        | {"aux_loss_alpha": 0.001, "seq_aux": True},
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        671_026_404_352,
        sizes(129280, 7168, 61, 128, 128, 163840, 1e-6)
        | LATENT
        | {"q_lora_rank": 1536, "intermediate_size": 18432, "moe_intermediate_size": 2048, "first_k_dense_replace": 3}
        | {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
        | {"topk_method": "noaux_tc", "norm_topk_prob": True, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5}
        | {"rope_theta": 10000, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "moe_layer_freq": 1}
        | {"aux_loss_alpha": 0.001, "seq_aux": True},
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        20_914_757_184,
        sizes(201088, 2880, 24, 64, 8, 131072, 1e-5)
        | {"head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4}
        | {"experts_per_token": 4, "attention_bias": True, "sliding_window": 128, "swiglu_limit": 7.0}
        | {"layer_types": ["sliding_attention", "full_attention"] * 12, "initial_context_length": 4096}
        | {
            "rope_theta": 150000,
            "rope_scaling": YARN | {"factor": 32.0, "truncate": False},
            "router_aux_loss_coef": 0.9,
        },
    ),
    "ZAYA1-8B": (
        "zaya",
        8_840_000_000,  # 8.84 B
        sizes(262272, 2048, 40, 8, 2, 131072, 1e-5)
        | {"head_dim": 128, "num_experts": 16, "num_experts_per_tok": 1, "moe_intermediate_size": 2048}
        | {"router_hidden_size": 256, "cca_time0": 2, "cca_time1": 2, "layer_types": ["hybrid"] * 40}
        | {"rope_parameters": {"hybrid": {"rope_theta": 5e6, "partial_rotary_factor": 0.5, "rope_type": "default"}}},
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_read_whole_and_written_back(name: str) -> None:
    family, parameters, values = RELEASED[name]
    settings = Settings(values, name)
    model = ModelConfig.model_validate(FAMILIES[family].read(settings))
    assert settings.left() == []
    found = count(model, 4096).total_params
    assert found == pytest.approx(parameters, rel=1e-4) if name == "ZAYA1-8B" else found == parameters
    assert family_of(model) == (family, "")


def test_multi_token_prediction_is_read() -> None:
    family, _, values = RELEASED["DeepSeek-V3"]
    model = ModelConfig.model_validate(FAMILIES[family].read(Settings(values | {"num_nextn_predict_layers": 1}, "")))
    assert model.mtp is not None
    assert family_of(model) == (family, "")
    assert differences(model, model.model_copy(update={"mtp": None})) == ["mtp = 1"]
