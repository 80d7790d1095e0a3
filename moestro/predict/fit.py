"""Fits the constants of training steps to measured runs."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from moestro.predict.constants import Calibration, Constants, generation
from moestro.predict.costs import StepCost
from moestro.predict.many import Floats, many_step_times, table
from moestro.predict.public import PublicRun

GENERATIONS = ("eager", "fused")
# How far a class of devices may lie from the generation's constants, in log: what is known before looking at its runs.
SPREAD = {
    "gemm": 0.08, "gemm_low": 0.15, "grouped": 0.3, "grouped_low": 0.3, "attention": 0.3, "memory": 0.4,
    "optimizer": 0.4, "inside": 0.25, "between": 0.3, "launch_s": 0.5, "collective_host_s": 0.5, "step_s": 0.7,
    "contention": 0.3,
}  # fmt: skip
ERROR = 0.08  # of a run, by which the two are weighed against each other
START = {
    "eager": Constants(memory=1.6, attention=1.3, launch_s=80e-6, collective_host_s=30e-6),
    "fused": Constants(launch_s=15e-6, collective_host_s=30e-6),
}
TRIED_LAUNCHES = (0.3, 1.0, 3.0)  # times the start: where the host decides is found from several sides

Priced = tuple[PublicRun, StepCost]


def source_of(run: PublicRun) -> str:
    """The publisher: rows of one repository, paper or submission belong together."""
    found = re.match(r"(github [^/\s]+/\S+|arXiv \S+|MLPerf Training v\S+ results repo: [^/]+)", run.source)
    return found[1] if found else run.source[:40]


def fit_calibration(priced: Sequence[Priced], names: Collection[str] = GENERATIONS) -> Calibration:
    """Constants of each software generation (`names`) over all devices, then of each device near them."""
    general = {name: _general(name, [x for x in priced if generation(x[0].workload) == name]) for name in names}
    groups: dict[tuple[str, str], list[Priced]] = defaultdict(list)
    for run, cost in priced:
        if generation(run.workload) in names:
            groups[run.device, generation(run.workload)].append((run, cost))
    devices: dict[str, dict[str, Constants]] = defaultdict(dict)
    for (device, name), members in groups.items():
        devices[device][name] = _fit(members, general[name], SPREAD, (1.0,))
    return Calibration(
        generations=general, devices=dict(devices), sources=tuple(sorted({source_of(run) for run, _ in priced}))
    )


def _general(name: str, priced: Sequence[Priced]) -> Constants:
    wide = {key: 2 * value for key, value in SPREAD.items()}
    return _fit(priced, START[name], wide, TRIED_LAUNCHES)


def _fit(
    priced: Sequence[Priced], near: Constants, spread: Mapping[str, float], launches: Sequence[float]
) -> Constants:
    """Least squares on log time, each shape of a source weighing by the root of its runs, drawn to `near`."""
    if not priced:
        return near
    from scipy.optimize import least_squares

    names = list(spread)
    rows = table([cost for _, cost in priced], [run.plan for run, _ in priced])
    measured = np.log([run.measured for run, _ in priced])
    counts = Counter(_shape(run) for run, _ in priced)
    weight = np.array([counts[_shape(run)] ** -0.25 for run, _ in priced]) / ERROR
    center = np.log([getattr(near, name) for name in names])
    scale = np.array([spread[name] for name in names])

    def constants(x: Floats) -> Constants:
        return near.model_copy(update={name: float(value) for name, value in zip(names, np.exp(x), strict=True)})

    def misses(x: Floats) -> Floats:
        error = (np.log(many_step_times(rows, constants(x))) - measured) * weight
        return np.concatenate([np.sign(error) * _soft(np.abs(error)), (x - center) / scale])

    best, least = center, np.inf
    for factor in launches:
        start = center.copy()
        start[names.index("launch_s")] += np.log(factor)
        found = least_squares(misses, start, max_nfev=40)
        if found.cost < least:
            best, least = found.x, found.cost
    return constants(best)


def _shape(run: PublicRun) -> tuple[str, int, int]:
    """Runs of one source and shape tell much the same; one name may stand for many shapes."""
    return source_of(run), run.workload.model.num_layers, run.workload.model.hidden_size


def _soft(x: Floats) -> Floats:
    """Large errors count by their root: a few odd rows must not bend the rest."""
    return np.sqrt(2 * (np.sqrt(1 + x**2) - 1))


def left_out(
    priced: Sequence[Priced], progress: Callable[[str], None] = lambda source: None
) -> list[tuple[PublicRun, float]]:
    """(Run, predicted seconds) with constants fitted to all other sources, for every source in turn."""
    sources: dict[str, list[Priced]] = defaultdict(list)
    for run, cost in priced:
        sources[source_of(run)].append((run, cost))
    found = []
    for source, members in sources.items():
        progress(source)
        names = {generation(run.workload) for run, _ in members}
        calibration = fit_calibration([x for x in priced if source_of(x[0]) != source], names)
        found += predicted(members, calibration)
    return found


def predicted(priced: Sequence[Priced], calibration: Calibration) -> list[tuple[PublicRun, float]]:
    groups: dict[tuple[str, str], list[Priced]] = defaultdict(list)
    for run, cost in priced:
        groups[run.device, generation(run.workload)].append((run, cost))
    found = []
    for (device, name), members in groups.items():
        rows = table([cost for _, cost in members], [run.plan for run, _ in members])
        times = many_step_times(rows, calibration.of(device, name))
        found += [(run, float(time)) for (run, _), time in zip(members, times, strict=True)]
    return found
