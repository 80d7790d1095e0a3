"""The plans that there are for a workload on so many devices, in three nested parts.

A *family* is all that the work inside a layer depends on; its pipelines say how layers and micro-batches go round; the
variants what happens once a step. Families are many and cost milliseconds, what is inside them is nearly free.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from math import lcm
from typing import Any, NamedTuple, get_args

from pydantic import ValidationError

from moestro.config.plan import Plan, Schedule, Workload, cut_heads
from moestro.errors import MoestroError, nearest
from moestro.predict.orders import SPLIT_BACKWARD, pipeline_orders

MOST_VPP = 8
CHUNKS = (1, 2, 4, 8)
MICRO_BATCHES = (1, 2, 4, 8, 16)  # sequences in each
CHUNKS_OF_SCHEDULE = {"gpipe": 1, "1f1b": 1, "zero_bubble": 1, "dualpipe": 1, "zbv": 2, "dualpipev": 2}


class Family(NamedTuple):
    """All that the work inside a layer depends on. Names and values are those of Plan."""

    tp: int
    cp: int
    ep: int
    etp: int
    sequence_parallel: bool
    context: str
    micro_batch_size: int
    recompute: str
    expert_chunks: int
    expert_recompute: bool
    dispatch: str
    overlap_dispatch: bool
    overlap_tensor: bool
    gradient_dtype: str


class Pipeline(NamedTuple):
    """recompute_layers None: all, where the family recomputes."""

    pp: int
    dp: int
    vpp: int
    schedule: str
    recompute_layers: int | None
    micro_batches: int


class Variant(NamedTuple):
    """What happens once a step. shard: None for all data ranks."""

    zero: int
    shard: int | None
    offload: str
    bucket_bytes: float | None
    overlap_gradients: bool
    overlap_parameters: bool


@dataclass(frozen=True)
class Space:
    """The values that each field of Plan may take; dp is what the others leave of the devices."""

    tp: tuple[int, ...]
    cp: tuple[int, ...]
    ep: tuple[int, ...]
    etp: tuple[int, ...]
    sequence_parallel: tuple[bool, ...]
    context: tuple[str, ...]
    micro_batch_size: tuple[int, ...]
    recompute: tuple[str, ...]
    expert_chunks: tuple[int, ...]
    expert_recompute: tuple[bool, ...]
    dispatch: tuple[str, ...]
    overlap_dispatch: tuple[bool, ...]
    overlap_tensor: tuple[bool, ...]
    gradient_dtype: tuple[str, ...]
    pp: tuple[int, ...]
    vpp: tuple[int, ...]
    schedule: tuple[str, ...]
    recompute_layers: tuple[int | None, ...]
    zero: tuple[int, ...]
    shard: tuple[int | None, ...]
    offload: tuple[str, ...]
    bucket_bytes: tuple[float | None, ...]
    overlap_gradients: tuple[bool, ...]
    overlap_parameters: tuple[bool, ...]

    def families(self, workload: Workload) -> Iterator[Family]:
        """Those that the workload allows; choices that mean nothing in a family are not repeated."""
        values = (getattr(self, name) for name in Family._fields)
        seen = set()
        for family in (Family(*choice) for choice in product(*values)):
            family = _plain(family, workload)
            if family not in seen and _allowed(family, workload):
                seen.add(family)
                yield family

    def pipelines(self, family: Family, workload: Workload, devices: int) -> Iterator[Pipeline]:
        """That use all the devices. Whole micro-batches and at least a layer for each stage."""
        layers = workload.model.num_layers
        again = self.recompute_layers if family.recompute != "none" else (None,)
        for pp in self.pp:
            per_pipeline, left = divmod(devices, pp)
            dp, rest = divmod(per_pipeline, family.cp * family.tp)
            if left or rest or not dp or per_pipeline % (family.ep * family.etp):
                continue
            micro_batches, rest = divmod(workload.global_batch_size, dp * family.micro_batch_size)
            if rest or not micro_batches:
                continue
            for schedule, vpp in product(self.schedule, self.vpp):
                ours = workload.trainer == "moestro"
                if pp * vpp > layers or (ours and _trainer_refuses(family, schedule, pp, vpp, micro_batches)):
                    continue
                if _runs(schedule, pp, vpp, micro_batches):
                    for some in again:
                        yield Pipeline(pp, dp, vpp, schedule, some, micro_batches)

    def variants(self, family: Family, workload: Workload, pipeline: Pipeline) -> list[Variant]:
        """Those that mean something with so many data and pipeline ranks, and that the workload's trainer can do. What
        is in flight is offloaded, which is nothing without a pipeline."""
        ours, dp = workload.trainer == "moestro", pipeline.dp
        ranks = dp * family.cp
        found = dict.fromkeys(
            Variant(zero, shard if zero else None, offload, bucket, gradients, parameters)
            for zero, shard, offload, bucket, gradients, parameters in product(
                self.zero if ranks > 1 else (0,), self.shard, self.offload, self.bucket_bytes,
                self.overlap_gradients, self.overlap_parameters,
            )
            if not (zero and shard is not None and (shard >= ranks or ranks % shard))
            and not (pipeline.pp == 1 and offload == "activations")
            and not (ours and zero == 1 and shard is not None)
            and not (ours and zero >= 2 and dp == 1)
            and not (ours and zero == 3 and pipeline.pp > 1 and pipeline.schedule in SPLIT_BACKWARD)
        )  # fmt: skip
        return list(found)


def plan_of(family: Family, pipeline: Pipeline, variant: Variant, ranks_per_node: int | None) -> Plan:
    """The same as one Plan, checked."""
    return Plan.model_validate(values_of(family, pipeline, variant, ranks_per_node))


def values_of(family: Family, pipeline: Pipeline, variant: Variant, ranks_per_node: int | None) -> dict[str, Any]:
    found = {**family._asdict(), **pipeline._asdict(), **variant._asdict()}
    del found["micro_batches"]
    found["ranks_per_node"] = ranks_per_node if family.dispatch == "two_hop" else None
    return found


def space_of(
    workload: Workload, devices: int, node_size: int, given: Mapping[str, tuple[Any, ...]] | None = None,
    offloads: bool = False,
) -> Space:  # fmt: skip
    """What is worth trying: powers of two and divisors, tensor parallelism within a node, all that the workload's
    trainer can do.

    given: values for fields of Plan, instead. offloads: there is a host to offload to (predict.offload.host_rate).

    Raises:
        MoestroError: `given` names what is not a field of the space, or a value that the field cannot have.
    """
    model, moe = workload.model, workload.model.moe
    powers = [2**i for i in range(devices.bit_length())]
    experts = 1 if moe is None else moe.resolved_num_experts
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    several = moe is not None and devices > 1
    ours = workload.trainer == "moestro"
    space = Space(
        tp=tuple(n for n in powers if n <= node_size and devices % n == 0 and not cut_heads(workload, n)),
        cp=tuple(n for n in powers if devices % n == 0 and workload.seq_len // n >= 4096) or (1,),
        ep=tuple(n for n in divisors if experts % n == 0),
        etp=(1,) if moe is None else (0,) if ours else (1, 0),
        sequence_parallel=(True,),
        context=("ring", "all_gather") if ours else ("ring",),
        micro_batch_size=MICRO_BATCHES,
        recompute=("none", "block") if ours else ("none", "selective", "block"),
        expert_chunks=CHUNKS if moe is not None else (1,),
        expert_recompute=(False, True) if moe is not None else (False,),
        dispatch=("deduplicated", *(("two_hop",) if devices > node_size else ())) if several else ("all_to_all",),
        overlap_dispatch=(False, True) if several else (False,),
        overlap_tensor=(False,),
        gradient_dtype=("fp32",),
        pp=tuple(n for n in divisors if n <= model.num_layers),
        vpp=tuple(range(1, min(MOST_VPP, model.num_layers) + 1)),
        # GPipe waits as long as 1F1B and holds more.
        schedule=tuple(name for name in get_args(Schedule) if name != "gpipe" and not (ours and name == "dualpipe")),
        recompute_layers=(None,),
        zero=(0, 1, 2, 3),
        shard=(None, *((node_size,) if ours and devices > node_size else ())),
        offload=("none", "optimizer", "activations") if offloads and not ours else ("none",),
        bucket_bytes=(None,),
        overlap_gradients=(True,),
        overlap_parameters=(True,),
    )
    return _narrowed(space, workload, given or {})


def _narrowed(space: Space, workload: Workload, given: Mapping[str, tuple[Any, ...]]) -> Space:
    """To the values that are given."""
    known = [field.name for field in fields(Space)]
    unknown = sorted(set(given) - set(known))
    if "dp" in unknown:
        raise MoestroError("a search has no plan.dp, which is what pp, cp and tp leave of the devices; fix those")
    if unknown:
        raise MoestroError(f"a search has no plan.{unknown[0]}.{nearest(unknown[0], known)} It has {', '.join(known)}")
    for name, values in given.items():
        _check(name, values)
    space = replace(space, **given)
    refused = [why for tp in space.tp for why in cut_heads(workload, tp)[:1]]
    if len(refused) == len(space.tp):
        raise MoestroError(refused[0])
    return space


def _check(name: str, values: tuple[Any, ...]) -> None:
    """Each by itself; what does not go together is left out of the search."""
    if not values:
        raise MoestroError(f"plan.{name}: nothing to try; give a value, or a list as [1, 2, 4]")
    for value in values:
        try:
            Plan.model_validate({name: value})
        except ValidationError as error:
            for found in error.errors():
                if found["loc"]:
                    raise MoestroError(f"plan.{name} = {value}: {found['msg']}") from error


def _plain(family: Family, workload: Workload) -> Family:
    """With the usual value where a choice means nothing."""
    model = workload.model
    changes: dict[str, Any] = {"etp": family.etp or family.tp}  # 0: as tp
    if family.cp == 1:
        changes["context"] = "ring"
    if family.tp == 1:
        changes.update(sequence_parallel=True, overlap_tensor=False)
    if model.moe is None:
        changes.update(etp=1, expert_chunks=1, expert_recompute=False)
    if model.moe is None or family.ep == 1:
        changes.update(dispatch="all_to_all", overlap_dispatch=False)
    if workload.trainer == "moestro" and family.expert_chunks == 1:
        changes["overlap_dispatch"] = False  # ours hides the dispatch of one chunk behind another
    return family._replace(**changes)


def _allowed(family: Family, workload: Workload) -> bool:
    moe, length = workload.model.moe, workload.seq_len // family.cp
    if cut_heads(workload, family.tp) or (family.cp > 1 and workload.seq_len % (2 * family.cp)):
        return False
    if family.tp > 1 and family.sequence_parallel and length % family.tp:
        return False
    if family.expert_recompute and family.recompute == "block":
        return False  # computed again already
    if workload.trainer == "moestro" and family.expert_recompute and family.overlap_dispatch:
        return False  # it has one or the other
    return moe is None or moe.resolved_num_experts % family.ep == 0


def _trainer_refuses(family: Family, schedule: str, pp: int, vpp: int, micro_batches: int) -> bool:
    """Ours wants a micro-batch for each pipeline rank, with DualPipeV for each stage, and splits no backward pass that
    follows recomputation (parallel.layout)."""
    if pp == 1:
        return False
    again = family.recompute != "none" or family.expert_recompute
    wanted = pp * vpp if schedule == "dualpipev" else pp
    whole = schedule in ("interleaved", "zero_bubble")
    return (again and schedule in SPLIT_BACKWARD) or micro_batches < wanted or (whole and micro_batches % pp > 0)


@lru_cache(maxsize=65536)
def _runs(schedule: str, pp: int, vpp: int, micro_batches: int) -> bool:
    """Whether the schedule exists; without a pipeline there is one."""
    if pp == 1:
        return schedule == "1f1b" and vpp == 1
    if CHUNKS_OF_SCHEDULE.get(schedule, vpp) != vpp or (schedule == "interleaved" and vpp == 1):
        return False
    like = 2 * pp + micro_batches % lcm(pp, 2)  # as many odd ones, and as many beyond a multiple of the ranks
    try:
        pipeline_orders(schedule, pp, vpp, min(micro_batches, like))
    except MoestroError:
        return False
    return True
