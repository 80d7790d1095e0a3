"""What a rank does once a step: gather weights, reduce gradients, update."""

from moestro.config.plan import Plan, Workload
from moestro.graph.tape import ACTIVATION_BYTES
from moestro.graph.words import Collective, CollectiveOp, Dimension, Kernel, Matrices, Node, Parameters, RankStep

# Bytes of optimizer state beside the fp32 master weight. Muon's is of matrices; its other parameters are AdamW's.
STATE_BYTES = {"adamw": 8, "muon": 4, "sgd": 4, "none": 0}
NEWTON_SCHULZ_STEPS = 5


def rank_step(workload: Workload, plan: Plan, rank: int, parameters: Parameters, ends: bool = False) -> RankStep:
    """`parameters`: of all the rank's stages. ends: it shares the embedding with another end of the pipeline."""
    share = parameters.trained / parameters.total if parameters.total else 0.0
    dense, expert = parameters.dense * share, parameters.expert * share
    gradients: list[Node] = []
    before: list[Node] = []
    groups: tuple[tuple[str, Dimension, float, int], ...] = (
        ("gradients", "dp", dense, plan.dp * plan.cp),
        ("expert gradients", "edp", expert, plan.expert_data_ranks),
    )
    for name, dimension, numbers, ranks in groups:
        if numbers and ranks > 1:
            gradients += _reductions(plan, name, dimension, numbers, ranks)
            if plan.zero in (1, 2):
                before.append(_gather(workload, plan, name, dimension, numbers, ranks))
    gradients += _shared(workload, plan, parameters.replicated * share, ends)
    experts = min(plan.shard_ranks, plan.expert_data_ranks)
    owned = dense / plan.shard_ranks + expert / experts
    update: list[Node] = [_norm(plan, owned)]
    if plan.world_size > 1:
        update.append(Collective("all_reduce", "optimizer", "gradient norm", "world", plan.world_size, 4.0, "fp32"))
    if workload.optimizer == "muon":
        update += _newton_schulz(plan, parameters.shapes, experts)
    matrices = parameters.matrices * owned / parameters.total if parameters.total else 0.0
    return RankStep(rank, tuple(before), tuple(gradients), (*update, *_optimizer(workload, owned, matrices)))


def _shared(workload: Workload, plan: Plan, replicated: float, ends: bool) -> list[Node]:
    """Gradients of what several ranks hold whole, of different tokens: all that tensor parallelism does not cut, when
    it cuts the sequence; and the embedding, at both ends of a pipeline."""
    width, dtype = 4 if plan.gradient_dtype == "fp32" else 2, plan.gradient_dtype
    nodes: list[Node] = []
    if plan.tp > 1 and plan.sequence_parallel and replicated:
        name = "gradients of whole weights"
        nodes.append(Collective("all_reduce", "gradients", name, "tp", plan.tp, replicated * width, dtype))
    if ends and workload.adapter_rank is None:
        size = float((workload.model.vocab_size or 0) * workload.model.hidden_size * width)
        size /= 1 if workload.fused_loss else plan.tp
        nodes.append(Collective("all_reduce", "gradients", "shared embedding", "pp", 2, size, dtype))
    return nodes


def _newton_schulz(plan: Plan, shapes: tuple[Matrices, ...], expert_ranks: int) -> list[Node]:
    """Muon's orthogonalisation: each step of a matrix [m, n], m ≤ n, costs 4 m² n + 2 m³ FLOPs (Jordan et al. 2024).

    With ZeRO the ranks that split the optimizer state share the matrices out; tensor ranks gather a matrix and do the
    same on each.
    """
    nodes: list[Node] = []
    cut = 0.0
    for rows, columns, times, expert in shapes:
        m, n = sorted((rows, columns))
        mine = times / (expert_ranks if expert else plan.shard_ranks)
        cut += 2.0 * mine * rows * columns * (plan.tp > 1 and not expert)
        for name, dims in (("gram", (1, m, m, n)), ("square", (1, m, m, m)), ("product", (1, m, n, m))):
            _, a, b, c = dims
            moved = 2.0 * (a * c + c * b + 2 * a * b)
            flops = 2.0 * a * b * c
            nodes.append(
                Kernel("gemm", "optimizer", name, dims, "bf16", flops, moved, times=NEWTON_SCHULZ_STEPS * mine)
            )
    if cut:
        nodes.insert(0, Collective("all_gather", "optimizer", "matrices", "tp", plan.tp, cut, "bf16"))
    return nodes


def _reductions(plan: Plan, name: str, dimension: Dimension, numbers: float, ranks: int) -> list[Node]:
    """ZeRO-3 has reduced its gradients layer by layer; replicas of its shards remain."""
    width = 4 if plan.gradient_dtype == "fp32" else 2
    dtype, overlap = plan.gradient_dtype, plan.overlap_gradients
    split = min(plan.shard_ranks, ranks)
    found: list[tuple[CollectiveOp, int, float]] = []
    if plan.zero == 0:
        found.append(("all_reduce", ranks, numbers * width))
    else:
        if plan.zero != 3 and split > 1:
            found.append(("reduce_scatter", split, numbers * width))
        if ranks // split > 1:
            found.append(("all_reduce", ranks // split, numbers * width / split))
    nodes: list[Node] = []
    for op, among, size in found:
        pieces = max(1, round(size / plan.bucket_bytes)) if plan.bucket_bytes else 1
        nodes.append(
            Collective(op, "gradients", name, dimension, among, size / pieces, dtype, times=pieces, overlap=overlap)
        )
    return nodes


def _gather(workload: Workload, plan: Plan, name: str, dimension: Dimension, numbers: float, ranks: int) -> Collective:
    width = ACTIVATION_BYTES.get(workload.precision, 2)
    split = min(plan.shard_ranks, ranks)
    return Collective(
        "all_gather",
        "weights",
        name.replace("gradients", "weights"),
        dimension,
        split,
        numbers * width,
        "fp32" if width == 4 else "bf16",
        overlap=plan.overlap_parameters,
    )


def _norm(plan: Plan, owned: float) -> Kernel:
    width = 4 if plan.gradient_dtype == "fp32" else 2
    return Kernel("memory", "optimizer", "gradient norm", (round(owned),), "fp32", 0.0, owned * width)


def _optimizer(workload: Workload, owned: float, matrices: float) -> list[Node]:
    """Reads gradient, state and master weight, writes the latter two and, where there is one, the 16-bit copy.

    matrices: of the owned parameters, those whose state is Muon's.
    """
    if workload.optimizer == "none":
        return []
    state = STATE_BYTES[workload.optimizer] * owned
    if workload.optimizer == "muon":
        state += (STATE_BYTES["adamw"] - STATE_BYTES["muon"]) * (owned - matrices)
    copy = 0 if workload.precision in ACTIVATION_BYTES else 2
    moved = owned * (4 + 2 * 4 + copy) + 2 * state
    return [Kernel("memory", "optimizer", workload.optimizer, (round(owned),), "fp32", 0.0, moved)]
