"""Predictions beside public runs: errors by source, device, precision and scale, against a null model."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from moestro.config.counts import count
from moestro.errors import MoestroError
from moestro.hardware.catalog import load_device
from moestro.predict.confidence import interval, residuals_of
from moestro.predict.constants import Calibration, load_calibration
from moestro.predict.costs import StepCost
from moestro.predict.fit import Priced, fit_calibration, left_out, predicted, source_of
from moestro.predict.public import PublicRun, parse_runs
from moestro.predict.step import Place, cost_step

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Row:
    """One run: predicted seconds of a step, and those of the null model (None: nothing to compare with)."""

    run: PublicRun
    predicted: float
    null: float | None

    @property
    def error(self) -> float:
        return self.predicted / self.run.measured - 1


@dataclass(frozen=True)
class Group:
    name: str
    runs: int
    median: float  # of |error|
    p90: float
    bias: float  # median of error
    null_median: float | None


@dataclass(frozen=True)
class Validation:
    rows: tuple[Row, ...]
    unusable: Counter[str]
    failed: Counter[str]
    held_out: bool  # whole sources were left out of the fit, each in turn

    def complete(self) -> list[Row]:
        """Rows whose whole configuration was in the table."""
        return [row for row in self.rows if row.run.complete]


def validate(
    path: Path | None = None, *, hold_out: bool = False, progress: Progress = lambda done, total, what: None
) -> Validation:
    """Predict the step times in a CSV of runs (None: the shipped half of the public ones).

    hold_out: fit the constants anew without each source, and predict that source; otherwise the shipped constants.

    Raises:
        MoestroError: the file cannot be read, or no row of it can be predicted.
    """
    runs, unusable = parse_runs(path)
    priced, failed = price_runs([run for run in runs if run.quantity == "step_s"], progress)
    if not priced:
        raise MoestroError(
            "no row can be predicted; " + "; ".join(f"{n} rows: {why}" for why, n in unusable.most_common(3))
        )
    found = left_out(priced) if hold_out else predicted(priced, load_calibration())
    null = null_model([run for run, _ in found])
    rows = [Row(run, seconds, null.get(run.row)) for run, seconds in found]
    return Validation(tuple(sorted(rows, key=lambda row: row.run.row)), unusable, failed, hold_out)


def calibrate(path: Path | None = None, progress: Progress = lambda done, total, what: None) -> Calibration:
    """Constants fitted to a table's complete runs, with the errors that intervals are made of.

    Of devices that have none, to all their runs: what is wrongly taken for a layout goes into that device's constants.
    """
    runs, _ = parse_runs(path)
    known = {run.device for run in runs if run.complete}
    used = [run for run in runs if run.quantity == "step_s" and (run.complete or run.device not in known)]
    priced, _ = price_runs(used, progress)
    calibration = fit_calibration(priced)
    seen, unseen = predicted(priced, calibration), left_out(priced)
    residuals = (*residuals_of(seen, unseen=False), *residuals_of(unseen, unseen=True))
    return calibration.model_copy(update={"residuals": residuals})


def price_runs(runs: Sequence[PublicRun], progress: Progress) -> tuple[list[Priced], Counter[str]]:
    """Step costs of the runs, equal configurations priced once; and why some cannot be."""
    known: dict[object, StepCost] = {}
    priced, failed = [], Counter[str]()
    for number, run in enumerate(runs):
        place = Place.of(load_device(run.device), run.devices_per_node)
        key = (run.workload.model_dump_json(), run.plan.model_dump_json(), run.device, place.node_size)
        try:
            if key not in known:
                known[key] = cost_step(run.workload, run.plan, place)
            priced.append((run, known[key]))
        except MoestroError as error:
            failed[str(error)] += 1
        if number % 50 == 0:
            progress(number, len(runs), "runs priced")
    progress(len(runs), len(runs), "runs priced")
    return priced, failed


def null_model(runs: Sequence[PublicRun]) -> dict[int, float]:
    """Seconds by the median efficiency of the other runs of a device and precision: what a predictor must beat."""
    groups: dict[tuple[str, str], list[tuple[int, float, float]]] = defaultdict(list)
    for run in runs:
        peak = load_device(run.device).peak_flops("bf16") or 1e15
        ideal = count(run.workload.model, run.workload.seq_len).train_flops_per_token * run.workload.tokens
        ideal /= peak * run.num_devices
        groups[run.device, run.workload.precision].append((run.row, ideal, run.measured))
    found = {}
    for members in groups.values():
        slowness = np.array([measured / ideal for _, ideal, measured in members])
        for i, (row, ideal, _) in enumerate(members):
            others = np.delete(slowness, i)
            if len(others):
                found[row] = ideal * float(np.median(others))
    return found


def coverage(rows: Sequence[Row]) -> float | None:
    """The share of runs inside their 80 % intervals, made of all other sources' errors; None: there is one source.

    Errors of `rows` say nothing of themselves this way; four of five should be inside.
    """
    sources = {source_of(row.run) for row in rows}
    if len(sources) < 2:
        return None
    inside = 0
    for source in sources:
        others = [(row.run, row.predicted) for row in rows if source_of(row.run) != source]
        residuals = (*residuals_of(others, unseen=False), *residuals_of(others, unseen=True))
        calibration = Calibration(residuals=residuals)
        for row in rows:
            if source_of(row.run) == source:
                run = row.run
                found = interval(row.predicted, run.workload, run.device, run.num_devices, calibration)
                inside += found.low <= run.measured <= found.high
    return inside / len(rows)


def groups(rows: Sequence[Row], key: Callable[[Row], str]) -> list[Group]:
    """Errors by `key`, the largest group first."""
    members: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        members[key(row)].append(row)
    return [group(name, own) for name, own in sorted(members.items(), key=lambda item: -len(item[1]))]


def group(name: str, rows: Sequence[Row]) -> Group:
    errors = [row.error for row in rows]
    sizes = np.abs(errors)
    null = [abs(row.null / row.run.measured - 1) for row in rows if row.null is not None]
    return Group(
        name,
        len(rows),
        float(np.median(sizes)),
        float(np.quantile(sizes, 0.9)),
        median(errors),
        median(null) if null else None,
    )


def by_source(row: Row) -> str:
    return source_of(row.run)


def by_device(row: Row) -> str:
    return f"{row.run.device} {row.run.workload.precision}"


def by_kind(row: Row) -> str:
    return "mixture of experts" if row.run.is_moe else "dense"


def by_scale(row: Row) -> str:
    """One device, one node, a few, many."""
    if row.run.num_devices == 1:
        return "one device"
    for limit in (8, 64, 512):
        if row.run.num_devices <= limit:
            return f"up to {limit} devices"
    return "more than 512 devices"
