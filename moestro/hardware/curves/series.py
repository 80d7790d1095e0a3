"""Measured series of collectives, and what they say about a series that nobody measured.

A series is one operation on one device with so many ranks, over sizes. Its log time, less that of the device's wire
(curves.wire), is close to that of other series: of the same place with other software, of fewer ranks, of a related
operation, of a device with such a link. How close, is one covariance with five terms, and a new series is the mean
given those that are there (kriging, or a Gaussian process, at every size by itself). With it, what leaving a series out
costs has a closed form, so that the terms could be set by that error on the public series; no result depends much on
any of them. A term for the distance between versions of one library, tried too, did not lower it.
"""

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from moestro.hardware.curves.busbw import bus_factor
from moestro.hardware.curves.shapes import Piecewise
from moestro.hardware.curves.wire import ALPHA_PER_DOUBLING, Floats, Wire
from moestro.hardware.profile import Sample

GRID: Floats = np.logspace(6, 36, 31, base=2.0, dtype=np.float64)  # bytes at which series are compared: 64 B to 64 GiB

# Variances of the log time.
ALL, SAME_OP, SAME_LINK, SAME_DEVICE, SAME_DEVICE_OP = 0.1, 0.15, 1.0, 0.3, 0.04
NOISE = 0.006  # of a measurement, 8 %
RELATED = 0.98  # correlation of operations in one of the groups below
OTHER_ALGORITHM = 0.7
OTHER_TOOL = 0.8  # that timed it: a benchmark of a framework sees more start-up than one of the library
DOUBLINGS = 5.0  # of ranks or nodes, over which a correlation falls to 1/e; of a link's bandwidth it takes one

_KIN = {
    "all_gather": "gather", "reduce_scatter": "gather", "all_to_all": "exchange", "all_to_all_uneven": "exchange",
    "broadcast": "root", "reduce": "root", "send_recv": "pair", "ring": "pair", "all_reduce": "all_reduce",
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a series was measured. device: an id of the catalog, or a source's own words."""

    device: str
    op: str
    ranks: int
    nodes: int = 1
    software: str = ""
    algorithm: str = ""


@dataclass(frozen=True)
class Series:
    place: Place
    sizes_bytes: tuple[float, ...]  # rising
    times_s: tuple[float, ...]

    @property
    def best_bus_bytes_per_s(self) -> float:
        rate = max(size / time for size, time in zip(self.sizes_bytes, self.times_s, strict=True))
        return rate * bus_factor(self.place.op, self.place.ranks)

    @property
    def alpha_s(self) -> float:
        """The shortest time, brought to two ranks."""
        return min(self.times_s) / (1 + ALPHA_PER_DOUBLING * math.log2(self.place.ranks))

    @property
    def reach_bytes(self) -> tuple[float, float]:
        """An octave beyond the sizes measured."""
        return self.sizes_bytes[0] / 2, self.sizes_bytes[-1] * 2

    def log_times(self) -> Floats:
        """[len(GRID)]: the log time, NaN where the series does not reach."""
        curve = Piecewise(self.sizes_bytes, self.times_s)
        low, high = self.reach_bytes
        outside = np.logical_or(low > GRID, high < GRID)
        return np.where(outside, np.nan, np.log(np.maximum(curve.seconds(GRID), 1e-12)))


def group_series(samples: Iterable[Sample], device: str = "") -> list[Series]:
    """The samples by place, those of one size at their median; `device` names that of samples that do not.

    Left out: collectives of one rank, and sub-groups that were busy all at once, which share their links.
    """
    times: dict[Place, dict[float, list[float]]] = {}
    for sample in samples:
        if sample.case.get("groups") == "all" or sample.op not in _KIN or sample.number("ranks") < 2:
            continue
        place = Place(
            str(sample.case.get("device", device)),
            sample.op,
            round(sample.number("ranks")),
            round(sample.number("nodes")) if "nodes" in sample.case else 1,
            sample.software,
            str(sample.case.get("algorithm", "")),
        )
        times.setdefault(place, {}).setdefault(sample.number("bytes"), []).append(sample.median_s)
    return [
        Series(place, tuple(sorted(by_size)), tuple(median(by_size[size]) for size in sorted(by_size)))
        for place, by_size in times.items()
    ]


class Kriging:
    """Residuals of series against their wires, and predictions of them.

    Args:
        series: of any devices.
        wires: of every device among the series and of those to be predicted.
    """

    def __init__(self, series: Sequence[Series], wires: Mapping[str, Wire]) -> None:
        self.series = series
        self.wires = wires
        self.places = [one.place for one in series]
        shape = (len(series), len(GRID))
        self.residuals: Floats = np.reshape([one.log_times() - self.expected(one.place, GRID) for one in series], shape)
        self._covered = np.isfinite(self.residuals)
        self._covariance = self._between(self.places) + NOISE * np.eye(len(series))

    def expected(self, place: Place, sizes_bytes: Floats) -> Floats:
        """Log time on the wire alone."""
        return np.log(self.wires[place.device].seconds(place.op, place.ranks, place.nodes, sizes_bytes))

    def predict(self, place: Place, kept: NDArray[np.bool_]) -> Floats:
        """[len(GRID)]: the residual of `place` from the series `kept`, NaN at sizes that none of them covers."""
        near = self._between([place])[0]
        residual = np.full(len(GRID), np.nan)
        for columns, there in self._patterns(self._covered & kept[:, None]):
            weights = np.linalg.solve(self._covariance[np.ix_(there, there)], near[there])
            residual[columns] = weights @ self.residuals[np.ix_(there, columns)]
        return residual

    def left_out(self, groups: Sequence[Hashable]) -> Floats:
        """[series, len(GRID)]: log of the actual over the predicted time of each series, without its whole group.

        With C the covariance of all series and I those of a group, this is (C⁻¹_II)⁻¹ (C⁻¹ r)_I.
        """
        errors = np.full(self.residuals.shape, np.nan)
        for columns, there in self._patterns(self._covered):
            inverse = np.linalg.inv(self._covariance[np.ix_(there, there)])
            whitened = inverse @ self.residuals[np.ix_(there, columns)]
            members: dict[Hashable, list[int]] = {}
            for row, series in enumerate(there):
                members.setdefault(groups[series], []).append(row)
            for rows in members.values():
                block = np.linalg.solve(inverse[np.ix_(rows, rows)], whitened[rows])
                errors[np.ix_(there[rows], columns)] = block
        return errors

    def left_out_sizes(self) -> list[Floats]:
        """Of each series the log of the actual over the predicted time of each of its sizes, left out by itself.

        The other series predict the whole curve, and its own errors at the sizes beside the one left out mend it.
        """
        others: Floats = self.residuals - self.left_out(range(len(self.series)))
        found = []
        for one, predicted in zip(self.series, others, strict=True):
            sizes = np.array(one.sizes_bytes)
            actual = np.log(one.times_s) - self.expected(one.place, sizes)
            errors = actual - level(predicted, GRID, sizes)
            rest = [np.delete(np.arange(len(sizes)), i) for i in range(len(sizes) if len(sizes) > 1 else 0)]
            mended = [level(errors[kept], sizes[kept], sizes[[i]])[0] for i, kept in enumerate(rest)]
            found.append(errors[: len(mended)] - mended)
        return found

    def _patterns(self, covered: NDArray[np.bool_]) -> list[tuple[NDArray[np.intp], NDArray[np.intp]]]:
        """(sizes, series) for every set of series that covers some size: those sizes share one system of equations."""
        sizes: dict[bytes, list[int]] = {}
        for column in range(covered.shape[1]):
            if covered[:, column].any():
                sizes.setdefault(covered[:, column].tobytes(), []).append(column)
        return [(np.array(columns), np.flatnonzero(covered[:, columns[0]])) for columns in sizes.values()]

    def _between(self, places: Sequence[Place]) -> Floats:
        """[places, series]: covariance of the residuals."""
        there = self.places
        ranks = _distance([math.log2(p.ranks) for p in places], [math.log2(p.ranks) for p in there])
        nodes = _distance([math.log2(p.nodes) for p in places], [math.log2(p.nodes) for p in there])
        links = _distance([self._link(p) for p in places], [self._link(p) for p in there])
        near = np.exp(-(ranks + nodes) / DOUBLINGS)
        device = _equal([p.device for p in places], [p.device for p in there])
        op = np.maximum(
            _equal([p.op for p in places], [p.op for p in there]),
            RELATED * _equal([_KIN[p.op] for p in places], [_KIN[p.op] for p in there]),
        )
        algorithm = _equal([p.algorithm for p in places], [p.algorithm for p in there])
        tool = _equal([tool_of(p.software) for p in places], [tool_of(p.software) for p in there])
        topology = _equal([self._topology(p) for p in places], [self._topology(p) for p in there])
        link = SAME_LINK * np.exp(-links) * topology  # a switch may add values up on the way, which a mesh cannot
        own = SAME_DEVICE + SAME_DEVICE_OP * op * np.maximum(algorithm, OTHER_ALGORITHM)
        return ALL + near * (SAME_OP * op + link + own * device * np.maximum(tool, OTHER_TOOL))

    def _link(self, place: Place) -> float:
        return math.log2(self.wires[place.device].bytes_per_s)

    def _topology(self, place: Place) -> str:
        return self.wires[place.device].topology


def level(values: Floats, sizes_bytes: Floats, at_bytes: Floats) -> Floats:
    """Values at other sizes: straight over log size, level beyond the outermost. NaN is passed over; all NaN is 0."""
    there = np.isfinite(values)
    if not there.any():
        return np.zeros(len(at_bytes))
    return np.interp(np.log(at_bytes), np.log(sizes_bytes[there]), values[there])


def tool_of(software: str) -> str:
    """nccl of `NCCL 2.29.2`: without the version."""
    return re.sub(r"\d.*", "", software).strip().lower()


def _distance(a: Sequence[float], b: Sequence[float]) -> Floats:
    return np.abs(np.asarray(a)[:, None] - np.asarray(b))


def _equal(a: Sequence[str], b: Sequence[str]) -> Floats:
    return (np.array(a, dtype=object)[:, None] == np.array(b, dtype=object)).astype(np.float64)
