"""What of a ModelConfig decides what the model computes, with every default resolved: two that agree are one model."""

from typing import Any

from moestro.checkpoint.huggingface.rope import table_factor
from moestro.config import ModelConfig, MoEConfig, RopeConfig, RouterConfig

# How a model starts, is computed, or is trained.
NOT_COMPUTED = ("init_scale", "attention", "residual_fp32", "head_fp32", "max_seq_len")
MOE_RESOLVED = (
    "num_experts",
    "expert_hidden_size",
    "granularity",
    "top_k",
    "first_k_dense",
    "every_n_layers",
    "experts",
)
ROUTER_TRAINING = (
    "temperature",
    "temperature_decay",
    "min_temperature",
    "jitter",
    "noise",
    "noise_scale",
    "init_scale",
    "fp32",
)


def architecture(model: ModelConfig) -> dict[str, Any]:
    """Dotted names and values."""
    tree = model.model_dump(mode="json")
    for name in (*NOT_COMPUTED, "moe", "rope", "sliding_rope", "layer_types"):
        del tree[name]
    types = [model.layer_type(layer) for layer in range(model.num_layers)]
    tree["layer_types"] = types
    if "sliding" not in types:
        tree["sliding_window"] = None
    for kind, rope in (("full", model.rope), ("sliding", model.sliding_rope or model.rope)):
        if kind in types:
            tree |= {f"rope ({kind} layers).{name}": value for name, value in _rope(rope).items()}
    tree["num_kv_heads"] = None if model.mla else model.resolved_num_kv_heads
    tree["head_dim"] = None if model.mla else model.resolved_head_dim
    tree["mtp"] = model.mtp.depth if model.mtp else None
    tree["moe layers"] = model.moe_layers
    if all(model.moe_layers):
        tree["intermediate_size"] = tree["activation"] = None
    for name in ("mla", "cca", "attention_experts", "depth"):
        section = tree.pop(name)
        tree |= {name: None} if section is None else {f"{name}.{key}": value for key, value in section.items()}
    tree["encoders"] = [encoder.name for encoder in model.encoders]
    return tree | {f"moe.{name}": value for name, value in _moe(model).items()}


def differences(one: ModelConfig, other: ModelConfig) -> list[str]:
    """`name = value` of `one`, where the other's is not the same."""
    mine, theirs = architecture(one), architecture(other)
    return [f"{name} = {value}" for name, value in mine.items() if value != theirs.get(name)]


def _rope(rope: RopeConfig) -> dict[str, Any]:
    tree: dict[str, Any] = {"theta": rope.theta, "fraction": rope.fraction, "scaling": rope.scaling}
    if rope.scaling != "none":
        tree["factor"] = rope.factor
    if rope.scaling in ("yarn", "llama3"):
        tree["original_max_seq_len"] = rope.original_max_seq_len
    if rope.scaling == "yarn":
        tree |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        tree |= {"attention_factor": round(table_factor(rope), 9), "mscale_all_dim": rope.mscale_all_dim}
    if rope.scaling == "llama3":
        tree |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    return tree


def _moe(model: ModelConfig) -> dict[str, Any]:
    moe = model.moe
    if moe is None:
        return {}
    tree = moe.model_dump(mode="json")
    for name in (*MOE_RESOLVED, "router", "balance", "null_bias"):
        del tree[name]
    tree |= {
        "num_experts": moe.resolved_num_experts,
        "expert_hidden_size": moe.resolved_expert_hidden_size,
        "num_shared_experts": moe.num_shared_experts * moe.resolved_expert_hidden_size,
        "top_k": [model.top_k_of_layer(i) for i, is_moe in enumerate(model.moe_layers) if is_moe],
        "balance.bias_rule": "a selection bias" if moe.balance.bias_rule != "none" else "none",
    }
    if moe.activation != "clamped_swiglu":
        del tree["activation_limit"]
    if not moe.null_experts:
        tree["null_output"] = None
    if not moe.null_experts or max(tree["top_k"]) == 1:
        tree["null_ends_choice"] = None
    return tree | {f"router.{name}": value for name, value in _router(moe).items()}


def _router(moe: MoEConfig) -> dict[str, Any]:
    router: RouterConfig = moe.router
    tree = router.model_dump(mode="json")
    for name in ROUTER_TRAINING:
        del tree[name]
    if router.kind == "linear":
        tree["hidden_size"] = None
    if router.kind != "zaya":
        tree["carry_state"] = None
    if router.top_groups >= router.num_groups:
        tree |= {"num_groups": 1, "top_groups": 1, "group_score": None}
    if router.capacity_factor is None and router.eval_capacity_factor is None:
        tree |= {"min_expert_capacity": None, "group_size": None}
    if router.top_k_before_score and router.score == "softmax" and moe.balance.bias_rule == "none":
        tree |= {"top_k_before_score": False, "renormalize": True}  # the same weights either way
    return tree
