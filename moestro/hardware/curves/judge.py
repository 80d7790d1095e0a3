"""How well curves predict rows that they were not fitted to: left out of their own samples, or of another file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moestro.errors import MoestroError
from moestro.hardware.curves.compute import (
    OPS,
    Curve,
    Key,
    fit_group,
    from_another_device,
    grouped,
    predict,
    reports,
    roofline_seconds,
)
from moestro.hardware.curves.fitting import Floats
from moestro.hardware.curves.network import CollectiveModel
from moestro.hardware.profile import Sample

Progress = Callable[[int, int, str], None]  # done, of, what


@dataclass(frozen=True)
class Verdict:
    """Relative errors of the time, over rows that the curve has not seen. None: too few samples to say.

    sheet: median error of the data sheet's peak and bandwidth on the same rows. elsewhere: that of the curve of the
    device named in `other`, scaled by the data sheets, as for a device without samples.
    """

    what: str
    rows: int
    basis: str
    median: float | None
    p90: float | None
    sheet: float | None = None
    elsewhere: float | None = None
    other: str = ""


def fit_curves(
    groups: dict[Key, list[Sample]], progress: Progress | None = None
) -> tuple[dict[Key, Curve], dict[str, int]]:
    """A curve of every group, and the groups that cannot have one: reason → samples."""
    curves: dict[Key, Curve] = {}
    refused: dict[str, int] = {}
    for i, (key, samples) in enumerate(groups.items()):
        if progress:
            progress(i, len(groups), " ".join(key))
        try:
            curves[key] = fit_group(key, samples)
        except MoestroError as error:
            refused[str(error)] = refused.get(str(error), 0) + len(samples)
    return curves, refused


def left_out(groups: dict[Key, list[Sample]], curves: dict[Key, Curve]) -> list[Verdict]:
    """Each curve on fifths of its own samples that were left out of a fit to the rest."""
    verdicts = []
    for key, curve in curves.items():
        for report in reports(key, curve):
            of = [s for s in groups[key] if str(s.case.get("phase", "fwd")) in report.what or s.op != "attention"]
            elsewhere = from_another_device(key, curves)
            verdicts.append(
                Verdict(
                    what=report.what,
                    rows=report.samples,
                    basis=report.form,
                    median=report.held_out_median,
                    p90=report.held_out_p90,
                    sheet=_sheet_error(of),
                    elsewhere=_median(_errors(elsewhere[0], of)) if elsewhere else None,
                    other=elsewhere[1] if elsewhere else "",
                )
            )
    return verdicts


def against(
    samples: Sequence[Sample], rows: Sequence[Sample], progress: Progress | None = None
) -> tuple[list[Verdict], dict[str, int]]:
    """Curves fitted to `samples` on the `rows` that are not among them; and the rows without a prediction, by reason.

    A device without samples gets the curve of the nearest other one, and an operation or dtype that no device has the
    class default. The verdicts end with one for each operation and one for all rows.
    """
    seen = {_identity(s) for s in samples}
    groups = grouped(row for row in rows if _identity(row) not in seen)
    have = grouped(samples)
    wanted = {key for key in have if any(key[1:] == other[1:] for other in groups if key == other or other not in have)}
    curves, unpredicted = fit_curves({key: have[key] for key in have if key in wanted}, progress)
    known = sum(_identity(row) in seen for row in rows)
    if known:
        unpredicted["also among the rows that were fitted"] = known
    strange = sum(row.op not in OPS for row in rows)
    if strange:
        unpredicted["operation without a curve"] = strange
    verdicts: list[Verdict] = []
    errors: dict[str, list[Floats]] = {}
    for key, those in groups.items():
        try:
            curve, basis = _curve_for(key, curves)
        except MoestroError as error:
            unpredicted[str(error)] = unpredicted.get(str(error), 0) + len(those)
            continue
        found = _errors(curve, those)
        errors.setdefault(key[1], []).append(found)
        verdicts.append(_verdict(" ".join(part for part in key if part), basis, found, _sheet_error(those)))
    totals = [_verdict(f"all {op}", "", np.concatenate(found)) for op, found in sorted(errors.items())]
    if len(totals) > 1:
        totals.append(_verdict("all", "", np.concatenate([part for found in errors.values() for part in found])))
    return verdicts + totals, unpredicted


def against_collectives(samples: Sequence[Sample], rows: Sequence[Sample]) -> tuple[list[Verdict], dict[str, int]]:
    """The same for collectives, by device and operation."""
    seen = {_identity(s) for s in samples}
    models: dict[str, CollectiveModel] = {}
    found: dict[tuple[str, str, str], list[float]] = {}
    unpredicted: dict[str, int] = {}
    for row in rows:
        if _identity(row) in seen:
            reason = "also among the rows that were fitted"
            unpredicted[reason] = unpredicted.get(reason, 0) + 1
            continue
        device = str(row.case.get("device", ""))
        try:
            model = models.setdefault(device, CollectiveModel(samples, device))
            time = model.seconds(
                row.op,
                row.number("bytes"),
                int(row.number("ranks")),
                int(row.number("nodes")) if "nodes" in row.case else 1,
                row.software or None,
                str(row.case["dtype"]) if "dtype" in row.case else None,
                str(row.case["algorithm"]) if "algorithm" in row.case else None,
            )
        except MoestroError as error:
            unpredicted[str(error)] = unpredicted.get(str(error), 0) + 1
            continue
        found.setdefault((device, row.op, time.basis), []).append(abs(time.seconds / row.median_s - 1.0))
    verdicts = [_verdict(f"{d} {op}", basis, np.array(e)) for (d, op, basis), e in sorted(found.items())]
    for basis in sorted({key[2] for key in found}):
        these = np.concatenate([np.array(e) for key, e in found.items() if key[2] == basis])
        verdicts.append(_verdict(f"all from {basis}", basis, these))
    if found:
        verdicts.append(_verdict("all", "", np.concatenate([np.array(e) for e in found.values()])))
    return verdicts, unpredicted


def _curve_for(key: Key, curves: dict[Key, Curve]) -> tuple[Curve, str]:
    if key in curves:
        return curves[key], "own samples"
    elsewhere = from_another_device(key, curves)
    if elsewhere is not None:
        return elsewhere[0], f"shares of {elsewhere[1]}"
    return fit_group(key, []), "class default"


def _identity(sample: Sample) -> tuple[object, ...]:
    return sample.op, tuple(sorted(sample.case.items())), sample.software, sample.median_s


def _errors(curve: Curve, samples: Sequence[Sample]) -> Floats:
    actual = np.array([s.median_s for s in samples])
    return np.abs(predict(curve, samples) / actual - 1.0)


def _sheet_error(samples: Sequence[Sample]) -> float | None:
    pairs = [(roofline_seconds(s), s.median_s) for s in samples]
    return _median(np.array([abs(sheet / actual - 1.0) for sheet, actual in pairs if sheet is not None]))


def _median(errors: Floats) -> float | None:
    return float(np.median(errors)) if len(errors) else None


def _verdict(what: str, basis: str, errors: Floats, sheet: float | None = None) -> Verdict:
    return Verdict(what, len(errors), basis, float(np.median(errors)), float(np.quantile(errors, 0.9)), sheet)
