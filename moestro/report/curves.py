"""Fewer points for long runs, without hiding what a reader looks for."""

import warnings

import numpy as np

from moestro.report.read import FloatArray, IntArray

MAX_POINTS = 1000
MAX_COLUMNS = 300


def thin(step: IntArray, values: FloatArray, limit: int = MAX_POINTS) -> tuple[IntArray, FloatArray]:
    """At most `limit` points: of every bin its lowest, its highest and one gap, so that spikes and gaps stay."""
    if len(step) <= limit:
        return step, values
    keep: list[int] = []
    for rows in np.array_split(np.arange(len(step)), max(1, limit // 3)):
        finite = rows[np.isfinite(values[rows])]
        chosen = {int(rows[~np.isfinite(values[rows])][0])} if finite.size < rows.size else set()
        if finite.size:
            chosen |= {int(finite[np.argmin(values[finite])]), int(finite[np.argmax(values[finite])])}
        keep += sorted(chosen)
    # The ends are what the axis labels and the key figures speak of.
    index = np.unique([0, *keep, len(step) - 1])
    return step[index], values[index]


def smooth(values: FloatArray) -> tuple[FloatArray, int]:
    """Centred mean over 1/40 of the run and its window; centred, so the curve does not lag behind the raw one."""
    window = max(1, len(values) // 40) | 1
    finite = np.isfinite(values)
    sums = np.cumsum(np.concatenate([[0.0], np.where(finite, values, 0.0)]))
    counts = np.cumsum(np.concatenate([[0], finite]))
    rows = np.arange(len(values))
    # Narrower, still symmetric, towards the ends: a one-sided mean would bend the curve there.
    half = np.minimum(np.minimum(rows, len(values) - 1 - rows), window // 2)
    low, high = rows - half, rows + half + 1
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (sums[high] - sums[low]) / (counts[high] - counts[low])
    return np.where(finite, mean, np.nan), window


def bin_means(step: IntArray, rows: FloatArray, columns: int) -> tuple[IntArray, FloatArray]:
    """Average `rows` [steps, n] within at most `columns` bins of consecutive steps: (last step of each bin, means)."""
    bins = np.array_split(np.arange(len(step)), min(columns, len(step)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a bin without a figure is NaN, which is drawn as a gap
        means = np.stack([np.nanmean(rows[index], axis=0) for index in bins])
    return step[[int(index[-1]) for index in bins]], means


def heatmap_columns(layers: int, experts: int) -> int:
    """Columns of a load map such that all maps together stay near 300 000 cells (about 1.6 MB in the page)."""
    return max(1, min(MAX_COLUMNS, 300_000 // max(1, layers * experts)))


def layer_points(layers: int) -> int:
    """Points of a per-layer curve such that one plot of all layers stays near 20 000 points."""
    return max(30, min(MAX_POINTS, 20_000 // max(1, layers)))
