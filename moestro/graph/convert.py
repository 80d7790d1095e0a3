"""Between the trainer's own configuration and what a prediction is made of."""

from moestro.config.counts import resolved_model
from moestro.config.plan import Plan, Workload
from moestro.config.root import Config
from moestro.errors import MoestroError
from moestro.parallel.layout import Layout, resolve_layout


def workload_of(config: Config, software: str = "") -> Workload:
    """One step of this run. A run in phases is taken as its first one; pass `config.in_phase(n)` for another.

    Raises:
        MoestroError: the vocabulary's size is in a tokenizer's file.
    """
    config = config.in_phase(0)
    return Workload(
        model=resolved_model(config),
        seq_len=config.data.seq_len,
        global_batch_size=config.train.global_batch_size,
        precision=config.train.dtype,
        optimizer=config.optim.name,
        trainer="moestro",
        software=software,
    )


def plan_of(config: Config, world_size: int, ranks_per_node: int | None = None) -> Plan:
    """How the trainer lays this run out on `world_size` ranks (with `ranks_per_node` on each machine).

    The trainer's dp · fsdp ranks, which read different sequences, are a plan's dp; its tp ranks hold slices of every
    expert, which is a plan's etp. Its all-to-all sends a token once to each rank.

    Raises:
        MoestroError: the layout does not fit, or nothing counts it.
    """
    config = config.in_phase(0)
    parallel, train, layout = config.parallel, config.train, resolve_layout(config, world_size, ranks_per_node)
    if parallel.dispatch == "leader" and layout.ep > 1:
        raise MoestroError(
            "parallel.dispatch = 'leader' is not counted; predict with 'two_hop', which sends less, or 'all_to_all'"
        )
    sharded = layout.fsdp > 1
    return Plan(
        pp=layout.pp,
        dp=layout.batch_ranks,
        cp=layout.cp,
        tp=layout.tp,
        ep=layout.ep,
        etp=layout.tp if config.model.moe is not None else 1,
        context=parallel.context,
        micro_batch_size=layout.micro_batch_size,
        schedule=layout.schedule,
        vpp=len(layout.stages) // layout.pp,
        layers_per_stage=tuple(len(stage) for stage in layout.stages) if layout.pp > 1 else None,
        zero=layout.zero,
        shard=layout.fsdp * layout.cp if sharded else None,
        overlap_gradients=sharded,  # replicas and ZeRO-1 reduce after the last micro-batch
        overlap_parameters=sharded,
        overlap_dispatch=train.expert_overlap,
        recompute=train.recompute,
        expert_chunks=_chunks(config, layout),
        expert_recompute=train.expert_recompute,
        dispatch="deduplicated" if parallel.dispatch in ("all_to_all", "leader") else parallel.dispatch,
        ranks_per_node=layout.ranks_per_node if parallel.dispatch == "two_hop" else None,
    )


def _chunks(config: Config, layout: Layout) -> int:
    """With "auto", what even loads would choose."""
    train, moe = config.train, config.model.moe
    if train.expert_chunks != "auto" or moe is None:
        return train.expert_chunks if isinstance(train.expert_chunks, int) else 1
    from moestro.parallel.experts import FINEST, chunk_bytes  # here, as it brings PyTorch

    assert train.expert_memory_mib is not None
    top_k = max(config.model.top_k_of_layer(i) for i, mixed in enumerate(config.model.moe_layers) if mixed)
    tokens = layout.micro_batch_size * config.data.seq_len // layout.cp
    copies = tokens * min(top_k, layout.ep) if layout.ep > 1 else 0
    hidden, width = moe.latent_size or config.model.hidden_size, moe.resolved_expert_hidden_size // layout.tp
    element = 4 if train.dtype == "fp32" else 2
    for chunks in (n for n in range(1, FINEST + 1) if FINEST % n == 0):
        sizes = (tokens // chunks, copies // chunks, max(copies, tokens) // chunks, tokens * top_k // chunks)
        if chunk_bytes(*sizes, hidden, width, element, moe.activation) <= train.expert_memory_mib * 2**20:
            return chunks
    return FINEST


def overrides_of(plan: Plan) -> list[str]:
    """What to put on the trainer's command line (`section.key=value`) for this plan.

    Raises:
        MoestroError: the trainer cannot do it; the message names the first thing.
    """
    _refuse(plan)
    fsdp = plan.shard_ranks // plan.cp if plan.zero >= 2 else 1
    values: dict[str, object] = {
        "parallel.pp": plan.pp,
        "parallel.dp": plan.dp // fsdp,
        "parallel.fsdp": fsdp,
        "parallel.cp": plan.cp,
        "parallel.tp": plan.tp,
        "parallel.ep": plan.ep,
        # One rank has nothing to split, and then the trainer decides.
        "parallel.zero": plan.zero if plan.world_size > plan.pp or plan.zero == 0 else "none",
        "parallel.context": plan.context,
        "train.micro_batch_size": plan.micro_batch_size,
        "train.recompute": plan.recompute,
        "train.expert_chunks": plan.expert_chunks,
        "train.expert_recompute": str(plan.expert_recompute).lower(),
        "train.expert_overlap": str(plan.overlap_dispatch and plan.expert_chunks > 1).lower(),
        "parallel.dispatch": "all_to_all" if plan.dispatch == "deduplicated" else plan.dispatch,
    }
    cut = plan.pp > 1  # else what a file says of a pipeline is unset, and so are layers that are not the plan's
    values["parallel.schedule"] = plan.schedule if cut else "1f1b"
    values["parallel.stages_per_rank"] = plan.vpp if cut else "none"
    values["parallel.layers_per_stage"] = list(plan.layers_per_stage) if cut and plan.layers_per_stage else "none"
    if plan.ranks_per_node is not None:
        values["parallel.ranks_per_node"] = plan.ranks_per_node
    if plan.capacity_factor is not None:
        values["model.moe.router.capacity_factor"] = plan.capacity_factor
    return [f"{key}={value}" for key, value in values.items()]


def _refuse(plan: Plan) -> None:
    sharded = plan.zero >= 2
    reasons = {
        f"schedule = {plan.schedule!r}": plan.pp > 1 and plan.schedule == "dualpipe",
        f"vpp = {plan.vpp} with one pipeline rank": plan.pp == 1 and plan.vpp > 1,
        f"etp = {plan.etp} with tp = {plan.tp}; its tp ranks hold slices of every expert": plan.etp not in (1, plan.tp)
        or (plan.etp == 1 < plan.tp and plan.ep > 1),
        "tp without sequence_parallel": plan.tp > 1 and not plan.sequence_parallel,
        f"shard = {plan.shard} with zero = 1; it splits over all data ranks": plan.zero == 1
        and plan.shard_ranks != plan.dp * plan.cp,
        f"shard = {plan.shard} with cp = {plan.cp}; it splits whole context groups": sharded
        and plan.shard_ranks % plan.cp > 0,
        f"zero = {plan.zero} among one reading rank": sharded and plan.shard_ranks // plan.cp == 1,
        "recompute = 'selective'": plan.recompute == "selective",
        "recompute_layers": plan.recompute_layers is not None and plan.recompute != "none",
        "recompute_per_stage": plan.recompute_per_stage is not None and plan.recompute != "none",
        f"gradient_dtype = {plan.gradient_dtype!r}": plan.gradient_dtype != "fp32",
        "bucket_bytes": plan.bucket_bytes is not None,
        "in_flight": plan.in_flight is not None,
        f"offload = {plan.offload!r}": plan.offload != "none",
    }
    for what, refused in reasons.items():
        if refused:
            raise MoestroError(f"the trainer has no {what}; change the plan")
