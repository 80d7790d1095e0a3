"""The look of the plots: one palette, thin grid, no decoration that carries no figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from moestro.report.read import FloatArray, IntArray

if TYPE_CHECKING:
    from plotly.graph_objects import Figure, Scatter  # importing plotly takes half a second: only when drawing

INK, MUTED, GRID = "#1f2933", "#66727f", "#e9edf1"
BLUE, ORANGE, TEAL = "#3355cc", "#d9580d", "#0b8a83"
PALE_BLUE = "rgba(51,85,204,0.36)"
_DEPTH = ((94, 201, 168), (38, 130, 142), (51, 85, 204), (96, 33, 140))  # shallow to deep layers
_FEW = 40  # below this a curve shows its points, and a single point is seen at all


@dataclass(frozen=True)
class Plot:
    key: str  # the element id in the page
    title: str
    caption: str
    figure: Figure
    wide: bool = False


def depth_colour(index: int, count: int) -> str:
    """The colour of layer `index` of `count`: ordered, so that depth can be read from it."""
    place = (index / (count - 1) if count > 1 else 0.66) * (len(_DEPTH) - 1)
    stops = np.arange(len(_DEPTH))
    red, green, blue = (round(float(np.interp(place, stops, [c[i] for c in _DEPTH]))) for i in range(3))
    return f"rgb({red},{green},{blue})"


def curve(step: IntArray, values: FloatArray, name: str, colour: str, **options: Any) -> Scatter:
    """A line over steps. Non-finite values are gaps."""
    from plotly.graph_objects import Scatter

    options.setdefault("mode", "lines+markers" if len(step) <= _FEW else "lines")
    return Scatter(
        x=step.astype(np.int32),
        y=np.where(np.isfinite(values), values, np.nan).astype(np.float32),
        name=name,
        line={"color": colour, "width": options.pop("width", 1.8), "dash": options.pop("dash", "solid")},
        marker={"color": colour, "size": options.pop("size", 6)},
        connectgaps=False,
        **options,
    )


def whole_ticks(steps: IntArray | FloatArray) -> dict[str, Any]:
    """Axis options for a few steps only, where plotly would label fractions of one."""
    return {"dtick": 1} if steps.size and np.ptp(steps) < 8 else {}


def figure(traces: Sequence[object], y_title: str, height: int = 310, **layout: Any) -> Figure:
    """A figure in the house style, by default over training steps."""
    from plotly.graph_objects import Figure
    from plotly.graph_objs.layout import Template

    title = {"font": {"size": 12, "color": MUTED}, "standoff": 8}
    axis = {
        "gridcolor": GRID,
        "linecolor": "#c5ced6",
        "showline": True,
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": "#c5ced6",
        "automargin": True,
    }
    drawn = Figure(data=list(traces))
    drawn.update_layout(
        template=Template(),
        height=height,
        margin={"l": 56, "r": 16, "t": 34, "b": 8},
        paper_bgcolor="white",
        plot_bgcolor="white",
        font={"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12, "color": INK},
        separators=".\u202f",
        hovermode="x unified",
        hoverlabel={"bgcolor": "white", "bordercolor": "#c5ced6", "font": {"color": INK}},
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
        showlegend=len(traces) > 1,
        xaxis={**axis, "title": {**title, "text": "step"}, "tickformat": ",d", "nticks": 8},
        yaxis={**axis, "title": {**title, "text": y_title}},
    )
    drawn.update_layout(**layout)
    if not drawn.layout.showlegend:
        drawn.update_layout(margin={"t": 14})
    steps = np.concatenate([np.asarray(getattr(trace, "x", ())) for trace in traces]) if traces else np.zeros(0)
    drawn.update_xaxes(**whole_ticks(steps))
    return drawn
