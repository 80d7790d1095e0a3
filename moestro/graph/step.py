"""What a rank does once a step: gather weights, reduce gradients, update."""

from moestro.config.plan import Plan, Workload
from moestro.graph.tape import ACTIVATION_BYTES
from moestro.graph.words import Collective, CollectiveOp, Dimension, Kernel, Node, Parameters, RankStep

# Bytes of optimizer state beside the fp32 master weight, and of traffic for one updated parameter: state, master weight
# and gradient read, state and master weight written (the 16-bit copy is added where there is one).
STATE_BYTES = {"adamw": 8, "muon": 4, "sgd": 4, "none": 0}


def rank_step(workload: Workload, plan: Plan, rank: int, parameters: Parameters) -> RankStep:
    """`parameters`: of all the rank's stages."""
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
    owned = dense / plan.shard_ranks + expert / min(plan.shard_ranks, plan.expert_data_ranks)
    update = [_norm(plan, owned), *_optimizer(workload, owned)]
    if plan.world_size > 1:
        update.insert(1, Collective("all_reduce", "optimizer", "gradient norm", "world", plan.world_size, 4.0, "fp32"))
    return RankStep(rank, tuple(before), tuple(gradients), tuple(update))


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


def _optimizer(workload: Workload, owned: float) -> list[Node]:
    if workload.optimizer == "none":
        return []
    state = STATE_BYTES[workload.optimizer]
    copy = 0 if workload.precision in ACTIVATION_BYTES else 2
    moved = owned * (4 + 2 * (4 + state) + copy)
    return [Kernel("memory", "optimizer", workload.optimizer, (round(owned),), "fp32", 0.0, moved)]
