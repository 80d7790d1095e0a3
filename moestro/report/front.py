"""The picture of a search: step time over memory, for all plans that are not beaten in both, and the choice."""

from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from moestro.config.plan import Plan
from moestro.errors import MoestroError
from moestro.plan.candidates import Candidate, Found
from moestro.plan.why import changes
from moestro.report.style import BLUE, MUTED, ORANGE, figure
from moestro.report.template import write_picture
from moestro.report.text import duration

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

KINDS = (".html", ".png", ".svg", ".pdf")
WIDE, HIGH = 1000, 560  # pixels
LABELLED = 6  # points with their change beside them; the others tell it under the pointer
MOST_TOLD = 3  # fields beside a point


def check_plot(path: Path) -> None:
    """Raises MoestroError where no such picture can be written: before a search, not after it."""
    if path.suffix not in KINDS:
        raise MoestroError(f"--plot {path}: give a name that ends in {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise MoestroError(f"--plot {path}: there is no folder {path.parent}")
    if path.suffix != ".html" and find_spec("kaleido") is None:
        raise MoestroError(f"--plot {path}: pictures other than .html need kaleido (pip install kaleido) and a Chrome")


def write_front(found: Found, title: str, limit_bytes: float | None, path: Path) -> None:
    """limit_bytes: of a device.

    Raises:
        MoestroError: as check_plot, or kaleido finds no Chrome.
    """
    check_plot(path)
    drawn = draw_front(found, limit_bytes)
    if path.suffix != ".html":
        drawn.update_layout(title={"text": escape(title), "font": {"size": 15}}, margin={"t": 84})
        try:
            drawn.write_image(path, width=WIDE, height=HIGH, scale=2)
        except (RuntimeError, ValueError) as error:
            raise MoestroError(f"cannot draw {path}: {str(error).splitlines()[0]}; .html needs no Chrome") from error
        return
    plot = drawn.to_html(full_html=False, include_plotlyjs=False)
    least = "at least " if found.tally.skipped else ""  # of plans that a rule left out nobody knows all
    caption = (
        f"Predicted by the closed form. {found.tally.plans:,} plans, {least}{found.tally.too_big:,} of them too big "
        "for memory. On the line: no other plan is as fast with as little memory; beside a point stands what is "
        "different from the choice."
    )
    write_picture(path, title, f"{plot}<p>{escape(caption)}</p>")


def draw_front(found: Found, limit_bytes: float | None) -> "Figure":
    """GB of the fullest device across, seconds of a step up."""
    from plotly.graph_objects import Scatter

    plan, one = found.exact[0]
    front = sorted(found.front, key=lambda candidate: candidate.total_bytes)
    traces = [
        Scatter(
            x=[candidate.total_bytes / 1e9 for candidate in front],
            y=[candidate.step_s for candidate in front],
            mode="lines+markers+text",
            name="no plan is faster with as little memory",
            line={"color": BLUE, "width": 1.4, "shape": "hv"},
            marker={"color": BLUE, "size": 7},
            text=_labels(front, plan),
            textposition="top right",
            textfont={"size": 11, "color": MUTED},
            cliponaxis=False,
            hovertext=[_told(candidate, plan) for candidate in front],
            hovertemplate="%{hovertext}<extra></extra>",
        ),
        Scatter(
            x=[one.memory.total / 1e9],
            y=[one.step_s.value],
            mode="markers",
            name="the choice, simulated",
            marker={"color": ORANGE, "size": 14, "symbol": "diamond"},
            hovertext=[escape(" ".join(changes(Plan(), plan)))],
            hovertemplate="%{hovertext}<extra></extra>",
        ),
    ]
    if found.faster is not None and found.faster.step_s < one.step_s.value:
        traces.append(
            Scatter(
                x=[found.faster.total_bytes / 1e9],
                y=[found.faster.step_s],
                mode="markers",
                name="faster, but does not fit",
                marker={"color": "white", "size": 9, "line": {"color": MUTED, "width": 1.5}},
                hovertext=[_told(found.faster, plan)],
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )
    drawn = figure(traces, "a step, s", height=HIGH - 60, hovermode="closest", showlegend=True)
    drawn.update_xaxes(title_text="memory of the fullest device, GB", tickformat="~g", rangemode="tozero")
    drawn.update_yaxes(tickformat="~g")
    if limit_bytes is not None:
        drawn.add_vline(limit_bytes / 1e9, line={"color": MUTED, "width": 1.2, "dash": "dash"})
        drawn.add_annotation(
            x=limit_bytes / 1e9, y=1, yref="paper", text="what a device has", showarrow=False, xanchor="right",
            yanchor="top", xshift=-6, font={"size": 11, "color": MUTED},
        )  # fmt: skip
    return drawn


def _labels(front: Sequence[Candidate], plan: Plan) -> list[str]:
    """Of points that are far enough from each other, evenly over the front."""
    every = max(1, -(-len(front) // LABELLED))
    return [escape(_short(changes(plan, one.plan))) if n % every == 0 else "" for n, one in enumerate(front)]


def _short(texts: Sequence[str]) -> str:
    return " ".join(texts[:MOST_TOLD]) + (" …" if len(texts) > MOST_TOLD else "")


def _told(one: Candidate, plan: Plan) -> str:
    what = " ".join(changes(plan, one.plan)) or "the choice"
    return escape(f"{duration(one.step_s)}, {one.total_bytes / 1e9:.1f} GB: {what}")
