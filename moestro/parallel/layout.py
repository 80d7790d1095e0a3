"""A layout: the mesh that a configuration asks for, resolved and checked against a world size. Plain arithmetic.

Ranks are numbered with pp outermost, then dp, fsdp, cp, and tp innermost. The dp · fsdp · cp ranks that hold the same
part of the dense model are its *data* ranks; their numbers split once more, into ep (innermost) and edp: the ranks of
an ep group hold different experts, those of an edp group the same ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from moestro.config import Config, ParallelConfig
from moestro.errors import MoestroError
from moestro.parallel.process import this_rank

V_SHAPED = ("zbv", "dualpipev")
SPLIT_BACKWARD = ("zero_bubble", "zbv", "dualpipev")
MANY_STAGES = ("interleaved", "zero_bubble", "zbv", "dualpipev")


@dataclass(frozen=True)
class Place:
    """A rank's coordinates."""

    pp: int
    dp: int
    fsdp: int
    cp: int
    tp: int
    edp: int
    ep: int
    data: int  # number among the data ranks
    batch: int  # number among the dp · fsdp ranks that read different sequences


@dataclass(frozen=True)
class Layout:
    pp: int
    dp: int
    fsdp: int
    cp: int
    tp: int
    ep: int
    zero: int
    micro_batch_size: int  # sequences of one forward on one batch rank
    micro_batches: int  # of a batch rank in one step
    stages: tuple[tuple[int, ...], ...]  # the layers of each pipeline stage
    schedule: str
    ranks_per_node: int

    @property
    def world_size(self) -> int:
        return self.pp * self.data_ranks * self.tp

    @property
    def data_ranks(self) -> int:
        return self.dp * self.fsdp * self.cp

    @property
    def batch_ranks(self) -> int:
        return self.dp * self.fsdp

    @property
    def efsdp(self) -> int:
        """Ranks among which FSDP2 splits an expert-parallel rank's experts."""
        return max(1, self.fsdp * self.cp // self.ep) if self.fsdp > 1 else 1

    @property
    def sequence_ranks(self) -> int:
        """Ranks that hold different parts of the same sequences."""
        return self.cp * self.tp

    def place(self, rank: int) -> Place:
        rest, tp = divmod(rank, self.tp)
        pp, data = divmod(rest, self.data_ranks)
        batch, cp = divmod(data, self.cp)
        dp, fsdp = divmod(batch, self.fsdp)
        edp, ep = divmod(data, self.ep)
        return Place(pp, dp, fsdp, cp, tp, edp, ep, data, batch)

    def places(self) -> Iterator[Place]:
        return (self.place(rank) for rank in range(self.world_size))

    def stages_of(self, pp: int) -> list[int]:
        """The stages that pipeline rank `pp` holds: every pp-th, or for V-shaped schedules one from each end."""
        count = len(self.stages)
        return [pp, count - 1 - pp] if self.schedule in V_SHAPED else list(range(pp, count, self.pp))

    def describe(self) -> str:
        sizes = {name: getattr(self, name) for name in ("pp", "dp", "fsdp", "cp", "tp", "ep")}
        text = " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one process"
        return text + (f" zero={self.zero}" if self.data_ranks * self.tp > 1 else "")


# One process; the sizes of batches are the caller's business.
ONE = Layout(
    1, 1, 1, 1, 1, 1, zero=0, micro_batch_size=1, micro_batches=1, stages=(), schedule="1f1b", ranks_per_node=1
)


def resolve_layout(config: Config, world_size: int, ranks_per_node: int | None = None) -> Layout:
    """The layout of `config` on `world_size` ranks, `ranks_per_node` on each machine (None: as this process's launcher
    says), unless the config says otherwise.

    Raises:
        MoestroError: it does not fit; the message says which setting to change.
    """
    parallel = config.parallel
    others = parallel.pp * parallel.fsdp * parallel.cp * parallel.tp
    dp = parallel.dp if parallel.dp is not None else max(1, world_size // others)
    if dp * others != world_size:
        sizes = " · ".join(
            f"{n} {v}"
            for n, v in (
                ("pp", parallel.pp),
                ("dp", dp),
                ("fsdp", parallel.fsdp),
                ("cp", parallel.cp),
                ("tp", parallel.tp),
            )
        )
        raise MoestroError(
            f"parallel: {sizes} = {dp * others} ranks, but {world_size} "
            f"{'is' if world_size == 1 else 'are'} running; start with --nproc {dp * others} (or torchrun), "
            "or change one of them"
        )
    ranks_per_node = parallel.ranks_per_node or ranks_per_node or this_rank().local_world_size
    _check_cuts(config)
    _check_experts(config, dp, ranks_per_node)
    stages = _stages(config)
    size, micro_batches = _micro_batches(config, dp, stages)
    _check_schedule(parallel, len(stages), micro_batches, config)
    return Layout(
        pp=parallel.pp,
        dp=dp,
        fsdp=parallel.fsdp,
        cp=parallel.cp,
        tp=parallel.tp,
        ep=parallel.ep,
        zero=_zero(parallel, dp),
        micro_batch_size=size,
        micro_batches=micro_batches,
        stages=stages,
        schedule=parallel.schedule,
        ranks_per_node=ranks_per_node,
    )


def _zero(parallel: ParallelConfig, dp: int) -> int:
    if parallel.zero is None:
        if parallel.fsdp == 1:
            return int(dp * parallel.cp * parallel.tp > 1)
        return 3 if parallel.pp == 1 else 2  # a pipeline would gather freed weights for every micro-batch
    if parallel.fsdp > 1 and parallel.zero < 2:
        raise MoestroError(
            f"parallel.zero = {parallel.zero} keeps whole weights, but parallel.fsdp = {parallel.fsdp} splits them; "
            "set parallel.zero to 2 or 3, or use parallel.dp"
        )
    if parallel.fsdp == 1 and parallel.zero > 1:
        raise MoestroError(
            f"parallel.zero = {parallel.zero} splits weights among parallel.fsdp ranks; raise that from 1"
        )
    if parallel.zero == 3 and parallel.pp > 1 and parallel.schedule in SPLIT_BACKWARD:
        raise MoestroError(
            f"parallel.schedule = {parallel.schedule!r} runs backward in two parts, and parallel.zero = 3 frees the "
            "weights between them; set parallel.zero = 2"
        )
    return parallel.zero


def _check_cuts(config: Config) -> None:
    """What tp and cp cut: widths and sequences."""
    model, moe, tp, cp, seq_len = (
        config.model,
        config.model.moe,
        config.parallel.tp,
        config.parallel.cp,
        config.data.seq_len,
    )
    widths = {
        "model.num_heads": model.num_heads,
        "model.num_kv_heads": None if model.mla else model.resolved_num_kv_heads,
        "model.intermediate_size": model.intermediate_size if not all(model.moe_layers) else None,
    }
    if moe is not None:
        split = " / granularity" if moe.granularity > 1 else ""
        widths[f"model.moe.expert_hidden_size{split}"] = moe.resolved_expert_hidden_size
    if moe is not None and moe.expert_bias:  # of an expert's output, see `parts.py`
        widths[f"model.{'moe.latent_size' if moe.latent_size else 'hidden_size'}"] = (
            moe.latent_size or model.hidden_size
        )
    for name, width in widths.items():
        if width is not None and width % tp:
            raise MoestroError(f"parallel.tp = {tp} does not divide {name} = {width}; change one of them")
    whole = "cca" if model.cca else "attention_experts" if model.attention_experts else None
    if whole is not None and tp > 1:
        raise MoestroError(f"model.{whole} needs all heads on every rank, but parallel.tp = {tp}; set that to 1")
    for part, there in (("depth", model.depth is not None), ("encoders", bool(model.encoders))):
        if there and tp * cp > 1:
            raise MoestroError(
                f"model.{part} needs whole sequences on a rank, but parallel.tp = {tp} and parallel.cp = {cp}; "
                "set both to 1"
            )
    parts = tp * (2 * cp if cp > 1 else 1)
    if seq_len % parts:
        raise MoestroError(
            f"data.seq_len = {seq_len} cannot be cut for parallel.cp = {cp} and parallel.tp = {tp}; "
            f"make it a multiple of {parts}"
        )
    if model.cca is not None and cp > 1 and model.cca.halo > seq_len // (2 * cp):
        raise MoestroError(
            f"model.cca looks back {model.cca.halo} tokens, further than the {seq_len // (2 * cp)} of a chunk; "
            f"use longer sequences or lower parallel.cp = {cp}"
        )


def _check_experts(config: Config, dp: int, ranks_per_node: int) -> None:
    """Where the experts are, and how tokens reach them."""
    parallel, moe, ep = config.parallel, config.model.moe, config.parallel.ep
    if ep > 1 and moe is None:
        raise MoestroError(
            f"parallel.ep = {ep} needs experts, but the model has no [model.moe]; add it or leave ep out"
        )
    if moe is not None and moe.resolved_num_experts % ep:
        times = f" · granularity = {moe.resolved_num_experts}" if moe.granularity > 1 else f" = {moe.num_experts}"
        raise MoestroError(f"parallel.ep = {ep} does not divide model.moe.num_experts{times}; change one of them")
    data, shards = dp * parallel.fsdp * parallel.cp, parallel.fsdp * parallel.cp
    if data % ep:
        raise MoestroError(
            f"parallel.ep = {ep} does not divide the dp · fsdp · cp = {data} ranks it is taken from; change one of them"
        )
    if parallel.fsdp > 1 and shards % ep and ep % shards:
        raise MoestroError(
            f"parallel.ep = {ep} must divide parallel.fsdp · parallel.cp = {shards} or be a multiple of it"
        )
    if config.train.expert_overlap and ep > 1 and parallel.dispatch != "all_to_all":
        raise MoestroError(
            f"train.expert_overlap needs an exchange that travels by itself, and parallel.dispatch = "
            f"{parallel.dispatch!r} does not; set it to 'all_to_all' or train.expert_overlap to false"
        )
    if parallel.dispatch in ("leader", "two_hop") and ep > 1:
        per_node = ranks_per_node // parallel.tp
        if per_node < 2 or ep % per_node or ep == per_node:
            raise MoestroError(
                f"parallel.dispatch = {parallel.dispatch!r} needs an ep group over several nodes: ep = {ep} with "
                f"{per_node} data ranks a node; set parallel.ranks_per_node, or dispatch to 'all_to_all'"
            )


def _stages(config: Config) -> tuple[tuple[int, ...], ...]:
    parallel, layers = config.parallel, config.model.num_layers
    if parallel.pp == 1:
        if parallel.layers_per_stage is not None or parallel.stages_per_rank is not None:
            raise MoestroError(
                "parallel.layers_per_stage and parallel.stages_per_rank cut a pipeline, but parallel.pp = 1; "
                "raise that or leave them out"
            )
        return (tuple(range(layers)),)
    per_rank = parallel.stages_per_rank or (2 if parallel.schedule in ("interleaved", *V_SHAPED) else 1)
    count = parallel.pp * per_rank
    if parallel.layers_per_stage is not None:
        sizes = list(parallel.layers_per_stage)
        if len(sizes) != count or sum(sizes) != layers or min(sizes) < 1:
            raise MoestroError(
                f"parallel.layers_per_stage must list {count} numbers of at least 1 (parallel.pp · stages_per_rank) "
                f"that add up to model.num_layers = {layers}, got {sizes}"
            )
    elif count > layers:
        raise MoestroError(
            f"{count} pipeline stages (parallel.pp = {parallel.pp}, {per_rank} a rank) for "
            f"model.num_layers = {layers}; lower parallel.pp or stages_per_rank"
        )
    else:  # longer stages in the middle: the ends also hold the embedding and the head
        sizes = [layers // count] * count
        middle = sorted(range(count), key=lambda i: (abs(2 * i - count + 1), i))
        for i in middle[: layers % count]:
            sizes[i] += 1
    ends = [sum(sizes[: i + 1]) for i in range(count)]
    return tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))


def _micro_batches(config: Config, dp: int, stages: tuple[tuple[int, ...], ...]) -> tuple[int, int]:
    """Sequences of a micro-batch and how many of those a batch rank runs in a step."""
    ranks, total, size = dp * config.parallel.fsdp, config.train.global_batch_size, config.train.micro_batch_size
    if total % ranks:
        raise MoestroError(
            f"train.global_batch_size = {total} is not a multiple of the dp · fsdp = {ranks} ranks that read data"
        )
    mine = total // ranks
    if size is None:  # as large as the pipeline allows, which wants at least a micro-batch a stage
        wanted = len(stages) if config.parallel.pp > 1 else 1
        counts = [n for n in range(1, mine + 1) if mine % n == 0 and n % (config.parallel.pp) == 0 and n >= wanted]
        return (mine // counts[0], counts[0]) if counts else (1, mine)
    if mine % size:
        raise MoestroError(
            f"a rank's {mine} sequences (train.global_batch_size = {total} over {ranks} ranks) are not a multiple of "
            f"train.micro_batch_size = {size}"
        )
    return size, mine // size


def _check_schedule(parallel: ParallelConfig, stages: int, micro_batches: int, config: Config) -> None:
    pp, schedule = parallel.pp, parallel.schedule
    if pp == 1:
        return
    per_rank = stages // pp
    if schedule in V_SHAPED and per_rank != 2:
        raise MoestroError(f"parallel.schedule = {schedule!r} has 2 stages a rank; leave parallel.stages_per_rank out")
    if schedule not in MANY_STAGES and per_rank != 1:
        raise MoestroError(
            f"parallel.schedule = {schedule!r} has one stage a rank; leave parallel.stages_per_rank out or choose "
            "'interleaved'"
        )
    wanted = stages if schedule == "dualpipev" else pp
    if micro_batches < wanted or (schedule in ("interleaved", "zero_bubble") and micro_batches % pp):
        multiple = f"a multiple of {pp}" if schedule in ("interleaved", "zero_bubble") else f"at least {wanted}"
        raise MoestroError(
            f"parallel.schedule = {schedule!r} needs {multiple} micro-batches a rank, got {micro_batches}; lower "
            "train.micro_batch_size or raise train.global_batch_size"
        )
    model = config.model
    if schedule in SPLIT_BACKWARD and model.mtp is not None and (model.mtp.depth > 1 or model.tie_embeddings):
        raise MoestroError(
            f"parallel.schedule = {schedule!r} runs backward in two parts, which cannot follow an embedding that is "
            "used at several depths; set model.mtp.depth = 1 and model.tie_embeddings = false, or choose '1f1b' or "
            "'interleaved'"
        )
    if schedule in SPLIT_BACKWARD and (config.train.recompute != "none" or config.train.expert_recompute):
        raise MoestroError(
            f"parallel.schedule = {schedule!r} runs backward in two parts, which cannot follow what is recomputed; set "
            "train.recompute = 'none' and train.expert_recompute = false, or choose '1f1b' or 'interleaved'"
        )
