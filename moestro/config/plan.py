"""What a step computes, and how it lies on a cluster. A prediction is made of the two and of a machine's profile."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from moestro.config.base import Section
from moestro.config.model import ModelConfig

Size = Annotated[int, Field(ge=1)]
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipe", "dualpipev"]


class RoutingConfig(Section):
    """How tokens fall on experts, of which a prediction knows only a distribution.

    balanced: every expert gets the same. power_law: shares ∝ rank^-alpha, in an order that differs from layer to layer.
    measured: max_over_mean is the busiest expert's load over the mean, from a run; or `loads` are, of each layer, what
    each expert got (in any unit).
    """

    kind: Literal["balanced", "power_law", "measured"] = "balanced"
    alpha: float = Field(1.2, gt=0)
    max_over_mean: float | None = Field(None, ge=1)
    loads: tuple[tuple[Annotated[float, Field(ge=0)], ...], ...] = ()

    @model_validator(mode="after")
    def _alike(self) -> Self:
        if len({len(layer) for layer in self.loads}) > 1 or not all(sum(layer) > 0 for layer in self.loads):
            raise ValueError("loads hold a number for each expert, of as many in each layer, not all of them zero")
        if self.loads and self.kind != "measured":
            raise ValueError(f'loads go with kind = "measured", not "{self.kind}"')
        return self


class Workload(Section):
    """One optimizer step, without a layout."""

    model: ModelConfig  # vocab_size resolved
    seq_len: Size
    global_batch_size: Size  # sequences
    # Of the matrix products. Below fp32, weights have a copy in 16 bits (fp8 and fp4 are made of it), activations are
    # 16 bits wide, and master weights, optimizer state and (by the plan) gradients fp32.
    precision: Precision = "bf16"
    optimizer: Literal["adamw", "muon", "sgd", "none"] = "adamw"
    # None: all weights. Otherwise low-rank adapters of this rank on all linear layers, whose base is frozen.
    adapter_rank: int | None = Field(None, ge=1)
    attention_kernel: Literal["flash", "math"] = "flash"  # math: scores are written to memory
    fused_kernels: bool = True  # norms, activations, optimizer: one pass over memory each, not one an operation
    # Head and loss in blocks of tokens: the logits are never whole in memory, and a tensor rank holds the whole
    # vocabulary. Otherwise tensor ranks hold parts of the vocabulary.
    fused_loss: bool = True
    # Whose habits: Megatron's, or our trainer's. Ours keeps weights in fp32, without a 16-bit copy. Its experts read
    # their tokens in place, so that backward keeps index lists and first products only (MoEBlaze, arXiv 2601.05296);
    # its norms keep an fp32 copy of a 16-bit input, and its tensor ranks the tokens they gathered. Slices of experts
    # gather tokens before the exchange, not rows after it. What tensor ranks hold whole is reduced among them too.
    trainer: Literal["megatron", "moestro"] = "megatron"
    dropout: bool = False  # after attention, after the feed-forward and on the scores: masks are kept
    # Of each encoder of the model, items (images, sounds) in a sequence, on average; (): none.
    media_items: tuple[float, ...] = ()
    routing: RoutingConfig = RoutingConfig()
    software: str = ""  # for example "NCCL 2.27": curves of that version, where known

    @property
    def tokens(self) -> int:
        return self.global_batch_size * self.seq_len


class Plan(Section):
    """A layout with the choices that go with it. The names are those of the `parallel` and `train` sections where the
    trainer has them; what it does not have is here because published runs use it.

    The world is pp · dp · cp · tp devices. Experts are shared out over ep · etp of the dp · cp · tp ranks of a stage:
    etp ranks hold slices of the same experts; with etp = 1 the tp ranks each dispatch the tokens they hold.
    """

    pp: Size = 1
    dp: Size = 1  # ranks that see different sequences: replicas times shards
    cp: Size = 1
    tp: Size = 1
    ep: Size = 1
    etp: Size = 1
    sequence_parallel: bool = True  # between tp regions activations are cut along the sequence; no effect with tp = 1

    context: Literal["ring", "all_gather"] = "ring"  # with cp: other ranks' keys pass by, or are gathered and kept

    micro_batch_size: Size = 1  # sequences
    schedule: Schedule = "1f1b"
    vpp: Size = 1  # chunks of layers on each pipeline rank
    layers_per_stage: tuple[int, ...] | None = None  # a number for each of pp · vpp stages; None: as even as possible
    # Micro-batches that each pipeline rank holds at most, with 1f1b; None: pp - rank. More of them hide slow links.
    in_flight: tuple[Size, ...] | None = None

    # 0: replicas keep all. 1: optimizer state split over dp · cp. 2: gradients too. 3: weights too. `shard`: among how
    # many of the dp · cp ranks (None: all).
    zero: Literal[0, 1, 2, 3] = 0
    shard: int | None = Field(None, ge=1)
    gradient_dtype: Literal["fp32", "bf16"] = "fp32"  # accumulated and reduced in
    bucket_bytes: float | None = Field(None, gt=0)  # None: one collective for each chunk of layers
    overlap_gradients: bool = True  # reduce while backward computes (of the last micro-batch)
    overlap_parameters: bool = True  # gather while forward computes
    overlap_dispatch: bool = False  # expert all-to-all behind the computation of another chunk or micro-batch
    overlap_tensor: bool = False

    # selective: attention's scores and soft-max (with "math"), or norms and activations (with "flash"). block: all of a
    # layer but its input. `recompute_layers`: of how many layers of a stage (None: all).
    recompute: Literal["none", "selective", "block"] = "none"
    recompute_layers: int | None = Field(None, ge=0)
    recompute_per_stage: tuple[Annotated[int, Field(ge=0)], ...] | None = None  # of each of pp · vpp stages, instead
    expert_chunks: Size = 1
    expert_recompute: bool = False
    # all_to_all: a copy for each (token, expert). deduplicated: a copy for each (token, rank), summed on the way back.
    # two_hop: a copy for each (token, node) between nodes of `ranks_per_node` ranks, for each (token, expert) inside.
    dispatch: Literal["all_to_all", "deduplicated", "two_hop", "all_gather"] = "all_to_all"
    ranks_per_node: int | None = Field(None, ge=1)  # that fast links join; only two_hop asks
    capacity_factor: float | None = Field(None, gt=0)  # None: the model's, or dropless
    offload: Literal["none", "optimizer", "activations"] = "none"

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def shard_ranks(self) -> int:
        """Ranks among which dense optimizer state (and, by `zero`, gradients and weights) is split."""
        return 1 if self.zero == 0 else (self.shard or self.dp * self.cp)

    @property
    def expert_data_ranks(self) -> int:
        """Ranks that hold the same experts."""
        return max(1, self.dp * self.cp * self.tp // (self.ep * self.etp))

    def micro_batches(self, workload: Workload) -> int:
        return workload.global_batch_size // (self.dp * self.micro_batch_size)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dp * self.cp * self.tp % (self.ep * self.etp):
            raise ValueError(
                f"ep · etp = {self.ep * self.etp} does not divide dp · cp · tp = {self.dp * self.cp * self.tp}"
            )
        if self.dispatch == "two_hop" and self.ranks_per_node is None:
            raise ValueError('dispatch = "two_hop" needs ranks_per_node')
        if self.vpp > 1 and self.schedule == "1f1b":
            raise ValueError(f'vpp = {self.vpp} needs schedule = "interleaved" (or another with several chunks a rank)')
        if self.recompute_layers is not None and self.recompute_per_stage is not None:
            raise ValueError("recompute_layers and recompute_per_stage say the same thing: give one of them")
        if self.shard is not None and self.dp * self.cp % self.shard:
            raise ValueError(f"shard = {self.shard} does not divide dp · cp = {self.dp * self.cp}")
        return self


def misfits(workload: Workload, plan: Plan) -> list[str]:
    """Why the plan does not fit the workload; empty when it does."""
    model, found = workload.model, []
    if workload.global_batch_size % (plan.dp * plan.micro_batch_size):
        found.append(
            f"global_batch_size = {workload.global_batch_size} is not a multiple of dp · micro_batch_size = "
            f"{plan.dp * plan.micro_batch_size}"
        )
    if plan.pp * plan.vpp > model.num_layers:
        found.append(f"pp · vpp = {plan.pp * plan.vpp} stages for {model.num_layers} layers")
    found += cut_heads(workload, plan.tp)
    if plan.cp > 1 and workload.seq_len % (2 * plan.cp):
        found.append(f"seq_len = {workload.seq_len} is not a multiple of 2 · cp = {2 * plan.cp}")
    if plan.tp > 1 and plan.sequence_parallel and workload.seq_len // plan.cp % plan.tp:
        found.append(f"tp = {plan.tp} does not divide the sequence of {workload.seq_len // plan.cp} tokens")
    if plan.ep > 1 and model.moe is None:
        found.append(f"ep = {plan.ep} for a model without experts")
    if model.moe is not None and model.moe.resolved_num_experts % plan.ep:
        found.append(f"ep = {plan.ep} does not divide num_experts = {model.moe.resolved_num_experts}")
    if plan.layers_per_stage is not None and len(plan.layers_per_stage) != plan.pp * plan.vpp:
        found.append(f"layers_per_stage has {len(plan.layers_per_stage)} numbers for {plan.pp * plan.vpp} stages")
    if plan.recompute_per_stage is not None and len(plan.recompute_per_stage) != plan.pp * plan.vpp:
        found.append(f"recompute_per_stage has {len(plan.recompute_per_stage)} numbers for {plan.pp * plan.vpp} stages")
    if plan.in_flight is not None and (plan.schedule != "1f1b" or len(plan.in_flight) != plan.pp):
        found.append(f"in_flight has {len(plan.in_flight)} numbers; it goes with 1f1b, one for each of {plan.pp} ranks")
    if plan.layers_per_stage is not None and sum(plan.layers_per_stage) != model.num_layers:
        found.append(
            f"layers_per_stage adds up to {sum(plan.layers_per_stage)}, the model has {model.num_layers} layers"
        )
    return found


def cut_heads(workload: Workload, tp: int) -> list[str]:
    """Why tensor parallelism cannot cut the heads; a rank holds whole heads of queries, and of keys and values."""
    model, found = workload.model, list[str]()
    if tp == 1:
        return found
    whole = "cca" if model.cca is not None else "attention_experts" if model.attention_experts else ""
    kv_heads = model.num_heads if model.mla is not None else model.resolved_num_kv_heads
    if model.num_heads % tp:
        found.append(f"tp = {tp} does not divide num_heads = {model.num_heads}")
    elif kv_heads % tp:
        found.append(f"tp = {tp} does not divide num_kv_heads = {kv_heads}: ranks hold whole heads of keys")
    elif whole and workload.trainer == "moestro":
        found.append(f"tp = {tp}: the trainer needs all heads of model.{whole} on every rank; set tp to 1")
    return found
