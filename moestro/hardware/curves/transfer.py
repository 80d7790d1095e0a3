"""Time of a transfer against its bytes: the form of curves.shapes that its samples call for.

The same curves serve collectives, copies in memory, storage and messages.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from moestro.errors import MoestroError
from moestro.hardware.curves.heldout import HeldOut, leave_one_out
from moestro.hardware.curves.shapes import (
    AlphaBeta,
    Floats,
    Number,
    Piecewise,
    Shape,
    fit_alpha_beta,
    fit_half_size,
    fit_sigmoid,
)
from moestro.hardware.profile import FitReport

MARGIN = 0.02  # by which a more detailed form must lower the median error on held-out sizes to be chosen
ALL = ("alpha_beta", "half_size", "sigmoid", "piecewise")  # from simple to detailed
_LEAST_SIZES = {"alpha_beta": 1, "half_size": 4, "sigmoid": 9, "piecewise": 2}


@dataclass(frozen=True)
class TransferCurve:
    """A fitted curve. bandwidth is bytes/s times `factor` (of a collective: busbw with its bus_factor).

    points: the samples, each size at the median of its times. held_out: relative error of the time at sizes left out
    of the fit one by one; None for fewer than three sizes.
    """

    form: str
    shape: Shape
    points: Piecewise
    factor: float
    samples: int
    held_out: HeldOut | None

    def seconds(self, size_bytes: Number) -> Number:
        """Time of a transfer of `size_bytes`, a number or an array."""
        return self.shape.seconds(size_bytes)

    def bandwidth(self, size_bytes: Number) -> Number:
        """Bytes per second times the factor, at `size_bytes` above zero."""
        return size_bytes * self.factor / self.shape.seconds(size_bytes)

    @property
    def parameters(self) -> dict[str, float]:
        """alpha_s and bandwidth of every form, and what else the form has.

        piecewise: the shortest time and the best bandwidth that were measured.
        """
        return self.shape.parameters(self.factor)

    def size_at(self, share: float) -> float:
        """The smallest size whose bandwidth is at least `share` of the best: S_50 is size_at(0.5).

        With α-β the best is its B, and this is α·B·share/(1 - share). The other forms near their limit so slowly that
        the best is the highest bandwidth measured, if that is below it. Infinite where the curve never gets there.

        Raises:
            MoestroError: a share that is not between 0 and 1.
        """
        if not 0 < share < 1:
            raise MoestroError(f"a share of the best bandwidth lies between 0 and 1, not at {share:g}")
        best = self.parameters["bandwidth"]
        if not isinstance(self.shape, AlphaBeta):
            best = min(best, self.points.parameters(self.factor)["bandwidth"])
        wanted = share * best
        sizes = np.logspace(0, 18, 1441)  # 2.9 % apart
        reached = self.bandwidth(sizes) >= wanted
        if not reached.any():
            return math.inf
        first = int(np.argmax(reached))
        low, high = math.log(sizes[max(first - 1, 0)]), math.log(sizes[first])
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if self.bandwidth(math.exp(middle)) >= wanted else (middle, high)
        return math.exp(high)

    def report(self, what: str) -> FitReport:
        return FitReport(
            what=what,
            form=self.form,
            parameters=self.parameters,
            samples=self.samples,
            held_out_median=None if self.held_out is None else self.held_out.median,
            held_out_p90=None if self.held_out is None else self.held_out.p90,
        )


def fit_transfer(
    sizes_bytes: ArrayLike, times_s: ArrayLike, factor: float = 1.0, forms: Sequence[str] = ALL
) -> TransferCurve:
    """The simplest of `forms` that predicts held-out sizes nearly as well as the best of them (within MARGIN).

    Least squares of the relative error. Samples of one size count as their median. One size gives t = S/B; two or
    three give α-β, or the points themselves where only "piecewise" is asked for.

    Args:
        sizes_bytes, times_s: one entry for each sample.
        factor: of the bandwidth, for a collective its bus_factor.
        forms: out of ALL, in any order.

    Raises:
        MoestroError: no samples, a size or time that is not finite and above zero, or an unknown form.
    """
    sizes, times, samples = _distinct(sizes_bytes, times_s)
    if not (math.isfinite(factor) and factor > 0):
        raise MoestroError(f"the factor of a bandwidth must be above zero, not {factor:g}; one rank alone has none")
    unknown = [form for form in forms if form not in ALL]
    if unknown or not forms:
        raise MoestroError(f"'{unknown[0] if unknown else ''}' is not a form of a curve: {', '.join(ALL)}")
    wanted = [form for form in ALL if form in forms]
    possible = [form for form in wanted if len(sizes) >= _LEAST_SIZES[form]] or ["alpha_beta"]
    points = Piecewise(tuple(sizes.tolist()), tuple(times.tolist()))
    if len(sizes) < 3:
        return TransferCurve(possible[0], _fit(possible[0], sizes, times), points, factor, samples, None)
    errors = {form: _held_out(form, sizes, times) for form in possible}
    best = min(error.median for error in errors.values())
    chosen = next(form for form in possible if errors[form].median <= best + MARGIN)
    return TransferCurve(chosen, _fit(chosen, sizes, times), points, factor, samples, errors[chosen])


def _distinct(sizes_bytes: ArrayLike, times_s: ArrayLike) -> tuple[Floats, Floats, int]:
    """The sizes in rising order, each once, with the median of its times."""
    sizes = np.asarray(sizes_bytes, dtype=np.float64).ravel()
    times = np.asarray(times_s, dtype=np.float64).ravel()
    if len(sizes) != len(times) or not len(sizes):
        raise MoestroError(f"a curve needs one time for each size: {len(sizes)} sizes, {len(times)} times")
    for name, values in (("size", sizes), ("time", times)):
        bad = values[~(np.isfinite(values) & (values > 0))]
        if len(bad):
            raise MoestroError(f"a {name} of a transfer must be above zero and finite, not {bad[0]:g}")
    distinct, where = np.unique(sizes, return_inverse=True)
    medians = np.array([np.median(times[where == i]) for i in range(len(distinct))])
    return distinct, medians, len(sizes)


def _held_out(form: str, sizes: Floats, times: Floats) -> HeldOut:
    def fit(points: Sequence[int]) -> "_AtPoint":
        kept = list(points)
        return _AtPoint(_fit(form, sizes[kept], times[kept]), sizes)

    return leave_one_out(range(len(sizes)), fit, lambda i: float(times[i]))


@dataclass(frozen=True)
class _AtPoint:
    shape: Shape
    sizes: Floats

    def __call__(self, point: int) -> float:
        return self.shape.seconds(float(self.sizes[point]))


def _fit(form: str, sizes: Floats, times: Floats) -> Shape:
    if form == "piecewise":
        return Piecewise(tuple(sizes.tolist()), tuple(times.tolist()))
    if form == "sigmoid":
        return fit_sigmoid(sizes, times)
    if form == "half_size":
        return fit_half_size(sizes, times)
    alpha, per_byte = fit_alpha_beta(sizes, times)
    return AlphaBeta(alpha, 1 / per_byte)
