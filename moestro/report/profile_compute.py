"""The plots of a profile's products and attention: rate over work with the knee, over widths, over length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from moestro.hardware.curves.gemm import GemmCurve
from moestro.hardware.profile import MachineProfile, Sample
from moestro.measure.curves import Curves
from moestro.measure.sweeps import MOST_ALIGNED, Sweep, alignment_of, find_sweeps
from moestro.report.profile_points import COLOURS, line, over_lengths, over_numbers, over_work, points
from moestro.report.read import FloatArray
from moestro.report.style import Plot, depth_colour
from moestro.report.text import si

_MOST_POINTS = 1500  # of one colour in one plot; a public table of a device holds tens of thousands
_CLASSES = tuple(2**i for i in range(MOST_ALIGNED.bit_length()))  # powers of two that divide a width


def gemm_plots(profile: MachineProfile, curves: Curves) -> list[Plot]:
    """The rate over the work of one product, one colour a dtype; dashed: the knee."""
    by_dtype = defaultdict[str, list[Sample]](list)
    for sample in profile.of("gemm"):
        if sample.flops:
            by_dtype[str(sample.case.get("dtype", ""))].append(sample)
    if not by_dtype:
        return []
    unit = _unit(sample for samples in by_dtype.values() for sample in samples)
    traces: list[object] = []
    knees = []
    for colour, (dtype, samples) in zip(COLOURS, sorted(by_dtype.items()), strict=False):
        traces.append(points(_thinned(samples), _flops, unit.rate, dtype, colour))
        if dtype in curves.gemm:
            work, rate = _cubes(curves.gemm[dtype], max(map(_flops, samples)))
            traces.append(line(work, rate / unit.flops, dtype, colour))
        if (knee := profile.constants.get(f"knee_gflop_{dtype}")) is not None:
            knees.append((dtype, knee, colour))
    drawn = over_work(traces, "FLOP of one product", unit.name, height=400)
    for index, (dtype, knee, colour) in enumerate(knees):
        drawn.add_vline(knee * 1e9, line={"color": colour, "width": 1.2, "dash": "dash"})
        drawn.add_annotation(
            x=np.log10(knee * 1e9),  # a shape takes the value on a logarithmic axis, a text its logarithm
            y=0.04 + 0.08 * index,
            yref="paper",
            xanchor="left",
            showarrow=False,
            text=f"knee {dtype}: {si(knee * 1e9, 'FLOP')}",
            font={"size": 11, "color": colour},
        )
    caption = (
        "Each point is one shape m × n × k. The curve is the fitted rate of products with m = n = k, a multiple of 64. "
        "The knee is the work from which such a product reaches 90 % of the best of them."
    )
    return [Plot("gemm", "GEMM rate over size", caption, drawn, wide=True)]


_AXES = {
    "gemm_n": ("Output width of a product", "n, columns of the result"),
    "gemm_k": ("Inner width of a product", "k, the summed width"),
    "hidden": ("Hidden size", "n = k, the hidden size"),
    "vocab": ("Vocabulary", "n, the size of the vocabulary"),
    "expert_n": ("Expert width", "n of every expert's product"),
    "ffn": ("Expert width", "hidden width of an expert"),
    "head_dim": ("Head dimension", "head dimension"),
}


def width_plots(profile: MachineProfile) -> list[Plot]:
    """The rate over one width, coloured by the largest power of two that divides it; dashed: the derived alignment."""
    return [_width_plot(sweep, profile) for sweep in find_sweeps(profile.samples)]


def _width_plot(sweep: Sweep, profile: MachineProfile) -> Plot:
    from plotly.graph_objects import Scatter

    title, axis = _AXES[sweep.name]
    unit = _unit(sweep.samples)
    traces: list[object] = [
        Scatter(
            x=[sweep.width(s) for s in sweep.samples],
            y=[unit.rate(s, s.median_s) for s in sweep.samples],
            mode="lines",
            line={"color": "#d5dce3", "width": 1},
            hoverinfo="skip",
            showlegend=False,
        )
    ]
    for index, divisor in enumerate(_CLASSES):
        part = [s for s in sweep.samples if alignment_of(sweep.width(s)) == divisor]
        if part:
            name = "odd" if divisor == 1 else f"{divisor}+" if divisor == MOST_ALIGNED else str(divisor)
            colour = depth_colour(index, len(_CLASSES))
            traces.append(points(part, lambda s: float(sweep.width(s)), unit.rate, name, colour))
    drawn = over_numbers(traces, axis, unit.name, showlegend=True)
    shared = ", ".join(f"{key} {value}" for key, value in sweep.fixed.items() if key != "device")
    caption = f"Coloured by the largest power of two in the width. {shared}."
    if (best := profile.constants.get(f"align_{sweep.name}_{sweep.dtype}")) is not None:
        caption += f" Multiples of {best:.0f} reach 98 % of the best."
    return Plot(f"width-{sweep.name}-{sweep.dtype}", title, caption, drawn)


def attention_plots(profile: MachineProfile) -> list[Plot]:
    """The rate over the length, a colour for each kind of heads; decoding apart, in µs."""
    plots = []
    prefill = [s for s in profile.of("attention") if s.case.get("phase") != "decode" and s.flops]
    if prefill and (traces := _by_heads(prefill, (unit := _unit(prefill)).rate)):
        drawn = over_lengths(traces, "sequence length", unit.name, height=360)
        text = "Scaled dot-product attention, forward and backward; a causal mask halves the counted FLOP."
        plots.append(Plot("attention", "Attention speed over length", text, drawn, wide=True))
    decoding = [s for s in profile.of("attention") if s.case.get("phase") == "decode"]
    if traces := _by_heads(decoding, lambda s, t: t * 1e6):
        drawn = over_lengths(traces, "tokens in the cache", "µs")
        plots.append(Plot("decode", "Attention when decoding", "One query over a cache, time of one layer.", drawn))
    return plots


def _by_heads(samples: Sequence[Sample], rate: Callable[[Sample, float], float]) -> list[object]:
    """A line for each kind of heads that was measured at several lengths; the longest sweeps first."""
    names = ("phase", "dtype", "heads", "kv_heads", "head_dim", "batch")
    series = defaultdict[tuple[object, ...], list[Sample]](list)
    for sample in samples:
        series[tuple(sample.case.get(name) for name in names)].append(sample)
    lengths = {key: len({s.case["seq"] for s in group}) for key, group in series.items()}
    chosen = sorted((key for key in series if lengths[key] > 1), key=lambda key: -lengths[key])[: len(COLOURS)]
    traces: list[object] = []
    for colour, key in zip(COLOURS, chosen, strict=False):
        phase, dtype, heads, kv_heads, head_dim, batch = key
        name = f"{phase} {dtype}, {heads}/{kv_heads} heads × {head_dim}, batch {batch}"
        trace = points(series[key], lambda s: s.number("seq"), rate, name, colour)
        trace.update(mode="lines+markers", line={"color": colour, "width": 1.4})
        traces.append(trace)
    return traces


def _thinned(samples: list[Sample]) -> list[Sample]:
    """At most _MOST_POINTS, every so-manieth by size."""
    if len(samples) <= _MOST_POINTS:
        return samples
    ordered = sorted(samples, key=_flops)
    return [ordered[i * len(ordered) // _MOST_POINTS] for i in range(_MOST_POINTS)]


def _cubes(curve: GemmCurve, most_flops: float) -> tuple[FloatArray, FloatArray]:
    """Work and rate, in FLOP/s, of products with three equal sides."""
    side = np.unique(64 * np.round(np.geomspace(64, max((most_flops / 2) ** (1 / 3), 128), 100) / 64))
    work = 2.0 * side**3
    return work, work / curve.seconds(side, side, side)


class _Unit(NamedTuple):
    name: str
    flops: float

    def rate(self, sample: Sample, time_s: float) -> float:
        return _flops(sample) / time_s / self.flops


def _unit(samples: Iterable[Sample]) -> _Unit:
    """TFLOP/s, or GFLOP/s for what never reaches one."""
    best = max(sample.flops_per_s or 0.0 for sample in samples)
    return _Unit("TFLOP/s", 1e12) if best >= 1e12 else _Unit("GFLOP/s", 1e9)


def _flops(sample: Sample) -> float:
    return sample.flops or 0.0
