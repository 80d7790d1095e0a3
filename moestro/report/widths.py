"""The page of a choice of expert width: training throughput over decoding latency, a point for each choice."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from moestro.plan.width import Choice, Widths
from moestro.report.style import BLUE, ORANGE, TEAL, figure
from moestro.report.template import write_picture

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

COLOURS = (TEAL, BLUE, ORANGE)
ALIKE = 0.01


def write_widths(found: Widths, title: str, path: Path) -> None:
    """One HTML file that needs nothing else."""
    plot = scatter(found).to_html(full_html=False, include_plotlyjs=False)
    caption = (
        f"Predicted; every point has the same active parameters. Decoding: {found.batch} sequences of "
        f"{found.context:,} tokens together on {found.replica} device(s), a lower bound. Full points: no other "
        "choice is as large, trains as fast and decodes as soon. A line joins choices of as many parameters; the large "
        "point is the one chosen."
    )
    write_picture(path, title, f"<p>{escape(found.why)}</p>{plot}<p>{escape(caption)}</p>")


def scatter(found: Widths) -> "Figure":
    """Milliseconds of a decoding step across, tokens per second of a device in training up."""
    from plotly.graph_objects import Scatter

    points = []
    for colour, alike in zip(COLOURS * 4, _by_size(found.choices), strict=False):
        points.append(
            Scatter(
                x=[1e3 * one.decode_s for one in alike],
                y=[one.tokens_per_s for one in alike],
                mode="lines+markers+text",
                name=f"{alike[0].total_params / 1e9:.3g} B parameters",
                line={"color": colour, "width": 1, "dash": "dot"},
                marker={
                    "color": [colour if one.best else "white" for one in alike],
                    "line": {"color": colour, "width": 1.5},
                    "size": [13 if one is found.chosen else 8 for one in alike],
                },
                text=[
                    f"{one.top_k} of {one.experts}" if i in (0, len(alike) - 1) else "" for i, one in enumerate(alike)
                ],
                textposition="middle right",
                cliponaxis=False,
                hovertext=[_label(one) for one in alike],
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )
    drawn = figure(points, "training, tokens/s a device", height=520, hovermode="closest", showlegend=True)
    drawn.update_xaxes(title_text="a decoding step, ms", tickformat="~g")
    drawn.update_yaxes(tickformat="~s")
    drawn.update_layout(margin={"r": 90})
    return drawn


def _by_size(choices: Sequence[Choice]) -> list[list[Choice]]:
    """Those of as many parameters together, the smallest first, each by width."""
    groups: list[list[Choice]] = []
    for one in sorted(choices, key=lambda one: one.total_params):
        if not groups or one.total_params > (1 + ALIKE) * groups[-1][0].total_params:
            groups.append([])
        groups[-1].append(one)
    return [sorted(group, key=lambda one: -one.width) for group in groups]


def _label(one: Choice) -> str:
    return escape(
        f"{one.top_k} of {one.experts} experts of {one.width:,}: {one.tokens_per_s:,.0f} tokens/s, "
        f"{1e3 * one.decode_s:.3g} ms, {one.tokens_per_expert:,.0f} tokens an expert"
    )
