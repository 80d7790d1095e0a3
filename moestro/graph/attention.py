"""Attention on one rank: the operations of grouped-query, latent (MLA) and convolutional (CCA) attention."""

from moestro.config.model import ModelConfig
from moestro.graph.tape import Tape


def attention(tape: Tape, model: ModelConfig, layer: int, sequences: int, length: int) -> None:
    """From the normalised input of a layer to what is added to the residual stream.

    sequences: of a micro-batch. length: tokens of a sequence that this layer takes (all of them, unless a mixture of
    depths admits some), before context parallelism cuts it.
    """
    plan = tape.plan
    local = length // plan.cp
    tokens = sequences * local
    tape.enter_tensor("attention", tokens, model.hidden_size)
    if model.mla is not None:
        heads, kv_heads, qk_dim, v_dim = _latent(tape, model, tokens)
    elif model.cca is not None:
        heads, kv_heads, qk_dim, v_dim = _convolutional(tape, model, tokens)
    else:
        heads, kv_heads, qk_dim, v_dim = _grouped_query(tape, model, tokens)
    # Keys and values of the other context ranks. Counted for all_gather; a ring carries the same bytes.
    gathered = plan.cp * tokens * kv_heads * (qk_dim + v_dim)
    tape.exchange("all_gather", "attention", "keys and values", "cp", plan.cp, gathered, overlap=True)
    seen = _keys_seen(model, layer, length)
    tape.attention((sequences, local, seen, heads, kv_heads, qk_dim, v_dim))
    tape.save(tokens * (heads * (qk_dim + v_dim) + kv_heads * (qk_dim + v_dim)))  # queries, keys, values, output
    tape.save(tokens * heads, width=4)  # log-sum-exp of the scores
    if tape.workload.attention_kernel == "math":
        tape.save(2 * sequences * heads * local * seen, cheap=True)  # scores before and after the soft-max
    tape.gemm("attention", "out", tokens, model.hidden_size, heads * v_dim)
    tape.own(heads * v_dim * model.hidden_size, model.hidden_size if model.attention_bias == "all" else 0)
    tape.leave_tensor("attention", tokens, model.hidden_size)


def _save_input(tape: Tape, tokens: int, hidden: int) -> None:
    """The normalised input that the projections share; selective recomputation makes it again from the norm's."""
    tape.save(tokens * hidden / (tape.plan.tp if tape.plan.sequence_parallel else 1), cheap=True)


def _grouped_query(tape: Tape, model: ModelConfig, tokens: int) -> tuple[int, int, int, int]:
    """Projections and rotation. Returns (heads, key-value heads, query-key dims, value dims) of this rank."""
    tp, hidden, dim = tape.plan.tp, model.hidden_size, model.resolved_head_dim
    heads, kv_heads = model.num_heads // tp, max(1, model.resolved_num_kv_heads // tp)
    width = (heads + 2 * kv_heads) * dim
    _save_input(tape, tokens, hidden)
    tape.gemm("attention", "qkv", tokens, width, hidden)
    tape.own(hidden * width, width if model.attention_bias != "none" else 0)
    if model.attention_experts is not None:
        tape.own(model.attention_experts.num_experts * hidden)
    norms = {"none": 0, "head": 2 * dim, "projection": (heads + kv_heads) * dim}[model.qk_norm]
    if model.qk_norm != "none":
        tape.memory("attention", "norm of queries and keys", tokens * (heads + kv_heads) * dim, 2, 3)
        tape.save(tokens * (heads + kv_heads) * dim)
    tape.own(0, norms + (heads if model.attention_sinks else 0))
    tape.memory("attention", "rotation", tokens * (heads + kv_heads) * dim, 2, 2)
    return heads, kv_heads, dim, dim


def _latent(tape: Tape, model: ModelConfig, tokens: int) -> tuple[int, int, int, int]:
    """DeepSeek-V2's multi-head latent attention: down- and up-projections of queries and of keys with values."""
    mla, tp, hidden = model.mla, tape.plan.tp, model.hidden_size
    assert mla is not None
    heads = model.num_heads // tp
    query = heads * mla.qk_head_dim
    _save_input(tape, tokens, hidden)
    if mla.q_rank is None:
        tape.gemm("attention", "q", tokens, query, hidden)
        tape.own(hidden * query)
    else:
        tape.gemm("attention", "q down", tokens, mla.q_rank, hidden)
        tape.memory("attention", "norm of the query latent", tokens * mla.q_rank, 2, 3)
        tape.save(2 * tokens * mla.q_rank)
        tape.gemm("attention", "q up", tokens, query, mla.q_rank)
        tape.own(mla.q_rank * (hidden + query), mla.q_rank)
    tape.gemm("attention", "kv down", tokens, mla.kv_rank + mla.rope_head_dim, hidden)
    tape.memory("attention", "norm of the latent", tokens * mla.kv_rank, 2, 3)
    tape.save(2 * tokens * mla.kv_rank)
    up = heads * (mla.nope_head_dim + mla.v_head_dim)
    tape.gemm("attention", "kv up", tokens, up, mla.kv_rank)
    tape.own(hidden * (mla.kv_rank + mla.rope_head_dim) + mla.kv_rank * up, mla.kv_rank)
    tape.memory("attention", "rotation", tokens * 2 * query, 2, 2)
    return heads, heads, mla.qk_head_dim, mla.v_head_dim


def _convolutional(tape: Tape, model: ModelConfig, tokens: int) -> tuple[int, int, int, int]:
    """ZAYA1's compressed convolutional attention: latents, two causal convolutions, means, norms, shifted values."""
    cca, tp, hidden, dim = model.cca, tape.plan.tp, model.hidden_size, model.resolved_head_dim
    assert cca is not None
    heads, kv_heads = model.num_heads // tp, max(1, model.resolved_num_kv_heads // tp)
    channels = (heads + kv_heads) * dim
    _save_input(tape, tokens, hidden)
    tape.gemm("attention", "queries and keys", tokens, channels, hidden)
    tape.gemm("attention", "values", tokens, kv_heads * dim, hidden)
    tape.memory("attention", "depthwise convolution", tokens * channels, 2, 3)
    tape.gemm("attention", "grouped convolution", tokens, dim, dim * cca.grouped_taps, batch=heads + kv_heads)
    tape.memory("attention", "means, norms, rotation", tokens * channels, 4, 6)
    tape.save(4 * tokens * channels)
    matrices = hidden * (channels + kv_heads * dim) + channels * dim * cca.grouped_taps
    tape.own(matrices + channels * cca.depthwise_taps, 2 * channels + kv_heads)
    return heads, kv_heads, dim, dim


def _keys_seen(model: ModelConfig, layer: int, length: int) -> int:
    """The keys of an attention kernel of this layer: of a window, such that half of them are seen by a query."""
    window = model.sliding_window if model.layer_type(layer) == "sliding" else None
    if window is None or window >= length:
        return length
    return round(2 * (window * (window + 1) / 2 + (length - window) * window) / length) - 1
