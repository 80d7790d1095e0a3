"""What is drawn, as options of ECharts: plain data, no page. Keys that begin with a colon are JavaScript."""

from collections.abc import Mapping, Sequence
from typing import Any

from moestro.plan.candidates import Candidate
from moestro.predict.words import MemoryBreakdown, TimeBreakdown
from moestro.report.style import BLUE, GRID, INK, MUTED, ORANGE, TEAL
from moestro.ui.gantt import Gantt

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
OVER = "#b42318"
GREY = "#8a94a0"
PURPLE = "#7a3e9d"
# Of a step, in the order of the bar: blue what attention does, green what experts do, warm what is waited for.
PARTS = {
    "attention": BLUE, "norms": "#6f8be0", "embedding": "#a9bbf0", "head": "#8197d8", "loss": "#c3cff3",
    "router": "#9fd5d1", "dispatch": "#5cb5af", "experts": TEAL, "shared experts": "#075e59", "dense": "#3f9b96",
    "other computation": "#b7c4cf", "host": GREY, "communication": ORANGE, "bubble": "#f0b48a", "optimizer": PURPLE,
}  # fmt: skip
MEMORY = {
    "weights": BLUE, "gradients": "#7d97ea", "optimizer": PURPLE, "activations": TEAL, "transient": "#86cbc6",
    "fragmentation": "#e6c15c", "communication": ORANGE, "framework": GREY,
}  # fmt: skip
MEMORY_WORDS = {"transient": "comes and goes", "communication": "communicators"}
PASSES = (BLUE, ORANGE, TEAL, "#8f9fc0", "#d3a93c", PURPLE)
STREAMS = (GREY, BLUE, ORANGE)
LABELLED = 8  # ranks, up to which each bar says its size


def step_chart(now: TimeBreakdown, before: TimeBreakdown | None) -> dict[str, Any]:
    """A bar of the step's parts, and under it the one before the last change."""
    bars = [parts_of(now), parts_of(before) if before is not None else {}]
    there = [name for name in PARTS if any(bar.get(name, 0.0) > 0 for bar in bars)]
    series = [
        {
            "name": name,
            "type": "bar",
            "stack": "step",
            "barWidth": 30,
            "itemStyle": {"color": colour},
            "data": [bars[0].get(name, 0.0), {"value": bars[1].get(name, 0.0), "itemStyle": {"opacity": 0.45}}],
        }
        for name, colour in PARTS.items()
    ]
    return {
        **_base(),
        "grid": {"left": 52, "right": 18, "top": 8, "bottom": 66},
        "legend": {**_legend(), "data": there},
        "tooltip": {**_tooltip(), "trigger": "item", ":formatter": _PART},
        "xAxis": {**_axis(), "type": "value", "name": "seconds", "nameLocation": "middle", "nameGap": 24},
        "yAxis": {**_axis(), "type": "category", "inverse": True, "data": ["now", "before"],
                  "splitLine": {"show": False}},
        "series": series,
    }  # fmt: skip


def parts_of(time: TimeBreakdown) -> dict[str, float]:
    """Seconds by the names of PARTS; they add up to the step."""
    parts = {name: seconds for name, seconds in time.by_part.items() if name in PARTS}
    return {
        **parts,
        "other computation": max(0.0, time.compute - sum(parts.values())),
        "host": time.host,
        "communication": time.communication,
        "bubble": time.bubble,
        "optimizer": time.optimizer,
    }


def memory_chart(ranks: Sequence[MemoryBreakdown], limit_bytes: float | None) -> dict[str, Any]:
    """A bar of each pipeline rank, with the device's memory as a line; its size is red where it is above."""
    totals = [rank.total / 1e9 for rank in ranks]
    limit = None if limit_bytes is None else limit_bytes / 1e9
    series: list[dict[str, Any]] = [
        {
            "name": MEMORY_WORDS.get(name, name),
            "type": "bar",
            "stack": "memory",
            "barMaxWidth": 54,
            "itemStyle": {"color": colour},
            "data": [getattr(rank, name) / 1e9 for rank in ranks],
        }
        for name, colour in MEMORY.items()
    ]
    digits = 1 if max(totals) >= 10 else 2
    sizes = [
        {
            "value": 0,
            "label": {
                "show": len(ranks) <= LABELLED or total == max(totals),
                "position": "top",
                "formatter": f"{total:.{digits}f}",
                "color": OVER if limit is not None and total > limit else INK,
                "fontWeight": 600,
                "fontSize": 11,
            },
        }
        for total in totals
    ]
    line = {
        "silent": True, "symbol": "none", "lineStyle": {"color": OVER, "type": "dashed", "width": 1.5},
        "label": {"position": "insideEndTop", "color": OVER, "formatter": "" if limit is None else f"{limit:.1f} GB"},
        "data": [] if limit is None else [{"yAxis": limit}],
    }  # fmt: skip
    series.append({"name": "size", "type": "bar", "stack": "memory", "data": sizes, "markLine": line, "itemStyle": {}})
    top = max([*totals, *([] if limit is None else [limit])])
    return {
        **_base(),
        "grid": {"left": 52, "right": 18, "top": 22, "bottom": 66},
        "legend": {**_legend(), "data": [MEMORY_WORDS.get(name, name) for name in MEMORY]},
        "tooltip": {**_tooltip(), "trigger": "axis", "axisPointer": {"type": "shadow"}, ":formatter": _SIZES},
        "xAxis": {**_axis(), "type": "category", "name": "pipeline rank", "nameLocation": "middle", "nameGap": 24,
                  "data": [str(rank) for rank in range(len(ranks))], "splitLine": {"show": False}},
        "yAxis": {**_axis(), "type": "value", "name": "GB", "nameGap": 8, "max": round(1.08 * top, 3),
                  "axisLabel": {**_axis()["axisLabel"], "showMaxLabel": False}},
        "series": series,
    }  # fmt: skip


def gantt_chart(gantt: Gantt) -> dict[str, Any]:
    """Bars in rows, to zoom into. One series of each kind, so that the legend can hide it."""
    colours = STREAMS if len(gantt.kinds) == len(STREAMS) else PASSES
    scale, unit = (1.0, "seconds") if gantt.total_s >= 1 else (1e3, "milliseconds")
    series = [
        {
            "name": name,
            "type": "custom",
            ":renderItem": _BAR,
            "itemStyle": {"color": colours[kind]},
            "encode": {"x": [1, 2], "y": 0},
            "clip": True,
            "data": [
                [bar.row, round(bar.start_s * scale, 6), round(bar.end_s * scale, 6), bar.name]
                for bar in gantt.bars
                if bar.kind == kind
            ],
        }
        for kind, name in enumerate(gantt.kinds)
    ]
    present = [one["name"] for one in series if one["data"]]
    return {
        **_base(),
        "grid": {"left": 62, "right": 18, "top": 34, "bottom": 68},
        "legend": {**_legend(), "bottom": "auto", "top": 4, "data": present},
        "tooltip": {**_tooltip(), "trigger": "item", ":formatter": _SPAN.replace("UNIT", "s" if scale == 1 else "ms")},
        "dataZoom": [
            {"type": "slider", "bottom": 8, "height": 16, "filterMode": "weakFilter", "showDetail": False,
             "brushSelect": False, "borderColor": GRID, "fillerColor": "rgba(51,85,204,0.10)"},
            {"type": "inside", "filterMode": "weakFilter", "zoomOnMouseWheel": "ctrl", "moveOnMouseMove": True},
        ],
        "xAxis": {**_axis(), "type": "value", "min": 0, "max": gantt.total_s * scale, "name": unit,
                  "nameLocation": "middle", "nameGap": 22,
                  "axisLabel": {**_axis()["axisLabel"], "showMaxLabel": False}},
        "yAxis": {**_axis(), "type": "category", "inverse": True, "data": list(gantt.rows),
                  "splitLine": {"show": False}},
        "series": series,
    }  # fmt: skip


def front_chart(front: Sequence[Candidate], chosen: int | None) -> dict[str, Any]:
    """Step time over memory of plans for which no other is as fast with as little. chosen: the one that is shown."""
    points = [
        {
            "value": [round(one.total_bytes / 1e9, 3), one.step_s],
            "symbolSize": 15 if place == chosen else 9,
            "itemStyle": {"color": ORANGE if place == chosen else BLUE},
        }
        for place, one in enumerate(front)
    ]
    return {
        **_base(),
        "grid": {"left": 58, "right": 22, "top": 16, "bottom": 44},
        "tooltip": {**_tooltip(), "trigger": "item", ":formatter": _POINT},
        "xAxis": {**_axis(), "type": "value", "scale": True, "name": "GB on the fullest device",
                  "nameLocation": "middle", "nameGap": 26},
        "yAxis": {**_axis(), "type": "value", "scale": True, "name": "seconds",
                  "nameLocation": "middle", "nameGap": 42},
        "series": [{"type": "line", "step": "start", "lineStyle": {"color": BLUE, "width": 1.2, "opacity": 0.5},
                    "symbol": "circle", "data": points}],
    }  # fmt: skip


_PART = (
    "p => p.value > 0 ? `${p.marker} ${p.seriesName} (${p.name})<br><b>${Number(p.value.toPrecision(3))} s</b>` : ''"
)
_SIZES = (
    "all => `rank ${all[0].name}<br>` + all.filter(p => p.seriesName != 'size' && p.value > 0.005).reverse()"
    ".map(p => `${p.marker} ${p.seriesName} <b>${p.value.toFixed(2)} GB</b>`).join('<br>')"
)
_SPAN = (
    "p => `${p.marker} ${p.value[3]}<br><b>${Number((p.value[2] - p.value[1]).toPrecision(3))} UNIT</b>, "
    "from ${Number(p.value[1].toPrecision(4))} UNIT`"
)
_POINT = "p => `${Number(p.value[1].toPrecision(3))} s with ${p.value[0].toFixed(1)} GB<br>click to take this plan`"
# A rectangle over its row, at least half a pixel wide.
_BAR = """(params, api) => {
  const from = api.coord([api.value(1), api.value(0)]), to = api.coord([api.value(2), api.value(0)]);
  const height = Math.min(26, api.size([0, 1])[1] * 0.74), box = params.coordSys;
  const left = Math.max(from[0], box.x), right = Math.min(to[0], box.x + box.width);
  if (right < left) return;
  return {type: 'rect', shape: {x: left, y: from[1] - height / 2, width: Math.max(right - left, 0.5), height},
          style: {fill: api.visual('color'), stroke: '#fff', lineWidth: right - left > 3 ? 0.6 : 0}};
}"""


def _base() -> dict[str, Any]:
    return {"animation": False, "textStyle": {"fontFamily": FONT, "color": INK}}


def _legend() -> dict[str, Any]:
    return {"type": "scroll", "bottom": 0, "left": 8, "right": 8, "icon": "roundRect",
            "itemWidth": 12, "itemHeight": 9, "itemGap": 12,
            "textStyle": {"color": MUTED, "fontSize": 11.5}}  # fmt: skip


def _tooltip() -> dict[str, Any]:
    return {"confine": True, "backgroundColor": "#fff", "borderColor": "#c5ced6", "padding": [6, 10],
            "textStyle": {"color": INK, "fontSize": 12}}  # fmt: skip


def _axis() -> Mapping[str, Any]:
    return {
        "axisLine": {"show": True, "lineStyle": {"color": "#c5ced6"}},
        "axisTick": {"lineStyle": {"color": "#c5ced6"}},
        "axisLabel": {"color": MUTED, "fontSize": 11},
        "splitLine": {"lineStyle": {"color": GRID}},
        "nameTextStyle": {"color": MUTED, "fontSize": 11},
    }
