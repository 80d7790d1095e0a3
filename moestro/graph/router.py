"""What chooses a token's experts, on one rank."""

from moestro.config.model import ModelConfig
from moestro.config.moe import MoEConfig
from moestro.graph.tape import Tape


def router(tape: Tape, model: ModelConfig, moe: MoEConfig, tokens: int, layer: int, top_k: int) -> None:
    """tokens: that this rank routes."""
    config, hidden, choices, size = moe.router, model.hidden_size, moe.num_choices, moe.router.hidden_size
    kind, dtype = config.kind, "fp32" if config.fp32 else None
    if kind != "hash" and (config.jitter > 0 or (config.fp32 and tape.width < 4)):
        tape.save(tokens * hidden, width=4)  # the input once more, wider or with noise
    if config.jitter > 0:
        tape.save(tokens * hidden, width=4)
    if kind in ("linear", "hybrid"):
        tape.gemm("router", "logits", tokens, choices, hidden, dtype=dtype)
        tape.own(choices, hidden)
        tape.own_vectors(choices if kind == "linear" and config.bias else 0)
    if kind == "zaya":
        _zaya(tape, model, moe, tokens, layer, dtype)
    if kind in ("mlp", "attention", "mlp_hadamard", "hybrid"):
        gates = 2 if kind == "mlp_hadamard" else 1
        for name in ("query", "gate")[:gates]:
            tape.gemm("router", name, tokens, size, hidden, dtype=dtype)
        tape.gemm("router", "keys", tokens, choices, size, dtype=dtype)
        tape.own(size, hidden, times=gates)
        tape.own(choices, size)
        tape.own_vectors(1 if kind == "hybrid" else 0)
        tape.save((2 if kind == "mlp" else 3 if gates == 2 else 1) * tokens * size, width=4 if config.fp32 else None)
    tape.memory("router", "scores and choice", tokens * choices, 6, 4, launches=4, width=4)
    tape.save(tokens * _kept_of_choice(moe, top_k), width=1)
    if config.selection == "expert_choice":  # a second, causal router that foretells the choice
        width = max(1, hidden // 2)
        tape.gemm("router", "causal in", tokens, width, hidden, dtype=dtype, detached=True)
        tape.gemm("router", "causal out", tokens, choices, width, dtype=dtype)
        tape.own(width, hidden)
        tape.own(choices, width)
        tape.save(2 * tokens * width + 2 * tokens * choices, width=4 if config.fp32 else None)


def _zaya(tape: Tape, model: ModelConfig, moe: MoEConfig, tokens: int, layer: int, dtype: str | None) -> None:
    """ZAYA1's: down-projection, the state of the MoE layer before, a norm, a network of three layers."""
    size, choices = moe.router.hidden_size, moe.num_choices
    carries = moe.router.carry_state and layer != model.moe_layers.index(True)
    tape.gemm("router", "down", tokens, size, model.hidden_size, dtype=dtype)
    for name in ("first", "second"):
        tape.gemm("router", name, tokens, size, size, dtype=dtype)
    tape.gemm("router", "logits", tokens, choices, size, dtype=dtype)
    tape.memory("router", "state, norm, activations", tokens * size, 8, 12, width=4)
    tape.own(size, model.hidden_size)
    tape.own(size, size, times=2)
    tape.own(choices, size)
    tape.own_vectors(size * (5 if carries else 4))
    tape.save(6 * tokens * size, width=4 if dtype else None)
    tape.save(tokens, width=4)


def _kept_of_choice(moe: MoEConfig, top_k: int) -> int:
    """Bytes that scoring, sorting and weighting keep of a token."""
    config, choices = moe.router, moe.num_choices
    kept = choices * (4 + 4 + 8) + 4  # logits, scores, all choices in order, their log-sum-exp
    if config.score == "sigmoid":
        kept += 8
    if config.top_k_before_score:
        kept += 4 * top_k
    if config.renormalize:
        kept += 4 * top_k + 8
    if moe.balance.aux_scope != "global_batch":
        kept += 4 * choices + 12
    if config.selection == "expert_choice":  # every pair of token and expert is looked at
        return kept + 13 * choices
    return kept + top_k * (2 if config.capacity_factor is not None else 1)
