"""Traces that `moestro predict` writes, for ui.perfetto.dev."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moestro.config.files import write_whole
from moestro.graph.count import count_step
from moestro.predict.perfetto import pipeline_trace, stage_trace, step_trace
from moestro.predict.predict import price_step, slowest_stage

if TYPE_CHECKING:
    from moestro.config.plan import Plan, Workload
    from moestro.predict.simulate import Simulation
    from moestro.predict.target import Target


def write_passes(path: Path, workload: "Workload", plan: "Plan", target: "Target") -> None:
    """Every pass of every pipeline rank."""
    costs = price_step(count_step(workload, plan), workload, plan, target)
    write_events(path, pipeline_trace(costs, plan, target.constants_for(workload, plan.world_size)))


def write_timeline(path: Path, workload: "Workload", plan: "Plan", target: "Target") -> None:
    """One micro-batch of the slowest stage, kernel by kernel."""
    write_events(path, stage_trace(slowest_stage(count_step(workload, plan), workload, plan, target)))


def write_streams(path: Path, found: "Simulation") -> None:
    """All streams of every pipeline rank."""
    write_events(path, step_trace(found))


def write_events(path: Path, trace: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(trace))
