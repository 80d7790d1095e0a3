"""Attention on one rank: the operations of grouped-query, latent (MLA) and convolutional (CCA) attention."""

from typing import NamedTuple

from moestro.config.model import ModelConfig
from moestro.graph.tape import Tape


class Heads(NamedTuple):
    """Of this rank: what an attention kernel works on, and what is kept of each token for its backward."""

    queries: int
    keys: int  # heads of keys and values
    qk_dim: int
    v_dim: int
    kept: int  # numbers: queries, keys, values


def attention(tape: Tape, model: ModelConfig, layer: int, sequences: int, length: int) -> None:
    """From the normalised input of a layer to what is added to the residual stream.

    sequences: of a micro-batch. length: tokens of a sequence that this layer takes (all of them, unless a mixture of
    depths admits some), before context parallelism cuts it.
    """
    plan, kernel = tape.plan, tape.workload.attention_kernel
    local = length // plan.cp
    tokens = sequences * local
    if model.mla is not None:
        heads = _latent(tape, model, tokens)
    elif model.cca is not None:
        heads = _convolutional(tape, model, tokens)
    else:
        heads = _grouped_query(tape, model, tokens)
    kv_width = heads.keys * (heads.qk_dim + heads.v_dim)
    # Keys and values of the other context ranks. Counted for all_gather; a ring carries the same bytes.
    gathered = plan.cp * tokens * kv_width
    tape.exchange("all_gather", "attention", "keys and values", "cp", plan.cp, gathered, overlap=True)
    if plan.context == "all_gather":
        tape.save((plan.cp - 1) * tokens * kv_width)
        if tape.ours and plan.cp > 1 and model.mla is not None:  # values are no longer part of a projection with keys
            tape.save(-tokens * heads.queries * model.mla.nope_head_dim)
    exact = _keys_seen(model, layer, length)
    seen = round(2 * exact - 1)
    if tape.ours and model.attention_sinks and plan.cp == 1 and 2 * exact == length + 1:
        # Our trainer's causal kernels see a sink as one more key, with a query before it and a dimension for its score.
        wider = (sequences, local + 1, local + 1, heads.queries, heads.keys, heads.qk_dim + 1, heads.v_dim + 1)
        tape.attention(wider)
        tape.save(tokens * heads.queries * heads.v_dim)
    else:
        tape.attention((sequences, local, seen, *heads[:4]), seen=exact)
    tape.save(tokens * (heads.kept + heads.queries * heads.v_dim))
    if tape.ours and plan.cp > 1:  # made in parts, and once more in one
        tape.save(tokens * heads.queries * heads.v_dim)
    scores = sequences * heads.queries * local * seen
    if kernel == "math":  # after the soft-max, and with dropout the mask and what it leaves
        tape.save(scores, cheap=True)
        if tape.workload.dropout:
            tape.save(scores, width=tape.width + 1, cheap=True)
    else:
        tape.save(tokens * heads.queries, width=4)  # log-sum-exp of the scores
    tape.gemm("attention", "out", tokens, model.hidden_size, heads.queries * heads.v_dim)
    tape.own(model.hidden_size, heads.queries * heads.v_dim, cut="columns")
    tape.own_vectors(model.hidden_size if model.attention_bias == "all" else 0)
    tape.leave_tensor("attention", tokens, model.hidden_size)
    tape.dropped(tokens * model.hidden_size)


def _grouped_query(tape: Tape, model: ModelConfig, tokens: int) -> Heads:
    """Projections and rotation."""
    tp, hidden, dim = tape.plan.tp, model.hidden_size, model.resolved_head_dim
    heads, kv_heads = model.num_heads // tp, max(1, model.resolved_num_kv_heads // tp)
    width = (heads + 2 * kv_heads) * dim
    tape.enter_tensor("attention", tokens, hidden)
    tape.save_entered(tokens, hidden)
    tape.gemm("attention", "qkv", tokens, width, hidden)
    tape.own(heads * dim, hidden, cut="rows")
    tape.own(kv_heads * dim, hidden, times=2, cut="rows")
    tape.own_vectors(width if model.attention_bias != "none" else 0, cut=True)
    if model.attention_experts is not None:
        _head_router(tape, model.attention_experts.num_experts, tokens, hidden, heads * dim)
    if model.qk_norm != "none":
        tape.memory("attention", "norm of queries and keys", tokens * (heads + kv_heads) * dim, 2, 3)
        tape.save_normed(tokens, (heads + kv_heads) * dim)
        whole = model.num_heads + model.resolved_num_kv_heads
        tape.save(tokens * (heads + kv_heads if model.qk_norm == "head" else 2), width=4)
        if tape.ours and tp > 1 and model.qk_norm != "head":  # over parts of rows there is no kernel
            tape.save(tokens * (heads + kv_heads) * dim, width=4)
            sums = (4.0 * 2 * tp * tokens,) * 2
            tape.exchange("all_gather", "attention", "sums of squares", "tp", tp, 0, extra=sums)
        tape.own_vectors(2 * dim if model.qk_norm == "head" else whole * dim)
    if model.clip_qkv is not None:
        tape.memory("attention", "clip", tokens * width, 2, 3)
        tape.save(tokens * width)
    tape.own_vectors(heads if model.attention_sinks else 0, cut=True)
    tape.memory("attention", "rotation", tokens * (heads + kv_heads) * dim, 2, 2)
    return Heads(heads, kv_heads, dim, dim, width)


def _head_router(tape: Tape, experts: int, tokens: int, hidden: int, width: int) -> None:
    """Attention experts (DS-MoE): a softmax over groups of heads, with which their outputs are weighted."""
    tape.gemm("router", "head router", tokens, experts, hidden, dtype="fp32")
    tape.memory("router", "shares of heads", tokens * experts, 4, 4, launches=3, width=4)
    tape.memory("attention", "weighting of heads", tokens * width, 2, 4)
    tape.own(experts, hidden)
    tape.save(tokens * width)
    tape.save(5 * tokens * experts, width=4)
    if tape.width < 4:
        tape.save(tokens * hidden, width=4)
        tape.save(tokens * experts)


def _latent(tape: Tape, model: ModelConfig, tokens: int) -> Heads:
    """DeepSeek-V2's multi-head latent attention: down- and up-projections of queries and of keys with values.

    Tensor ranks make the latents of the tokens they hold and gather those of the others.
    """
    mla, plan, hidden = model.mla, tape.plan, model.hidden_size
    assert mla is not None
    heads = model.num_heads // plan.tp
    query, up = heads * mla.qk_head_dim, heads * (mla.nope_head_dim + mla.v_head_dim)
    latent = mla.kv_rank + mla.rope_head_dim
    local = tokens // plan.tp if plan.sequence_parallel else tokens
    tape.save(local * hidden, cheap=True)
    if mla.q_rank is not None:
        tape.gemm("attention", "q down", local, mla.q_rank, hidden)
        tape.memory("attention", "norm of the query latent", local * mla.q_rank, 2, 3)
        tape.save_normed(local, mla.q_rank)
        tape.save(local, width=4)
        tape.own(mla.q_rank, hidden)
        tape.own_vectors(mla.q_rank)
    tape.gemm("attention", "kv down", local, latent, hidden)
    tape.memory("attention", "norm of the latent", local * mla.kv_rank, 2, 3)
    # A copy of the latent, or all of the projection that it is part of.
    tape.save_normed(local, mla.kv_rank if tape.ours and tape.width < 4 else latent)
    tape.save(local, width=4)
    tape.own(latent, hidden)
    tape.own_vectors(mla.kv_rank)
    tape.enter_tensor("attention", tokens, (mla.q_rank or hidden) + latent)
    query_input = mla.q_rank or hidden
    tape.gemm("attention", "q up" if mla.q_rank else "q", tokens, query, query_input)
    tape.own(query, query_input, cut="rows")
    if mla.q_rank is not None:
        tape.save(tokens * mla.q_rank)
    if tape.ours and plan.tp > 1:  # kept as gathered, queries' and keys' inputs in one
        tape.save(tokens * (latent + (0 if mla.q_rank else hidden)))
    tape.gemm("attention", "kv up", tokens, up, mla.kv_rank)
    tape.save(tokens * latent)
    tape.own(up, mla.kv_rank, cut="rows")
    tape.memory("attention", "rotation", tokens * 2 * query, 2, 2)
    return Heads(heads, heads, mla.qk_head_dim, mla.v_head_dim, 2 * query + up)


def _convolutional(tape: Tape, model: ModelConfig, tokens: int) -> Heads:
    """ZAYA1's compressed convolutional attention: latents, two causal convolutions, means, norms, shifted values."""
    cca, tp, hidden, dim = model.cca, tape.plan.tp, model.hidden_size, model.resolved_head_dim
    assert cca is not None
    heads, kv_heads = model.num_heads // tp, max(1, model.resolved_num_kv_heads // tp)
    channels = (heads + kv_heads) * dim
    tape.enter_tensor("attention", tokens, hidden)
    tape.save_entered(tokens, hidden)
    tape.gemm("attention", "queries and keys", tokens, channels, hidden)
    tape.gemm("attention", "values", tokens, kv_heads * dim, hidden)
    taps = 2.0 * tokens * channels * cca.depthwise_taps
    tape.memory("attention", "depthwise convolution", tokens * channels, 2, 3, flops=taps)
    tape.gemm("attention", "grouped convolution", tokens, dim, dim * cca.grouped_taps, batch=heads + kv_heads)
    tape.memory("attention", "means, norms, rotation", tokens * channels, 4, 6)
    tape.save((cca.depthwise_taps + cca.grouped_taps) * tokens * channels)  # shifted inputs
    tape.save((heads + 2 * kv_heads) * tokens * dim + 2 * (heads + kv_heads) * tokens, width=4)  # the norms, in fp32
    tape.own(heads * dim, hidden, cut="rows")
    tape.own(kv_heads * dim, hidden, cut="rows")
    tape.own(kv_heads * dim // 2, hidden, times=2, cut="rows")
    tape.own(channels, dim * cca.grouped_taps, cut="rows", muon=False)
    tape.own(channels, cca.depthwise_taps, cut="rows", muon=False)
    tape.own_vectors(2 * channels + kv_heads, cut=True)
    return Heads(heads, kv_heads, dim, dim, (heads + 2 * kv_heads) * dim)


def _keys_seen(model: ModelConfig, layer: int, length: int) -> float:
    """The keys that a query of this layer looks at, on average. A kernel is given twice as many: half are seen."""
    window = model.sliding_window if model.layer_type(layer) == "sliding" else None
    window = length if window is None else min(window, length)
    return (window * (window + 1) / 2 + (length - window) * window) / length
