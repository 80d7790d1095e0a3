"""The trainer's own step, as one rank of a world of any size runs it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from moestro.config import Config
from moestro.config.counts import resolved_model
from moestro.config.plan import RoutingConfig
from moestro.data.batches import Batch
from moestro.graph.trace.recorder import Event, Exchange, Memory, Op, Recorder
from moestro.graph.trace.session import recording
from moestro.graph.words import Parameters
from moestro.optim.slots import fresh_state
from moestro.parallel.layout import Layout, resolve_layout
from moestro.parallel.mesh import Mesh
from moestro.train.engine import build_engine, build_update
from moestro.train.stage import Stage
from moestro.train.step import train_step


@dataclass(frozen=True)
class StageTrace:
    """A stage of the traced rank."""

    index: int
    layers: tuple[int, ...]
    parameters: Parameters
    # Bytes that one micro-batch leaves behind for its backward pass, with its copies of weights in another type, and
    # with what came from the stage before and goes to the next; without gathered weights.
    saved: int
    stream_bytes: int  # of what goes to the next stage


@dataclass(frozen=True)
class RankTrace:
    """One step on one rank. Micro-batches beyond those that the schedule needs are left out: they are all alike."""

    layout: Layout  # of the whole step
    rank: int
    events: list[Event]
    memory: Memory
    stages: list[StageTrace]
    groups: dict[tuple[int, ...], list[str]] = field(default_factory=dict)  # of the mesh: ranks, names


def unique_ranks(layout: Layout) -> list[int]:
    """One rank for each place in the pipeline. The others of a place do the same with other tokens and experts."""
    return [place * layout.data_ranks * layout.tp for place in range(layout.pp)]


def trace_rank(
    config: Config,
    world_size: int,
    rank: int = 0,
    routing: RoutingConfig | None = None,
    recorded: Sequence[Tensor] = (),
    ranks_per_node: int | None = None,
    more: int = 0,
) -> RankTrace:
    """Run one optimizer step of `config` as `rank` of `world_size`, without weights, data or other ranks.

    more: micro-batches beyond those that the schedule takes.

    Raises:
        MoestroError: the layout does not fit.
    """
    config = config.in_phase(0)
    config = config.model_copy(update={"model": resolved_model(config)})
    layout = resolve_layout(config, world_size, ranks_per_node or world_size)
    short = _shortened(config, layout, more)
    with recording(world_size, rank, routing, recorded) as (recorder, device):
        short_layout = resolve_layout(short, world_size, ranks_per_node or world_size)
        engine, parts = build_engine(short, short_layout, device)
        update = build_update(short, engine, parts)
        for optimizer in update.optimizers:
            fresh_state(optimizer)
        numbers = layout.stages_of(engine.mesh.place.pp)
        saved = [_watch(stage, number, recorder) for stage, number in zip(engine.stages, numbers, strict=True)]
        recorder.phase = "between"
        recorder.events.clear()
        batches = [_batch(short, short_layout) for _ in range(short_layout.micro_batches)]
        train_step(engine, _Watched(update, recorder), batches, short.train.grad_clip)
        groups = _groups(engine.mesh)
    stages = [
        StageTrace(
            number,
            layout.stages[number],
            _parameters(stage.model),
            max(sizes),
            _stream_bytes(stage, short_layout, short),
        )
        for number, stage, sizes in zip(numbers, engine.stages, saved, strict=True)
    ]
    events = recorder.events
    if layout.pp == 1 and layout.fsdp > 1:
        events = _late(events)
    return RankTrace(layout, rank, events, recorder.memory, stages, groups)


def _shortened(config: Config, layout: Layout, more: int) -> Config:
    """The same with as few micro-batches as the schedule takes. Where gradients come to be in backward, a second one
    finds those of the first in memory."""
    wanted = 2 if layout.zero != 1 else 1
    if layout.pp > 1:
        wanted = len(layout.stages) if layout.schedule == "dualpipev" else layout.pp
    count = min(layout.micro_batches, wanted + more)
    size = count * layout.micro_batch_size * layout.batch_ranks
    changes = {"global_batch_size": size, "micro_batch_size": layout.micro_batch_size}
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})


def _batch(config: Config, layout: Layout) -> Batch:
    """One document a row, as long as it."""
    shape = layout.micro_batch_size, config.data.seq_len
    positions = torch.arange(shape[1]).repeat(shape[0], 1)
    documents = torch.zeros(shape, dtype=torch.int32)
    return Batch(positions % 2, positions % 2, documents, positions, torch.arange(shape[0]))


def _watch(stage: Stage, number: int, recorder: Recorder) -> list[int]:
    """Note to which micro-batch of which stage things belong; gives the bytes that each forward leaves behind."""
    before: list[tuple[int, int]] = []  # lives of storages, and gathered bytes less those that came
    saved: list[int] = []
    lives = recorder.memory.lives

    def enter(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        recorder.phase, recorder.micro = "forward", (number, len(before))
        came = inputs[0].untyped_storage().nbytes() if number > 0 else 0
        before.append((len(lives), _gathered(stage) + came))

    def leave(*_: Any) -> None:
        recorder.phase, recorder.micro = "between", None
        first, other = before[-1]
        kept = sum(life.bytes for life in lives[first:] if life.died is None)
        saved.append(kept + other - _gathered(stage))

    stage.register_forward_pre_hook(enter, prepend=True)
    stage.register_forward_hook(leave)
    return saved


def _gathered(stage: Stage) -> int:
    """Bytes of the weights that FSDP2 has gathered and not freed."""
    modules = [module for module in stage.modules() if isinstance(module, FSDPModule)]
    groups = [module._get_fsdp_state()._fsdp_param_group for module in modules]
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for group in groups
        if group is not None
        for parameter in group.fsdp_params
        for t in (*parameter.all_gather_outputs, *_unsharded(parameter))
    }
    return sum(storages.values())


def _unsharded(parameter: Any) -> list[Tensor]:
    """The gathered weight, which is memory of its own where shards do not lie end to end."""
    whole = getattr(parameter, "_unsharded_param", None)
    return [] if whole is None else [whole]


def _late(events: list[Event]) -> list[Event]:
    """FSDP2 reduces the root's gradients when backward has ended, but they are of the micro-batch before."""
    found, micro = list[Event](), None
    for event in events:
        if isinstance(event, (Op, Exchange)) and event.place.micro is not None:
            micro = event.place.micro
        elif isinstance(event, Exchange) and event.place.phase == "backward":
            event = replace(event, place=event.place._replace(micro=micro))
        found.append(event)
    return found


class _Watched:
    """An `Updates` that tells the recorder what is being done."""

    def __init__(self, update: Any, recorder: Recorder) -> None:
        self.update, self.recorder = update, recorder

    def reduce_gradients(self) -> None:
        self.recorder.phase = "gradients"
        self.update.reduce_gradients()

    def clip(self, max_norm: float) -> Tensor:
        self.recorder.phase = "update"
        norm: Tensor = self.update.clip(max_norm)
        return norm

    def step(self) -> None:
        self.update.step()

    def zero_grad(self) -> None:
        self.update.zero_grad()
        self.recorder.phase = "between"


def _parameters(stage: nn.Module) -> Parameters:
    """As many as the rank has before FSDP2 splits them."""
    dense = expert = 0
    for name, parameter in stage.named_parameters():
        if ".experts." in name:
            expert += parameter.numel()
        else:
            dense += parameter.numel()
    return Parameters(dense, expert, trained=dense + expert)


def _stream_bytes(stage: Stage, layout: Layout, config: Config) -> int:
    if stage.model.is_last:
        return 0
    tokens = layout.micro_batch_size * config.data.seq_len // layout.sequence_ranks
    return tokens * stage.model.stream_size * stage.model.stream_dtype.itemsize


def _groups(mesh: Mesh) -> dict[tuple[int, ...], list[str]]:
    """The names of each group, those that most collectives mean first. Groups of one layout may coincide."""
    found: dict[tuple[int, ...], list[str]] = {}
    for name in ("tp", "cp", "ep", "edp", "data", "pp", "sequence", "tokens", "ends", "world"):
        group = getattr(mesh, name)
        if group is not None:
            found.setdefault(tuple(dist.get_process_group_ranks(group)), []).append(name)
    for name, shards in (("data", mesh.shard), ("edp", mesh.expert_shard)):
        for axis in range(0 if shards is None else shards.ndim):
            assert shards is not None
            names = found.setdefault(tuple(dist.get_process_group_ranks(shards.get_group(axis))), [])
            if name not in names:
                names.append(name)
    return found
