"""Feed-forward layers on one rank: dense, and mixtures of experts with what moves tokens to them and back."""

from moestro.config.counts import matrices_of
from moestro.config.model import ModelConfig
from moestro.config.moe import MoEConfig
from moestro.config.plan import Plan
from moestro.graph.tape import Tape


def dense(tape: Tape, model: ModelConfig, tokens: int) -> None:
    """tokens: of a micro-batch on one context rank."""
    assert model.intermediate_size is not None
    hidden, width = model.hidden_size, model.intermediate_size // tape.plan.tp
    tape.enter_tensor("dense", tokens, hidden)
    tape.save(tokens * hidden / (tape.plan.tp if tape.plan.sequence_parallel else 1), cheap=True)
    _two_products(tape, "dense", tokens, hidden, width, matrices_of(model.activation))
    tape.leave_tensor("dense", tokens, hidden)


def mixture(tape: Tape, model: ModelConfig, layer: int, tokens: int) -> None:
    """A layer of routed and shared experts. tokens: of a micro-batch on one context rank, before tp cuts them."""
    moe, plan, hidden = model.moe, tape.plan, model.hidden_size
    assert moe is not None
    local = tokens // plan.tp if plan.sequence_parallel else tokens
    top_k, experts = model.top_k_of_layer(layer), moe.resolved_num_experts
    matrices = matrices_of(moe.activation)
    _router(tape, model, moe, local, layer)
    tape.save(local * hidden)  # input of router and experts
    outer = hidden
    if moe.latent_size is not None:
        outer = moe.latent_size
        tape.gemm("experts", "to latent", local, outer, hidden)
        tape.gemm("experts", "from latent", local, hidden, outer)
        tape.own(2 * hidden * outer)
    if moe.num_shared_experts:
        width = moe.num_shared_experts * moe.expert_hidden_size // plan.tp
        tape.enter_tensor("shared experts", tokens, hidden)
        _two_products(tape, "shared experts", tokens, hidden, width, matrices)
        tape.leave_tensor("shared experts", tokens, hidden)
    copies = _copies(moe, plan, local, top_k)
    sent = _sent(plan, local, copies, experts, top_k)
    _dispatch(tape, copies, sent, outer, back=False)
    # With etp ranks holding slices of the same experts, all of their tokens pass all slices.
    rows = copies * plan.etp
    if plan.etp > 1:
        tape.exchange("all_gather", "dispatch", "tokens of the slices", "etp", plan.etp, rows * outer)
    width = moe.resolved_expert_hidden_size // plan.etp
    held = experts // plan.ep
    up = (matrices - 1) * width
    tape.grouped("experts", "up", held, rows, up, outer)
    tape.save(rows * outer)
    tape.activation("experts", rows, width, matrices)
    tape.grouped("experts", "down", held, rows, outer, width)
    biases = (up + outer) if moe.expert_bias else 0
    tape.own(held * outer * (up + width), held * biases, expert=True)
    if plan.etp > 1:
        tape.exchange("reduce_scatter", "dispatch", "tokens of the slices back", "etp", plan.etp, rows * outer)
    _dispatch(tape, copies, sent, outer, back=True)
    tape.save(copies * outer)  # what the weighted sum of the experts' outputs needs for the weights' gradient


def _two_products(tape: Tape, part: str, tokens: int, hidden: int, width: int, matrices: int) -> None:
    up = (matrices - 1) * width
    tape.gemm(part, "up", tokens, up, hidden)
    tape.activation(part, tokens, width, matrices)
    tape.gemm(part, "down", tokens, hidden, width)
    tape.own(hidden * (up + width))


def _router(tape: Tape, model: ModelConfig, moe: MoEConfig, tokens: int, layer: int) -> None:
    router, hidden, choices, size = moe.router, model.hidden_size, moe.num_choices, moe.router.hidden_size
    dtype = "fp32" if router.fp32 else None
    if router.kind in ("linear", "hybrid"):
        tape.gemm("router", "logits", tokens, choices, hidden, dtype=dtype)
        tape.own(hidden * choices, choices if router.bias else 0)
    if router.kind == "zaya":
        carries = router.carry_state and layer != model.moe_layers.index(True)
        tape.gemm("router", "down", tokens, size, hidden, dtype=dtype)
        for name in ("first", "second"):
            tape.gemm("router", name, tokens, size, size, dtype=dtype)
        tape.gemm("router", "logits", tokens, choices, size, dtype=dtype)
        tape.memory("router", "state, norm, activations", tokens * size, 8, 12, width=4)
        tape.own(hidden * size + 2 * size * size + size * choices, size * (5 if carries else 4))
        tape.save(6 * tokens * size, width=4)
    if router.kind in ("mlp", "attention", "mlp_hadamard", "hybrid"):
        for name in ("query", "gate")[: 2 if router.kind == "mlp_hadamard" else 1]:
            tape.gemm("router", name, tokens, size, hidden, dtype=dtype)
        tape.gemm("router", "keys", tokens, choices, size, dtype=dtype)
        gates = 2 if router.kind == "mlp_hadamard" else 1
        tape.own(gates * hidden * size + size * choices, 1 if router.kind == "hybrid" else 0)
        tape.save(2 * tokens * size, width=4)
    tape.memory("router", "scores and choice", tokens * choices, 6, 4, launches=4, width=4)
    tape.save(2 * tokens * choices, width=4)
    if router.selection == "expert_choice":  # a second, causal router stands in when not training
        tape.own(hidden // 2 * (hidden + choices))


def _copies(moe: MoEConfig, plan: Plan, tokens: int, top_k: int) -> int:
    """(token, expert) pairs that leave a rank, and on average arrive at one."""
    if moe.router.selection == "dense":
        return tokens * moe.resolved_num_experts
    if moe.router.selection == "expert_choice":
        return round(tokens * top_k * (moe.router.capacity_factor or 1.0))
    capacity = plan.capacity_factor or moe.router.capacity_factor
    # With a capacity, experts compute at most their share; below 1 the rest is dropped.
    return round(tokens * top_k * min(1.0, capacity)) if capacity is not None else tokens * top_k


def _sent(plan: Plan, tokens: int, copies: int, experts: int, top_k: int) -> float:
    """Rows that a rank sends to the ep ranks, its own included."""
    if plan.dispatch == "deduplicated":
        return min(copies, tokens * distinct_ranks(experts, top_k, plan.ep))
    return copies


def distinct_ranks(experts: int, top_k: int, ranks: int) -> float:
    """Ranks that a token's top_k experts lie on, on average over even choices without repetition.

    ranks · (1 - C(E - E/ranks, k) / C(E, k)), the hypergeometric count of fine-grained MoE's price (2506.02890).
    """
    held = experts // ranks
    missed = 1.0
    for i in range(top_k):
        missed *= max(0, experts - held - i) / (experts - i)
    return ranks * (1 - missed)


def _dispatch(tape: Tape, copies: int, sent: float, hidden: int, back: bool) -> None:
    """Tokens to their experts' ranks, or the results back to their tokens."""
    plan = tape.plan
    name = "combine" if back else "dispatch"
    passes = 2.0
    if not back:
        tape.memory("dispatch", "sort by expert", copies * hidden, passes, passes, launches=3)
    if plan.ep > 1:
        if plan.dispatch == "all_gather":
            size, op = plan.ep * sent, "reduce_scatter" if back else "all_gather"
        else:
            size, op = sent, "all_to_all"
        tape.exchange(op, "dispatch", name, "ep", plan.ep, size * hidden, overlap=plan.overlap_dispatch)  # type: ignore[arg-type]
        tape.memory("dispatch", f"{name}: order by expert", copies * hidden, passes, passes)
    if back:
        tape.memory("dispatch", "weighted sum", copies * hidden, passes, 3, launches=2)
