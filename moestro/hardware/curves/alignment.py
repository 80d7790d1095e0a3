"""What a sweep says about good sizes: the alignment constant, the share of full tiles and waves, and the knee."""

from collections import defaultdict
from collections.abc import Sequence
from math import ceil

import numpy as np

from moestro.errors import MoestroError
from moestro.hardware.profile import Sample

LARGEST = 256  # no alignment above this is looked for


def rate(sample: Sample) -> float:
    """FLOP/s; a product's are counted from its sizes where the sample does not say."""
    if sample.flops_per_s is not None:
        return sample.flops_per_s
    many = sample.case.get("groups", sample.case.get("batch", 1))
    work = 2.0 * sample.number("m") * sample.number("n") * sample.number("k") * float(many)
    return work / sample.median_s


def alignment_table(samples: Sequence[Sample], dim: str) -> dict[int, float]:
    """Largest power of two (up to 256) that divides `dim` -> its rate as a share of the best power's.

    Samples that differ in anything but `dim` are series of their own. In each, log rate is a smooth function of log
    size (a parabola) plus an effect of the power of two that all series share; least squares tell the two apart.
    """
    series: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        others = tuple(sorted((key, value) for key, value in sample.case.items() if key != dim))
        series[sample.op, *others].append((sample.number(dim), rate(sample)))
    swept = [points for points in series.values() if len({size for size, _ in points}) > 1]
    powers = sorted({_power_of_two(size) for points in swept for size, _ in points})
    rows, logs = [], []
    for i, points in enumerate(swept):
        middle = float(np.mean([np.log(size) for size, _ in points]))
        for size, own in points:
            trend = np.zeros(3 * len(swept))
            x = float(np.log(size)) - middle
            trend[3 * i : 3 * i + 3] = 1.0, x, x * x
            rows.append([*trend, *(float(_power_of_two(size) == power) for power in powers)])
            logs.append(np.log(own))
    if len(powers) < 2:
        return {}
    solved, *_ = np.linalg.lstsq(np.array(rows), np.array(logs), rcond=1e-6)
    effects = solved[-len(powers) :]
    return {power: float(np.exp(effect - effects.max())) for power, effect in zip(powers, effects, strict=True)}


def alignment(samples: Sequence[Sample], dim: str = "n", share: float = 0.98) -> int:
    """Smallest power of two A whose multiples (those of no higher power) reach `share` of the best alignment's rate.

    samples: a sweep over `dim` (m, n, k, head_dim, ...) with everything else equal, or several such sweeps.

    Raises:
        MoestroError: the sweep holds fewer than two alignments to compare.
    """
    table = alignment_table(samples, dim)
    if len(table) < 2:
        raise MoestroError(f"no sweep over {dim}: it needs neighbouring sizes, such as 1023, 1024 and 1032, to compare")
    return next(power for power, found in table.items() if found >= share)


def _power_of_two(size: float) -> int:
    whole = int(size)
    return min(whole & -whole, LARGEST) if whole else LARGEST


def tile_efficiency(m: int, n: int, tile_m: int, tile_n: int) -> float:
    """Share of the tiles' area that the output fills: m·n / (⌈m/tile_m⌉·tile_m·⌈n/tile_n⌉·tile_n) (2401.14489)."""
    return m * n / (ceil(m / tile_m) * tile_m * ceil(n / tile_n) * tile_n)


def wave_efficiency(m: int, n: int, tile_m: int, tile_n: int, units: int, batch: int = 1) -> float:
    """Share of the compute units that the tiles keep busy over whole waves; 1 just below a multiple of `units`."""
    tiles = batch * ceil(m / tile_m) * ceil(n / tile_n)
    return tiles / (ceil(tiles / units) * units)


def knee(samples: Sequence[Sample], share: float = 0.9) -> float:
    """FLOPs of the smallest product that reached `share` of the best rate in the samples.

    Raises:
        MoestroError: no samples.
    """
    if not samples:
        raise MoestroError("no products to find a knee in")
    rates = np.array([rate(sample) for sample in samples])
    work = rates * np.array([sample.median_s for sample in samples])
    return float(work[rates >= share * rates.max()].min())
