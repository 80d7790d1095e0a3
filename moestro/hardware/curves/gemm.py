"""The time of a matrix product on one device in one dtype: a physical part times what the samples say beyond it.

The physical part (curves.tiles) holds at any size. The residual (curves.residual) is a smooth function of the sizes and
their alignment that goes to zero away from the samples, so that there the physical part speaks alone. Efficiency so
depends on size and dtype; the cost of quantising to fp8 or fp4 is in it where the samples had it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, gcd, log2
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from moestro.errors import MoestroError
from moestro.hardware.curves.fitting import Floats, error_in_folds
from moestro.hardware.curves.heldout import HeldOut
from moestro.hardware.curves.residual import Residual, fit_residual, no_residual
from moestro.hardware.curves.tiles import MENUS, TileModel, fit_tiles
from moestro.hardware.devices import DTYPE_BYTES
from moestro.hardware.profile import FitReport, Sample

ALIGNED = 64  # elements; being a multiple of more than this changes nothing
ABOVE_PEAK = 1.05  # no prediction is faster than this times the nominal peak, unless a sample is
MENU_FROM = 12  # samples from which on the tiles are chosen by them


@dataclass(frozen=True)
class Shares:
    """What a device reaches of its data sheet, and its fixed costs."""

    of_peak: float
    overhead_s: float
    of_bandwidth: float
    cast_bytes: float
    small_tiles: float = 1.0


# For a device without samples: the median, over the devices of published/gemm.csv.xz, of what fits them.
# tests/hardware/test_gemm_published.py derives it again.
DEFAULT: dict[str, Shares] = {
    "bf16": Shares(0.79, 2.6e-6, 0.80, 0.06),
    "fp8": Shares(0.68, 9.4e-6, 0.80, 9.2),
    "fp8_block": Shares(0.77, 160e-6, 0.80, 1.1),
    "nvfp4": Shares(0.43, 7.3e-6, 0.80, 2.5),
}
STANDS_IN = {"mxfp8": "fp8", "int8": "fp8", "fp4": "nvfp4", "int4": "nvfp4"}  # for a dtype without rows; others: bf16
SPREAD = (0.4, 0.7, 0.1, 1.5, 1.0)  # in log, of each share between devices
SPREAD_UNKNOWN = 1.5  # of a rate or bandwidth that no data sheet gives


@dataclass(frozen=True)
class GemmCurve:
    """Seconds of products [m, k] · [k, n]. Made by `fit_gemm`.

    basis: what it rests on. held_out: error of the time on samples left out of the fit (fifths; None below 5 samples).
    """

    dtype: str
    peak_flops: float  # nominal, or the best sample's where that is unknown
    bandwidth: float  # nominal, bytes per second
    model: TileModel
    residual: Residual
    best_flops: float  # highest rate in the samples; 0 without samples
    samples: int
    basis: str
    held_out: HeldOut | None = None

    @overload
    def seconds(self, m: float, n: float, k: float, batch: float = 1, kernel: str | None = None) -> float: ...
    @overload
    def seconds(
        self, m: Floats, n: Floats, k: Floats, batch: Floats | float = 1, kernel: str | None = None
    ) -> Floats: ...
    def seconds(self, m: Any, n: Any, k: Any, batch: Any = 1, kernel: str | None = None) -> Any:
        """Seconds of `batch` products; arrays of sizes give an array. kernel: a name of `kernel_of`, where known."""
        if isinstance(m, int | float) and isinstance(n, int | float) and isinstance(k, int | float):
            beyond = exp(self.residual.at(_features_of_one(m, n, k, batch), kernel))
            return max(self.model.seconds(m, n, k, batch) * beyond, 2.0 * batch * m * n * k / self.ceiling_flops)
        arrays = np.broadcast_arrays(*(np.asarray(each, dtype=np.float64) for each in (m, n, k, batch)))
        sizes = np.stack([each.ravel() for each in arrays], axis=1)
        seconds = self.model.seconds_many(sizes) * np.exp(self.residual.many(_features(sizes), kernel))
        return np.maximum(seconds, 2.0 * sizes.prod(axis=1) / self.ceiling_flops).reshape(arrays[0].shape)

    def efficiency(self, m: float, n: float, k: float, batch: float = 1) -> float:
        """Share of `peak_flops` that the product reaches."""
        return 2.0 * batch * m * n * k / self.seconds(m, n, k, batch) / self.peak_flops

    @property
    def ceiling_flops(self) -> float:
        return max(ABOVE_PEAK * self.peak_flops, self.best_flops)

    def knee_flops(self, share: float = 0.9) -> float:
        """Work of the smallest square product whose rate reaches `share` of the best square's."""
        side = np.unique(np.round(np.geomspace(64, 32768, 109) / 64) * 64)
        rate = 2.0 * side**3 / self.seconds(side, side, side)
        return float(2.0 * side[np.argmax(rate >= share * rate.max())] ** 3)

    def transferred(self, peak_ratio: float, bandwidth_ratio: float, units: int | None, of: str) -> "GemmCurve":
        """The same shares and residual on a device without samples; ratios: its nominal figures ÷ those of `of`."""
        model = self.model.scaled(peak_ratio, bandwidth_ratio, units)
        peak, bandwidth = self.peak_flops * peak_ratio, self.bandwidth * bandwidth_ratio
        return GemmCurve(self.dtype, peak, bandwidth, model, self.residual, 0.0, 0, f"shares of {of}")

    def report(self, what: str) -> FitReport:
        model, held = self.model, self.held_out
        tile_m, tile_n = MENUS[model.tiles][-1]
        parameters = {
            "flops_per_s": model.rate_flops,
            "share_of_peak": model.rate_flops / self.peak_flops,
            "overhead_s": model.overhead_s,
            "bytes_per_s": model.bytes_per_s,
            "cast_bytes": model.cast_bytes,
            "tile_m": float(tile_m),
            "tile_n": float(tile_n),
        }
        return FitReport(
            what=what,
            form=f"tiles {model.tiles}, {self.basis}",
            parameters=parameters,
            samples=self.samples,
            held_out_median=held.median if held else None,
            held_out_p90=held.p90 if held else None,
        )


def kernel_of(sample: Sample) -> str:
    """What else than the sizes decides the time of a sample: operation, layout and software."""
    return ", ".join(part for part in (sample.op, str(sample.case.get("layout", "")), sample.software) if part)


def fit_gemm(
    samples: Sequence[Sample],
    dtype: str,
    peak_flops: float | None,
    bytes_per_s: float | None,
    compute_units: int | None,
) -> GemmCurve:
    """The curve of one device from its gemm, batched_gemm and grouped_gemm samples in `dtype` (others are passed over).

    The model's numbers are drawn to the class default by as much as those of devices differ, so that few samples, or
    none, give a usable curve. peak_flops and bytes_per_s are nominal; where they are unknown the samples stand for
    them, and without compute_units there are no waves.

    Raises:
        MoestroError: a size that is not above zero, an unknown dtype, or no sample and no peak and bandwidth either.
    """
    if dtype not in DTYPE_BYTES:
        raise MoestroError(f"unknown dtype '{dtype}'; known: {', '.join(DTYPE_BYTES)}")
    used = [s for s in samples if s.case.get("dtype", dtype) == dtype]
    sizes, seconds = _sizes(used), np.array([s.median_s for s in used])
    start, spread = _start(dtype, sizes, seconds, peak_flops, bytes_per_s, compute_units)
    if not used:
        return start
    menus = tuple(MENUS) if len(used) >= MENU_FROM else (start.model.tiles,)
    kernels = [kernel_of(s) for s in used]
    curve = _fit(start, spread, menus, sizes, seconds, kernels)
    return replace(curve, held_out=_held_out(start, spread, curve, sizes, seconds, kernels))


def _sizes(samples: Sequence[Sample]) -> Floats:
    """[samples, 4]: m, n, k and how many such products."""
    rows = []
    for s in samples:
        many = s.number("groups") if "groups" in s.case else s.number("batch") if "batch" in s.case else 1.0
        rows.append((s.number("m"), s.number("n"), s.number("k"), many))
        if min(rows[-1]) < 1:
            raise MoestroError(f"sizes of a product are 1 or more, not {s.case}")
    return np.array(rows, dtype=np.float64).reshape(len(rows), 4)


def _features_of_one(m: float, n: float, k: float, batch: float) -> list[float]:
    aligned = [log2(gcd(int(size), ALIGNED)) for size in (m, n, k)]
    return [log2(m), log2(n), log2(k), log2(batch), *aligned]


def _features(sizes: Floats) -> Floats:
    """[products, 4] -> [products, 7]: octaves of the sizes, then of the powers of two that divide m, n and k."""
    return np.concatenate([np.log2(sizes), np.log2(np.gcd(sizes[:, :3].astype(np.int64), ALIGNED))], axis=1)


def default_model(dtype: str, peak_flops: float, bytes_per_s: float, units: int | None) -> tuple[TileModel, str]:
    """What devices in general reach in `dtype` (or in the one that stands in for it), and that dtype."""
    named = dtype if dtype in DEFAULT else STANDS_IN.get(dtype, "bf16")
    shares = DEFAULT[named]
    model = TileModel(
        rate_flops=shares.of_peak * peak_flops,
        overhead_s=shares.overhead_s,
        bytes_per_s=shares.of_bandwidth * bytes_per_s,
        cast_bytes=shares.cast_bytes,
        small_tiles=shares.small_tiles,
        tiles="several",
        units=units,
        element_bytes=DTYPE_BYTES[dtype],
    )
    return model, named


def _start(
    dtype: str,
    sizes: Floats,
    seconds: Floats,
    peak_flops: float | None,
    bytes_per_s: float | None,
    units: int | None,
) -> tuple[GemmCurve, tuple[float, ...]]:
    """The curve before it sees samples, and how far its numbers may be off."""
    best, flow, spread = 0.0, 0.0, list(SPREAD)
    if len(sizes):
        m, n, k, batch = sizes.T
        element = DTYPE_BYTES[dtype]
        best = float(np.max(2.0 * sizes.prod(axis=1) / seconds))
        flow = float(np.max(batch * ((m + n) * k * element + m * n * max(element, 2.0)) / seconds))
    if not len(sizes) and (peak_flops is None or bytes_per_s is None):
        raise MoestroError(
            f"no {dtype} sample, and no peak and memory bandwidth to predict from; measure, or name a device"
        )
    if peak_flops is None:
        peak_flops, spread[0] = best, SPREAD_UNKNOWN
    if bytes_per_s is None:
        bytes_per_s, spread[2] = 2.0 * flow, SPREAD_UNKNOWN
    model, named = default_model(dtype, peak_flops, bytes_per_s, units)
    basis = f"class default of {named}"
    return GemmCurve(dtype, peak_flops, bytes_per_s, model, no_residual(7), best, 0, basis), tuple(spread)


def _fit(
    start: GemmCurve,
    spread: tuple[float, ...],
    menus: Sequence[str],
    sizes: Floats,
    seconds: Floats,
    kernels: Sequence[str],
    like: Residual | None = None,
) -> GemmCurve:
    features = _features(sizes)
    model = fit_tiles(sizes, seconds, start.model, spread, menus)
    residual = fit_residual(features, np.log(seconds / model.seconds_many(sizes)), kernels, like)
    return replace(start, model=model, residual=residual, samples=len(sizes), basis=f"{len(sizes)} samples")


def _held_out(
    start: GemmCurve,
    spread: tuple[float, ...],
    whole: GemmCurve,
    sizes: Floats,
    seconds: Floats,
    kernels: Sequence[str],
) -> HeldOut | None:
    """Tiles and length scales stay those of the whole; all else is fitted again without the fold."""
    menus = (whole.model.tiles,)

    def predict(inside: NDArray[np.int64], outside: NDArray[np.int64]) -> list[float]:
        named = [kernels[i] for i in inside]
        part = _fit(start, spread, menus, sizes[inside], seconds[inside], named, whole.residual)
        times = []
        for i in outside:
            m, n, k, batch = (float(size) for size in sizes[i])
            times.append(part.seconds(m, n, k, batch, kernels[i]))
        return times

    return error_in_folds(seconds, predict)
