"""A preset's real training step: built, timed, profiled, and taken apart into primitives.

The step is the one that `moestro train` runs, on random tokens. The learning rate is 0 and the routers' balance is put
back after every step: the same arithmetic is done, and all steps are alike, so that the calls of one can be laid beside
the times of another.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from moestro.config import Config, count, load_config, resolved_model
from moestro.data.batches import Batch
from moestro.errors import MoestroError
from moestro.hardware.device import synchronize
from moestro.measure.operands import free_bytes
from moestro.measure.primitives import Account, Call, Event, Spans, account, account_on_device, find_calls, places
from moestro.measure.step_calls import CallRecorder, Lookup, event_key, event_operands
from moestro.measure.step_marks import MarkedUpdate, marked
from moestro.measure.step_work import bytes_of, flops_of, gemm_of, kind_of
from moestro.optim.update import Update
from moestro.parallel.build import buffers
from moestro.parallel.process import this_rank
from moestro.train.engine import Engine, build_engine, build_update
from moestro.train.phases import resolve_stretches
from moestro.train.step import Updates, train_step

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler's library tells of each start and stop on stderr

STEP = "moestro.step"  # the profiler's name for the whole step
WARM_UP = 3
SECONDS = 30.0  # after which no further repeat is begun, with FEWEST done
FEWEST = 3
BYTES_PER_PARAMETER = 16  # fp32 weight, gradient and two moments


class BuiltStep:
    """A step that can be run again and again with the same outcome. Of several ranks each builds its own."""

    def __init__(self, config: Config, device: torch.device) -> None:
        """Raises MoestroError: it needs another number of ranks than there are, or more memory."""
        if this_rank().world_size > 1:
            raise MoestroError(
                "a step is measured in one process, but torchrun or SLURM started several; run `moestro measure step` "
                "by itself"
            )
        config = config.model_copy(update={"model": resolved_model(config)})
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        stretch = resolve_stretches(config, ranks)[0]
        self.config, self.device = stretch.config, device
        self.counts = count(config.model, stretch.config.data.seq_len)
        _check_memory(self.counts.total_params, device)
        self.engine, parts = build_engine(stretch.config, stretch.layout, device)
        self.update: Update = build_update(config, self.engine, parts)
        self.update.set_learning_rate(0.0)
        self.batches = random_batches(config, stretch.layout.micro_batch_size, stretch.layout.micro_batches)
        self._balance = [(b, b.clone()) for b in _balance(self.engine)]

    @property
    def tokens(self) -> int:
        return sum(batch.input_ids.numel() for batch in self.batches)

    def run(self, update: Updates | None = None) -> None:
        """One step, to the end of its last kernel."""
        try:
            train_step(self.engine, update or self.update, self.batches, self.config.train.grad_clip)
            synchronize(self.device)
        except torch.OutOfMemoryError as error:
            raise MoestroError(
                f"out of memory on {self.device}; lower train.micro_batch_size, or measure a smaller preset"
            ) from error

    def put_back(self) -> None:
        """What the step moved: the routers' balance. Not timed."""
        with torch.no_grad():
            for buffer, start in self._balance:
                buffer.copy_(start)

    def record(self) -> CallRecorder:
        """What the calls of one step do."""
        with CallRecorder() as recorder:
            self.run()
        self.put_back()
        return recorder


def build_step(preset: str, overrides: Sequence[str], device: torch.device) -> BuiltStep:
    return BuiltStep(load_config(preset, overrides).config, device)


def random_batches(config: Config, micro_batch_size: int, micro_batches: int) -> list[Batch]:
    """Full sequences of one document each, in every micro-batch of a step."""
    vocab, seq = config.model.vocab_size, config.data.seq_len
    assert vocab is not None
    generator = torch.Generator().manual_seed(config.run.seed)
    batches = []
    for number in range(micro_batches):
        tokens = torch.randint(0, vocab, (micro_batch_size, seq + 1), generator=generator)
        batches.append(
            Batch(
                input_ids=tokens[:, :-1].contiguous(),
                labels=tokens[:, 1:].contiguous(),
                document_ids=torch.zeros(micro_batch_size, seq, dtype=torch.int32),
                position_ids=torch.arange(seq).repeat(micro_batch_size, 1),
                sample_ids=torch.arange(micro_batch_size) + number * micro_batch_size,
            )
        )
    return batches


def _balance(engine: Engine) -> list[Tensor]:
    return [chunk.tensor for logical in buffers(engine.models).values() for chunk in logical.chunks]


def _check_memory(parameters: int, device: torch.device) -> None:
    free = free_bytes(device)
    needed = parameters * BYTES_PER_PARAMETER
    if needed > free:
        raise MoestroError(
            f"weights, gradients and optimizer state take {needed / 1e9:.1f} GB and {device} has {free / 1e9:.1f} GB "
            "free; measure a smaller preset, or lower model.num_layers or model.moe.num_experts"
        )


@dataclass(frozen=True)
class StepTimes:
    """Seconds of whole steps, without the profiler, and the account of one profiled step.

    The profiled steps took turns with the others; accounted is the one of median length.
    """

    steps_s: list[float]
    profiled_s: list[float]
    accounted: Account
    events: int
    profiler_cost_s: float  # of one event

    @property
    def median_s(self) -> float:
        return statistics.median(self.steps_s)


def take_apart(step: BuiltStep, recorder: CallRecorder) -> list[Call]:
    """The calls of a step in their order, from one profiled step with markers, which is not timed."""
    with marked(step.engine):
        spans = profiled(step, MarkedUpdate(step.update), with_operands=True)
    lookup = Lookup(recorder, spans.ops)
    calls = []
    for span, (phase, part) in zip(spans.calls, places(spans), strict=True):
        event = span.event
        key, work = lookup.find(event)
        kind = kind_of(event.name, part, phase, work is not None and work.is_view)
        operands = work.operands if work else event.operands
        flops = work.flops if work else flops_of(event.name, operands)
        moved = work.bytes_moved if work else bytes_of(event.name, operands) * (kind != "view")
        calls.append(Call(event.name, key, phase, part, kind, operands, gemm_of(event.name, operands), flops, moved))
    return calls


def time_step(
    step: BuiltStep, calls: Sequence[Call], repeats: int, tick: Callable[[], None] = lambda: None
) -> StepTimes:
    """Time `repeats` steps, and profile one after each, so that both see the same weather. tick: called after each.

    Raises:
        RuntimeError: no profiled step shows the calls in their order.
    """
    for _ in range(WARM_UP):
        step.run()
        step.put_back()
        tick()
    ops, plain, accounts = [call.op for call in calls], list[float](), list[tuple[Account, int]]()
    cost_s = profiler_cost_s(step.device)
    gc.collect()
    begun = time.perf_counter()
    for number in range(repeats):
        if number >= FEWEST and time.perf_counter() - begun > SECONDS:
            break
        start = time.perf_counter()
        step.run()
        plain.append(time.perf_counter() - start)
        step.put_back()
        spans = profiled(step)
        if spans.ops == ops:
            accounts.append((_account(spans, step.device, cost_s), spans.events))
        tick()
    if not accounts:
        raise RuntimeError("the step does not make the same calls twice; its primitives cannot be told apart")
    accounts.sort(key=lambda pair: pair[0].wall_s)
    middle, events = accounts[(len(accounts) - 1) // 2]
    return StepTimes(plain, [found.wall_s for found, _ in accounts], middle, events, cost_s)


def _account(spans: Spans, device: torch.device, cost_s: float) -> Account:
    return account(spans, cost_s) if device.type == "cpu" else account_on_device(spans)


def profiled(step: BuiltStep, update: Updates | None = None, with_operands: bool = False) -> Spans:
    """The calls of one step, as the profiler saw them."""
    activities = [ProfilerActivity.CPU]
    if step.device.type != "cpu":
        activities.append(getattr(ProfilerActivity, step.device.type.upper(), ProfilerActivity.CPU))
    with (
        profile(activities=activities, record_shapes=with_operands, acc_events=False) as profiler,
        record_function(STEP),
    ):
        step.run(update)
    step.put_back()
    events = _events(profiler, with_operands)
    whole = next(event for event in events if event.name == STEP)
    return find_calls(events, whole, _is_call)


def _events(profiler: Any, with_operands: bool) -> list[Event]:
    """Of the host. On an accelerator each knows the time of the kernels that were launched in it."""
    host, device_ns, events = torch.autograd.DeviceType.CPU, {}, []
    if profiler.use_device:
        device_ns = {
            (e.id, e.name): round(e.device_time_total * 1e3) for e in profiler.events() if e.device_type == host
        }
    for e in profiler.profiler.kineto_results.events():
        if e.device_type() != host:
            continue
        event = Event(e.name(), e.start_ns(), e.end_ns(), device_ns.get((e.correlation_id(), e.name()), 0))
        if with_operands:
            given = (e.name(), e.structured_input_shapes(), e.structured_input_strides(), e.dtypes())
            event = replace(event, key=event_key(*given), sequence=e.sequence_nr(), operands=event_operands(*given))
        events.append(event)
    return events


@cache
def _is_call(name: str) -> bool:
    """Whether events of this name do work of their own: operations that are not made of others (as linear is of mm)."""
    namespace, _, packet = name.partition("::")
    operators = getattr(getattr(torch.ops, namespace, None), packet, None) if packet.isidentifier() else None
    if not isinstance(operators, torch._ops.OpOverloadPacket) or name == "aten::detach":
        return False
    names = [f"{name}.{o}".removesuffix(".default") for o in operators.overloads() if "out" not in o]
    known = [each for each in names if torch._C._dispatch_has_kernel(each)]  # others are TorchScript's only
    composite = torch._C._dispatch_has_kernel_for_dispatch_key
    return not all(composite(each, "CompositeImplicitAutograd") for each in known)


def profiler_cost_s(device: torch.device, calls: int = 2000) -> float:
    """Seconds that recording one event adds to an operation: many small ones with the profiler, and without.

    In time of this thread, so that a busy machine does not count.
    """
    x = torch.ones(1, device=device)

    def loop() -> float:
        start = time.thread_time()
        for _ in range(calls):
            x.view(1)
        return time.thread_time() - start

    loop()
    plain = min(loop() for _ in range(3))
    costs = []
    for _ in range(3):
        with profile(activities=[ProfilerActivity.CPU], acc_events=False):
            costs.append(loop())
    return max(min(costs) - plain, 0.0) / calls
