"""What a physical model leaves unexplained: a Gaussian process that returns to zero away from its samples."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moestro.hardware.curves.fitting import Floats

LENGTHS = (0.5, 1.0, 2.0, 4.0)  # candidates, in units of a feature (octaves, where features are log2 of sizes)
BRIDGED = 1.2  # lengths between neighbouring values of a feature, at most
NOISE = (0.01, 0.03, 0.1, 0.3, 1.0)  # variance of a single sample's scatter ÷ variance of the residual
SHARED = (0.0, 0.3, 0.6, 0.9)  # how much of the residual the kernels of one device have in common
MAX_TUNED = 160  # samples that the length scales are chosen on
CHUNK = 1 << 18  # entries of the kernel matrix that exist at once


@dataclass(frozen=True)
class Residual:
    """log(measured ÷ model) as a function of features, for several labels (kernels, layouts) at once.

    The covariance of two samples is variance · exp(-½ Σ ((a - b) / length)²) · (shared + (1 - shared)·[same label]).
    A label that was not seen, or none, gets the mean over the labels, weighted by their samples.
    """

    points: Floats  # [samples, features], as they were given
    weights: Floats  # [samples]: inverse covariance times values, times the variance
    labels: NDArray[np.int64]
    names: tuple[str, ...]
    lengths: Floats  # [features]; infinite for a feature that did not vary
    noise: float
    shared: float

    def at(self, features: Sequence[float], label: str | None = None) -> float:
        """One point: some 10 µs with 400 samples."""
        if not len(self.weights):
            return 0.0
        used, centre, inverse, scaled, half = self._scaled
        x = (np.asarray(features)[used] - centre) * inverse
        return float(np.exp(scaled @ x - half - 0.5 * (x @ x)) @ self._coupled(label))

    def many(self, features: ArrayLike, label: str | None = None) -> Floats:
        """features [points, features] -> [points], in single precision: to within 1e-4 of `at`."""
        at = np.asarray(features, dtype=np.float64)
        out = np.zeros(len(at))
        if not len(self.weights):
            return out
        used, centre, inverse, scaled, half = self._scaled
        x = ((at[:, used] - centre) * inverse).astype(np.float32)
        ours, half_ours = scaled.T.astype(np.float32), half.astype(np.float32)
        coupled = self._coupled(label).astype(np.float32)
        rows = max(1, CHUNK // len(half))
        for start in range(0, len(x), rows):
            part = x[start : start + rows]
            close = part @ ours
            close -= half_ours
            close -= 0.5 * np.einsum("ij,ij->i", part, part)[:, None]
            out[start : start + rows] = np.exp(close, out=close) @ coupled
        return out

    @cached_property
    def _scaled(self) -> tuple[NDArray[np.int64], Floats, Floats, Floats, Floats]:
        """Features that count, their centre and inverse lengths, the points in these terms and half their squares."""
        used = np.flatnonzero(np.isfinite(self.lengths))
        centre, inverse = self.points[:, used].mean(axis=0), 1.0 / self.lengths[used]
        scaled = np.ascontiguousarray((self.points[:, used] - centre) * inverse)
        return used, centre, inverse, scaled, 0.5 * np.einsum("ij,ij->i", scaled, scaled)

    def _coupled(self, label: str | None) -> Floats:
        known = self._by_label
        return known.get(label, known[None])

    @cached_property
    def _by_label(self) -> dict[str | None, Floats]:
        """Weights as each label sees them; None: the mean over labels."""
        share = np.bincount(self.labels, minlength=len(self.names)) / len(self.labels)
        own: dict[str | None, Floats] = {None: self.weights * (self.shared + (1.0 - self.shared) * share[self.labels])}
        for i, name in enumerate(self.names):
            own[name] = self.weights * (self.shared + (1.0 - self.shared) * (self.labels == i))
        return own


def no_residual(features: int) -> Residual:
    empty = np.zeros(0)
    return Residual(np.zeros((0, features)), empty, empty.astype(np.int64), (), np.full(features, np.inf), 1.0, 1.0)


def fit_residual(
    features: ArrayLike, values: ArrayLike, labels: Sequence[str], like: Residual | None = None
) -> Residual:
    """features [samples, features], values [samples] (of log time), labels [samples].

    Lengths, noise and sharing are those with the least mean |error| of leaving one sample out (closed form), or
    `like`'s, where that is given.
    """
    x, y = np.asarray(features, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if len(y) < 3:
        return no_residual(x.shape[1])
    names = tuple(sorted(set(labels)))
    index = np.array([names.index(label) for label in labels])
    start = like or replace(
        no_residual(x.shape[1]), lengths=np.where(np.ptp(x, axis=0) > 0, 2.0, np.inf), noise=0.1, shared=0.6
    )
    chosen = start if like else _tuned(x, y, index, start)
    covariance = _covariance(x, index, chosen)
    weights = np.asarray(np.linalg.solve(covariance + chosen.noise * np.eye(len(y)), y), dtype=np.float64)
    return replace(chosen, points=x, weights=weights, labels=index, names=names)


def _covariance(x: Floats, index: NDArray[np.int64], with_: Residual) -> Floats:
    scaled = x / with_.lengths
    squares = np.einsum("ij,ij->i", scaled, scaled)
    gap = np.maximum(squares[:, None] + squares[None] - 2.0 * scaled @ scaled.T, 0.0)
    same = index[:, None] == index[None]
    return np.asarray(np.exp(-0.5 * gap) * (with_.shared + (1.0 - with_.shared) * same))


def _tuned(x: Floats, y: Floats, index: NDArray[np.int64], start: Residual) -> Residual:
    if len(y) > MAX_TUNED:
        some = np.random.default_rng(0).permutation(len(y))[:MAX_TUNED]
        x, y, index = x[some], y[some], index[some]

    def error(of: Residual) -> float:
        inverse = np.linalg.inv(_covariance(x, index, of) + of.noise * np.eye(len(y)))
        return float(np.mean(np.abs(inverse @ y / np.diag(inverse))))

    best, least = start, error(start)
    for _ in range(2):
        tries = [replace(best, noise=noise) for noise in NOISE]
        if index.max() > 0:
            tries += [replace(best, shared=shared) for shared in SHARED]
        best, least = _better(tries, best, least, error)
        for i in np.flatnonzero(np.isfinite(start.lengths)):
            lengths = [np.where(np.arange(x.shape[1]) == i, length, best.lengths) for length in _lengths(x[:, i])]
            best, least = _better([replace(best, lengths=each) for each in lengths], best, least, error)
    # Where even the best residual predicts no better than none, none is the honest answer.
    return best if least < float(np.mean(np.abs(y))) else replace(best, noise=1e6)


def _lengths(feature: Floats) -> tuple[float, ...]:
    """Candidates that reach from one value to the next: shorter ones would let the residual fall to zero in between."""
    gaps = np.diff(np.unique(feature))
    wide = float(np.median(gaps)) / BRIDGED if len(gaps) else LENGTHS[-1]
    return tuple(length for length in LENGTHS if length >= wide) or LENGTHS[-1:]


def _better(
    tries: list[Residual], best: Residual, least: float, error: Callable[[Residual], float]
) -> tuple[Residual, float]:
    for each in tries:
        found = error(each)
        if found < least * (1.0 - 1e-4):
            best, least = each, found
    return best, least
