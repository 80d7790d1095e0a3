"""The physical part of a matrix product's time: tiles in waves or memory traffic, whichever is longer.

    t(batch, m, n, k) = max(min over tiles of waves·units·tile work / rate, bytes / bandwidth) + cast + overhead

The skeleton max(compute, memory) + overhead is Hong and Kim's; tile and wave quantisation are those of Anthony et al.
(2401.14489): an output is cut into tiles, ⌈m/tile_m⌉·⌈n/tile_n⌉ of them, which run in waves of one tile a compute unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil

import numpy as np

from moestro.hardware.curves.fitting import Floats, fit_positive

# What a library may cut the output into; it takes the fastest of its menu, whose last tile is the best when it is full.
MENUS: dict[str, tuple[tuple[int, int], ...]] = {
    "several": ((64, 64), (64, 128), (128, 64), (128, 128), (128, 256), (256, 128), (256, 256)),
    "256x256": ((256, 256),),
    "256x128": ((256, 128),),
    "128x256": ((128, 256),),
    "128x128": ((128, 128),),
    "64x64": ((64, 64),),
}


@dataclass(frozen=True)
class TileModel:
    rate_flops: float  # FLOP/s in full waves of the best tile
    overhead_s: float
    bytes_per_s: float
    cast_bytes: float  # moved per element of the left factor before the product: quantising to fp8 or fp4
    small_tiles: float  # a tile of t × t needs 1 + 2·small_tiles/t times the time per FLOP of an infinite one
    tiles: str  # a key of MENUS
    units: int | None  # None: no waves
    element_bytes: float

    def seconds(self, m: float, n: float, k: float, batch: float = 1) -> float:
        """`seconds_many` of one product, without arrays: a planner asks for many of them one by one."""
        units, least = self.units, float("inf")
        for tile_m, tile_n, cost in self._costs:
            count = batch * ceil(m / tile_m) * ceil(n / tile_n)
            if units:
                count = ceil(count / units) * units
            least = min(least, count * cost)
        moved = batch * (m * k + k * n) * self.element_bytes + batch * m * n * max(self.element_bytes, 2.0)
        compute_s = 2.0 * k * least / self.rate_flops
        cast_s = self.cast_bytes * batch * m * k / self.bytes_per_s
        return max(compute_s, moved / self.bytes_per_s) + cast_s + self.overhead_s

    def seconds_many(self, sizes: Floats) -> Floats:
        """sizes [products, 4] of (m, n, k, batch) -> seconds [products]."""
        m, n, k, batch = sizes.T
        least = np.full(len(sizes), np.inf)
        for tile_m, tile_n, cost in self._costs:
            count = batch * np.ceil(m / tile_m) * np.ceil(n / tile_n)
            if self.units:
                count = np.ceil(count / self.units) * self.units
            least = np.minimum(least, count * cost)
        moved = batch * ((m + n) * k * self.element_bytes + m * n * max(self.element_bytes, 2.0))
        busy = np.maximum(2.0 * k * least / self.rate_flops, moved / self.bytes_per_s)
        return np.asarray(busy + self.cast_bytes * batch * m * k / self.bytes_per_s + self.overhead_s)

    def scaled(self, peak_ratio: float, bandwidth_ratio: float, units: int | None) -> "TileModel":
        """The same shares of another device's peak and bandwidth."""
        rate, bandwidth = self.rate_flops * peak_ratio, self.bytes_per_s * bandwidth_ratio
        return replace(self, rate_flops=rate, bytes_per_s=bandwidth, units=units)

    @cached_property
    def _costs(self) -> list[tuple[int, int, float]]:
        """Each tile with its area times its time per FLOP, the last tile's taken as one."""
        relative = [1.0 + self.small_tiles * (1.0 / tile_m + 1.0 / tile_n) for tile_m, tile_n in MENUS[self.tiles]]
        return [(m, n, m * n * each / relative[-1]) for (m, n), each in zip(MENUS[self.tiles], relative, strict=True)]


def numbers(model: TileModel) -> tuple[float, ...]:
    return model.rate_flops, model.overhead_s, model.bytes_per_s, model.cast_bytes, model.small_tiles


def with_numbers(model: TileModel, values: Sequence[float]) -> TileModel:
    rate, overhead, bandwidth, cast, small = values
    return replace(
        model, rate_flops=rate, overhead_s=overhead, bytes_per_s=bandwidth, cast_bytes=cast, small_tiles=small
    )


def fit_tiles(
    sizes: Floats, seconds: Floats, guess: TileModel, spread: Sequence[float], menus: Sequence[str] = tuple(MENUS)
) -> TileModel:
    """The model nearest to the samples; its five numbers are drawn to those of `guess` (see `fit_positive`).

    sizes [samples, 4] of (m, n, k, batch), seconds [samples]. Of the menus, all of which have the same number of
    parameters, the one that fits best is taken.
    """
    best, least = guess, float("inf")
    for menu in menus:
        cut = replace(guess, tiles=menu)
        values, misfit = fit_positive(partial(_seconds, cut, sizes), numbers(guess), spread, seconds)
        if misfit < least:
            best, least = with_numbers(cut, values), misfit
    return best


def _seconds(model: TileModel, sizes: Floats, values: Sequence[float]) -> Floats:
    return with_numbers(model, values).seconds_many(sizes)
