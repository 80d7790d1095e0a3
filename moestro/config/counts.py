"""Parameters and FLOPs of an architecture, counted from its shape alone."""

from dataclasses import dataclass

from moestro.config.model import ModelConfig


def feed_forward_params(hidden_size: int, width: int, matrices: int = 3) -> int:
    """Weights of one feed-forward or expert: 3 matrices when gated (SwiGLU), 2 when not."""
    return matrices * hidden_size * width


def attention_params(hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Weights of the query, key, value and output projections."""
    return hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)


def moe_params(hidden_size: int, width: int, num_experts: int, matrices: int = 3) -> int:
    """Weights of num_experts experts and of a linear router."""
    return num_experts * (feed_forward_params(hidden_size, width, matrices) + hidden_size)


@dataclass(frozen=True)
class Counts:
    """What one model holds and does. A multiply-add is two FLOPs; backward is twice forward."""

    total_params: int
    active_params: int  # used by one token; the embedding table counts once, as in published figures
    matmul_params: int  # multiplied with a token: active without the embedding look-up, with the head
    attention_flops_per_token: float  # forward score and value products at the given length, causal half only

    @property
    def train_flops_per_token(self) -> float:
        """Model FLOPs of one trained token, recomputation not counted (PaLM's MFU, arXiv 2204.02311, appendix B)."""
        return 3 * (2 * self.matmul_params + self.attention_flops_per_token)


def count(model: ModelConfig, seq_len: int) -> Counts:
    """Count `model` (vocab_size resolved) for sequences of `seq_len` tokens."""
    assert model.vocab_size is not None
    hidden, head_dim = model.hidden_size, model.resolved_head_dim
    attention = attention_params(hidden, model.num_heads, model.resolved_num_kv_heads, head_dim)
    norms = 2 * hidden + (2 * head_dim if model.qk_norm else 0)
    embedding = model.vocab_size * hidden
    total = active = matmul = 0
    for layer, is_moe in enumerate(model.moe_layers):
        if is_moe:
            moe = model.moe
            assert moe is not None
            expert = feed_forward_params(hidden, moe.expert_hidden_size)
            every_token = hidden * moe.num_experts + moe.num_shared_experts * expert
            held = every_token + moe.num_experts * expert
            used = every_token + model.top_k_of_layer(layer) * expert
        else:
            assert model.intermediate_size is not None
            held = used = feed_forward_params(hidden, model.intermediate_size)
        total += attention + norms + held
        active += attention + norms + used
        matmul += attention + used
    outside = hidden + embedding * (1 if model.tie_embeddings else 2)
    return Counts(
        total_params=total + outside,
        active_params=active + outside,
        matmul_params=matmul + embedding,
        attention_flops_per_token=model.num_layers * 2 * 2 * model.num_heads * head_dim * (seq_len + 1) / 2,
    )
