"""ZAYA1: as transformers has it, and as its released checkpoints were written before that ("legacy").

A legacy checkpoint counts attention and experts as layers of their own, and keeps with each the scales of the residual
sum before it. Where a token's choice is to skip the experts, the code that came with these adds its input (times its
weight), and transformers nothing.
"""

import re
from typing import Any

from moestro.checkpoint.huggingface.fields import (
    has,
    read_heads,
    read_layer_types,
    read_sizes,
    write_heads,
    write_layer_types,
    write_sizes,
)
from moestro.checkpoint.huggingface.mapping import Naming, replacing
from moestro.checkpoint.huggingface.rope import read_rope, write_rope
from moestro.checkpoint.huggingface.settings import Settings
from moestro.config import ModelConfig


def read(s: Settings) -> dict[str, Any]:
    s.expect("attention_bias", False)
    s.expect("lm_head_bias", False)
    if s.peek("zaya_mlp_expansion") is not None:
        return _read_legacy(s)
    s.expect("num_experts_per_tok", 1)
    ropes = {kind: read_rope(s, 5e6, kind) for kind in ("hybrid", "hybrid_sliding")}
    found = read_sizes(s, 1e-5, tied=True) | read_heads(s, 128) | read_layer_types(s, ["hybrid"])
    found |= {"rope": ropes["hybrid"], "sliding_rope": ropes["hybrid_sliding"]}
    experts, width = s.take("num_experts"), s.take("moe_intermediate_size")
    return found | _parts(s, experts, width, s.take("router_hidden_size", default=256), "zero")


def _parts(s: Settings, experts: int, width: int, router: int, skip: str) -> dict[str, Any]:
    return {
        "cca": {"depthwise_taps": s.take("cca_time0", default=2), "grouped_taps": s.take("cca_time1", default=2)},
        "residual_scaling": "released",
        "residual_fp32": True,
        "moe": {
            "num_experts": experts,
            "top_k": 1,
            "expert_hidden_size": width,
            "null_experts": 1,
            "null_output": skip,
            "null_bias": -1.0,
            "null_ends_choice": True,
            "router": {"kind": "zaya", "hidden_size": router, "renormalize": False},
            "balance": {"aux_coef": 0.0, "bias_rule": "adamw"},
        },
    }


def _read_legacy(s: Settings) -> dict[str, Any]:
    for name, only in (
        ("activation_func", "swiglu"),
        ("normalization", "RMSNorm"),
        ("gated_linear_unit", True),
        ("zaya_use_mod", True),
        ("zaya_use_eda", True),
        ("scale_residual_merge", True),
        ("cca", True),
        ("clamp_temp", False),
        ("add_bias_linear", False),
        ("moe_router_topk", 1),
    ):
        s.expect(name, only)
    halves = s.take("zaya_layers", default=None) or ["a", s.take("num_experts")] * (s.take("num_hidden_layers") // 2)
    if halves != ["a", halves[1]] * (len(halves) // 2):
        raise s.refusal("zaya_layers", halves, "attention and experts must take turns, always as many experts")
    # The number of heads that is written beside these is that before compression in some, and after it in others.
    compressed = s.peek("cca_num_q_heads") is not None
    heads = s.take("num_attention_heads")
    windows = [_of(w, 0) for w in (s.take("swa_layers", default=None) or [0])[::2]]
    theta = s.take("rope_theta", default=1e6)
    rope = {"theta": theta, "fraction": s.take("partial_rotary_factor", "rope_pct", default=0.5)}
    found = {
        "vocab_size": s.take("vocab_size"),
        "hidden_size": s.take("hidden_size"),
        "num_layers": len(halves) // 2,
        "num_heads": _of(s.take("cca_num_q_heads", default=heads), 0),
        "num_kv_heads": _of(s.take("num_query_groups_list", "num_query_groups", "num_key_value_heads"), 0),
        "head_dim": s.take("hidden_size") // heads if compressed else s.take("head_dim", default=128),
        "max_seq_len": s.take("max_position_embeddings"),
        "norm_eps": s.take("norm_epsilon", default=1e-5),
        "tie_embeddings": s.take("tie_word_embeddings", default=True),
        "rope": rope,
        "sliding_rope": rope | {"theta": s.take("swa_rotary_base", default=None) or theta},
    }
    if any(windows):
        if len({w for w in windows if w}) > 1:
            raise s.refusal("swa_layers", windows, "only one size of window is known")
        found |= {"sliding_window": max(windows), "layer_types": [("full", "sliding")[w > 0] for w in windows]}
    width = _of(s.take("ffn_hidden_size_list", "ffn_hidden_size"), 1) // 2
    return found | _parts(s, halves[1], width, _of(s.take("zaya_mlp_expansion"), 1), "input")


def _of(value: Any, half: int) -> int:
    """The number of the first attention (half 0) or experts (1), where a list has one for each half layer."""
    return int(value[half] or 0) if isinstance(value, list) else int(value or 0)


def write(model: ModelConfig) -> dict[str, Any] | None:
    moe, cca = model.moe, model.cca
    if not has(model, moe=True, cca=True) or moe is None or cca is None:
        return None
    ropes = {"hybrid": model.rope, "hybrid_sliding": model.sliding_rope or model.rope}
    found = write_sizes(model) | write_heads(model) | {"rope_parameters": {k: write_rope(ropes[k]) for k in ropes}}
    for name in ("rope_theta", "rope_scaling"):  # of before transformers 5, which did not know this family
        del found[name]
    return found | {
        "layer_types": write_layer_types(model, ("hybrid", "hybrid_sliding")),
        "sliding_window": model.sliding_window,
        "num_experts": moe.resolved_num_experts,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": moe.resolved_expert_hidden_size,
        "router_hidden_size": moe.router.hidden_size,
        "cca_time0": cca.depthwise_taps,
        "cca_time1": cca.grouped_taps,
        "lm_head_bias": False,
    }


SCALES = ((".output_scale", ".hidden_states_scale"), (".output_bias", ".hidden_states_bias"))
_native = replacing(
    (".self_attn.q_proj.", ".self_attn.qkv_proj.q_proj."),
    (".self_attn.k_proj.", ".self_attn.qkv_proj.k_proj."),
    (".self_attn.v_proj_", ".self_attn.qkv_proj.v_proj_"),
    (".self_attn.conv_qk_", ".self_attn.qkv_proj.conv_qk_"),
    (".self_attn.key_temperature", ".self_attn.qk_norm.temp"),
    (".attention_residual.", ".post_attention_residual_scale."),
    (".feed_forward_residual.", ".post_mlp_residual_scale."),
    *SCALES,
    ("input_residual.", "input_hidden_states_"),
    (".mlp.router.bias", ".mlp.gate.balancing_biases"),
    (".mlp.router.in_proj.", ".mlp.gate.down_proj."),
    (".mlp.router.state_scale", ".mlp.gate.router_states_scale"),
    (".mlp.router.", ".mlp.gate.router_mlp."),
)
_in_layer = replacing(
    (".self_attn.q_proj.", ".self_attn.qkv.linear_q."),
    (".self_attn.k_proj.", ".self_attn.qkv.linear_k."),
    (".self_attn.v_proj_current.", ".self_attn.qkv.val_proj1."),
    (".self_attn.v_proj_delayed.", ".self_attn.qkv.val_proj2."),
    (".self_attn.conv_qk_depthwise.", ".self_attn.qkv.conv_qk.0."),
    (".self_attn.conv_qk_grouped.", ".self_attn.qkv.conv_qk.1."),
    (".self_attn.key_temperature", ".self_attn.qkv.temp"),
    (".input_layernorm.", ".input_norm."),
    (".post_attention_layernorm.", ".input_norm."),
    (".attention_residual.", ".res_scale."),
    (".feed_forward_residual.", ".res_scale."),
    *SCALES,
    (".mlp.router.bias", ".mlp.router.balancing_biases"),
    (".mlp.router.in_proj.", ".mlp.router.down_proj."),
    (".mlp.router.state_scale", ".mlp.router.router_states_scale"),
    (".mlp.router.norm.", ".mlp.router.rmsnorm_eda."),
    (".mlp.router.fc1.", ".mlp.router.router_mlp.0."),
    (".mlp.router.fc2.", ".mlp.router.router_mlp.2."),
    (".mlp.router.out_proj.", ".mlp.router.router_mlp.4."),
    (".mlp.experts.", ".mlp.experts.local_experts."),
    (".mlp.", ".zaya_block."),
)


def _legacy(name: str, model: ModelConfig) -> str:
    found = re.fullmatch(r"layers\.(\d+)\.(\w+)(.*)", name)
    if found is None:
        return replacing(("input_residual.", "layers.0.res_scale.hidden_states_"), ("norm.", "final_norm."))(
            name, model
        )
    layer, part, rest = int(found[1]), found[2], found[3]
    # How far the half layer that has a part is from the attention of this layer.
    ahead = {"mlp": 1, "post_attention_layernorm": 1, "attention_residual": 1, "feed_forward_residual": 2}.get(part, 0)
    half = 2 * layer + ahead
    where = f"layers.{half}" if half < 2 * model.num_layers else "model"
    return where + _in_layer(f".{part}{rest}", model)


LAYOUTS = {
    "fused": Naming(_native, has_bias=True),
    "legacy": Naming(_legacy, (("linear_fc1",), ("linear_fc2",)), has_bias=True),
}
