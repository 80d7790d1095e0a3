"""The time of a collective on a device: measured there, or from the series that are nearest to it."""

import contextlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from moestro.errors import MoestroError
from moestro.hardware.catalog import device_ids, load_device
from moestro.hardware.curves.busbw import bus_factor
from moestro.hardware.curves.heldout import HeldOut
from moestro.hardware.curves.series import GRID, Kriging, Place, Series, group_series, level
from moestro.hardware.curves.shapes import Piecewise
from moestro.hardware.curves.transfer import TransferCurve
from moestro.hardware.curves.wire import Floats, Wire, measured_wire, wire_of
from moestro.hardware.devices import Device
from moestro.hardware.profile import FitReport, Sample

# What a time rests on, the surest first. "other device": the class of devices, scaled by the link's bandwidth.
# "catalog": nothing measured at all, only α + S·f/(0.7·link).
Basis = Literal["measured", "other software", "other ranks", "other op", "other nodes", "other device", "catalog"]


@dataclass(frozen=True)
class CollectiveTime:
    """held_out: relative error of the model's series on the same basis, left out in turn; None if it has too few."""

    seconds: float
    basis: Basis
    held_out: HeldOut | None


@dataclass(frozen=True)
class CollectiveCurve:
    """Time over bytes. measured: the series of this place, if any; others: the basis where it does not reach."""

    curve: TransferCurve
    measured: Series | None
    others: Basis

    def basis(self, size_bytes: float) -> Basis:
        low, high = self.measured.reach_bytes if self.measured else (0.0, 0.0)
        return "measured" if low <= size_bytes <= high else self.others


class CollectiveModel:
    """Times of collectives on one device, from samples of any devices.

    Args:
        samples: of collectives (others are passed over). One without a "device" in its case is of `device`.
        device: of the catalog, or the name that samples give; None: the only one among the samples.

    Raises:
        MoestroError: samples of several devices and none chosen.
    """

    def __init__(self, samples: Sequence[Sample], device: Device | str | None = None) -> None:
        self.device = device if isinstance(device, str) else device.id if device else _only_device(samples)
        self._samples = samples
        self._known = device if isinstance(device, Device) else None
        self._curves: dict[tuple[str, int, int, str | None, str | None, str | None], CollectiveCurve] = {}
        self._errors: dict[Basis, HeldOut | None] = {}

    def seconds(
        self,
        op: str,
        size_bytes: float,
        ranks: int,
        nodes: int = 1,
        software: str | None = None,
        dtype: str | None = None,
        algorithm: str | None = None,
    ) -> CollectiveTime:
        """The time of one collective. One rank alone takes none.

        Args:
            op, size_bytes: as curves.busbw defines them.
            ranks, nodes: all ranks, on how many nodes.
            software, algorithm: for example "NCCL 2.29.2", "NVLS"; None: the latest measured, and its fastest.
            dtype: of the elements; matters only where that dtype was measured itself.

        Raises:
            MoestroError: an unknown operation, an impossible size or number of ranks, or a device without samples whose
                link the catalog does not know.
        """
        if not size_bytes > 0:
            raise MoestroError(f"a collective needs more than {size_bytes:g} bytes")
        if ranks == 1 and bus_factor(op, 1) == 0:
            return CollectiveTime(0.0, "measured", None)
        found = self.curve(op, ranks, nodes, software, dtype, algorithm)
        basis = found.basis(size_bytes)
        return CollectiveTime(float(found.curve.seconds(float(size_bytes))), basis, self.held_out(basis))

    def curve(
        self,
        op: str,
        ranks: int,
        nodes: int = 1,
        software: str | None = None,
        dtype: str | None = None,
        algorithm: str | None = None,
    ) -> CollectiveCurve:
        """The whole curve that `seconds` reads; built once."""
        key = (op, ranks, nodes, software, dtype, algorithm)
        if key not in self._curves:
            if ranks < 2 or not 1 <= nodes <= ranks:
                raise MoestroError(f"there is no {op} over {ranks} ranks on {nodes} nodes")
            place = Place(self.device, op, ranks, nodes, software or self._usual_software, algorithm or "")
            self._curves[key] = self._build(place, self._own(place, software, dtype, algorithm))
        return self._curves[key]

    def _build(self, place: Place, own: Series | None) -> CollectiveCurve:
        """The curve that other series predict; where there is one of its own, bent to go through its points."""
        factor = bus_factor(place.op, place.ranks)
        place = own.place if own else place
        kept = np.array([one.place != place for one in self._series], dtype=bool)
        residual = self._kriging.predict(place, kept)
        sizes = GRID if own is None else np.array(sorted({*GRID.tolist(), *own.sizes_bytes}))
        log_times: Floats = level(residual, GRID, sizes) + self._kriging.expected(place, sizes)
        if own is not None:
            own_sizes = np.array(own.sizes_bytes)
            errors = np.log(own.times_s) - log_times[np.searchsorted(sizes, own_sizes)]
            log_times = log_times + level(errors, own_sizes, sizes)
        shape = Piecewise(tuple(sizes.tolist()), tuple(np.exp(log_times).tolist()))
        points = shape if own is None else Piecewise(own.sizes_bytes, own.times_s)
        others = _basis(place, [one.place for one in self._series if one.place != place])
        count = 0 if own is None else len(own.sizes_bytes)
        error = self.held_out(others if own is None else "measured")
        return CollectiveCurve(TransferCurve("piecewise", shape, points, factor, count, error), own, others)

    def _own(self, place: Place, software: str | None, dtype: str | None, algorithm: str | None) -> Series | None:
        """The series measured at the place: of the software asked for, or of the latest version and what is fastest."""
        found = [one for one in self._series if _same(one.place, place, "device", "op", "ranks", "nodes")]
        if algorithm is not None:
            found = [one for one in found if one.place.algorithm == algorithm]
        if software is not None:
            exact = [one for one in found if one.place.software == software]
            found = exact or [one for one in found if software.lower() in one.place.software.lower()]
        if not found:
            return None
        best = max(found, key=lambda one: (_version(one.place.software), len(one.times_s), one.best_bus_bytes_per_s))
        if dtype is not None:
            typed = group_series([s for s in self._samples if s.case.get("dtype") == dtype], self.device)
            return next((one for one in typed if one.place == best.place), best)
        return best

    @cached_property
    def _series(self) -> list[Series]:
        return group_series(self._samples, self.device)

    @cached_property
    def _usual_software(self) -> str:
        """Of the device's series, else of all."""
        places = [one.place for one in self._series]
        here = [place for place in places if place.device == self.device] or places
        return Counter(place.software for place in here).most_common(1)[0][0] if here else ""

    @cached_property
    def _kriging(self) -> Kriging:
        wires: dict[str, Wire] = {}
        for name in {self.device, *(one.place.device for one in self._series)}:
            known = self._known if name == self.device else None
            if known is None and name in device_ids():
                known = load_device(name)
            wires[name] = _wire(name, known, [one for one in self._series if one.place.device == name])
        return Kriging(self._series, wires)

    def held_out(self, basis: Basis) -> HeldOut | None:
        """Relative errors of times on a basis: of series that have no surer one when they (or more) are left out.

        "measured" leaves out single sizes, "other software" one series of a place, "other ranks" all of the place,
        "other op" all of the device with that operation, "other device" all of the device. None: fewer than three.
        """
        if basis not in self._errors:
            logs = self.left_out(basis)
            found = np.abs(np.expm1(-np.concatenate(logs))) if logs else np.zeros(0)
            self._errors[basis] = _errors(found) if len(found) >= 3 else None
        return self._errors[basis]

    def left_out(self, basis: Basis) -> list[Floats]:
        """Of each series the log of the actual over the predicted time at each size left out, as in held_out."""
        if not self._series or basis not in ("measured", *_LEFT_OUT):
            return []
        if basis == "measured":
            return self._kriging.left_out_sizes()
        places = [one.place for one in self._series]
        fields = _LEFT_OUT[basis]
        groups = [tuple(getattr(place, field) for field in fields) or (i,) for i, place in enumerate(places)]
        rest = {group: [p for p, g in zip(places, groups, strict=True) if g != group] for group in set(groups)}
        errors = self._kriging.left_out(groups)
        rows = [i for i, place in enumerate(places) if _basis(place, rest[groups[i]]) == basis]
        return [errors[i][np.isfinite(errors[i])] for i in rows]


# What is left out, besides the series itself, to see how good a basis is: all that agree with it in these.
_LEFT_OUT: dict[Basis, tuple[str, ...]] = {
    "other software": (),
    "other ranks": ("device", "op", "ranks", "nodes"),
    "other op": ("device", "op"),
    "other device": ("device",),
}


def held_out_table(samples: Sequence[Sample]) -> list[FitReport]:
    """How well left-out collectives are predicted: sizes by device and operation, then whole series by basis."""
    series = group_series(samples)
    if not series:
        return []
    model = CollectiveModel(samples, series[0].place.device)
    sizes = model.left_out("measured")
    named: dict[str, list[Floats]] = {}
    for one, errors in zip(series, sizes, strict=True):
        named.setdefault(f"{one.place.device} {one.place.op}", []).append(errors)
    rows = [_row(name, "piecewise", logs) for name, logs in sorted(named.items())]
    rows.append(_row("all: a size left out", "piecewise", sizes))
    for basis in _LEFT_OUT:
        rows.append(_row(f"all: series left out, from {basis}", "kriging", model.left_out(basis)))
    return [row for row in rows if row.samples]


def _row(what: str, form: str, logs: Sequence[Floats]) -> FitReport:
    relative = np.abs(np.expm1(-np.concatenate(logs))) if logs else np.zeros(0)
    if not len(relative):
        return FitReport(what=what, form=form, parameters={}, samples=0)
    error = _errors(relative)
    return FitReport(
        what=what,
        form=form,
        parameters={},
        samples=error.count,
        held_out_median=error.median,
        held_out_p90=error.p90,
    )


def _errors(relative: Floats) -> HeldOut:
    return HeldOut(float(np.median(relative)), float(np.quantile(relative, 0.9)), len(relative))


def _only_device(samples: Sequence[Sample]) -> str:
    names = sorted({str(s.case["device"]) for s in samples if "device" in s.case})
    if len(names) > 1:
        raise MoestroError(f"samples of several devices: say which of {', '.join(names)} is meant")
    return names[0] if names else ""


def _wire(name: str, known: Device | None, series: Sequence[Series]) -> Wire:
    if not series:
        if known is None:
            raise MoestroError(f"no collective was measured on '{name}', and the catalog does not know it")
        return wire_of(known)
    wire = None
    if known is not None and known.kind != "cpu":  # processes of one CPU meet in memory, not on its links
        with contextlib.suppress(MoestroError):  # no link in the catalog, but the series show one
            wire = wire_of(known)
    inside = [one for one in series if one.place.nodes == 1] or series
    return measured_wire(wire, max(one.best_bus_bytes_per_s for one in inside), min(one.alpha_s for one in inside))


def _same(a: Place, b: Place, *fields: str) -> bool:
    return all(getattr(a, field) == getattr(b, field) for field in fields)


def _basis(place: Place, others: Sequence[Place]) -> Basis:
    """The surest of what `others` offer for `place`."""
    here = [other for other in others if other.device == place.device]
    spread = [other for other in here if (other.nodes > 1) == (place.nodes > 1)]
    if any(_same(other, place, "op", "ranks", "nodes") for other in spread):
        return "other software"
    if any(other.op == place.op for other in spread):
        return "other ranks"
    if spread:
        return "other op"
    if here:
        return "other nodes"
    return "other device" if others else "catalog"


def _version(software: str) -> tuple[int, ...]:
    """(2, 29, 2) of `NCCL 2.29.2`; empty if it names no version, which sorts first."""
    found = re.search(r"\d+(?:\.\d+)+", software)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
