"""What a rank does once a step: gather weights, reduce gradients, update."""

from typing import NamedTuple

from moestro.config.plan import Plan, Workload
from moestro.graph.pieces import sharded_passes
from moestro.graph.tape import expert_shards, weight_bytes
from moestro.graph.words import Collective, CollectiveOp, Dimension, Kernel, Matrices, Node, Parameters, RankStep

# Bytes of optimizer state beside the fp32 master weight. Muon's is of matrices; its other parameters are AdamW's.
STATE_BYTES = {"adamw": 8, "muon": 4, "sgd": 4, "none": 0}
NEWTON_SCHULZ_STEPS = 5


def rank_step(workload: Workload, plan: Plan, rank: int, parameters: Parameters, ends: bool = False) -> RankStep:
    """`parameters`: of all the rank's stages. ends: it shares the embedding with another end of the pipeline."""
    gradients: list[Node] = []
    before: list[Node] = []
    owned = 0.0
    reduced = sharded_passes(workload, plan) and workload.trainer == "moestro"
    for group in _groups(workload, plan, parameters):
        owned += group.numbers / group.split
        if not group.numbers or group.ranks == 1 or reduced:
            continue
        gradients += _reductions(plan, group)
        if plan.zero in (1, 2) and group.split > 1:
            before.append(_gather(workload, plan, group))
    gradients += _shared(workload, plan, parameters, ends)
    update: list[Node] = [_norm(plan, owned)]
    if plan.world_size > 1:
        update.append(Collective("all_reduce", "optimizer", "gradient norm", "world", plan.world_size, 4.0, "fp32"))
    if workload.optimizer == "muon":
        update += _newton_schulz(plan, parameters.shapes, expert_shards(workload, plan))
        update += _brought_together(workload, plan, parameters.shapes)
    matrices = parameters.matrices * owned / parameters.total if parameters.total else 0.0
    return RankStep(rank, tuple(before), tuple(gradients), (*update, *_optimizer(workload, owned, matrices)))


class Shared(NamedTuple):
    """A buffer that `ranks` ranks share out. sizes: (elements, how many) of the matrices in it."""

    dimension: Dimension
    ranks: int
    sizes: list[tuple[int, int]]


class _Group(NamedTuple):
    """Trained parameters whose gradients the same ranks add up."""

    name: str
    dimension: Dimension
    numbers: float
    ranks: int
    split: int  # among how many of the ranks the optimizer's state is


def _groups(workload: Workload, plan: Plan, parameters: Parameters) -> list[_Group]:
    share = parameters.trained / parameters.total if parameters.total else 0.0
    dense, expert, whole = parameters.dense * share, parameters.expert * share, parameters.replicated * share
    data = plan.dp * plan.cp
    experts = _Group("expert gradients", "edp", expert, plan.expert_data_ranks, expert_shards(workload, plan))
    if workload.trainer == "megatron" or plan.tp == 1 or plan.zero >= 2:
        groups = [_Group("gradients", "dp", dense, data, plan.shard_ranks), experts]
        return groups if workload.trainer == "megatron" or plan.zero != 1 else [_even(group) for group in groups]
    all_ranks = data * plan.tp  # of a stage, which hold the same of what tensor parallelism does not cut
    groups = [
        _Group("gradients", "dp", dense - whole, data, plan.shard_ranks),
        _Group("gradients of whole weights", "world", whole, all_ranks, all_ranks if plan.zero else 1),
        experts,
    ]
    return [_even(group) for group in groups] if plan.zero == 1 else groups


def _even(group: _Group) -> _Group:
    """Padded as our trainer's slices of 16-byte units are."""
    unit = 4 * group.split
    return group._replace(numbers=float(-(-group.numbers // unit) * unit))


def _shared(workload: Workload, plan: Plan, parameters: Parameters, ends: bool) -> list[Node]:
    """Gradients of what several ranks hold whole, of different tokens: all that tensor parallelism does not cut, when
    it cuts the sequence; and the embedding, at both ends of a pipeline."""
    width, dtype, ours = 4 if plan.gradient_dtype == "fp32" else 2, plan.gradient_dtype, workload.trainer == "moestro"
    nodes: list[Node] = []
    share = parameters.trained / parameters.total if parameters.total else 0.0
    whole = parameters.replicated * share * width / (plan.shard_ranks if ours else 1)
    if plan.tp > 1 and plan.sequence_parallel and whole and not (ours and plan.zero < 2):
        nodes.append(Collective("all_reduce", "gradients", "gradients of whole weights", "tp", plan.tp, whole, dtype))
    if ends and workload.adapter_rank is None:
        size = float((workload.model.vocab_size or 0) * workload.model.hidden_size * width)
        size /= 1 if workload.fused_loss else plan.tp
        if ours:  # after the reduction among the ranks of a stage, of which each has a part
            size /= plan.shard_ranks * (plan.tp if plan.zero == 1 else 1)
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


def shared_matrices(workload: Workload, plan: Plan, shapes: tuple[Matrices, ...]) -> list[Shared]:
    """The buffers with Muon's matrices that ranks share out: one, or experts by themselves where other ranks hold them.
    Of what tensor parallelism cuts, a rank's part."""
    parts = [(m.expert, m.rows * m.columns // (plan.etp if m.expert else plan.tp), m.times) for m in shapes if m.times]
    dense, expert = ([(size, times) for of, size, times in parts if of is which] for which in (False, True))
    ranks, expert_ranks = plan.shard_ranks, expert_shards(workload, plan)
    if plan.ep == 1 and plan.etp == plan.tp:
        found = [Shared("dp", ranks, dense + expert)]
    else:
        found = [Shared("dp", ranks, dense), Shared("edp", expert_ranks, expert)]
    return [one for one in found if one.ranks > 1 and one.sizes]


def _brought_together(workload: Workload, plan: Plan, shapes: tuple[Matrices, ...]) -> list[Node]:
    """What ranks send so that each matrix is whole on one of them, and the results back, in 16 bits (arXiv 2511.17127,
    algorithm 1, and its extension in optim.matrix_exchange).

    With ZeRO-1 a slice ends somewhere in a matrix at either end, in its middle on average: half of it goes to the
    neighbour and half of a result comes back. Where slices are shorter than matrices, and with ZeRO-2 and 3, which cut
    every matrix among all ranks, each sends all it holds and gets as much back.
    """
    nodes: list[Node] = []
    for dimension, ranks, sizes in shared_matrices(workload, plan, shapes):
        elements = sum(size * times for size, times in sizes)
        held, mean = elements / ranks, sum(size * size * times for size, times in sizes) / elements
        if plan.zero == 1 and held >= mean:
            nodes.append(Collective("send_recv", "optimizer", "ends of slices", dimension, 2, 2 * mean, "bf16"))
        else:
            way = Collective("all_to_all", "optimizer", "pieces of matrices", dimension, ranks, 2 * held, "bf16")
            nodes += [way, way]
    return nodes


def _reductions(plan: Plan, group: _Group) -> list[Node]:
    """ZeRO-3 has reduced its gradients layer by layer; replicas of its shards remain."""
    width = 4 if plan.gradient_dtype == "fp32" else 2
    dtype, overlap, ranks, split = plan.gradient_dtype, plan.overlap_gradients, group.ranks, group.split
    found: list[tuple[CollectiveOp, int, float]] = []
    if plan.zero == 0:
        found.append(("all_reduce", ranks, group.numbers * width))
    else:
        if plan.zero != 3 and split > 1:
            found.append(("reduce_scatter", split, group.numbers * width))
        if ranks // split > 1:
            found.append(("all_reduce", ranks // split, group.numbers * width / split))
    nodes: list[Node] = []
    for op, among, size in found:
        times = max(1, round(size / plan.bucket_bytes)) if plan.bucket_bytes else 1
        each = size / times
        nodes.append(
            Collective(op, "gradients", group.name, group.dimension, among, each, dtype, times=times, overlap=overlap)
        )
    return nodes


def _gather(workload: Workload, plan: Plan, group: _Group) -> Collective:
    width = weight_bytes(workload)
    name, dtype = group.name.replace("gradients of ", "").replace("gradients", "weights"), "bf16"
    dtype = "fp32" if width == 4 else dtype
    size = group.numbers * width
    return Collective(
        "all_gather", "weights", name, group.dimension, group.split, size, dtype, overlap=plan.overlap_parameters
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
    copy = 0 if weight_bytes(workload) == 4 else 2
    moved = owned * (4 + 2 * 4 + copy) + 2 * state
    return [Kernel("memory", "optimizer", workload.optimizer, (round(owned),), "fp32", 0.0, moved)]
