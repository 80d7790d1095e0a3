"""The page of a validation: predicted over measured step times, a point for each run."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from moestro.predict.validate import Row, Validation, group
from moestro.report.style import BLUE, MUTED, ORANGE, figure
from moestro.report.template import write_picture

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

KINDS = ((False, "dense", BLUE), (True, "mixture of experts", ORANGE))


def write_page(found: Validation, path: Path) -> None:
    """One HTML file that needs nothing else."""
    whole = group("all", found.rows)
    how = (
        "each source predicted with constants fitted to the others" if found.held_out else "with the shipped constants"
    )
    text = (
        f"{whole.runs:,} runs, {how}: median error {whole.median:.1%}, nine of ten within {whole.p90:.1%}, "
        f"bias {whole.bias:+.1%}"
    )
    plot = scatter(found.rows).to_html(full_html=False, include_plotlyjs=False)
    hint = "The line is a perfect prediction, the dotted ones are 25 % off. Point at a run to see what it is."
    write_picture(path, "Predicted and measured step times", f"<p>{escape(text)}</p>{plot}<p>{hint}</p>")


def scatter(rows: Sequence[Row]) -> "Figure":
    """Seconds on both axes, in powers of ten."""
    from plotly.graph_objects import Scatter

    measured = [row.run.measured for row in rows]
    ends = [min(measured) / 2, max(measured) * 2]
    lines = [
        Scatter(
            x=ends,
            y=[factor * end for end in ends],
            mode="lines",
            line={"color": MUTED, "width": 1, "dash": "solid" if factor == 1 else "dot"},
            hoverinfo="skip",
            showlegend=False,
        )
        for factor in (0.75, 1.0, 1.25)
    ]
    points = []
    for is_moe, name, colour in KINDS:
        own = [row for row in rows if row.run.is_moe == is_moe]
        points.append(
            Scatter(
                x=[row.run.measured for row in own],
                y=[row.predicted for row in own],
                mode="markers",
                name=name,
                marker={"color": colour, "size": 5, "opacity": 0.6},
                text=[_label(row) for row in own],
                hovertemplate="%{text}<br>measured %{x:.3g} s, predicted %{y:.3g} s<extra></extra>",
            )
        )
    log = {"type": "log", "tickformat": "~g"}
    drawn = figure([*lines, *points], "predicted seconds", height=620, hovermode="closest")
    drawn.update_xaxes(title_text="measured seconds", dtick=1, **log)
    drawn.update_yaxes(dtick=1, **log)
    return drawn


def _label(row: Row) -> str:
    run = row.run
    return escape(f"{run.model}, {run.num_devices} × {run.device}, {run.workload.precision}: {row.error:+.0%}")
