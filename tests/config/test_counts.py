from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moestro.config import ModelConfig, cache_bytes, count, moe_params
from moestro.model.initial import is_vector
from moestro.model.transformer import Transformer

ROUTERS = ("linear", "mlp", "attention", "hybrid", "mlp_hadamard", "zaya", "hash")
ACTIVATIONS = ("swiglu", "geglu", "relu2", "gelu", "clamped_swiglu")


@st.composite
def attentions(draw: st.DrawFn, heads: int) -> dict[str, Any]:
    """Settings of one of the kinds of attention."""
    kind = draw(st.sampled_from(["grouped", "grouped", "latent", "convolutional", "head experts"]))
    if kind == "latent":
        mla = {
            "q_rank": draw(st.sampled_from([None, 3])),
            "kv_rank": draw(st.integers(1, 5)),
            "nope_head_dim": draw(st.integers(1, 5)),
            "rope_head_dim": draw(st.sampled_from([2, 4])),
            "v_head_dim": draw(st.integers(1, 5)),
        }
        return {"mla": mla}
    sizes: dict[str, Any] = {
        "num_kv_heads": draw(st.sampled_from([None, 1, heads])),
        "head_dim": draw(st.sampled_from([None, 2, 6])),
    }
    if kind == "convolutional":
        return sizes | {"cca": {"depthwise_taps": draw(st.integers(1, 3)), "grouped_taps": draw(st.integers(1, 3))}}
    sizes |= {"qk_norm": draw(st.sampled_from(["none", "head", "projection"]))}
    if kind == "head experts":
        return sizes | {"attention_experts": {"num_experts": draw(st.sampled_from([1, heads]))}}
    return sizes | {
        "attention_bias": draw(st.sampled_from(["none", "qkv", "all"])),
        "attention_sinks": draw(st.booleans()),
    }


@st.composite
def mixtures(draw: st.DrawFn, layers: int, carry_state: bool) -> dict[str, Any]:
    experts = draw(st.integers(1, 5))
    first = draw(st.integers(0, layers - 1))
    every = draw(st.integers(1, layers - first))
    moe_layers = len(range(first + every - 1, layers, every))
    granularity = draw(st.sampled_from([1, 1, 2]))
    selection = draw(st.sampled_from(["top_k", "top_k", "expert_choice", "dense", "dense_to_sparse"]))
    one = st.integers(1, experts)
    router = {
        "kind": draw(st.sampled_from(ROUTERS if selection == "top_k" else ROUTERS[:-1])),
        "hidden_size": draw(st.integers(1, 5)),
        "carry_state": carry_state,
        "bias": draw(st.booleans()),
        "selection": selection,
        "renormalize": False,
    }
    return {
        "num_experts": experts,
        "top_k": draw(st.one_of(one, st.lists(one, min_size=moe_layers, max_size=moe_layers))),
        "expert_hidden_size": granularity * draw(st.integers(1, 5)),
        "granularity": granularity,
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "expert_bias": draw(st.booleans()),
        "num_shared_experts": draw(st.integers(0, 2)),
        "latent_size": draw(st.sampled_from([None, 3])),
        "null_experts": draw(st.integers(0, 2)) if selection == "top_k" and router["kind"] != "hash" else 0,
        "first_k_dense": first,
        "every_n_layers": every,
        "router": router,
    }


@st.composite
def architectures(draw: st.DrawFn) -> ModelConfig:
    heads = draw(st.sampled_from([1, 2, 4]))
    layers = draw(st.integers(1, 4))
    window = draw(st.sampled_from([None, 3]))
    position = draw(st.sampled_from(["pre", "post"]))
    attention = draw(attentions(heads))
    depths = [] if "cca" in attention or "attention_experts" in attention else ["depth"]
    ahead = draw(st.sampled_from(["", "", "mtp", *depths]))
    return ModelConfig.model_validate(
        {
            "vocab_size": draw(st.integers(2, 50)),
            "hidden_size": heads * 2 * draw(st.integers(1, 4)),
            "num_layers": layers,
            "num_heads": heads,
            "intermediate_size": draw(st.integers(1, 20)),
            "activation": draw(st.sampled_from(ACTIVATIONS)),
            "sliding_window": window,
            "layer_types": draw(st.sampled_from([None, ["sliding", "full"]])) if window else None,
            "norm_position": position,
            "residual_scaling": "none"
            if position == "post"
            else draw(st.sampled_from(["none", "input", "output", "released"])),
            "tie_embeddings": draw(st.booleans()),
            "mtp": {"depth": draw(st.integers(1, 2))} if ahead == "mtp" else None,
            "depth": {"every_n_layers": draw(st.integers(1, 2))} if ahead == "depth" else None,
            "moe": draw(st.none() | mixtures(layers, ahead != "depth")),
        }
        | attention
    )


@settings(max_examples=15, deadline=None)
@given(architectures())
def test_counts_equal_the_parameters_of_the_built_model(config: ModelConfig) -> None:
    check_against_built(config)


SMALL = {"vocab_size": 11, "hidden_size": 8, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2}
ENCODER = {
    "name": "image",
    "input_size": 5,
    "max_patches": 9,
    "hidden_size": 6,
    "num_layers": 2,
    "num_heads": 2,
    "num_tokens": 4,
}
SMALL_MOE = {"num_experts": 4, "expert_hidden_size": 6, "first_k_dense": 1}


@pytest.mark.parametrize(
    "changes",
    [
        *({"qk_norm": norm} for norm in ("head", "projection")),
        *({"attention_bias": bias} for bias in ("qkv", "all")),
        {"attention_sinks": True, "tie_embeddings": True},
        {"attention_experts": {"num_experts": 2}},
        *(
            {"mla": {"q_rank": q, "kv_rank": 5, "nope_head_dim": 3, "rope_head_dim": 2, "v_head_dim": 4}}
            for q in (None, 7)
        ),
        {"cca": {"depthwise_taps": 3}},
        *({"residual_scaling": kind} for kind in ("input", "output", "released")),
        {"norm_position": "post"},
        *({"activation": activation} for activation in ACTIVATIONS),
        *({"moe": SMALL_MOE | {"activation": activation, "expert_bias": True}} for activation in ACTIVATIONS),
        {"moe": SMALL_MOE | {"num_shared_experts": 2, "granularity": 3}},
        {"moe": SMALL_MOE | {"latent_size": 3, "expert_bias": True}},
        {"moe": SMALL_MOE | {"null_experts": 3}},
        {"moe": SMALL_MOE | {"expert_groups": [2, 2], "router": {"selection": "expert_choice"}}, "token_types": [7]},
        *({"moe": SMALL_MOE | {"router": {"kind": kind, "hidden_size": 5}}} for kind in ROUTERS),
        {"moe": SMALL_MOE | {"router": {"bias": True}}},
        {"moe": SMALL_MOE | {"router": {"kind": "zaya", "hidden_size": 5}}, "mtp": {}},
        {"moe": SMALL_MOE | {"router": {"kind": "zaya", "hidden_size": 5, "carry_state": False}}},
        {"moe": SMALL_MOE, "mtp": {"depth": 2}, "tie_embeddings": True},
        {"moe": SMALL_MOE, "depth": {}},
        *({"encoders": [ENCODER | {"connector": connector}]} for connector in ("average_pool", "attention_pool")),
        {"encoders": [ENCODER | {"connector": "mlp", "num_tokens": 9, "position_patches": 4}]},
        *({"encoders": [ENCODER | {"connector": "c_abstractor", "shape": shape}]} for shape in ("grid", "line")),
    ],
)
def test_counts_of_each_option(changes: dict[str, Any]) -> None:
    check_against_built(ModelConfig.model_validate(SMALL | {"intermediate_size": 9} | changes))


def check_against_built(config: ModelConfig) -> None:
    parameters = dict(Transformer(config).named_parameters())
    counts = count(config, seq_len=8)
    assert counts.total_params == sum(p.numel() for p in parameters.values())
    used = {name: p.numel() * used_share(name, config) for name, p in parameters.items()}
    assert counts.active_params == sum(used.values())
    # Multiplied: active matrices, without the table where it is only looked up.
    looked_up = 0 if config.tie_embeddings else counts.embedding_params
    matrices = sum(size for name, size in used.items() if not is_vector(name, parameters[name].dim()))
    assert counts.matmul_params == matrices - looked_up
    prefixes = {
        "embedding": "embed_tokens.",
        "head": "lm_head.",
        "multi-token prediction": "mtp.",
        "encoders": "encoders.",
    }
    for part, prefix in prefixes.items():
        assert counts.part(part).total == sum(p.numel() for name, p in parameters.items() if name.startswith(prefix))


def used_share(name: str, config: ModelConfig) -> Fraction:
    """Share of a parameter that one generated token uses."""
    if name.startswith(("mtp.", "encoders.")):
        return Fraction(0)
    if ".mlp.experts." in name:
        assert config.moe is not None
        return Fraction(config.top_k_of_layer(int(name.split(".")[1])), config.moe.resolved_num_experts)
    return Fraction(1)


MIXTRAL_8X7B = ModelConfig.model_validate(
    {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "moe": {"num_experts": 8, "top_k": 2, "expert_hidden_size": 14_336},
    }
)
QWEN3_30B_A3B = ModelConfig.model_validate(
    {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "num_layers": 48,
        "num_heads": 32,
        "num_kv_heads": 4,
        "head_dim": 128,
        "qk_norm": "head",
        "moe": {"num_experts": 128, "top_k": 8, "expert_hidden_size": 768},
    }
)


def test_published_models() -> None:
    mixtral = count(MIXTRAL_8X7B, 4096)
    assert mixtral.total_params == 46_702_792_704  # the size of mistralai/Mixtral-8x7B-v0.1
    assert round(mixtral.active_params / 1e9, 1) == 12.9
    qwen = count(QWEN3_30B_A3B, 4096)
    assert qwen.total_params == 30_532_122_624  # the size of Qwen/Qwen3-30B-A3B
    assert qwen.active_params == 3_353_032_704  # published as 3.3 B


def test_flops_by_hand() -> None:
    config = ModelConfig.model_validate(
        {
            "vocab_size": 10,
            "hidden_size": 4,
            "num_layers": 2,
            "num_heads": 2,
            "num_kv_heads": 1,
            "intermediate_size": 6,
            "moe": {"num_experts": 3, "top_k": 2, "expert_hidden_size": 5, "num_shared_experts": 1, "first_k_dense": 1},
        }
    )
    counts = count(config, seq_len=7)
    attention = 4 * 4 + 4 * 2 + 4 * 2 + 4 * 4  # q, k, v, o
    dense = 3 * 4 * 6
    moe = 4 * 3 + (2 + 1) * 3 * 4 * 5  # router, two routed and one shared expert
    assert counts.matmul_params == 2 * attention + dense + moe + 4 * 10
    # A token sees 4 of 7 positions on average: two layers, two heads, head_dim 2, scores and values, 2 FLOPs each.
    assert counts.attention_flops_per_token == 2 * 2 * 2 * (2 + 2) * 4
    assert counts.train_flops_per_token == 3 * (2 * counts.matmul_params + counts.attention_flops_per_token)


def test_moe_params_of_switch_c() -> None:
    # Switch-C, 1571B parameters: 2048 experts of two matrices in each of its 15 + 15 layers.
    assert round(30 * moe_params(2080, 6144, 2048, matrices=2) / 1e9) == 1570


FLOP_CONFIG = {
    "vocab_size": 24,
    "hidden_size": 8,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 12,
    "qk_norm": "head",
}


MOE = {"num_experts": 4, "expert_hidden_size": 5, "num_shared_experts": 1, "experts": "segmented"}
MLA = {"kv_rank": 3, "nope_head_dim": 2, "rope_head_dim": 2, "v_head_dim": 5}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"moe": MOE},
        {"moe": MOE | {"experts": "reference"}},
        {"tie_embeddings": True, "activation": "gelu"},
        {"moe": MOE | {"activation": "relu2", "latent_size": 3}},
        {"moe": MOE | {"router": {"kind": "zaya", "hidden_size": 3}}},
        {"moe": MOE | {"router": {"kind": "hybrid", "hidden_size": 3}}},
        {"moe": MOE | {"router": {"kind": "mlp_hadamard", "hidden_size": 3}}},
        {"moe": MOE | {"router": {"selection": "dense"}}},
        {"moe": MOE | {"first_k_dense": 1}, "mla": MLA, "qk_norm": "none"},
        {"mla": MLA | {"q_rank": 7}, "qk_norm": "none", "mtp": {}},
        {"moe": MOE | {"first_k_dense": 1}, "mtp": {"depth": 2}},
        {"attention_experts": {"num_experts": 2}},
        {"attention_bias": "all", "norm_position": "post"},
    ],
)
def test_flops_equal_what_pytorch_counts(changes: dict[str, Any]) -> None:
    """Forward and backward of a whole step; PyTorch's attention multiplies the upper triangle too."""
    config = ModelConfig.model_validate(FLOP_CONFIG | changes)
    model = Transformer(config)
    model.init_weights(0)
    batch, seq = 2, 6
    ids = torch.randint(24, (batch, seq))
    ahead = ids.expand(len(model.mtp), -1, -1) if model.mtp else None
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        output = model(ids, labels=ids, ahead=ahead)
        (output.loss + (output.mtp_loss if model.mtp else 0)).backward()
    counts = count(config, seq)
    counted = batch * seq * counts.train_flops_per_token
    triangle = batch * seq * 3 * counts.attention_flops_per_token * (2 * seq / (seq + 1) - 1)
    unseen = batch * seq * 2 * config.hidden_size * 24 * (1 + len(model.mtp))  # addmm_ of the head's gradient
    assert counter.get_total_flops() == round(counted + triangle - unseen)


@given(st.integers(1, 30), st.integers(1, 30))
@settings(max_examples=15, deadline=None)
def test_attention_flops_of_sliding_layers(seq: int, window: int) -> None:
    def flops(**changes: Any) -> float:
        config = ModelConfig.model_validate(FLOP_CONFIG | changes)
        return count(config, seq).attention_flops_per_token

    seen = [min(i + 1, window) for i in range(seq)]
    alternating = {"sliding_window": window, "layer_types": ["sliding", "full"]}
    one_layer = 2 * 2 * 4 * 2  # scores and values, two FLOPs, four heads of two
    assert flops(sliding_window=window) == pytest.approx(2 * one_layer * sum(seen) / seq)
    assert flops(**alternating) == pytest.approx(one_layer * (sum(seen) / seq + (seq + 1) / 2))


def test_flops_of_a_mixture_of_depths() -> None:
    """A quarter of 40 tokens pass layer 0; each sees 5.5 of them on average."""
    plain, deep = (count(ModelConfig.model_validate(FLOP_CONFIG | c), 40) for c in ({}, {"depth": {"capacity": 0.25}}))
    one_layer = plain.part("attention").train_products / 2
    assert deep.part("attention").train_products == 1.25 * one_layer
    assert deep.part("attention").attention_flops == 2 * 2 * 4 * 2 * (20.5 + 0.25 * 5.5)
    assert deep.part("dense feed-forward").train_products == 1.25 / 2 * plain.part("dense feed-forward").train_products
    assert deep.part("head") == plain.part("head")
    assert deep.active_params - plain.active_params == deep.part("depth routers").total == 8 + 4 * 8 + 4


def test_experts_that_work_while_training() -> None:
    def products(**router: Any) -> float:
        moe = MOE | {"num_shared_experts": 0, "top_k": 2, "router": router | {"renormalize": False}}
        counts = count(ModelConfig.model_validate(FLOP_CONFIG | {"moe": moe}), 8)
        assert counts.part("experts").active == 2 * 2 * 3 * 8 * 5  # layers, experts, matrices
        return counts.part("experts").train_products / (2 * 3 * 8 * 5)

    assert products() == 2
    assert products(selection="dense") == 4
    assert products(selection="expert_choice") == 2
    assert products(selection="expert_choice", capacity_factor=0.5) == 1


# Cache


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 5},
        {"sliding_window": 5, "layer_types": ["sliding", "full"]},
        {"mla": MLA, "qk_norm": "none"},
        {"cca": {"grouped_taps": 3}, "qk_norm": "none"},
        {"attention_experts": {"num_experts": 2}, "mtp": {}},
    ],
)
def test_cache_bytes_are_those_of_a_cache(changes: dict[str, Any]) -> None:
    config = ModelConfig.model_validate(FLOP_CONFIG | changes)
    model = Transformer(config, dtype=torch.bfloat16)
    model.init_weights(0)
    cache = model.new_cache(1, 20, "cpu", torch.bfloat16)
    with torch.no_grad():
        model.eval()(torch.zeros(1, 3, dtype=torch.int64), cache=cache)
    entries = [buffer.nbytes for layer in cache.layers for buffer in layer.buffers.values()]
    state = [tensor.nbytes for layer in cache.layers for tensor in layer.state.values()]
    ours = cache_bytes(config)
    assert (20 * ours.per_token + ours.window, ours.state) == (sum(entries), sum(state))


def test_cache_bytes_of_published_models() -> None:
    assert cache_bytes(QWEN3_30B_A3B).per_token == 98_304
    zaya = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "num_layers": 40, "hidden_size": 2048, "cca": {}}
    assert cache_bytes(ModelConfig.model_validate(zaya | {"intermediate_size": 1})).per_token == 40_960
