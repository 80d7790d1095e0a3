"""The plots of a machine profile: bus bandwidth, links between pairs, memory, products, widths, attention.

Each holds measured points with their spread and, where a curve was fitted, the curve. A plot without data is left out:
`profile_plots` then says which, and why.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import numpy as np

from moestro.hardware.curves.busbw import busbw
from moestro.hardware.profile import MachineProfile, Sample
from moestro.measure.curves import Curves
from moestro.measure.sections import COLLECTIVES, SKIPPED
from moestro.report.profile_compute import attention_plots, gemm_plots, width_plots
from moestro.report.profile_points import COLOURS, between, line, over_bytes, points, size
from moestro.report.style import INK, Plot, depth_colour, figure

_MEMORY = ("copy", "scale", "add", "triad", "dot", "read")
_HELD = 16  # ranks or fewer: a heat map writes its figures into the cells


def profile_plots(profile: MachineProfile, curves: Curves) -> tuple[list[Plot], list[str]]:
    """The plots in the order of the page, and a line for each one that has no data."""
    groups = (
        (gemm_plots(profile, curves), "GEMM rate over size", "gemm"),
        (width_plots(profile), "rate over widths and their alignment", "gemm"),
        (memory_plots(profile, curves), "memory bandwidth over size", "memory"),
        (attention_plots(profile), "attention speed over length", "attention"),
        (collective_plots(profile, curves), "bus bandwidth over size", "collectives"),
        (pair_plots(profile), "map of links between pairs", "pairs"),
    )
    plots = [plot for part, _, _ in groups for plot in part]
    missing = [f"No {what}: {_why(profile, section)}" for part, what, section in groups if not part]
    return plots, missing


def _why(profile: MachineProfile, section: str) -> str:
    """The note of measuring that explains why a section is empty."""
    if profile.mode == "published":
        return "no public record of this device holds such figures."
    also = {"pairs": "collectives"}.get(section, "compute")  # what measures it
    for note in profile.notes:
        if note.startswith(SKIPPED) and section in note.removeprefix(SKIPPED):
            return f"{SKIPPED}."
        if note.startswith((f"{section}:", f"{also}:")):
            note = note.removeprefix(f"{also}:")
            return note.removeprefix(f"{section}:").strip().rstrip(".") + "."
    return "this profile holds no such samples."


def memory_plots(profile: MachineProfile, curves: Curves) -> list[Plot]:
    by_op = {
        op: found for op in _MEMORY if (found := [s for s in profile.of(op) if s.bytes_moved and "bytes" in s.case])
    }
    if not by_op:
        return []
    traces: list[object] = []
    for colour, (op, samples) in zip(COLOURS, by_op.items(), strict=False):
        traces.append(points(samples, _bytes, _gbps, op, colour))
        if op in curves.memory:
            x = between(map(_bytes, samples))
            traces.append(line(x, _moved_per_byte(samples[0]) * x / curves.memory[op].seconds(x) / 1e9, op, colour))
    drawn = over_bytes(traces, "size of one array", "GB/s", height=360)
    caption = (
        "Bytes read and written over time, by STREAM's count: two arrays in copy and scale, three in add and triad. "
        "Small arrays stay in a cache, so the plateau on the right is the memory."
    )
    return [Plot("memory", "Memory bandwidth over size", caption, drawn, wide=True)]


def collective_plots(profile: MachineProfile, curves: Curves) -> list[Plot]:
    """One figure an operation, one colour a number of ranks; between nodes with a dashed curve."""
    plots = []
    for op in COLLECTIVES:
        series = defaultdict[tuple[int, int], list[Sample]](list)
        for sample in profile.of(op):
            if "pair" not in sample.case and "bytes" in sample.case and sample.case.get("groups") != "all":
                series[int(sample.number("ranks")), int(sample.case.get("nodes", 1))].append(sample)
        if not series:
            continue
        traces: list[object] = []
        for index, (ranks, nodes) in enumerate(sorted(series)):
            samples = series[ranks, nodes]
            name = f"{ranks} ranks" + (f" on {nodes} nodes" if nodes > 1 else "")
            colour = depth_colour(index, len(series))
            traces.append(points(samples, _bytes, partial(_bus_gbps, op, ranks), name, colour))
            if (curve := curves.collectives.get((op, ranks, nodes))) is not None:
                x = between(map(_bytes, samples))
                traces.append(line(x, curve.bandwidth(x) / 1e9, name, colour, "dash" if nodes > 1 else "solid"))
        drawn = over_bytes(traces, "size", "bus bandwidth, GB/s")
        title = op.replace("_", "-").replace("all-to-all-uneven", "all-to-all, uneven")
        plots.append(Plot(f"busbw-{op}", f"{title[0].upper()}{title[1:]}", _factor_text(op), drawn))
    return plots


def _factor_text(op: str) -> str:
    factors = {
        "all_reduce": "2(n−1)/n; bytes are the buffer of a rank",
        "reduce_scatter": "(n−1)/n; bytes are the whole input of a rank",
        "all_gather": "(n−1)/n; bytes are the whole output of a rank",
        "all_to_all": "(n−1)/n; bytes are all that a rank sends",
        "all_to_all_uneven": "(n−1)/n; bytes are all that the fullest rank sends",
    }
    return f"Bytes over time, times {factors.get(op, '1; bytes are the message')}."


def pair_plots(profile: MachineProfile) -> list[Plot]:
    """The bandwidth of the largest message and the time of the smallest, between every two ranks."""
    samples = [s for s in profile.of("send_recv") if "pair" in s.case]
    if not samples:
        return []
    largest, smallest = max(map(_bytes, samples)), min(map(_bytes, samples))
    bandwidth = [s for s in samples if _bytes(s) == largest]
    plots = [
        _pair_map(
            "pairs-bandwidth",
            "Bandwidth between pairs",
            f"One direction, messages of {size(largest)}.",
            {_pair(s): largest / s.median_s / 1e9 for s in bandwidth},
            "GB/s",
        )
    ]
    if smallest < largest:
        latency = {_pair(s): s.median_s * 1e6 for s in samples if _bytes(s) == smallest}
        text = f"Of a message of {size(smallest)}, one way."
        plots.append(_pair_map("pairs-latency", "Latency between pairs", text, latency, "µs"))
    return plots


def _pair_map(key: str, title: str, caption: str, values: dict[tuple[int, int], float], unit: str) -> Plot:
    from plotly.graph_objects import Heatmap

    count = 1 + max(max(pair) for pair in values)
    grid = np.full((count, count), np.nan)
    for (a, b), value in values.items():
        grid[a, b] = value
        if (b, a) not in values:
            grid[b, a] = value
    trace = Heatmap(
        z=grid,
        x=list(range(count)),
        y=list(range(count)),
        colorscale=[[0, "#e8eefb"], [1, "#3355cc"]] if unit == "GB/s" else [[0, "#e5f4f3"], [1, "#0b8a83"]],
        colorbar={"title": {"text": unit}, "thickness": 12, "outlinewidth": 0},
        text=[[_figure(value) for value in row] for row in grid],
        texttemplate="%{text}" if count <= _HELD else None,
        hovertemplate="%{y} → %{x}: %{z:.4~g} " + unit + "<extra></extra>",
        xgap=2,
        ygap=2,
        zmin=0,
        zmax=float(np.nanmax(grid)),
    )
    drawn = figure([trace], "rank", height=340, hovermode="closest", font={"color": INK})
    drawn.update_xaxes(title={"text": "rank"}, showgrid=False, dtick=1 if count <= _HELD else None)
    drawn.update_yaxes(autorange="reversed", showgrid=False, dtick=1 if count <= _HELD else None)
    return Plot(key, title, caption, drawn)


def _figure(value: float) -> str:
    return "" if np.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _pair(sample: Sample) -> tuple[int, int]:
    a, b = str(sample.case["pair"]).split("-")
    return int(a), int(b)


def _bytes(sample: Sample) -> float:
    return sample.number("bytes")


def _gbps(sample: Sample, time_s: float) -> float:
    return (sample.bytes_moved or 0.0) / time_s / 1e9


def _bus_gbps(op: str, ranks: int, sample: Sample, time_s: float) -> float:
    return busbw(op, ranks, _bytes(sample), time_s) / 1e9


def _moved_per_byte(sample: Sample) -> float:
    return (sample.bytes_moved or 0.0) / _bytes(sample)
