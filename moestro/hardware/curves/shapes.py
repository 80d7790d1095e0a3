"""Forms of the time of a transfer against its bytes, from simple to detailed.

Sizes are the payload in bytes (of a collective: as curves.busbw defines it), times are seconds. A form knows nothing of
bus factors; curves.transfer does.

    alpha_beta   t = α + S/B
    half_size    t = α + (S + √(S·H))/B: the bandwidth beyond α rises as B/(1 + √(H/S)) and is half of B at S = H. The
                 root is what a transfer costs that is pipelined in chunks of the best size; a term H/B, without S,
                 would only be a further part of α.
    sigmoid      three regions over log2 S: a constant time, then log10(bandwidth) along a sigmoid, then α + S/B
                 (arXiv 2404.12674 and its predecessor arXiv 2201.07821).
    piecewise    the measured points, joined by straight lines in log t over log S, and α-β of its own beyond each end.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Number = TypeVar("Number", float, Floats)

FASTEST = 100.0  # times the best rate seen: what latency-bound samples, which show no bandwidth, may claim at most


@dataclass(frozen=True)
class AlphaBeta:
    alpha_s: float
    bytes_per_s: float

    def seconds(self, size: Number) -> Number:
        return self.alpha_s + size / self.bytes_per_s

    def parameters(self, factor: float) -> dict[str, float]:
        return {"alpha_s": self.alpha_s, "bandwidth": self.bytes_per_s * factor}


@dataclass(frozen=True)
class HalfSize:
    alpha_s: float
    bytes_per_s: float
    half_bytes: float

    def seconds(self, size: Number) -> Number:
        return self.alpha_s + (size + (size * self.half_bytes) ** 0.5) / self.bytes_per_s

    def parameters(self, factor: float) -> dict[str, float]:
        return {
            "alpha_s": self.alpha_s,
            "bandwidth": self.bytes_per_s * factor,
            "half_bytes": self.half_bytes,
        }


@dataclass(frozen=True)
class Sigmoid:
    """log10(bytes/s) = height / (1 + exp(-slope·(log2 S - middle))) + floor, from 2^latency_log2 to 2^plateau_log2."""

    alpha_s: float
    bytes_per_s: float
    latency_log2: float  # "ln_p": up to here the time is alpha_s
    plateau_log2: float  # "sats_p": from here on it is alpha_s + S/bytes_per_s
    height: float
    middle: float
    slope: float
    floor: float

    def seconds(self, size: Number) -> Number:
        if isinstance(size, np.ndarray):
            log2 = np.log2(np.maximum(size, 1e-300))
            rate = 10 ** _sigmoid(log2, self.height, self.middle, self.slope, self.floor)
            rising = np.where(log2 <= self.latency_log2, self.alpha_s, size / rate)
            return np.where(log2 >= self.plateau_log2, self.alpha_s + size / self.bytes_per_s, rising)
        position = math.log2(max(size, 1e-300))
        if position >= self.plateau_log2:
            return self.alpha_s + size / self.bytes_per_s
        if position <= self.latency_log2:
            return self.alpha_s
        exponent = min(700.0, -self.slope * (position - self.middle))
        return size / float(10 ** (self.height / (1 + math.exp(exponent)) + self.floor))

    def parameters(self, factor: float) -> dict[str, float]:
        return {
            "alpha_s": self.alpha_s,
            "bandwidth": self.bytes_per_s * factor,
            "latency_log2": self.latency_log2,
            "plateau_log2": self.plateau_log2,
            "height": self.height,
            "middle": self.middle,
            "slope": self.slope,
            "floor": self.floor + math.log10(factor),
        }


@dataclass(frozen=True)
class Piecewise:
    """sizes_bytes rise; times_s may fall in places, where the machine changes its protocol."""

    sizes_bytes: tuple[float, ...]
    times_s: tuple[float, ...]

    @cached_property
    def _logs(self) -> tuple[list[float], list[float]]:
        return [math.log(size) for size in self.sizes_bytes], [math.log(time) for time in self.times_s]

    @cached_property
    def _end_slopes(self) -> tuple[float, float]:
        """Seconds per byte below the first and above the last point: those of α + S/B there, with α not below zero."""
        sizes, times = np.array(self.sizes_bytes), np.array(self.times_s)
        first = fit_alpha_beta(sizes[:2], times[:2])[1]
        last = fit_alpha_beta(sizes[-3:], times[-3:])[1]
        return min(first, times[0] / sizes[0]), min(last, times[-1] / sizes[-1])

    def seconds(self, size: Number) -> Number:
        sizes, times = self.sizes_bytes, self.times_s
        log_sizes, log_times = self._logs
        below, above = self._end_slopes
        if isinstance(size, np.ndarray):
            inside = np.exp(np.interp(np.log(np.maximum(size, 1e-300)), log_sizes, log_times))
            low = np.where(size < sizes[0], times[0] + (size - sizes[0]) * below, inside)
            return np.where(size > sizes[-1], times[-1] + (size - sizes[-1]) * above, low)
        if size <= sizes[0]:
            return times[0] + (size - sizes[0]) * below
        if size >= sizes[-1]:
            return times[-1] + (size - sizes[-1]) * above
        i = bisect_right(sizes, size)
        share = (math.log(size) - log_sizes[i - 1]) / (log_sizes[i] - log_sizes[i - 1])
        return math.exp(log_times[i - 1] + share * (log_times[i] - log_times[i - 1]))

    def parameters(self, factor: float) -> dict[str, float]:
        rates = [size / time for size, time in zip(self.sizes_bytes, self.times_s, strict=True)]
        return {"alpha_s": min(self.times_s), "bandwidth": max(rates) * factor, "points": float(len(rates))}


Shape = AlphaBeta | HalfSize | Sigmoid | Piecewise


def fit_alpha_beta(sizes: Floats, times: Floats) -> tuple[float, float]:
    """(α, seconds per byte), neither below zero, with the least squares of the relative error of α + b·S."""
    least = _least_per_byte(sizes, times)
    one, size = 1 / times, sizes / times
    a, b, c = one @ one, one @ size, size @ size
    apart = a * c - b * b
    if apart <= 1e-12 * a * c:  # one size: nothing to tell α by
        return 0.0, float(size.sum() / c)
    per_byte = (a * size.sum() - b * one.sum()) / apart
    if per_byte < least:
        return float(max(0.0, (one.sum() - least * b) / a)), least
    alpha = (one.sum() - per_byte * b) / a
    return (float(alpha), float(per_byte)) if alpha >= 0 else (0.0, float(size.sum() / c))


def fit_half_size(sizes: Floats, times: Floats) -> HalfSize:
    """α, B and H, with the least squares of the relative error: linear in α, 1/B and √H/B, none of them below zero."""
    from scipy.optimize import nnls

    least = _least_per_byte(sizes, times)
    design = np.stack([np.ones_like(sizes), sizes, np.sqrt(sizes)], axis=1) / times[:, None]
    scale = np.linalg.norm(design, axis=0)  # the columns span nine decades
    found, _ = nnls(design / scale, 1 - least * sizes / times)
    alpha, per_byte, per_root = found / scale
    per_byte += least
    return HalfSize(float(alpha), float(1 / per_byte), float((per_root / per_byte) ** 2))


def _least_per_byte(sizes: Floats, times: Floats) -> float:
    return float(np.min(times / sizes)) / FASTEST


def _sigmoid(log2: Floats, height: float, middle: float, slope: float, floor: float) -> Floats:
    return height / (1 + np.exp(np.minimum(-slope * (log2 - middle), 700.0))) + floor


def fit_sigmoid(sizes: Floats, times: Floats) -> Sigmoid:
    """Region borders by the rules of arXiv 2404.12674, made robust to noise, then the sigmoid between them."""
    from scipy.optimize import least_squares

    log2, rates = np.log2(sizes), sizes / times
    jumps = [i for i in range(1, len(times)) if times[i] > 1.1 * np.median(times[:i])]
    flat = jumps[0] if jumps else len(times)  # points before the first latency that is more than 10 % longer
    alpha = float(np.median(times[:flat]))
    peak = float(np.median(np.sort(rates)[-3:]))
    low = np.flatnonzero(rates < 0.95 * peak)
    plateau = min(int(low[-1]) + 2 if len(low) else 0, len(times) - 1)
    tail = (times[plateau:] - alpha) / sizes[plateau:]
    per_byte = float(np.median(np.maximum(tail, 0.1 / peak)))
    middle = slice(max(0, flat - 1), plateau + 1)
    if len(log2[middle]) < 5:
        middle = slice(0, len(log2))
    x, y = log2[middle], np.log10(rates[middle])
    start = np.array([1.2 * (y[-1] - y[0]) + 0.1, float(np.median(x)), 0.5, y[0] - 0.1 * (y[-1] - y[0])])
    bounds = ([0.0, x[0] - 20, 0.02, y.min() - 6], [20.0, x[-1] + 20, 5.0, y.max() + 1])
    start = np.clip(start, np.array(bounds[0]) + 1e-6, np.array(bounds[1]) - 1e-6)
    found = least_squares(lambda p: _sigmoid(x, *p) - y, start, bounds=bounds, max_nfev=60).x
    return Sigmoid(alpha, 1 / per_byte, float(log2[flat - 1]), float(log2[plateau]), *(float(v) for v in found))
