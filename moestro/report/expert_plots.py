"""The plots of routing: who gets the tokens, how evenly, how surely."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from moestro.report.curves import bin_means, heatmap_columns, layer_points, thin
from moestro.report.read import FloatArray, LayerSeries, RunData
from moestro.report.style import MUTED, Plot, curve, depth_colour, figure, whole_ticks
from moestro.report.text import grouped, percent

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_SIDE_BY_SIDE = 8  # more layers than this go behind a menu
_UNDER, _EVEN, _OVER = ((8, 69, 148), (107, 164, 212)), (247, 247, 245), ((240, 140, 90), (155, 20, 30))


def expert_plots(run: RunData) -> list[Plot]:
    """Empty for a dense model."""
    layers = [layer for layer in run.train.layers if layer.num_experts]
    plots = [_load_over_steps(run, layers), _load_at_end(run, layers)] if layers else []
    for key, title, attribute, unit, caption in (
        ("imbalance", "Busiest expert", "max_over_mean", "max / mean load", "Load of the busiest expert over the "
         "mean; 1 is even. With one expert per rank it is how far the slowest rank lags behind the mean."),
        ("load-entropy", "Load entropy", "load_entropy", "entropy, 1 is uniform", "How evenly a layer's tokens spread "
         "over its experts; 1 is even, 0 is one expert for all."),
        ("token-entropy", "Token entropy", "token_entropy", "entropy, 1 is undecided", "How undecided the router is "
         "about one token; falling means that its choices become sharper."),
        ("dropped", "Dropped assignments", "dropped", "share dropped", "Assignments beyond an expert's capacity."),
    ):  # fmt: skip
        values = [getattr(layer, attribute) for layer in run.train.layers]
        # Nothing dropped at all is said by the key figure; a plot of a flat zero says it worse.
        if any(np.isfinite(v).any() for v in values) and not (key == "dropped" and not np.nansum(np.stack(values))):
            plots.append(Plot(key, title, caption, _per_layer(run, values, unit)))
    return plots


def _per_layer(run: RunData, values: list[FloatArray], unit: str) -> Figure:
    layers, limit = run.train.layers, layer_points(len(run.train.layers))
    traces = [
        curve(*thin(run.train.step, v, limit), f"layer {layer.layer}", depth_colour(i, len(layers)), width=1.4)
        for i, (layer, v) in enumerate(zip(layers, values, strict=True))
    ]
    if len(layers) <= 6:
        return figure(traces, unit, showlegend=True)
    # A long legend above would push the plot out of its card.
    legend = {"orientation": "v", "x": 1.02, "xanchor": "left", "y": 1, "yanchor": "top", "font": {"size": 10}}
    return figure(traces, unit, showlegend=True, legend=legend, hovermode="closest")


def _ratio_scale(ceiling: float) -> dict[str, Any]:
    """Colours for load over uniform load: even is pale, whatever the ceiling is."""
    even = 1 / ceiling
    stops = [
        (0.0, _UNDER[0]),
        (even * 0.6, _UNDER[1]),
        (even, _EVEN),
        (even + 0.4 * (1 - even), _OVER[0]),
        (1.0, _OVER[1]),
    ]
    return {
        "zmin": 0,
        "zmax": ceiling,
        "colorscale": [(place, f"rgb{colour}") for place, colour in stops],
        "colorbar": {
            "title": {"text": "× uniform", "side": "right", "font": {"size": 11, "color": MUTED}},
            "thickness": 11,
            "outlinewidth": 0,
            "tickvals": _ticks(ceiling),
            "tickfont": {"size": 11},
        },
    }


def _ticks(ceiling: float) -> list[float]:
    stride = max(1, math.ceil((ceiling - 1) / 4))
    return [0, 0.5, *np.arange(1, ceiling + 1e-9, stride).tolist()] if ceiling < 4 else [
        0, *np.arange(1, ceiling + 1e-9, stride).tolist()
    ]  # fmt: skip


def _ceiling(ratios: list[FloatArray]) -> float:
    """Where the colour saturates: 99.5 % of the cells lie below, and double the uniform load is always inside."""
    finite = np.concatenate([r[np.isfinite(r)].ravel() for r in ratios])
    return max(2.0, math.ceil(2 * float(np.percentile(finite, 99.5))) / 2) if finite.size else 2.0


def _load_over_steps(run: RunData, layers: list[LayerSeries]) -> Plot:
    columns = heatmap_columns(len(layers), max(layer.num_experts for layer in layers))
    binned = [bin_means(run.train.step, layer.load, columns) for layer in layers]
    ratios = [means * layer.num_experts for layer, (_, means) in zip(layers, binned, strict=True)]
    ceiling = _ceiling(ratios)
    steps = binned[0][0]
    many = len(layers) > _SIDE_BY_SIDE
    drawn = _behind_menu(layers, steps, ratios, ceiling) if many else _small_maps(layers, steps, ratios, ceiling)
    experts = layers[0].num_experts
    caption = (
        f"Share of a layer's assignments that each expert got, as a multiple of the uniform share "
        f"1/E = {percent(1 / experts)}: pale is even, red is overloaded, blue is starved. "
        f"The colour saturates at {ceiling:g} ×."
    )
    if len(steps) < len(run.train.step):
        caption += f" {grouped(len(run.train.step))} logged steps averaged within {len(steps)} columns."
    if many:
        caption += " Choose the layer in the menu; the map below has all of them."
    return Plot("load", "Expert load over the run", caption, drawn, wide=True)


def _small_maps(layers: list[LayerSeries], steps: Any, ratios: list[FloatArray], ceiling: float) -> Figure:
    from plotly.graph_objects import Heatmap
    from plotly.subplots import make_subplots

    across = 2 if len(layers) > 1 else 1
    down = math.ceil(len(layers) / across)
    height = 90 + down * 215
    grid = make_subplots(
        rows=down,
        cols=across,
        subplot_titles=[f"layer {layer.layer}" for layer in layers],
        horizontal_spacing=0.07,
        vertical_spacing=62 / (height - 90) if down > 1 else 0,
    )
    for i, (layer, ratio) in enumerate(zip(layers, ratios, strict=True)):
        trace = Heatmap(coloraxis="coloraxis", **_map(layer, steps, ratio))
        grid.add_trace(trace, row=i // across + 1, col=i % across + 1)
    styled = figure([], "expert").layout
    for key in ("template", "font", "paper_bgcolor", "plot_bgcolor", "hoverlabel", "separators"):
        grid.layout[key] = styled[key]
    scale = _ratio_scale(ceiling)
    grid.update_layout(
        height=height,
        margin={"l": 52, "r": 16, "t": 30, "b": 8},
        coloraxis={"cmin": 0, "cmax": ceiling, "colorscale": scale["colorscale"], "colorbar": scale["colorbar"]},
    )
    grid.update_annotations(font={"size": 12, "color": MUTED})
    axis = {"showgrid": False, "zeroline": False, "ticks": "outside", "ticklen": 4, "automargin": True}
    grid.update_xaxes(tickformat=",d", nticks=6, **axis, **whole_ticks(steps))
    grid.update_yaxes(**_expert_axis(max(layer.num_experts for layer in layers)))
    for row in range(1, down + 1):
        grid.update_yaxes(title={"text": "expert", "font": {"color": MUTED}}, row=row, col=1)
    for i in range(max(0, len(layers) - across), len(layers)):
        title = {"text": "step", "font": {"color": MUTED}, "standoff": 6}
        grid.update_xaxes(title=title, row=i // across + 1, col=i % across + 1)
    return grid


def _behind_menu(layers: list[LayerSeries], steps: Any, ratios: list[FloatArray], ceiling: float) -> Figure:
    from plotly.graph_objects import Heatmap

    traces = [
        Heatmap(visible=i == 0, **_map(layer, steps, ratio), **_ratio_scale(ceiling))
        for i, (layer, ratio) in enumerate(zip(layers, ratios, strict=True))
    ]
    buttons = [
        {
            "label": f"layer {layer.layer}",
            "method": "update",
            "args": [{"visible": [i == j for j in range(len(layers))]}],
        }
        for i, layer in enumerate(layers)
    ]
    menu = {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.03, "yanchor": "bottom", "bgcolor": "white"}
    drawn = figure(traces, "expert", height=460, updatemenus=[menu], showlegend=False, hovermode="closest")
    drawn.update_layout(margin={"t": 56})
    drawn.update_yaxes(**_expert_axis(layers[0].num_experts))
    drawn.update_xaxes(showgrid=False)
    return drawn


def _map(layer: LayerSeries, steps: Any, ratio: FloatArray) -> dict[str, Any]:
    return {
        "x": steps.astype(np.int32),
        "y": np.arange(layer.num_experts, dtype=np.int32),
        "z": ratio.T.astype(np.float32),
        "hovertemplate": f"layer {layer.layer}, expert %{{y}}, step %{{x:,d}}<br>%{{z:.2f}} × uniform<extra></extra>",
    }


def _expert_axis(experts: int) -> dict[str, Any]:
    axis = {"autorange": "reversed", "showgrid": False, "zeroline": False, "ticks": "outside", "ticklen": 4}
    return axis | {"automargin": True} | ({"dtick": 1} if experts <= 10 else {"nticks": 9, "tickformat": "d"})


def _load_at_end(run: RunData, layers: list[LayerSeries]) -> Plot:
    from plotly.graph_objects import Heatmap

    experts = max(layer.num_experts for layer in layers)
    ratio = np.full((len(layers), experts), np.nan)
    for row, layer in enumerate(layers):
        ratio[row, : layer.num_experts] = layer.load[-1] * layer.num_experts
    readable = experts <= 16 and len(layers) <= 32
    trace = Heatmap(
        x=np.arange(experts, dtype=np.int32),
        y=[f"{layer.layer}" for layer in layers],
        z=ratio.astype(np.float32),
        xgap=2 if readable else 0,
        ygap=2 if readable else 0,
        texttemplate="%{z:.2f}" if readable else None,
        hovertemplate="layer %{y}, expert %{x}<br>%{z:.2f} × uniform<extra></extra>",
        showscale=not readable,  # the cells say it themselves
        **_ratio_scale(_ceiling([ratio])),
    )
    height = 110 + len(layers) * (34 if len(layers) <= 12 else 18)
    drawn = figure([trace], "layer", height=max(200, min(height, 900)), showlegend=False, hovermode="closest")
    drawn.update_layout(margin={"t": 14})
    drawn.update_yaxes(type="category", autorange="reversed", showgrid=False)
    drawn.update_xaxes(title={"text": "expert"}, showgrid=False, **({"dtick": 1} if experts <= 32 else {"nticks": 17}))
    step = grouped(int(run.train.step[-1]))
    caption = (
        f"All layers at the last logged step ({step}), as multiples of the uniform share; one step, not an average."
    )
    return Plot("load-end", "Expert load at the end", caption, drawn, wide=True)
