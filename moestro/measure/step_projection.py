"""A measured step held against what its calls could take: where the time goes, and what each part of it loses.

Three figures of each call: its time in the step; its time alone (measured in a hot loop, or from a profile's curves);
and the floor, what its FLOPs and bytes take at the machine's best speeds.
"""

import csv
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from moestro.errors import MoestroError
from moestro.hardware.device import device_name
from moestro.measure.primitives import Call, Primitive, primitives
from moestro.measure.step import BuiltStep, StepTimes, take_apart, time_step
from moestro.measure.step_curves import Curves
from moestro.measure.step_replay import Limits, measure_alone, measure_limits
from moestro.measure.step_work import GEMM

ALONE_S = 15.0  # after which no further call is begun alone
CASE_S = 0.02  # of timing one of them
DATA = "random tokens, full sequences of one document; learning rate 0; routing as the initial router gives it"

Progress = Callable[[str, int, int], None]  # what is done, how much of it, of how much


@dataclass(frozen=True)
class Projection:
    """alone_s, floor_s: of each call. covered_s: time in the step of the calls whose alone_s is not their own time."""

    name: str
    overrides: tuple[str, ...]
    device: str
    load_average: float
    tokens: int
    model_flops: float  # of a step, by `moestro.config.count`
    times: StepTimes
    calls: list[Call]
    alone_s: list[float]
    floor_s: list[float]
    covered_s: float
    alone_from: str
    limits: Limits
    notes: list[str]

    @property
    def rows(self) -> list[Primitive]:
        return primitives(self.calls, self.times.accounted, self.alone_s, self.floor_s)

    @property
    def in_calls_s(self) -> float:
        return self.times.accounted.calls_s

    @property
    def gaps_s(self) -> float:
        return self.times.accounted.gaps_s

    @property
    def sum_over_step(self) -> float:
        """Σ primitives and gaps, from the profiled step, over the step without the profiler."""
        return (self.in_calls_s + self.gaps_s) / self.times.median_s

    @property
    def composed_s(self) -> float:
        """Σ calls alone, and the gaps as they are."""
        return sum(self.alone_s) + self.gaps_s

    @property
    def backward_over_forward(self) -> float:
        seconds = {"forward": 0.0, "backward": 0.0}
        for call, timed in zip(self.calls, self.times.accounted.calls, strict=True):
            if call.phase in seconds:
                seconds[call.phase] += timed.seconds + timed.gap_s
        return seconds["backward"] / seconds["forward"]


def project(
    step: BuiltStep,
    name: str,
    overrides: tuple[str, ...] = (),
    repeats: int = 10,
    curves: tuple[str, Curves] | None = None,
    progress: Progress = lambda *_: None,
) -> Projection:
    """Measure a step and its calls. curves: a profile's name and curves, to take the calls' own times from."""
    load = os.getloadavg()[0]
    progress("taking the step apart", 0, 1)
    recorder = step.record()
    calls = take_apart(step, recorder)
    done = iter(range(1, 10**9))
    times = time_step(step, calls, repeats, lambda: progress("timing the step", next(done), repeats))
    progress("the machine's best speeds", 0, 1)
    limits = measure_limits(step.device, {call.dtype for call in calls if call.kind == GEMM})
    notes: list[str] = []
    if curves is not None:
        alone_from = f"the curves of profile {curves[0]}"
        known = {call.key: curves[1].seconds(call) for call in {call.key: call for call in calls}.values()}
    else:
        alone_from = "measured alone in a hot loop"
        samples, notes = measure_alone(
            _by_time(calls, times, recorder.work),
            recorder.work,
            step.device,
            seconds_per_case=CASE_S,
            deadline=time.perf_counter() + ALONE_S,
            progress=lambda visit, of, _: progress("calls alone", visit, of),
        )
        known = {key: sample.median_s for key, sample in samples.items()}
        limits = limits.raised(samples.values())
    timed = times.accounted.calls
    return Projection(
        name=name,
        overrides=overrides,
        device=device_name(step.device),
        load_average=load,
        tokens=step.tokens,
        model_flops=step.counts.train_flops_per_token * step.tokens,
        times=times,
        calls=calls,
        alone_s=[known.get(call.key, own.seconds) for call, own in zip(calls, timed, strict=True)],
        floor_s=[limits.floor_s(call) for call in calls],
        covered_s=sum(own.seconds for call, own in zip(calls, timed, strict=True) if call.key in known),
        alone_from=alone_from,
        limits=limits,
        notes=notes,
    )


def _by_time(calls: list[Call], times: StepTimes, work: Any) -> dict[str, Call]:
    """One call of each key that can be made again, those first on which the step spends most. Views do no work."""
    spent: dict[str, float] = {}
    for call, timed in zip(calls, times.accounted.calls, strict=True):
        if call.key in work and call.kind != "view":
            spent[call.key] = spent.get(call.key, 0.0) + timed.seconds
    one = {call.key: call for call in calls}
    return {key: one[key] for key in sorted(spent, key=spent.__getitem__, reverse=True)}


def as_dict(found: Projection) -> dict[str, Any]:
    """For machines. Times in seconds; everything is measured here unless its name says otherwise."""
    times = found.times
    ordered = sorted(times.steps_s)
    return {
        "preset": found.name,
        "overrides": list(found.overrides),
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": found.device,
        "torch": torch.__version__,
        "load_average_before": found.load_average,
        "data": DATA,
        "tokens": found.tokens,
        "model_flops_counted": found.model_flops,
        "flops_of_calls": sum(call.flops for call in found.calls),
        "step_s": {"median": times.median_s, "low": ordered[0], "high": ordered[-1], "repeats": len(ordered)},
        "profiled_step_s": times.profiled_s,
        "profiler": {
            "events": times.events,
            "s_per_event": times.profiler_cost_s,
            "taken_off_s": times.accounted.profiler_s,
        },
        "in_calls_s": found.in_calls_s,
        "gaps_s": found.gaps_s,
        "sum_over_step": found.sum_over_step,
        "alone": {"from": found.alone_from, "sum_s": sum(found.alone_s), "covers_s": found.covered_s},
        "composed_s": found.composed_s,
        "composed_over_step": found.composed_s / times.median_s,
        "floor_s": sum(found.floor_s),
        "backward_over_forward": found.backward_over_forward,
        "best_flops_per_s": dict(found.limits.flops_per_s),
        "primitives": [_row(row) for row in found.rows],
        "notes": found.notes,
    }


def _row(row: Primitive) -> dict[str, Any]:
    return {
        "primitive": row.kind,
        "part": row.part,
        "phase": row.phase,
        "calls": row.calls,
        "in_step_s": row.in_step_s,
        "alone_s": row.alone_s,
        "ratio": row.ratio,
        "gap_s": row.gap_s,
        "floor_s": row.floor_s,
        "flops": row.flops,
        "bytes": row.bytes_moved,
    }


def write_projection(found: Projection, folder: Path) -> None:
    """step.json, primitives.csv and calls.csv in a new folder, whole or not at all.

    Raises:
        MoestroError: the folder is there already.
    """
    if folder.exists():
        raise MoestroError(f"{folder} exists; choose another --out")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        (temporary / "step.json").write_text(json.dumps(as_dict(found), indent=1) + "\n")
        _write_csv(temporary / "primitives.csv", [_row(row) for row in found.rows])
        _write_csv(temporary / "calls.csv", _call_rows(found))
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _call_rows(found: Projection) -> list[dict[str, Any]]:
    """Calls that are alike and in the same place, with the sums of their times."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    timed = found.times.accounted.calls
    for call, own, alone, floor in zip(found.calls, timed, found.alone_s, found.floor_s, strict=True):
        row = rows.setdefault(
            (call.key, call.part, call.phase),
            {
                "operation": call.op,
                "shapes": call.shapes,
                "dtype": call.dtype,
                "primitive": call.kind,
                "part": call.part,
            }
            | {
                "phase": call.phase,
                "calls": 0,
                "in_step_s": 0.0,
                "alone_s": 0.0,
                "floor_s": 0.0,
                "flops": 0.0,
                "bytes": 0.0,
            },
        )
        added = {"calls": 1, "in_step_s": own.seconds, "alone_s": alone, "floor_s": floor, "flops": call.flops}
        for key, value in (added | {"bytes": call.bytes_moved}).items():
            row[key] += value
    return sorted(rows.values(), key=lambda row: row["in_step_s"], reverse=True)


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
