import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moestro.config import ModelConfig, count, moe_params
from moestro.model.transformer import Transformer


@st.composite
def architectures(draw: st.DrawFn) -> ModelConfig:
    heads = draw(st.sampled_from([1, 2, 4]))
    moe = None
    layers = draw(st.integers(1, 4))
    if draw(st.booleans()):
        experts = draw(st.integers(1, 5))
        first = draw(st.integers(0, layers - 1))
        every = draw(st.integers(1, layers - first))
        moe_layers = len(range(first + every - 1, layers, every))
        one = st.integers(1, experts)
        moe = {
            "num_experts": experts,
            "top_k": draw(st.one_of(one, st.lists(one, min_size=moe_layers, max_size=moe_layers))),
            "expert_hidden_size": draw(st.integers(1, 9)),
            "num_shared_experts": draw(st.integers(0, 2)),
            "first_k_dense": first,
            "every_n_layers": every,
        }
    return ModelConfig.model_validate(
        {
            "vocab_size": draw(st.integers(2, 50)),
            "hidden_size": heads * 2 * draw(st.integers(1, 4)),
            "num_layers": layers,
            "num_heads": heads,
            "num_kv_heads": draw(st.sampled_from([None, 1, heads])),
            "head_dim": draw(st.sampled_from([None, 2, 6])),
            "intermediate_size": draw(st.integers(1, 20)),
            "qk_norm": draw(st.booleans()),
            "tie_embeddings": draw(st.booleans()),
            "moe": moe,
        }
    )


@settings(max_examples=40, deadline=None)
@given(architectures())
def test_counts_equal_the_parameters_of_the_built_model(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = Transformer(config)
    counts = count(config, seq_len=8)
    parameters = dict(model.named_parameters())
    assert counts.total_params == sum(p.numel() for p in parameters.values())
    # Active: the experts a token does not visit are left out.
    idle = 0
    for layer, is_moe in enumerate(config.moe_layers):
        if is_moe:
            assert config.moe is not None
            share = config.moe.num_experts - config.top_k_of_layer(layer)
            for name in ("gate_up_proj", "down_proj"):
                idle += share * parameters[f"layers.{layer}.mlp.experts.{name}"][0].numel()
    assert counts.active_params == counts.total_params - idle
    # Multiplied: active matrices, without the table where it is only looked up.
    vectors = sum(p.numel() for p in parameters.values() if p.dim() == 1)
    looked_up = 0 if config.tie_embeddings else parameters["embed_tokens.weight"].numel()
    assert counts.matmul_params == counts.active_params - vectors - looked_up


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
        "qk_norm": True,
        "moe": {"num_experts": 128, "top_k": 8, "expert_hidden_size": 768},
    }
)


def test_published_models() -> None:
    mixtral = count(MIXTRAL_8X7B, 4096)
    assert mixtral.total_params == 46_702_792_704  # the size of mistralai/Mixtral-8x7B-v0.1
    assert round(mixtral.active_params / 1e9, 1) == 12.9
    qwen = count(QWEN3_30B_A3B, 4096)
    assert qwen.total_params == 30_532_122_624  # the size of Qwen/Qwen3-30B-A3B
    assert round(qwen.active_params / 1e9, 1) == 3.4  # published as 3.3 without one of the two embedding tables


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
    "qk_norm": True,
}


@pytest.mark.parametrize("experts", [None, "reference", "segmented"])
@pytest.mark.parametrize("tied", [False, True])
def test_flops_equal_what_pytorch_counts(experts: str | None, tied: bool) -> None:
    """Forward and backward of a whole step; PyTorch's attention multiplies the upper triangle too."""
    moe = {"num_experts": 4, "expert_hidden_size": 5, "num_shared_experts": 1, "experts": experts}
    config = ModelConfig.model_validate(FLOP_CONFIG | {"tie_embeddings": tied, "moe": moe if experts else None})
    model = Transformer(config)
    model.init_weights(0)
    batch, seq = 2, 6
    ids = torch.randint(24, (batch, seq))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        logits = model.logits(model(ids).hidden)
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    counts = count(config, seq)
    square = counts.attention_flops_per_token * 2 * seq / (seq + 1)
    assert counter.get_total_flops() == batch * seq * 3 * (2 * counts.matmul_params + square)
