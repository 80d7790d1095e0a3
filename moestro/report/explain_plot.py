"""The picture of a comparison: from A's step to B's, a bar for each part that differs."""

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from moestro.plan.explain import Explanation, Row
from moestro.plan.explain_words import cause, seconds, verdict
from moestro.report.style import ORANGE, TEAL, figure
from moestro.report.template import write_picture

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

LEGEND = (
    "Orange: B takes longer there; green: less long. Pale: within the steps' spread. The bars add up. The axis need "
    "not begin at zero."
)
BARS = 12  # parts; what is left of the others is one more
LEAST = 0.0005  # of A: smaller differences share that one, too
WHOLE = "#8894a0"
ROOM = 0.12  # of what is seen, beside the bars for their labels


def write_waterfall(found: Explanation, path: Path) -> None:
    """One HTML file that needs nothing else.

    Raises:
        MoestroError: `path` is no file that can be written.
        OSError: no such folder, no right to write there, or a full disk.
    """
    plot = waterfall(found).to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False})
    sides = "".join(
        f"<p><b>{label}</b> {escape(side.name)}: {escape(side.basis)}</p>"
        for label, side in (("A", found.first), ("B", found.second))
    )
    write_picture(path, "From A to B", f"{sides}<p>{escape(verdict(found))}</p>{plot}<p>{LEGEND}</p>")


def waterfall(found: Explanation) -> "Figure":
    """Seconds across, A at the top, then the parts from the largest difference down, B at the bottom."""
    from plotly.graph_objects import Bar

    shown, rest = _shown(found)
    names, bases, widths, colours, labels, hover = (
        ["A"],
        [0.0],
        [found.first_s],
        [WHOLE],
        [seconds(found.first_s)],
        [""],
    )
    at = found.first_s
    for name, delta, pale, why in [*((r.name, r.seconds, r.is_noise, cause(r)) for r in shown), *rest]:
        names.append(name)
        bases.append(min(at, at + delta))
        widths.append(abs(delta))
        colours.append(_pale(ORANGE if delta > 0 else TEAL, pale))
        labels.append(seconds(delta, signed=True))
        hover.append(why)
        at += delta
    names, bases, widths = [*names, "B"], [*bases, 0.0], [*widths, found.second_s]
    colours, labels, hover = [*colours, WHOLE], [*labels, seconds(found.second_s)], [*hover, ""]
    ends = [base + width for base, width in zip(bases, widths, strict=True)]
    low, high = min(bases[1:-1] or [0.0]), max(ends)
    room = ROOM * (high - low) if low < high else high
    bar = Bar(
        y=names, x=widths, base=bases, orientation="h", marker={"color": colours}, width=0.62,
        text=labels, textposition="outside", cliponaxis=False,
        customdata=[[escape(text)] for text in hover], hovertemplate="%{y}: %{text}<br>%{customdata[0]}<extra></extra>",
    )  # fmt: skip
    unit = "a step" if found.per is None else f"{found.per:,} tokens"
    drawn = figure([bar], "", height=110 + 34 * len(names), hovermode="closest", showlegend=False)
    drawn.update_xaxes(title_text=f"seconds of {unit}", tickformat="~g", range=[max(0.0, low - room), high + room])
    drawn.update_yaxes(autorange="reversed", showgrid=False)
    return drawn


def _shown(found: Explanation) -> tuple[list[Row], list[tuple[str, float, bool, str]]]:
    """Parts with a bar of their own, and one bar for the others."""
    shown = [row for row in found.rows if abs(row.seconds) >= LEAST * found.first_s][:BARS]
    others = [row for row in found.rows if row not in shown and row.seconds]
    if not others:
        return shown, []
    return shown, [(f"{len(others)} more", sum(row.seconds for row in others), False, "")]


def _pale(colour: str, pale: bool) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{0.35 if pale else 1})"
