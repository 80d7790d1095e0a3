"""Traces for chrome://tracing or ui.perfetto.dev: the passes of a step, a row for each pipeline rank; a simulated step,
a process for each pipeline rank and a row for each stream; or the kernels of one stage, a row for the host and each
stream."""

from typing import Any

from moestro.config.plan import Plan
from moestro.predict.constants import Constants
from moestro.predict.costs import StepCost
from moestro.predict.schedule import simulate_pipeline
from moestro.predict.simulate import NAMES, PASSES, Simulation
from moestro.predict.timeline import COMPUTE, HOST, Timeline
from moestro.predict.warmup import orders_of


def pipeline_trace(costs: StepCost, plan: Plan, constants: Constants) -> dict[str, Any]:
    """In the Trace Event Format, times in µs. After the passes, each rank's reductions and its optimizer."""
    schedule = plan.schedule if plan.pp > 1 else "1f1b"
    result = simulate_pipeline(
        schedule,
        plan.pp,
        plan.vpp,
        costs.micro_batches,
        [stage.forward.seconds(constants) for stage in costs.stages],
        [stage.backward.seconds(constants) for stage in costs.stages],
        [stage.weight.seconds(constants) for stage in costs.stages],
        [stage.send_s * constants.between + stage.latency_s + stage.line_s for stage in costs.stages],
        orders=orders_of(plan, costs.micro_batches),
    )
    events = [_row(rank, f"pipeline rank {rank}") for rank in range(plan.pp)]
    for event in result.events:
        work = event.work
        arguments = {"stage": work.stage, "micro_batch": work.micro_batch}
        events.append(_event(NAMES[work.kind], event.rank, event.start_s, event.end_s, arguments))
    for rank, (_, reduce, update) in enumerate(costs.once):
        start = max((event.end_s for event in result.events if event.rank == rank), default=0.0)
        for name, cost in (("gradient reduction, if nothing hid it", reduce), ("optimizer", update)):
            end = start + cost.seconds(constants)
            if end > start:
                events.append(_event(name, rank, start, end, {}))
            start = end
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def stage_trace(timeline: Timeline) -> dict[str, Any]:
    """In the Trace Event Format, times in µs."""
    others = sorted({event.row for event in timeline.events} - {HOST, COMPUTE})
    rows = {name: number for number, name in enumerate((HOST, COMPUTE, *others))}
    events = [_row(number, name) for name, number in rows.items()]
    events += [_event(event.name, rows[event.row], event.start_s, event.end_s, {}) for event in timeline.events]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def step_trace(found: Simulation) -> dict[str, Any]:
    """In the Trace Event Format, times in µs."""
    events = []
    for rank in range(len(found.ranks)):
        rows = {PASSES: 0, COMPUTE: 1}
        for event in found.timeline(rank):
            row = rows.setdefault(event.row, len(rows))
            events.append(_event(event.name, row, event.start_s, event.end_s, {}, rank))
        name = {"name": f"pipeline rank {rank}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": name})
        events += [_row(number, name, rank) for name, number in rows.items()]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _row(number: int, name: str, process: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": name}}


def _event(
    name: str, row: int, start_s: float, end_s: float, arguments: dict[str, int], process: int = 0
) -> dict[str, Any]:  # fmt: skip
    return {
        "ph": "X", "name": name, "cat": "step", "pid": process, "tid": row, "ts": start_s * 1e6,
        "dur": (end_s - start_s) * 1e6, "args": arguments,
    }  # fmt: skip
