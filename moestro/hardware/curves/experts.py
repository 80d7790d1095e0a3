"""The forward time of the experts of one rank: two grouped products, the rows moved to and from them, and the skew.

    t = (products [r, hidden]·[hidden, 2·ffn] and [r, ffn]·[ffn, hidden] for each local expert + moved + overhead)
        · skew(ep, routing) · exp(residual)

r = tokens·top_k/experts are the rows of one expert under balanced routing. Sorting, gathering and adding up go over
the tokens of all ranks, so `moved` does not fall with ep. Under a power-law routing the busiest rank decides; how much
longer it takes than under a balanced one is measured, and grows with ep.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moestro.errors import MoestroError
from moestro.hardware.curves.fitting import Floats, error_in_folds, fit_positive
from moestro.hardware.curves.gemm import MENU_FROM, SPREAD, SPREAD_UNKNOWN, default_model, kernel_of
from moestro.hardware.curves.heldout import HeldOut
from moestro.hardware.curves.residual import Residual, fit_residual, no_residual
from moestro.hardware.curves.tiles import TileModel, numbers, with_numbers
from moestro.hardware.profile import FitReport, Sample

POWER_LAW = "power_law_"
MOVED_BYTES = 8.0  # guess, for each element of the tokens·top_k rows: read and written once each way, two bytes each
SPREAD_MOVED = 1.0
MENUS_TRIED = ("several", "128x128", "64x64")
REFERENCE_EXPONENT = 1.2  # of the power law that skew was measured with
# ep -> median time under power_law_1.2 ÷ balanced, over the data-centre devices of published/gemm.csv.xz.
DEFAULT_SKEW: dict[int, float] = {
    1: 1.12,
    2: 1.26,
    4: 1.39,
    8: 1.51,
    16: 1.58,
    32: 1.60,
    64: 1.60,
    128: 1.56,
    256: 1.45,
}


@dataclass(frozen=True)
class ExpertsCurve:
    """Made by `fit_experts`. basis and held_out as of a GemmCurve."""

    dtype: str
    model: TileModel
    moved_bytes: float  # per element of the tokens·top_k rows
    skew: Mapping[int, float]  # ep -> power law ÷ balanced
    residual: Residual
    samples: int
    basis: str
    held_out: HeldOut | None = None

    def seconds(
        self,
        tokens: float,
        experts: float,
        top_k: float,
        hidden: float,
        ffn: float,
        ep: float = 1,
        routing: str = "balanced",
        kernel: str | None = None,
    ) -> float:
        """One case. tokens: of all ep ranks. routing: balanced, or power_law_X with the exponent X."""
        row = np.array([[tokens, experts, top_k, hidden, ffn, ep, exponent(routing)]], dtype=np.float64)
        return float(self.seconds_many(row, kernel)[0])

    def seconds_many(self, cases: ArrayLike, kernel: str | None = None) -> Floats:
        """cases [cases, 7]: tokens, experts, top_k, hidden, ffn, ep, exponent of the power law (0: balanced)."""
        rows = np.asarray(cases, dtype=np.float64)
        physical = _physical(self.model, self.moved_bytes, rows) * _skewed(self.skew, rows)
        return np.asarray(physical * np.exp(self.residual.many(_features(rows), kernel)))

    def skew_factor(self, ep: float, routing: str = "power_law_1.2") -> float:
        """Time under `routing` ÷ time under balanced routing: the median over the shapes of the samples."""
        return float(_skewed(self.skew, np.array([[1, 1, 1, 1, 1, ep, exponent(routing)]], dtype=np.float64))[0])

    def transferred(self, peak_ratio: float, bandwidth_ratio: float, units: int | None, of: str) -> "ExpertsCurve":
        """The same shares, skew and residual on a device without samples; see `GemmCurve.transferred`."""
        model = self.model.scaled(peak_ratio, bandwidth_ratio, units)
        return replace(self, model=model, samples=0, basis=f"shares of {of}", held_out=None)

    def report(self, what: str) -> FitReport:
        held = self.held_out
        parameters = {
            "flops_per_s": self.model.rate_flops,
            "overhead_s": self.model.overhead_s,
            "bytes_per_s": self.model.bytes_per_s,
            "moved_bytes": self.moved_bytes,
        } | {f"skew_ep{ep}": value for ep, value in sorted(self.skew.items())}
        return FitReport(
            what=what,
            form=f"experts {self.model.tiles}, {self.basis}",
            parameters=parameters,
            samples=self.samples,
            held_out_median=held.median if held else None,
            held_out_p90=held.p90 if held else None,
        )


def exponent(routing: str) -> float:
    """Of the power law, 0 for balanced routing. Raises MoestroError for a routing of another kind."""
    if routing == "balanced":
        return 0.0
    try:
        if routing.startswith(POWER_LAW):
            return float(routing.removeprefix(POWER_LAW))
    except ValueError:
        pass
    raise MoestroError(f"routing '{routing}' is not known: balanced, or power_law_X with the exponent X")


def fit_experts(
    samples: Sequence[Sample],
    dtype: str,
    peak_flops: float | None,
    bytes_per_s: float | None,
    compute_units: int | None,
) -> ExpertsCurve:
    """The curve of one device from its moe_experts samples in `dtype` (others are passed over); see `fit_gemm`.

    Raises:
        MoestroError: a case that is not complete, or no sample and no peak and bandwidth either.
    """
    used = [s for s in samples if s.op == "moe_experts" and s.case.get("dtype", dtype) == dtype]
    rows, seconds = case_rows(used), np.array([s.median_s for s in used])
    spread = [*SPREAD, SPREAD_MOVED]
    if peak_flops is None or bytes_per_s is None:
        if not used:
            raise MoestroError(f"no sample of {dtype} experts, and no peak and memory bandwidth to predict from")
        work = 6.0 * rows[:, 0] * rows[:, 2] * rows[:, 3] * rows[:, 4] / rows[:, 5]
        peak_flops = peak_flops or float(np.max(work / seconds))
        weights = 3.0 * rows[:, 1] / rows[:, 5] * rows[:, 3] * rows[:, 4]
        bytes_per_s = bytes_per_s or 2.0 * float(np.max(2.0 * weights / seconds))
        spread[0] = spread[2] = SPREAD_UNKNOWN
    model, named = default_model(dtype, peak_flops, bytes_per_s, compute_units)
    start = ExpertsCurve(dtype, model, MOVED_BYTES, DEFAULT_SKEW, no_residual(9), 0, f"class default of {named}")
    if not used:
        return start
    menus = MENUS_TRIED if len(used) >= MENU_FROM else ("several",)
    kernels = [kernel_of(s) for s in used]
    whole = _fit(start, spread, menus, rows, seconds, kernels)

    def predict(inside: NDArray[np.int64], outside: NDArray[np.int64]) -> Floats:
        named = [kernels[i] for i in inside]
        part = _fit(start, spread, (whole.model.tiles,), rows[inside], seconds[inside], named, whole.residual)
        return np.concatenate([part.seconds_many(rows[i : i + 1], kernels[i]) for i in outside])

    return replace(whole, held_out=error_in_folds(seconds, predict))


def case_rows(samples: Sequence[Sample]) -> Floats:
    """[samples, 7] as `ExpertsCurve.seconds_many` takes them."""
    rows = []
    for s in samples:
        sizes = [s.number(name) for name in ("tokens", "experts", "top_k", "hidden", "ffn", "ep")]
        if min(sizes) < 1:
            raise MoestroError(f"sizes of experts are 1 or more, not {s.case}")
        rows.append([*sizes, exponent(str(s.case.get("routing", "balanced")))])
    return np.array(rows, dtype=np.float64).reshape(len(rows), 7)


def _physical(model: TileModel, moved_bytes: float, rows: Floats) -> Floats:
    """Seconds under balanced routing [cases]."""
    tokens, experts, top_k, hidden, ffn, ep, _ = rows.T
    pairs = tokens * top_k
    local = np.maximum(1.0, np.minimum(experts, pairs) / ep)  # that get a row at all
    each = np.maximum(1.0, pairs / ep / local)
    first = model.seconds_many(np.stack([each, 2.0 * ffn, hidden, local], axis=1))
    second = model.seconds_many(np.stack([each, hidden, ffn, local], axis=1))
    return np.asarray(first + second + moved_bytes * pairs * hidden / model.bytes_per_s)


def _skewed(skew: Mapping[int, float], rows: Floats) -> Floats:
    """Factor [cases]; linear in log2 of ep and in the exponent."""
    at = np.log2(np.array(sorted(skew)))
    factor = np.interp(np.log2(rows[:, 5]), at, [skew[ep] for ep in sorted(skew)])
    return np.asarray(1.0 + (factor - 1.0) * rows[:, 6] / REFERENCE_EXPONENT)


def _features(rows: Floats) -> Floats:
    """[cases, 7] -> [cases, 9]: octaves of the sizes, rows and experts of a rank, and whether the routing is skewed."""
    tokens, experts, top_k, hidden, ffn, ep, power = rows.T
    sizes = np.log2(np.stack([tokens, experts, top_k, hidden, ffn, ep], axis=1))
    derived = np.stack([np.log2(tokens * top_k / experts), np.log2(experts / ep), 2.0 * power], axis=1)
    return np.concatenate([sizes, derived], axis=1)


def _measured_skew(rows: Floats, seconds: Floats, kernels: Sequence[str]) -> dict[int, float]:
    """Median ratio of skewed to balanced over the pairs of samples that differ in the routing alone."""
    balanced = {(*row[:6], kernel): t for row, t, kernel in zip(rows, seconds, kernels, strict=True) if row[6] == 0}
    ratios: dict[int, list[float]] = defaultdict(list)
    for row, t, kernel in zip(rows, seconds, kernels, strict=True):
        same = balanced.get((*row[:6], kernel))
        if row[6] > 0 and same is not None:
            ratios[int(row[5])].append(1.0 + (t / same - 1.0) * REFERENCE_EXPONENT / row[6])
    return {ep: max(0.5, float(np.median(found))) for ep, found in ratios.items() if len(found) >= 3}


def _fit(
    start: ExpertsCurve,
    spread: Sequence[float],
    menus: Sequence[str],
    rows: Floats,
    seconds: Floats,
    kernels: Sequence[str],
    like: Residual | None = None,
) -> ExpertsCurve:
    skew = DEFAULT_SKEW | _measured_skew(rows, seconds, kernels)
    balanced = seconds / _skewed(skew, rows)
    model, moved, least = start.model, start.moved_bytes, float("inf")
    for menu in menus:
        cut = replace(start.model, tiles=menu)
        values, misfit = fit_positive(
            partial(_seconds, cut, rows),
            [*numbers(cut), start.moved_bytes],
            spread,
            balanced,
        )
        if misfit < least:
            model, moved, least = with_numbers(cut, values[:5]), values[5], misfit
    residual = fit_residual(_features(rows), np.log(balanced / _physical(model, moved, rows)), kernels, like)
    basis = f"{len(rows)} samples"
    return replace(start, model=model, moved_bytes=moved, skew=skew, residual=residual, samples=len(rows), basis=basis)


def _seconds(model: TileModel, rows: Floats, values: Sequence[float]) -> Floats:
    return _physical(with_numbers(model, values[:5]), values[5], rows)
