"""Measured points of a machine profile as plotly traces: a rate with its spread, hollow where it is noisy."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moestro.hardware.profile import Sample, Value
from moestro.report.read import FloatArray
from moestro.report.style import BLUE, ORANGE, TEAL, figure
from moestro.report.text import grouped, si

if TYPE_CHECKING:
    from plotly.graph_objects import Figure, Scatter

COLOURS = (BLUE, ORANGE, TEAL, "#7a3e9d", "#8a5a00", "#a03060", "#4d6b00", "#506070")
_STEPS = 120  # points of a drawn curve

Rate = Callable[[Sample, float], float]  # (sample, seconds of it) → what the axis shows


def points(samples: Sequence[Sample], x: Callable[[Sample], float], rate: Rate, name: str, colour: str) -> Scatter:
    """Markers at the medians; the bars reach from the 10th to the 90th percentile."""
    from plotly.graph_objects import Scatter

    ordered = sorted(samples, key=x)
    y = [rate(s, s.median_s) for s in ordered]
    # The longest time is the lowest rate.
    above = [rate(s, s.low_s) - value if s.low_s else 0.0 for s, value in zip(ordered, y, strict=True)]
    below = [value - rate(s, s.high_s) if s.high_s else 0.0 for s, value in zip(ordered, y, strict=True)]
    spread = any(above) or any(below)
    return Scatter(
        x=[x(s) for s in ordered],
        y=y,
        name=name,
        mode="markers",
        marker={
            "color": colour,
            "size": 7,
            "symbol": ["circle-open" if s.noisy else "circle" for s in ordered],
            "line": {"width": 1.5},
        },
        error_y={"array": above, "arrayminus": below, "thickness": 1, "width": 2, "color": colour} if spread else None,
        text=[about(s) for s in ordered],
        hovertemplate="%{y:.4~g}<br>%{text}<extra></extra>",
        # Not the legend's own marker: it would be hollow where the first point is.
        legendgroup=name,
    )


def line(x: FloatArray, y: FloatArray, name: str, colour: str, dash: str = "solid") -> Scatter:
    """A fitted curve."""
    from plotly.graph_objects import Scatter

    return Scatter(
        x=x.astype(np.float32),
        y=y.astype(np.float32),
        name=name,
        mode="lines",
        line={"color": colour, "width": 1.6, "dash": dash},
        opacity=0.75,
        legendgroup=name,
        showlegend=False,
        hoverinfo="skip",
    )


def between(values: Iterable[float]) -> FloatArray:
    """Places of a curve over the range of the values, evenly on a logarithmic axis."""
    ordered = sorted(values)
    return np.geomspace(ordered[0], ordered[-1], _STEPS)


def about(sample: Sample) -> str:
    """A case as a hover text, with its time and its spread."""
    case = ", ".join(f"{key} {_entry(key, value)}" for key, value in sample.case.items() if key != "device")
    time = f"{seconds(sample.median_s)}"
    if sample.low_s is not None and sample.high_s is not None:
        time += f" ({seconds(sample.low_s)} – {seconds(sample.high_s)})"
    flags = ", noisy" if sample.noisy else ""
    source = "" if sample.source == "measured" else f"<br>{html.escape(sample.source)}"
    return f"{html.escape(case)}<br>{time}{flags}{source}"


def _entry(key: str, value: Value) -> str:
    return size(float(value)) if key.endswith("bytes") and not isinstance(value, str) else str(value)


def seconds(value: float) -> str:
    """0.00123 → `1.23 ms`."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= scale:
            return f"{_three(value / scale)} {unit}"
    return f"{_three(value / 1e-9)} ns"


def size(value: float) -> str:
    """65536 → `64 KiB`."""
    for scale, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= scale:
            return f"{_three(value / scale)} {unit}"
    return f"{_three(value)} B"


def _three(value: float) -> str:
    """Three digits, or four: 1023 KiB are less than the next unit, and not 1.02e+03."""
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def over_bytes(traces: Sequence[Any], x_title: str, y_title: str, **layout: Any) -> Figure:
    """A figure over sizes in bytes, labelled in powers of 1024."""
    low, high = _powers(traces, 2)
    step = 2 * max(1, math.ceil((high - low) / 14))  # even, so that KiB, MiB and GiB are among them
    ticks = [2**power for power in range(low - low % step, high + 1, step)]
    return _over_ticks(traces, x_title, y_title, ticks, [size(tick) for tick in ticks], layout)


def over_work(traces: Sequence[Any], x_title: str, y_title: str, **layout: Any) -> Figure:
    """A figure over numbers of operations, labelled in powers of ten."""
    low, high = _powers(traces, 10)
    ticks = [10**power for power in range(low, high + 1)]
    return _over_ticks(
        traces, x_title, y_title, ticks, [si(tick).replace(".00", "").replace(".0", "") for tick in ticks], layout
    )


def over_lengths(traces: Sequence[Any], x_title: str, y_title: str, **layout: Any) -> Figure:
    """A figure over lengths, labelled in powers of two."""
    low, high = _powers(traces, 2)
    ticks = [2**power for power in range(low, high + 1)]
    return _over_ticks(traces, x_title, y_title, ticks, [grouped(tick) for tick in ticks], layout)


def over_numbers(traces: Sequence[Any], x_title: str, y_title: str, **layout: Any) -> Figure:
    drawn = figure(traces, y_title, **layout)
    drawn.update_xaxes(title={"text": x_title}, dtick=None)
    return _scattered(drawn)


def _powers(traces: Sequence[Any], base: int) -> tuple[int, int]:
    """The powers of the base that the traces reach from and to."""
    every = np.concatenate([np.asarray(trace.x, dtype=float) for trace in traces])
    low, high = np.log(every.min()) / np.log(base), np.log(every.max()) / np.log(base)
    return int(np.floor(low + 1e-9)), int(np.ceil(high - 1e-9))


def _over_ticks(
    traces: Sequence[Any], x_title: str, y_title: str, ticks: list[int], labels: list[str], layout: dict[str, Any]
) -> Figure:
    drawn = figure(traces, y_title, **layout)
    drawn.update_xaxes(type="log", tickvals=ticks, ticktext=labels, title={"text": x_title}, dtick=None)
    return _scattered(drawn)


def _scattered(drawn: Figure) -> Figure:
    drawn.update_layout(hovermode="closest")
    drawn.update_yaxes(rangemode="tozero")
    return drawn
