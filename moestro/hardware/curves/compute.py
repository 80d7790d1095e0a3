"""One curve for each device, operation and dtype that has samples, and the nearest device's where there are none."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import log

import numpy as np

from moestro.hardware.catalog import device_ids, load_device
from moestro.hardware.curves.attention import PHASES, AttentionCurve, fit_attention
from moestro.hardware.curves.attention import case_rows as attention_rows
from moestro.hardware.curves.experts import ExpertsCurve, fit_experts
from moestro.hardware.curves.experts import case_rows as expert_rows
from moestro.hardware.curves.fitting import Floats
from moestro.hardware.curves.gemm import GemmCurve, fit_gemm, kernel_of
from moestro.hardware.curves.transfer import TransferCurve, fit_transfer
from moestro.hardware.devices import DTYPE_BYTES, Device
from moestro.hardware.profile import FitReport, Sample

PRODUCTS = ("gemm", "batched_gemm", "grouped_gemm")
MEMORY = ("copy", "scale", "add", "triad", "dot", "read")
OPS = (*PRODUCTS, "moe_experts", "attention", *MEMORY)

MANY = 20  # samples, from which on a curve is preferred as another device's

Curve = GemmCurve | ExpertsCurve | AttentionCurve | TransferCurve
Key = tuple[str, str, str]  # device, operation, dtype ("" for memory)


def key_of(sample: Sample) -> Key:
    dtype = "" if sample.op in MEMORY else str(sample.case.get("dtype", ""))
    return str(sample.case.get("device", "")), sample.op, dtype


def grouped(samples: Iterable[Sample]) -> dict[Key, list[Sample]]:
    """The samples of operations that have curves, by device, operation and dtype."""
    groups: dict[Key, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.op in OPS:
            groups[key_of(sample)].append(sample)
    return dict(sorted(groups.items()))


def fit_group(key: Key, samples: Sequence[Sample]) -> Curve:
    """The curve of one group; peak, bandwidth and width of its device come from the catalog, where it is there.

    Raises:
        MoestroError: a case that is not complete, or a group without samples on a device that the catalog lacks.
    """
    device, op, dtype = key
    if op in MEMORY:
        return fit_transfer([s.number("bytes") for s in samples], [s.median_s for s in samples])
    known = known_device(device)
    peak, bandwidth, units = data_sheet(known, dtype) if known else (None, None, None)
    if op == "moe_experts":
        return fit_experts(samples, dtype, peak, bandwidth, units)
    if op == "attention":
        return fit_attention(samples, dtype, peak, bandwidth, units)
    return fit_gemm(samples, dtype, peak, bandwidth, units)


def predict(curve: Curve, samples: Sequence[Sample]) -> Floats:
    """Seconds [samples] of samples of the curve's operation."""
    out = np.empty(len(samples))
    if isinstance(curve, TransferCurve):
        return np.array([float(curve.seconds(s.number("bytes"))) for s in samples])
    for kernel, at in _by(samples, kernel_of).items():
        some = [samples[i] for i in at]
        if isinstance(curve, ExpertsCurve):
            out[at] = curve.seconds_many(expert_rows(some), kernel)
        elif isinstance(curve, AttentionCurve):
            for phase, inner in _by(some, lambda s: str(s.case.get("phase", "fwd"))).items():
                rows = attention_rows([some[i] for i in inner])
                out[np.array(at)[inner]] = curve.seconds_many(rows, phase, kernel)
        else:
            out[at] = [_product_seconds(curve, s, kernel) for s in some]
    return out


def reports(key: Key, curve: Curve) -> list[FitReport]:
    """One for each curve that rests on samples: attention has one a phase."""
    device, op, dtype = key
    if isinstance(curve, AttentionCurve):
        phases = [phase for phase in PHASES if curve.phases[phase].samples]
        return [curve.report(f"{device} attention {phase} {dtype}", phase) for phase in phases]
    return [curve.report(" ".join(part for part in (device, op, dtype) if part))]


def from_another_device(key: Key, curves: dict[Key, Curve]) -> tuple[Curve, str] | None:
    """The curve of the nearest other device for the same operation and dtype, scaled by the data sheets; and its id.

    Nearest: of the same kind and vendor, with many samples, and with the least factor of peak and bandwidth between.
    None where the catalog lacks the device or its figures, or no other device has such a curve.
    """
    device, op, dtype = key
    here = known_device(device)
    if here is None or op in MEMORY:
        return None
    peak, bandwidth, units = data_sheet(here, dtype)
    if peak is None or bandwidth is None:
        return None
    best: tuple[tuple[bool, bool, bool, float], Curve, str] | None = None
    for (other, *rest), curve in curves.items():
        there = known_device(other)
        if other == device or rest != [op, dtype] or there is None or isinstance(curve, TransferCurve):
            continue
        its_peak, its_bandwidth, _ = data_sheet(there, dtype)
        if its_peak is None or its_bandwidth is None:
            continue
        ratios = peak / its_peak, bandwidth / its_bandwidth
        far = abs(log(ratios[0])) + abs(log(ratios[1]))
        rank = (there.kind != here.kind, there.vendor != here.vendor, _samples(curve) < MANY, far)
        if best is None or rank < best[0]:
            best = rank, curve.transferred(*ratios, units, other), other
    return None if best is None else (best[1], best[2])


def roofline_seconds(sample: Sample) -> float | None:
    """What the data sheet promises: FLOPs at the nominal peak, or a product's bytes at the nominal bandwidth."""
    device, _, dtype = key_of(sample)
    known = known_device(device)
    peak, bandwidth, _ = data_sheet(known, dtype) if known and dtype else (None, None, None)
    if sample.flops is None or peak is None:
        return None
    moved = 0.0
    if sample.op in PRODUCTS:
        m, n, k = (sample.number(name) for name in ("m", "n", "k"))
        many = float(sample.case.get("groups", sample.case.get("batch", 1)))
        moved = many * ((m + n) * k * DTYPE_BYTES[dtype] + m * n * max(DTYPE_BYTES[dtype], 2.0))
    return max(sample.flops / peak, moved / bandwidth if bandwidth else 0.0)


def known_device(device: str) -> Device | None:
    return load_device(device) if device in device_ids() else None


def data_sheet(device: Device, dtype: str) -> tuple[float | None, float | None, int | None]:
    """Nominal FLOP/s in `dtype` and bytes per second of memory, and compute units; None where the catalog has none."""
    units, gbps = device.compute_units.best, device.memory.gbps.nominal
    return device.peak_flops(dtype), None if gbps is None else gbps * 1e9, None if units is None else round(units)


def _samples(curve: GemmCurve | ExpertsCurve | AttentionCurve) -> int:
    if isinstance(curve, AttentionCurve):
        return sum(each.samples for each in curve.phases.values())
    return curve.samples


def _by(samples: Sequence[Sample], name: Callable[[Sample], str]) -> dict[str, list[int]]:
    at: dict[str, list[int]] = defaultdict(list)
    for i, sample in enumerate(samples):
        at[name(sample)].append(i)
    return at


def _product_seconds(curve: GemmCurve, sample: Sample, kernel: str) -> float:
    case = sample.case
    many = sample.number("groups") if "groups" in case else sample.number("batch") if "batch" in case else 1.0
    return curve.seconds(sample.number("m"), sample.number("n"), sample.number("k"), many, kernel)
