"""A run as one side of a comparison: what its steady steps took, and what their layout says of the work in them."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moestro.config.load import load_config
from moestro.config.plan import Plan, Workload
from moestro.config.root import Config
from moestro.errors import MoestroError
from moestro.graph.convert import plan_of, workload_of
from moestro.graph.count import count_step
from moestro.plan.explain_side import PASSES, REDUCE, REST, UPDATE, WHOLE, Level, Part, Side, Work, settings_of, work_of
from moestro.report.keyfigures import run_status
from moestro.report.read import FloatArray, IntArray, RunData, number, read_run, table, whole
from moestro.train.phases import Stretch, resolve_stretches

WARM_UP = 2  # steps after a start, which allocate and compile
FEW = 5  # steps, below which their spread says little
SOFTWARE = ("moestro", "git_commit", "git_dirty", "python", "torch")
MACHINE = ("device_name", "num_threads", "cpu_count", "platform")
COUNTED = (  # settings of a run that its workload and its plan hold already
    "data.seq_len", "optim.name", "train.global_batch_size", "train.micro_batch_size", "train.dtype", "train.recompute",
    "train.expert_chunks", "train.expert_recompute", "train.expert_overlap",
)  # fmt: skip


@dataclass(frozen=True)
class MeasuredRun:
    """side: what was measured. config, ranks: of the steps that were compared, to predict them."""

    side: Side
    config: Config
    ranks: int


def measured_run(folder: Path, steps: tuple[int, int] | None = None) -> MeasuredRun:
    """Of a run's folder, the mean of the middle half of its steady steps: robust as a median is, and means of parts add
    up. steps: first and last that may be taken, instead.

    Raises:
        MoestroError: no run, no step times, or none in `steps`.
    """
    run = read_run(folder)
    config = load_config(str(folder / "config.toml")).config
    ranks = whole(run.environment.get("world_size")) or 1
    stretches = resolve_stretches(config, ranks)
    rows, why = _steady(run, steps)
    stretch, rows = _alike(stretches, run.train.step, rows)
    workload = workload_of(stretch.config)
    notes = [f"{why}; {_listed(run.train.step[rows])}"]
    if len(rows) < FEW:
        notes.append(f"{len(rows)} steps say little of the spread; give runs of more steps")
    status = run_status(run)
    if status.word != "finished":
        notes.append(f"{status.word} {status.detail}: what it has logged was compared")
    try:
        plan: Plan | None = plan_of(stretch.config, ranks)
    except MoestroError as error:
        plan = None
        notes.append(f"its work is not counted: {error}")
    levels = _levels(run, rows, workload, plan)
    side = Side(
        name=str(folder),
        kind="measured",
        basis=f"measured: middle half of {len(rows)} steps on {run.environment.get('device_name', 'a device')}",
        step_s=levels["whole"][WHOLE].seconds,
        tokens=workload.tokens,
        devices=ranks,
        levels=levels,
        settings=_settings(run, config, workload, plan),
        mfu=_known(_median(run.train.mfu[rows])) if np.isfinite(run.train.mfu[rows]).any() else None,
        peak_flops=_known(number(run.environment.get("peak_flops_measured"))),
        around=_around(run, rows),
        notes=tuple(notes),
    )
    return MeasuredRun(side, stretch.config, ranks)


def _steady(run: RunData, steps: tuple[int, int] | None) -> tuple[IntArray, str]:
    """Rows of the records to take, and how they were chosen. A run that was resumed may have had another layout or
    machine before, of which only the last is known."""
    train = run.train
    timed = np.isfinite(train.step_s) & (train.step_s > 0)
    if steps is not None:
        wanted, why = (train.step >= steps[0]) & (train.step <= steps[1]), f"steps {steps[0]} to {steps[1]}, as asked"
    else:
        resumes = [event.step for event in run.events if event.event == "resume" and event.step is not None]
        begin = max((step for step in resumes if step < train.step[-1]), default=0)
        wanted = train.step > begin + WARM_UP
        if not (timed & wanted).any():
            wanted = train.step > begin
        why = f"steps after the last resume, at {begin}," if begin else "steps"
        why += f" without the first {WARM_UP}"
    rows = np.flatnonzero(timed & wanted)
    if not rows.size:
        asked = "" if steps is None else f" between {steps[0]} and {steps[1]}"
        logged = f"it has logged steps {train.step[0]} to {train.step[-1]}"
        raise MoestroError(f"{run.folder} has no times of steps{asked}; {logged}")
    return rows, why


def _alike(stretches: list[Stretch], step: IntArray, rows: IntArray) -> tuple[Stretch, IntArray]:
    """Of a run in phases, the stretch with most of the rows, and those."""
    parts = [(one, rows[(step[rows] > one.first_step) & (step[rows] <= one.end)]) for one in stretches]
    found = max(parts, key=lambda part: len(part[1]))
    return found if len(found[1]) else (stretches[-1], rows)


def _levels(run: RunData, rows: IntArray, workload: Workload, plan: Plan | None) -> dict[Level, dict[str, Part]]:
    """The first rank's: it keeps the log."""
    work = Work() if plan is None else work_of(count_step(workload, plan), plan, 0)
    train, steps_s = run.train, run.train.step_s[rows]
    low, high = np.percentile(steps_s, [25, 75])
    middle = (steps_s >= low) & (steps_s <= high)

    def part(column: FloatArray, done: float = 0.0, unit: str = "") -> Part:
        quarter, three_quarters = np.percentile(column, [25, 75])
        spread_s = float(three_quarters - quarter) / 2
        return Part(float(column[middle].mean()), done, unit if done else "", spread_s=spread_s)

    found: dict[Level, dict[str, Part]] = {"whole": {WHOLE: part(steps_s, work.flops, "FLOPs")}}
    passes, reduce, update = train.passes_s[rows], train.reduce_s[rows], train.update_s[rows]
    if np.isfinite(passes + reduce + update).all():  # older versions did not tell them apart
        found["phases"] = {
            PASSES: part(passes, work.flops, "FLOPs"),
            REDUCE: part(reduce, work.sent_once, "bytes sent"),
            UPDATE: part(update, work.updated, "bytes moved"),
            REST: part(steps_s - passes - reduce - update),
        }
    return found


def _around(run: RunData, rows: IntArray) -> dict[str, Part]:
    """Seconds for each of these steps, outside of them. What was not logged is left out."""
    train, found = run.train, {}
    first, last = int(train.step[rows[0]]), int(train.step[rows[-1]])
    if np.isfinite(train.data_s[rows]).any():
        found["data"] = Part(_median(train.data_s[rows]))
    planned = whole(table(run.config, "train").get("steps")) or last  # at the end all held-out text is evaluated once
    evals = run.evals.eval_s[(run.evals.step >= first) & (run.evals.step <= min(last, planned - 1))]
    steps = last - first + 1
    if not run.evals.step.size or np.isfinite(run.evals.eval_s).any():
        found["evaluations"] = Part(float(np.nansum(evals)) / steps)
    if np.isfinite(train.checkpoint_s).any():
        found["checkpoints"] = Part(float(np.nansum(train.checkpoint_s[rows[0] : rows[-1] + 1])) / steps)
    return found


def _settings(run: RunData, config: Config, workload: Workload, plan: Plan | None) -> dict[str, dict[str, Any]]:
    environment = run.environment
    found = settings_of(workload, plan or Plan())
    if plan is None:
        found["plan"] = config.parallel.model_dump(mode="json")
    found["software"] |= {name: environment[name] for name in SOFTWARE if name in environment}
    found["machine"] = {name: environment[name] for name in MACHINE if name in environment}
    tree = config.model_dump(mode="json", exclude={"model": True, "parallel": True, "description": True})
    found["run"] = {
        f"{section}.{key}": value
        for section, values in tree.items()
        for key, value in (values.items() if isinstance(values, dict) else ())
        if f"{section}.{key}" not in COUNTED and (section, key) not in (("run", "name"), ("run", "dir"))
    }
    return found


def _listed(steps: IntArray) -> str:
    return f"{len(steps)} of them, {steps[0]} to {steps[-1]}"


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _median(values: FloatArray) -> float:
    return float(np.nanmedian(values))
