"""Feed-forward layers on one rank: dense, and mixtures of experts with what moves tokens to them and back."""

from math import comb

from moestro.config.counts import matrices_of
from moestro.config.model import ModelConfig
from moestro.config.moe import MoEConfig
from moestro.config.plan import Plan
from moestro.graph.router import router
from moestro.graph.tape import Tape
from moestro.graph.words import CollectiveOp, Dimension


def dense(tape: Tape, model: ModelConfig, tokens: int) -> None:
    """tokens: of a micro-batch on one context rank."""
    assert model.intermediate_size is not None
    hidden, width = model.hidden_size, model.intermediate_size // tape.plan.tp
    tape.enter_tensor("dense", tokens, hidden)
    tape.save_entered(tokens, hidden)
    _two_products(tape, "dense", tokens, hidden, width, matrices_of(model.activation))
    tape.leave_tensor("dense", tokens, hidden)
    tape.dropped(tokens * hidden)


def mixture(tape: Tape, model: ModelConfig, layer: int, tokens: int) -> None:
    """A layer of routed and shared experts. tokens: of a micro-batch on one context rank, before tp cuts them."""
    moe, plan, hidden = model.moe, tape.plan, model.hidden_size
    assert moe is not None
    local = tokens // plan.tp if plan.sequence_parallel else tokens
    matrices = matrices_of(moe.activation)
    router(tape, model, moe, local, layer, model.top_k_of_layer(layer))
    if _keeps_input(tape, moe):
        tape.save(local * hidden)
    outer = moe.latent_size or hidden
    if moe.latent_size is not None:
        tape.gemm("experts", "to latent", local, outer, hidden)
        tape.own(outer, hidden)
        tape.own(hidden, outer)
        tape.save(2 * local * outer)
    if moe.num_shared_experts:
        width = moe.num_shared_experts * moe.expert_hidden_size // plan.tp
        tape.enter_tensor("shared experts", tokens, hidden)
        if tape.ours and plan.tp > 1:  # otherwise it is the router's
            tape.save(tokens * hidden)
        _two_products(tape, "shared experts", tokens, hidden, width, matrices)
        tape.leave_tensor("shared experts", tokens, hidden)
    _experts(tape, moe, local, model.top_k_of_layer(layer), outer)
    if moe.latent_size is not None:
        tape.gemm("experts", "from latent", local, hidden, outer)


def _keeps_input(tape: Tape, moe: MoEConfig) -> bool:
    """Whether the layer's input outlives it. Our trainer's router may keep a wider copy instead, and its experts what
    other ranks sent."""
    plan = tape.plan
    copied = moe.router.kind == "hash" or (moe.router.fp32 and tape.width < 4)
    away = plan.ep * plan.etp > 1 and moe.latent_size is None and not (moe.num_shared_experts and plan.tp == 1)
    return not (tape.ours and copied and away) or plan.expert_recompute


def _experts(tape: Tape, moe: MoEConfig, local: int, top_k: int, outer: int) -> None:
    """The routed experts of `local` tokens of width `outer`, in chunks from dispatch to combine."""
    plan, saved = tape.plan, tape.saved
    tape.repeat = plan.expert_chunks
    start = len(tape.forward)
    _chunk(tape, moe, local / plan.expert_chunks, top_k, outer)
    tape.repeat = 1
    chunk = tape.saved - saved
    tape.saved = saved + chunk * plan.expert_chunks
    if plan.expert_recompute:  # only what comes in and goes out outlives a chunk; its results need not travel again
        again = [node for node in tape.forward[start:] if not node.name.startswith("combine")]
        tape.backward_groups.append(again)
        tape.saved, tape.transient = saved, chunk
        if tape.ours:  # the choices and their weights
            tape.save(12 * local * top_k, width=1)
    _hold_experts(tape, moe, outer)
    if tape.ours:  # in backward: weights in 16 bits and their gradients, a row's gradients before and after its place
        rows = _copies(moe, plan, local / plan.expert_chunks, top_k)
        tape.transient += tape.expert * (4 + (tape.width if tape.width < 4 else 0)) + 2 * tape.width * rows * outer


def _chunk(tape: Tape, moe: MoEConfig, tokens: float, top_k: int, outer: int) -> None:
    """MemFine's unit (arXiv 2511.21431): some tokens of this rank through dispatch, experts and combine."""
    plan, matrices = tape.plan, matrices_of(moe.activation)
    first = plan.etp > 1 and tape.ours
    if first:
        tokens *= plan.etp
        weights = (4.0 * tokens * top_k,) * 2  # of the gate, fp32
        tape.exchange("all_gather", "dispatch", "tokens of the slices", "etp", plan.etp, tokens * outer, extra=weights)
    copies = _copies(moe, plan, tokens, top_k)
    _exchange(tape, moe, tokens, copies, top_k, outer, back=False)
    # With etp ranks holding slices of the same experts, all of their tokens pass all slices.
    last = plan.etp > 1 and not first
    rows = copies * plan.etp if last else copies
    if last:
        tape.exchange("all_gather", "dispatch", "rows of the slices", "etp", plan.etp, rows * outer)
    width, held = moe.resolved_expert_hidden_size // plan.etp, moe.resolved_num_experts // plan.ep
    up = (matrices - 1) * width
    tape.grouped("experts", "up", held, round(rows), up, outer)
    if tape.ours:
        tape.memory("experts", "activation", rows * width, matrices, 2 * matrices - 1)
        tape.save(rows * up)
        tape.save(rows, width=20)  # a row's place, token and weight
        if plan.ep * plan.etp > 1:  # the tokens that came, each once
            came = _sent(moe, plan.ep, tokens, copies, top_k) * (plan.etp if last else 1)
            if plan.dispatch == "all_gather":
                came = plan.ep * tokens
            tape.save(came * outer)
            if plan.ep > 1:  # what travelled with them, where they came from, and all of their choices in order
                if plan.dispatch != "all_gather":
                    tape.save(_packing(tape, came, outer, top_k)[0] + 16 * came, width=1)
                tape.save(8 * (came * top_k - rows), width=1)
    else:
        tape.save(rows * outer)
        tape.activation("experts", rows, width, matrices)
        tape.save(copies * outer)  # what the weighted sum of the experts' outputs needs for the weights' gradient
    tape.grouped("experts", "down", held, round(rows), outer, width)
    if tape.ours and moe.expert_bias:  # rows are added up by a product with whose they are
        tape.weight_only("experts", "bias wgrad", held, up + outer // plan.etp, round(rows))
    if last:
        tape.exchange("reduce_scatter", "dispatch", "combine rows of the slices", "etp", plan.etp, rows * outer)
    _exchange(tape, moe, tokens, copies, top_k, outer, back=True)
    if first:
        tape.exchange("reduce_scatter", "dispatch", "combine of the slices", "etp", plan.etp, tokens * outer)


def _hold_experts(tape: Tape, moe: MoEConfig, outer: int) -> None:
    plan, matrices = tape.plan, matrices_of(moe.activation)
    width, held = moe.resolved_expert_hidden_size // plan.etp, moe.resolved_num_experts // plan.ep
    tape.own(width, outer, times=held * (matrices - 1), cut="rows", expert=True)
    tape.own(outer, width, times=held, cut="columns", expert=True)
    if moe.expert_bias:
        tape.own_vectors(held * ((matrices - 1) * width + outer // plan.etp), cut=True, expert=True)


def _two_products(tape: Tape, part: str, tokens: int, hidden: int, width: int, matrices: int) -> None:
    up = (matrices - 1) * width
    tape.gemm(part, "up", tokens, up, hidden)
    tape.activation(part, tokens, width, matrices)
    tape.gemm(part, "down", tokens, hidden, width)
    tape.own(width, hidden, times=matrices - 1, cut="rows")
    tape.own(hidden, width, cut="columns")


def _copies(moe: MoEConfig, plan: Plan, tokens: float, top_k: int) -> float:
    """(token, expert) pairs that leave a rank, and on average arrive at one."""
    if moe.router.selection == "dense":
        return tokens * moe.resolved_num_experts
    if moe.router.selection == "expert_choice":
        return tokens * top_k * (moe.router.capacity_factor or 1.0)
    capacity = plan.capacity_factor or moe.router.capacity_factor
    # With a capacity, experts compute at most their share; below 1 the rest is dropped.
    return tokens * top_k * min(1.0, capacity) if capacity is not None else tokens * top_k


def distinct_ranks(experts: int, top_k: int, ranks: int, groups: int = 1, top_groups: int = 1) -> float:
    """Ranks that a token's top_k experts lie on, on average over even choices without repetition.

    ranks · (1 - C(E - E/ranks, k) / C(E, k)), the hypergeometric count of fine-grained MoE's price (2506.02890). With
    node-limited routing (DeepSeek-V3) a token's choice is among top_groups of `groups` equal groups of experts.
    """
    size = experts // groups  # of a group
    open_experts = top_groups * size
    held = min(experts // ranks, size)  # of a rank, in one group
    here = max(1, groups // ranks)  # groups of which a rank holds some
    hit = 0.0
    for opened in range(1, min(here, top_groups) + 1):
        chance = comb(here, opened) * comb(groups - here, top_groups - opened) / comb(groups, top_groups)
        missed = 1.0
        for i in range(top_k):
            missed *= max(0, open_experts - opened * held - i) / (open_experts - i)
        hit += chance * (1 - missed)
    return ranks * hit


def worst_rows(tokens: int, ep: int, top_k: int, experts_here: int) -> int:
    """The most expert rows that a rank can get: of `tokens` on each of ep ranks (MemFine, arXiv 2511.21431)."""
    return tokens * ep * min(top_k, experts_here)


def _exchange(tape: Tape, moe: MoEConfig, tokens: float, copies: float, top_k: int, hidden: int, back: bool) -> None:
    """Tokens to their experts' ranks, or the results back to their tokens."""
    plan = tape.plan
    name = "combine" if back else "dispatch"
    if not back:
        tape.memory("dispatch", "sort by expert", copies * hidden, 2, 2, launches=3)
    if plan.ep > 1:
        if plan.dispatch == "two_hop":
            _two_hop(tape, moe, tokens, copies, top_k, hidden, name)
        elif plan.dispatch == "all_gather":
            op: CollectiveOp = "reduce_scatter" if back else "all_gather"
            size = plan.ep * tokens * hidden
            weights = (4.0 * plan.ep * tokens * top_k,) * 2 if tape.ours and not back else (0.0, 0.0)
            tape.exchange(op, "dispatch", name, "ep", plan.ep, size, overlap=plan.overlap_dispatch, extra=weights)
        else:
            once = plan.dispatch == "deduplicated"
            sent = _sent(moe, plan.ep, tokens, copies, top_k) if once else copies
            extra = _packing(tape, sent, hidden, top_k) if once and not back else (0.0, 0.0)
            tape.exchange(
                "all_to_all", "dispatch", name, "ep", plan.ep, sent * hidden, overlap=plan.overlap_dispatch, extra=extra
            )
        tape.memory("dispatch", f"{name}: order by expert", copies * hidden, 2, 2)
    if back:
        tape.memory("dispatch", "weighted sum", copies * hidden, 2, 3, launches=2)


def _packing(tape: Tape, rows: float, hidden: int, top_k: int) -> tuple[float, float]:
    """What our trainer's rows carry besides a token: its weights (fp32) and, forward, its ids (int32), aligned."""
    if not tape.ours:
        return 0.0, 0.0
    weights_end = _aligned(hidden * tape.width, 8) + 4 * top_k
    sizes = _aligned(weights_end + 4 * top_k, 16), _aligned(weights_end, 16)
    return rows * (sizes[0] - hidden * tape.width), rows * (sizes[1] - hidden * tape.width)


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


def _two_hop(tape: Tape, moe: MoEConfig, tokens: float, copies: float, top_k: int, hidden: int, name: str) -> None:
    """Between nodes one copy of a token for each node it goes to, inside one for each expert (DeepEP's way); inside our
    trainer's one for each rank."""
    plan = tape.plan
    assert plan.ranks_per_node is not None
    inside = min(plan.ep, max(1, plan.ranks_per_node // plan.etp))
    nodes = -(-plan.ep // inside)
    hops = list[tuple[str, Dimension, int, float]]()
    if nodes > 1:
        hops.append(("between nodes", "ep_between", nodes, _sent(moe, nodes, tokens, copies, top_k)))
    if inside > 1:
        rows = _sent(moe, plan.ep, tokens, copies, top_k) if tape.ours else copies
        hops.append(("inside nodes", "ep", inside, rows))
    for where, dimension, ranks, rows in reversed(hops) if name == "combine" else hops:
        label, extra = f"{name} {where}", (0.0, 0.0) if name == "combine" else _packing(tape, rows, hidden, top_k)
        tape.exchange(
            "all_to_all", "dispatch", label, dimension, ranks, rows * hidden, overlap=plan.overlap_dispatch, extra=extra
        )


def _sent(moe: MoEConfig, ranks: int, tokens: float, copies: float, top_k: int) -> float:
    """Rows that a rank sends to `ranks` ranks or nodes, itself included, when a token goes to each of them once."""
    experts, limited = moe.resolved_num_experts, moe.router
    groups, top_groups = (limited.num_groups, limited.top_groups) if limited.selection == "top_k" else (1, 1)
    if moe.router.selection == "dense":
        return tokens * ranks
    return min(copies, tokens * distinct_ranks(experts, min(top_k, experts), ranks, groups, top_groups))
