"""The curves that the samples of one machine allow, each fitted by its own module of hardware.curves."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moestro.errors import MoestroError
from moestro.hardware.catalog import device_ids, load_device
from moestro.hardware.curves.attention import AttentionCurve, fit_attention
from moestro.hardware.curves.busbw import bus_factor
from moestro.hardware.curves.compute import MEMORY, PRODUCTS, data_sheet, reports
from moestro.hardware.curves.experts import ExpertsCurve, fit_experts
from moestro.hardware.curves.gemm import GemmCurve, fit_gemm
from moestro.hardware.curves.transfer import ALL, TransferCurve, fit_transfer
from moestro.hardware.devices import Device
from moestro.hardware.profile import FitReport, Machine, Sample
from moestro.measure.sections import COLLECTIVES

FEWEST_SIZES = 3  # of a curve over sizes
FEWEST_CASES = 5  # of one over shapes
# Of copies in memory: caches make them fast in the middle, which no smooth form has.
CACHES = ("piecewise",)

Series = tuple[str, int, int]  # operation, ranks, nodes


@dataclass(frozen=True)
class Curves:
    """What was fitted to a profile's samples. A series with too few cases has none."""

    gemm: dict[str, GemmCurve] = field(default_factory=dict)  # by dtype; of all kinds of products
    experts: dict[str, ExpertsCurve] = field(default_factory=dict)
    attention: dict[str, AttentionCurve] = field(default_factory=dict)
    memory: dict[str, TransferCurve] = field(default_factory=dict)  # by operation; over the bytes of one array
    collectives: dict[Series, TransferCurve] = field(default_factory=dict)
    start_up: dict[Series, TransferCurve] = field(default_factory=dict)  # the same series as α + S/B

    def reports(self) -> tuple[FitReport, ...]:
        shaped: dict[str, Mapping[str, GemmCurve | ExpertsCurve | AttentionCurve]]
        shaped = {"gemm": self.gemm, "moe_experts": self.experts, "attention": self.attention}
        found = [r for op, by in shaped.items() for dtype, curve in by.items() for r in reports(("", op, dtype), curve)]
        found += [curve.report(op) for op, curve in self.memory.items()]
        found += [curve.report(series_name(series)) for series, curve in self.collectives.items()]
        return tuple(report.model_copy(update={"what": report.what.strip()}) for report in found)


def series_name(series: Series) -> str:
    op, ranks, nodes = series
    return f"{op}, {ranks} ranks" + (f" on {nodes} nodes" if nodes > 1 else "")


def full_device(machine: Machine) -> Device | None:
    """The catalog's device, where the machine has all of it: a CPU of which we see some cores only is another."""
    if machine.device_id not in device_ids():
        return None
    device = load_device(machine.device_id)
    if device.kind == "cpu" and machine.cores != device.compute_units.nominal:
        return None
    return device


def fit_curves(samples: Iterable[Sample], device: Device | None) -> tuple[Curves, list[str]]:
    """Every curve that the samples allow, and a note for each that failed."""
    samples, curves, notes = list(samples), Curves(), list[str]()

    def attempt(what: str, fit: Callable[[], None]) -> None:
        try:
            fit()
        except (MoestroError, ValueError, ArithmeticError) as error:  # one bad series must not cost the others
            notes.append(f"no curve of {what}: {error}")

    for (kind, dtype), group in _by_shape(samples).items():
        attempt(f"{kind} {dtype}", lambda k=kind, d=dtype, g=group: _fit_shapes(curves, k, d, g, device))  # type: ignore[misc]
    for op in MEMORY:
        points = [(s.number("bytes"), s.median_s) for s in samples if s.op == op and "bytes" in s.case]
        if _enough(points):
            attempt(op, lambda o=op, p=points: curves.memory.update({o: _over_sizes(p, forms=CACHES)}))  # type: ignore[misc]
    for series, points in collective_series(samples).items():
        if _enough(points):
            attempt(series_name(series), lambda s=series, p=points: _fit_series(curves, s, p))  # type: ignore[misc]
    return curves, notes


def _by_shape(samples: Iterable[Sample]) -> dict[tuple[str, str], list[Sample]]:
    """By kind and dtype; of a dtype that the device does in software only a few cases are measured, and no curve is."""
    groups = defaultdict[tuple[str, str], list[Sample]](list)
    for sample in samples:
        kind = "gemm" if sample.op in PRODUCTS else sample.op
        if kind in ("gemm", "moe_experts", "attention"):
            groups[kind, str(sample.case.get("dtype", ""))].append(sample)
    several = {key: len({str(sorted(s.case.items())) for s in group}) for key, group in groups.items()}
    return {key: groups[key] for key in sorted(groups) if several[key] >= FEWEST_CASES}


def _fit_shapes(curves: Curves, kind: str, dtype: str, samples: Sequence[Sample], device: Device | None) -> None:
    sheet = data_sheet(device, dtype) if device else (None, None, None)
    if kind == "gemm":
        curves.gemm[dtype] = fit_gemm(samples, dtype, *sheet)
    elif kind == "moe_experts":
        curves.experts[dtype] = fit_experts(samples, dtype, *sheet)
    else:
        curves.attention[dtype] = fit_attention(samples, dtype, *sheet)


def collective_series(samples: Iterable[Sample]) -> dict[Series, list[tuple[float, float]]]:
    """(bytes, seconds) by operation, ranks and nodes; one group at a time, without the links of single pairs."""
    series = defaultdict[Series, list[tuple[float, float]]](list)
    for sample in samples:
        if sample.op not in COLLECTIVES or "pair" in sample.case or sample.case.get("groups") == "all":
            continue
        ranks, nodes = int(sample.number("ranks")), int(sample.case.get("nodes", 1))
        if ranks > 1:
            series[sample.op, ranks, nodes].append((sample.number("bytes"), sample.median_s))
    return dict(sorted(series.items()))


def _fit_series(curves: Curves, series: Series, points: Sequence[tuple[float, float]]) -> None:
    factor = bus_factor(series[0], series[1])
    curves.collectives[series] = _over_sizes(points, factor)
    curves.start_up[series] = _over_sizes(points, factor, ("alpha_beta",))


def _over_sizes(
    points: Sequence[tuple[float, float]], factor: float = 1.0, forms: Sequence[str] = ALL
) -> TransferCurve:
    return fit_transfer([size for size, _ in points], [time for _, time in points], factor, forms)


def _enough(points: Sequence[tuple[float, float]]) -> bool:
    return len({size for size, _ in points}) >= FEWEST_SIZES
