"""What the config.json of several families have in common, both ways."""

from itertools import product
from typing import Any

from moestro.checkpoint.huggingface.rope import older_names, write_rope
from moestro.checkpoint.huggingface.settings import Settings
from moestro.config import ModelConfig, MoEConfig

LAYER_TYPES = {"full_attention": "full", "sliding_attention": "sliding", "hybrid": "full", "hybrid_sliding": "sliding"}


def read_sizes(s: Settings, eps: float, tied: bool = False) -> dict[str, Any]:
    s.expect("hidden_act", "silu")
    return {
        "vocab_size": s.take("vocab_size"),
        "hidden_size": s.take("hidden_size"),
        "num_layers": s.take("num_hidden_layers"),
        "num_heads": s.take("num_attention_heads"),
        "max_seq_len": s.take("max_position_embeddings"),
        "norm_eps": s.take("rms_norm_eps", default=eps),
        "tie_embeddings": s.take("tie_word_embeddings", default=tied),
    }


def write_sizes(model: ModelConfig) -> dict[str, Any]:
    rope = write_rope(model.rope)
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": "silu",
        "rope_parameters": rope,
    } | older_names(rope)


def read_heads(s: Settings, head_dim: int | None = None) -> dict[str, Any]:
    return {
        "num_kv_heads": s.take("num_key_value_heads", default=None),
        "head_dim": s.take("head_dim", default=head_dim),
    }


def write_heads(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_key_value_heads": model.resolved_num_kv_heads,
        "head_dim": model.resolved_head_dim,
        "attention_bias": model.attention_bias == "all",
    }


def read_bias(s: Settings, default: bool = False) -> dict[str, Any]:
    return {"attention_bias": "all" if s.take("attention_bias", default=default) else "none"}


def read_layer_types(s: Settings, types: list[str] | None) -> dict[str, Any]:
    """Which layers see a window of sliding_window tokens only. types: by default, None for all of them."""
    window = s.take("sliding_window", default=None)
    types = s.take("layer_types", default=None) or types
    if types is None:
        return {"sliding_window": window}
    unknown = set(types) - LAYER_TYPES.keys()
    if unknown:
        raise s.refusal("layer_types", sorted(unknown)[0], f"known are {', '.join(LAYER_TYPES)}")
    ours = tuple(LAYER_TYPES[kind] for kind in types)
    return {"sliding_window": window, "layer_types": ours} if "sliding" in ours else {}


def write_layer_types(model: ModelConfig, names: tuple[str, str]) -> list[str]:
    return [names[model.layer_type(layer) == "sliding"] for layer in range(model.num_layers)]


def read_moe(s: Settings, width: tuple[str, ...], normalized: bool, aux_coef: float) -> dict[str, Any]:
    """Softmax over all experts, then the best ones. normalized: what `norm_topk_prob` is if it is not there."""
    top_k = s.take("num_experts_per_tok")
    # transformers' loss is top_k when the load is even, ours is 1.
    coefficient = s.take("router_aux_loss_coef", default=aux_coef) * top_k
    return {
        "num_experts": s.take("num_experts", "num_local_experts", "n_routed_experts"),
        "top_k": top_k,
        "expert_hidden_size": s.take(*width),
        "router": {"renormalize": s.take("norm_topk_prob", default=normalized)},
        "balance": {"aux_coef": coefficient},
    }


def write_moe(moe: MoEConfig, experts: str, width: str, top_k: int) -> dict[str, Any]:
    return {
        experts: moe.resolved_num_experts,
        "num_experts_per_tok": top_k,
        width: moe.resolved_expert_hidden_size,
        "router_aux_loss_coef": moe.balance.aux_coef / top_k,
    }


def places(s: Settings, is_moe: list[bool]) -> dict[str, Any]:
    """first_k_dense and every_n_layers that make just these layers MoE."""
    count = len(is_moe)
    for every, first in product(range(1, count + 1), range(count)):
        if all(is_moe[i] == (i >= first and (i - first) % every == every - 1) for i in range(count)):
            return {"first_k_dense": first, "every_n_layers": every}
    dense = [i for i, moe in enumerate(is_moe) if not moe]
    raise s.refusal("mlp_only_layers", dense, "the dense layers are neither the first ones nor regular")


def has(model: ModelConfig, moe: bool, mla: bool = False, cca: bool = False) -> bool:
    return ((model.moe is not None), (model.mla is not None), (model.cca is not None)) == (moe, mla, cca)


def top_k(model: ModelConfig) -> int:
    return model.top_k_of_layer(next(i for i, is_moe in enumerate(model.moe_layers) if is_moe))


def normalized(moe: MoEConfig) -> bool:
    return moe.router.renormalize or (moe.router.top_k_before_score and moe.router.score == "softmax")
