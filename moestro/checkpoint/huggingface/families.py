"""The families of models that are known: config.json both ways, and how their weights are named and laid out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moestro.checkpoint.huggingface import layouts, zaya
from moestro.checkpoint.huggingface.fields import (
    has,
    normalized,
    places,
    read_bias,
    read_heads,
    read_layer_types,
    read_moe,
    read_sizes,
    top_k,
    write_heads,
    write_layer_types,
    write_moe,
    write_sizes,
)
from moestro.checkpoint.huggingface.mapping import Naming
from moestro.checkpoint.huggingface.rope import read_rope
from moestro.checkpoint.huggingface.settings import Settings
from moestro.config import ModelConfig


@dataclass(frozen=True)
class Family:
    """read: ModelConfig's settings from config.json. write: config.json, or None for another kind of model.

    `write` says what it can of any model of the kind; whether that is all of it, `read` tells.
    """

    architecture: str
    read: Callable[[Settings], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any] | None]
    layouts: dict[str, Naming]  # "per-expert" and "fused" are written too, the first of them by default


def _basics(s: Settings, eps: float, theta: float) -> dict[str, Any]:
    """eps, theta: of the norms and of the rotary positions, by default."""
    return read_sizes(s, eps) | {"rope": read_rope(s, theta)}


def _read_llama(s: Settings) -> dict[str, Any]:
    s.expect("mlp_bias", False)
    return (
        _basics(s, 1e-6, 10_000.0) | read_heads(s) | read_bias(s) | {"intermediate_size": s.take("intermediate_size")}
    )


def _write_llama(model: ModelConfig) -> dict[str, Any] | None:
    if not has(model, moe=False):
        return None
    return write_sizes(model) | write_heads(model) | {"intermediate_size": model.intermediate_size, "mlp_bias": False}


def _read_qwen3(s: Settings) -> dict[str, Any]:
    found = _basics(s, 1e-6, 10_000.0) | read_heads(s, 128) | read_bias(s) | {"qk_norm": "head"}
    found["intermediate_size"] = s.take("intermediate_size")
    first = s.take("max_window_layers", default=28)
    if s.take("use_sliding_window", default=False) and s.peek("sliding_window") is not None:
        return found | read_layer_types(
            s, [("full_attention", "sliding_attention")[i >= first] for i in range(found["num_layers"])]
        )
    s.take("sliding_window", "layer_types", default=None)
    return found


def _write_qwen3(model: ModelConfig) -> dict[str, Any] | None:
    if not has(model, moe=False):
        return None
    types = write_layer_types(model, ("full_attention", "sliding_attention"))
    return (
        write_sizes(model)
        | write_heads(model)
        | {"intermediate_size": model.intermediate_size, "layer_types": types}
        | {"use_sliding_window": "sliding_attention" in types, "sliding_window": model.sliding_window}
    )


def _read_mixtral(s: Settings) -> dict[str, Any]:
    moe = read_moe(s, ("intermediate_size",), True, 0.001)
    moe["router"]["jitter"] = s.take("router_jitter_noise", default=0.0)
    return _basics(s, 1e-5, 1e6) | read_heads(s) | read_layer_types(s, None) | {"moe": moe}


def _write_mixtral(model: ModelConfig) -> dict[str, Any] | None:
    if not has(model, moe=True) or model.moe is None:
        return None
    heads = write_heads(model)
    del heads["attention_bias"]
    return (
        write_sizes(model)
        | heads
        | write_moe(model.moe, "num_local_experts", "intermediate_size", top_k(model))
        | {"sliding_window": model.sliding_window, "router_jitter_noise": model.moe.router.jitter}
    )


def _read_olmoe(s: Settings) -> dict[str, Any]:
    moe = read_moe(s, ("intermediate_size",), False, 0.01)
    clip = {"qk_norm": "projection", "clip_qkv": s.take("clip_qkv", default=None)}
    return _basics(s, 1e-5, 10_000.0) | read_heads(s) | read_bias(s) | clip | {"moe": moe}


def _write_olmoe(model: ModelConfig) -> dict[str, Any] | None:
    if not has(model, moe=True) or model.moe is None:
        return None
    heads = write_heads(model)
    del heads["head_dim"]  # hidden_size / num_attention_heads always
    return (
        write_sizes(model)
        | heads
        | write_moe(model.moe, "num_experts", "intermediate_size", top_k(model))
        | {"norm_topk_prob": normalized(model.moe), "clip_qkv": model.clip_qkv}
    )


def _read_qwen3_moe(s: Settings) -> dict[str, Any]:
    found = _basics(s, 1e-6, 10_000.0) | read_heads(s) | read_bias(s) | {"qk_norm": "head"}
    step, dense = s.take("decoder_sparse_step", default=1), s.take("mlp_only_layers", default=None) or []
    is_moe = [i not in dense and (i + 1) % step == 0 for i in range(found["num_layers"])]
    found["moe"] = read_moe(s, ("moe_intermediate_size",), False, 0.001) | places(s, is_moe)
    found["intermediate_size"] = s.take("intermediate_size", default=None)
    window = s.take("sliding_window", default=None)
    return found | ({"sliding_window": window} if s.take("use_sliding_window", default=False) else {})


def _write_qwen3_moe(model: ModelConfig) -> dict[str, Any] | None:
    if not has(model, moe=True) or model.moe is None:
        return None
    dense = [i for i, is_moe in enumerate(model.moe_layers) if not is_moe]
    return (
        write_sizes(model)
        | write_heads(model)
        | write_moe(model.moe, "num_experts", "moe_intermediate_size", top_k(model))
        | {"norm_topk_prob": normalized(model.moe), "mlp_only_layers": dense, "decoder_sparse_step": 1}
        | {"intermediate_size": model.intermediate_size or model.moe.resolved_expert_hidden_size}
        | {"use_sliding_window": model.sliding_window is not None, "sliding_window": model.sliding_window}
    )


def _read_deepseek(s: Settings, theta: float = 10_000.0) -> dict[str, Any]:
    s.expect("attention_bias", False)
    s.expect("moe_layer_freq", 1)
    s.take("head_dim", "qk_head_dim", "num_key_value_heads", default=None)  # follow from the others
    mla = {
        "q_rank": s.take("q_lora_rank", default=None),
        "kv_rank": s.take("kv_lora_rank"),
        "nope_head_dim": s.take("qk_nope_head_dim"),
        "rope_head_dim": s.take("qk_rope_head_dim"),
        "v_head_dim": s.take("v_head_dim"),
    }
    moe = read_moe(s, ("moe_intermediate_size",), False, 0.0) | {
        "num_shared_experts": s.take("n_shared_experts", default=None) or 0,
        "first_k_dense": s.take("first_k_dense_replace", default=0),
    }
    moe["router"] |= {"scaling_factor": s.take("routed_scaling_factor", default=1.0)}
    groups, open_groups = s.take("n_group", default=None) or 1, s.take("topk_group", default=None) or 1
    moe["router"] |= {"num_groups": groups, "top_groups": open_groups} if groups > 1 else {}
    dense = {"intermediate_size": s.take("intermediate_size", default=None)}
    return _basics(s, 1e-6, theta) | {"mla": mla, "moe": moe} | dense


def _write_deepseek(model: ModelConfig) -> dict[str, Any] | None:
    mla, moe = model.mla, model.moe
    if not has(model, moe=True, mla=True) or mla is None or moe is None:
        return None
    router = moe.router
    found = write_sizes(model) | write_moe(moe, "n_routed_experts", "moe_intermediate_size", top_k(model))
    del found["router_aux_loss_coef"]
    return found | {
        "num_key_value_heads": model.num_heads,
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_head_dim,
        "qk_rope_head_dim": mla.rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "n_shared_experts": moe.num_shared_experts,
        "first_k_dense_replace": next(i for i, is_moe in enumerate(model.moe_layers) if is_moe),
        "moe_layer_freq": 1,
        "intermediate_size": model.intermediate_size or moe.resolved_expert_hidden_size,
        "norm_topk_prob": normalized(moe),
        "routed_scaling_factor": router.scaling_factor,
        "n_group": router.num_groups,
        "topk_group": router.top_groups,
        "attention_bias": False,
    }


def _read_deepseek_v2(s: Settings) -> dict[str, Any]:
    s.expect("norm_topk_prob", False)
    s.expect("mlp_bias", False)
    s.expect("scoring_func", "softmax")
    s.expect("topk_method", "greedy", "group_limited_greedy")
    found = _read_deepseek(s)
    if s.peek("topk_method") in (None, "greedy"):
        for name in ("num_groups", "top_groups"):
            found["moe"]["router"].pop(name, None)
    found["moe"]["router"]["group_score"] = "max"
    found["moe"]["balance"] = {"aux_coef": s.take("aux_loss_alpha", default=0.001)}
    return found


def _write_deepseek_v2(model: ModelConfig) -> dict[str, Any] | None:
    found = _write_deepseek(model)
    if found is None:
        return None
    grouped = found["topk_group"] < found["n_group"]
    method = "group_limited_greedy" if grouped else "greedy"
    return found | {"norm_topk_prob": False, "topk_method": method, "scoring_func": "softmax", "mlp_bias": False}


def _read_deepseek_v3(s: Settings) -> dict[str, Any]:
    s.expect("scoring_func", "sigmoid")
    s.expect("topk_method", "noaux_tc")
    s.expect("rope_interleave", True)
    found = _read_deepseek(s)
    found["moe"]["router"] |= {"score": "sigmoid", "renormalize": s.take("norm_topk_prob", default=True)}
    # What the report trains with (arXiv 2412.19437, section 4.2).
    found["moe"]["balance"] = {"aux_coef": 1e-4, "aux_scope": "sequence", "bias_rule": "sign"}
    depth = s.take("num_nextn_predict_layers", "num_mtp_layers", default=0)
    return found | ({"mtp": {"depth": depth}} if depth else {})


def _write_deepseek_v3(model: ModelConfig) -> dict[str, Any] | None:
    found = _write_deepseek(model)
    if found is None:
        return None
    depth = model.mtp.depth if model.mtp else 0
    return found | {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": depth,
        "rope_interleave": True,
    }


def _read_gpt_oss(s: Settings) -> dict[str, Any]:
    s.expect("swiglu_alpha", 1.702)
    s.take("experts_per_token", "initial_context_length", default=None)  # older names of what is there too
    layers = s.peek("num_hidden_layers") or 0
    types = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
    found = _basics(s, 1e-5, 150_000.0) | read_heads(s, 64) | read_bias(s, True) | read_layer_types(s, types)
    moe = read_moe(s, ("intermediate_size",), True, 0.001)
    moe["router"] |= {"bias": True, "top_k_before_score": True}
    moe |= {"activation": "clamped_swiglu", "activation_limit": s.take("swiglu_limit", default=7.0)}
    return found | {"attention_sinks": True, "moe": moe | {"expert_bias": True}}


def _write_gpt_oss(model: ModelConfig) -> dict[str, Any] | None:
    if not has(model, moe=True) or model.moe is None:
        return None
    return (
        write_sizes(model)
        | write_heads(model)
        | write_moe(model.moe, "num_local_experts", "intermediate_size", top_k(model))
        | {"layer_types": write_layer_types(model, ("full_attention", "sliding_attention"))}
        | {"sliding_window": model.sliding_window}
        | {"swiglu_alpha": 1.702, "swiglu_limit": model.moe.activation_limit}
    )


FAMILIES = {
    "mixtral": Family("MixtralForCausalLM", _read_mixtral, _write_mixtral, layouts.MIXTRAL),
    "olmoe": Family("OlmoeForCausalLM", _read_olmoe, _write_olmoe, layouts.QWEN),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _read_qwen3_moe, _write_qwen3_moe, layouts.QWEN),
    "qwen3": Family("Qwen3ForCausalLM", _read_qwen3, _write_qwen3, layouts.DENSE),
    "llama": Family("LlamaForCausalLM", _read_llama, _write_llama, layouts.DENSE),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", _read_deepseek_v2, _write_deepseek_v2, layouts.DEEPSEEK_V2),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _read_deepseek_v3, _write_deepseek_v3, layouts.DEEPSEEK_V3),
    "zaya": Family("ZayaForCausalLM", zaya.read, zaya.write, zaya.LAYOUTS),
    "gpt_oss": Family("GptOssForCausalLM", _read_gpt_oss, _write_gpt_oss, layouts.GPT_OSS),
}
