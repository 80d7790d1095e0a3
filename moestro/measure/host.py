"""What the host adds to a training step beside the operations: the five overheads of arXiv 2201.07821, and its calls.

A small real step is traced by PyTorch's profiler, and the times between and inside the traced calls are sorted into

    T1  from the end of one operation to the start of the next: Python, the model's own code, autograd's engine
    T2  from an operation's start to its first launch: dispatch, checks, allocation
    T3  from an operation's last launch to its end
    T4  a launch itself
    T5  between the launches of one operation; of an operation that launches nothing, all its time

An operation is what is called from Python, or by autograd's engine. On an accelerator a launch is the runtime's call
that hands over a kernel or a copy. On a CPU nothing is launched: there the innermost calls, which compute, take the
place of launches, and T4 is what PyTorch takes to get to one, measured with tensors of a single element.

Tracing a call costs time of its own: what it adds to a call that does next to nothing is taken off where a call starts.
"""

import os
import re
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from moestro.config import ModelConfig, MoEConfig, OptimConfig
from moestro.hardware.device import synchronize
from moestro.hardware.profile import Sample
from moestro.measure.timing import Case, measure_cases
from moestro.model.transformer import Transformer
from moestro.optim.build import build_optimizers

LONGEST_S = 200e-6  # what takes longer is the system's doing or waiting, and left out (arXiv 2201.07821, of T1)
SHORTEST_S = 1e-8  # about the profiler's resolution; what is shorter after its cost was taken off is given as this
PHASES = ("forward", "backward", "optimizer")
LAUNCH = re.compile(r"^(cuda|cu|hip|musa|acl|ur|ze|sycl)\w*(Launch|Memcpy|Memset|memcpy|fill|copy)", re.ASCII)
CALLS_S = 0.05  # of timing each direct call


@dataclass
class Event:
    """A traced call on one thread of the host, with the calls that it made."""

    name: str
    start_s: float
    end_s: float
    thread: int = 0
    children: list["Event"] = field(default_factory=list)


def measure_host(device: torch.device, quick: bool) -> list[Sample]:
    """Ops host_t1 … host_t5, host_launch and host_sync; `what` says of which phase or call.

    The percentiles of T1 … T5 are over the operations of the step, not over repeats. "mean" is over all phases, for
    who wants to add them up.
    """
    step = _small_step(device)
    for _ in range(3):
        step()
    trace = _trace(step, 5 if quick else 20, device)
    return _samples(host_overheads(trace, launches=device.type != "cpu")) + _direct_calls(device)


@dataclass(frozen=True)
class Trace:
    """events: of all threads, in any order. phases: name, start and end. cost_s: of tracing one call."""

    events: list[Event]
    phases: list[tuple[str, float, float]]
    cost_s: float


def host_overheads(trace: Trace, launches: bool) -> dict[tuple[str, str], list[float]]:
    """T1 … T5 in seconds, by (overhead, phase); T4 by (overhead, kind of launch).

    launches: whether there are any; else the innermost calls take their place. What lies outside of all phases is left
    out.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    gap, roots = _gaps(trace), nest(trace.events)
    for phase, begin, end in trace.phases:
        before: dict[int, Event] = {}  # by thread
        for op in (root for root in roots if begin <= root.start_s < end):
            last = before.get(op.thread)
            if last is not None:
                found["host_t1", phase].append(gap(op.thread, last.end_s, op.start_s))
            before[op.thread] = op
            inner = _launches(op) if launches else _innermost(op)
            if not inner:
                found["host_t5", phase].append(gap(op.thread, op.start_s, op.end_s))
            elif inner != [op]:
                found["host_t2", phase].append(gap(op.thread, op.start_s, inner[0].start_s))
                found["host_t3", phase].append(gap(op.thread, inner[-1].end_s, op.end_s))
                found["host_t5", phase] += [gap(op.thread, a.end_s, b.start_s) for a, b in pairwise(inner)]
            if launches:
                for call in inner:
                    found["host_t4", call.name].append(call.end_s - call.start_s)
    kept = {key: [value for value in values if value <= LONGEST_S] for key, values in found.items()}
    return {key: values for key, values in kept.items() if values}


def _gaps(trace: Trace) -> Callable[[int, float, float], float]:
    """A function of thread, start and end: the seconds between, less the cost of tracing the calls that start there."""
    starts: dict[int, list[float]] = defaultdict(list)
    for event in sorted(trace.events, key=lambda e: e.start_s):
        starts[event.thread].append(event.start_s)

    def gap(thread: int, since: float, until: float) -> float:
        begun = bisect_right(starts[thread], until) - bisect_right(starts[thread], since)
        return max(until - since - begun * trace.cost_s, 0.0)

    return gap


def nest(events: Sequence[Event]) -> list[Event]:
    """The outermost events in the order of their starts, each with the events inside it as children."""
    roots: list[Event] = []
    open_events: dict[int, list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda e: (e.start_s, -e.end_s)):
        event.children = []
        stack = open_events[event.thread]
        while stack and stack[-1].end_s < event.end_s:
            stack.pop()
        (stack[-1].children if stack else roots).append(event)
        stack.append(event)
    return roots


def _innermost(op: Event) -> list[Event]:
    return [leaf for child in op.children for leaf in _innermost(child)] if op.children else [op]


def _launches(op: Event) -> list[Event]:
    if LAUNCH.match(op.name):
        return [op]
    return [call for child in op.children for call in _launches(child)]


def _small_step(device: torch.device) -> Callable[[], None]:
    """A training step of a small MoE model whose operations take next to no time."""
    moe = MoEConfig(num_experts=4, top_k=2, expert_hidden_size=32)
    config = ModelConfig(vocab_size=64, hidden_size=64, num_layers=2, num_heads=2, max_seq_len=32, moe=moe)
    model = Transformer(config)
    model.init_weights(0)
    model.to(device)
    optimizers = build_optimizers(model, OptimConfig())
    tokens = torch.arange(64, device=device).view(2, 32)

    def step() -> None:
        with torch.profiler.record_function("forward"):
            out = model(tokens, labels=tokens, loss_scale=1 / tokens.numel())
            loss = out.loss + sum(stats.aux_loss for stats in out.router_stats)
        with torch.profiler.record_function("backward"):
            loss.backward()
        with torch.profiler.record_function("optimizer"):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    return step


def _trace(step: Callable[[], None], steps: int, device: torch.device) -> Trace:
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler writes to the terminal
    others = torch.profiler.supported_activities() - {ProfilerActivity.CPU} if device.type != "cpu" else set()
    plain_s = _small_call_s()
    with profile(activities=[ProfilerActivity.CPU, *others], acc_events=True) as profiler:
        traced_s = _small_call_s()
        for _ in range(steps):
            step()
            synchronize(device)
    events, phases = [], []
    for event in profiler.events():
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue
        start_s, end_s = event.time_range.start / 1e6, event.time_range.end / 1e6
        if event.name in PHASES:
            phases.append((event.name, start_s, end_s))
        elif not event.is_user_annotation:  # such as those that optimizers put around their step
            events.append(Event(event.name, start_s, end_s, event.thread))
    return Trace(events, phases, max(traced_s - plain_s, 0.0))


def _small_call_s() -> float:
    """Seconds of a call that does next to nothing on the host, at the quietest of several moments."""
    one, out = torch.ones(1), torch.ones(1)
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(20):
            torch.add(one, one, out=out)
        best = min(best, (time.perf_counter() - start) / 20)
    return best


def _samples(overheads: dict[tuple[str, str], list[float]]) -> list[Sample]:
    samples = []
    for op, what in sorted(overheads):
        low, median, high = np.maximum(np.percentile(overheads[op, what], (10, 50, 90)), SHORTEST_S)
        count = len(overheads[op, what])
        samples.append(Sample(op=op, case={"what": what}, median_s=median, low_s=low, high_s=high, repeats=count))
    for op in sorted({op for op, _ in overheads}):
        values = [value for (name, _), some in overheads.items() if name == op for value in some]
        mean = max(float(np.mean(values)), SHORTEST_S)
        samples.append(Sample(op=op, case={"what": "mean"}, median_s=mean, repeats=len(values)))
    return samples


def _direct_calls(device: torch.device) -> list[Sample]:
    """Calls too short to be seen in a trace, timed one after the other without waiting for the device."""
    one, out = torch.ones(1, device=device), torch.ones(1, device=device)
    calls: list[tuple[str, str, Callable[[], object]]] = [
        ("host_launch", "python call", lambda: None),
        ("host_launch", "add", lambda: torch.add(one, one, out=out)),
        ("host_launch", "add with a new tensor", lambda: torch.add(one, one)),
        ("host_sync", "item", lambda: one.item()),
    ]
    if device.type == "cpu":
        calls.append(("host_t4", "mean", lambda: torch.add(one, one, out=out)))
    else:
        calls.append(("host_sync", "synchronize", lambda: synchronize(device)))
    cases = [Case(op, {"what": what}, None, None, partial(_itself, call)) for op, what, call in calls]
    # The host's time, so timed as on a CPU: by the clock, and not waiting for what was launched.
    return measure_cases(cases, torch.device("cpu"), seconds_per_case=CALLS_S).samples


def _itself(call: Callable[[], object]) -> Callable[[], object]:
    return call
