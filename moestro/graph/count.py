"""Counts a step's graph from shapes alone: no tensor is made, no module is built."""

from moestro.config.model import ModelConfig
from moestro.config.plan import Plan, Workload, misfits
from moestro.errors import MoestroError
from moestro.graph.pieces import Pieces, add_parameters, pieces_of
from moestro.graph.step import rank_step, shared_matrices
from moestro.graph.tape import stream_bytes
from moestro.graph.words import Parameters, RankStep, Stage, StepGraph
from moestro.optim.slices import sharing_of

V_SHAPED = ("zbv", "dualpipev")


def count_step(workload: Workload, plan: Plan) -> StepGraph:
    """The graph of one optimizer step.

    Pieces are kept between calls: many plans of one workload share them (see `words.Piece` for pricing them once).

    Raises:
        MoestroError: the plan does not fit the workload; the message says why.
    """
    wrong = misfits(workload, plan)
    if wrong:
        raise MoestroError("; ".join(wrong[:2]))
    model, pieces = workload.model, pieces_of(workload, plan)
    stages = []
    last = plan.pp * plan.vpp - 1
    send = float(pieces.local * stream_bytes(workload))
    for index, layers in enumerate(split_layers(model.num_layers, plan)):
        again = _recomputed(model, plan, index, layers)
        runs, parameters, saved = pieces.stage(layers, index == 0, index == last, plan.pp > 1, again)
        sent = 0.0 if index == last else send
        stages.append(Stage(index, rank_of(index, plan), tuple(layers), parameters, saved, runs, sent))
    return StepGraph(
        world_size=plan.world_size,
        micro_batches=plan.micro_batches(workload),
        tokens=workload.tokens,
        model_flops=pieces.flops_per_token * workload.tokens,
        stages=tuple(stages),
        ranks=_rank_steps(workload, plan, stages, pieces),
        notes=(*_notes(workload, plan), *_sliced(workload, plan, stages[0].parameters)),
    )


def split_layers(num_layers: int, plan: Plan) -> list[range]:
    """The layers of each of the pp · vpp stages, the first ones larger where they do not come out even."""
    stages = plan.pp * plan.vpp
    sizes = plan.layers_per_stage or tuple(num_layers // stages + (i < num_layers % stages) for i in range(stages))
    found, start = [], 0
    for size in sizes:
        found.append(range(start, start + size))
        start += size
    return found


def rank_of(stage: int, plan: Plan) -> int:
    """The pipeline rank of a stage: every pp-th, or for V-shaped schedules down and up again."""
    if plan.schedule in V_SHAPED:
        return stage if stage < plan.pp else 2 * plan.pp - 1 - stage
    return stage % plan.pp


def _recomputed(model: ModelConfig, plan: Plan, stage: int, layers: range) -> int:
    """Of how many layers of a stage; those of multi-token prediction come last."""
    if plan.recompute == "none":
        return 0
    there = len(layers) + (model.num_blocks - model.num_layers if stage == plan.pp * plan.vpp - 1 else 0)
    most = plan.recompute_layers if plan.recompute_per_stage is None else plan.recompute_per_stage[stage]
    return there if most is None else min(most, there)


def _rank_steps(workload: Workload, plan: Plan, stages: list[Stage], pieces: Pieces) -> tuple[RankStep, ...]:
    """Ranks with equal stages do the same; as pieces, so are these kept for later graphs."""
    shared = stages[0].rank != stages[-1].rank and (workload.model.tie_embeddings or workload.model.mtp is not None)
    ends = (stages[0].rank, stages[-1].rank) if shared else ()
    own: list[list[Parameters]] = [[] for _ in range(plan.pp)]
    for stage in stages:
        own[stage.rank].append(stage.parameters)
    # All that a rank's step depends on and pieces do not.
    outside = (workload.optimizer, plan.pp, plan.dp, plan.zero, plan.shard, plan.bucket_bytes)
    ranks = []
    for rank, parts in enumerate(own):
        key = (outside, rank in ends, *map(id, parts))
        step = pieces.steps.get(key)
        if step is None:
            parameters = add_parameters([(part, 1) for part in parts])
            step = pieces.steps[key] = rank_step(workload, plan, rank, parameters, rank in ends)
        ranks.append(RankStep(rank, step.before, step.gradients, step.update))
    return tuple(ranks)


def _notes(workload: Workload, plan: Plan) -> tuple[str, ...]:
    model, notes = workload.model, []
    if model.encoders and not workload.media_items:
        notes.append("no images or sounds: the encoders' weights are counted, their work is not (media_items)")
    if model.moe is not None and model.moe.null_experts:
        notes.append("choices of null experts are counted as if experts worked on them")
    return tuple(notes)


def _sliced(workload: Workload, plan: Plan, parameters: Parameters) -> list[str]:
    """That slices of ZeRO-1 are so short that Muon's matrices lie on more than two of them."""
    if workload.optimizer != "muon" or plan.zero != 1:
        return []
    notes = []
    for _, ranks, sizes in shared_matrices(workload, plan, parameters.shapes):
        shared = sharing_of((size for size, times in sizes for _ in range(times)), ranks)
        if shared.on_more:
            every = shared.alone + shared.on_two + shared.on_more
            notes.append(
                f"{shared.on_more:,} of Muon's {every:,} matrices lie on more than two of {ranks:,} slices of ZeRO-1: "
                f"a rank gathers each; up to {shared.most_ranks:,} slices ranks would only send to neighbours"
            )
    return notes
