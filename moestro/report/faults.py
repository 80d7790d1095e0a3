"""What went wrong in a run and what it cost: the time line of a supervised run, its goodput, and its audit log."""

import html
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moestro.errors import MoestroError
from moestro.report.keyfigures import KeyFigure
from moestro.report.style import BLUE, MUTED, ORANGE, TEAL, Plot, figure
from moestro.report.text import MISSING, duration, grouped, percent, plural, si
from moestro.resilience.goodput import Goodput, attempts_of, is_watched_run, measure_goodput, timeline
from moestro.resilience.taxonomy import FAULTS, Category
from moestro.train.incidents import Incident

COLOURS: dict[Category, str] = {
    "hardware": "#b3261e", "user": "#60218c", "platform": ORANGE, "numeric": TEAL, "unknown": MUTED,
}  # fmt: skip
MOST_ROWS = 400
FEW = 10  # faults, below which one run says little about their rate


class Part(NamedTuple):
    """A part of the run's time. share: of all of it."""

    name: str
    seconds: str
    share: str
    what: str


def faults(folder: Path) -> dict[str, Any] | None:
    """Of the page: keys, parts of the time, plots and rows; None: nobody watched over the run and nothing was noted."""
    if not is_watched_run(folder):
        return None
    try:
        measured = measure_goodput(folder)
    except MoestroError:
        return None
    seen = timeline(folder)
    rows = [_row(incident) for _, incident in seen[-MOST_ROWS:]]
    omitted = f"The last {MOST_ROWS} of {grouped(len(seen))}; audit.jsonl has all." if len(seen) > MOST_ROWS else ""
    return {
        "figures": fault_figures(measured),
        "parts": _parts(measured),
        "plots": _time_line(folder, seen),
        "rows": rows,
        "omitted": omitted,
    }


def fault_figures(of: Goodput) -> list[KeyFigure]:
    """Goodput and what goes with it, for the page and the terminal."""
    predicted = "no fault between two checkpoints, so nothing to predict from"
    if math.isfinite(of.predicted):
        few = f" (of {plural(of.faults, 'fault')}, which is few)" if of.faults < FEW else ""
        model = f"where the model says {percent(of.predicted)}{few}"
        predicted = f"without starting and evaluating {percent(of.training)}, {model}"
    figures = [KeyFigure("Goodput", percent(of.goodput), f"useful steps over {duration(of.wall_s)}; {predicted}")]
    lost = f"{plural(of.redone_steps, 'step')} ran again ({si(of.redone_tokens)} tokens)"
    noted = f"; {plural(of.flagged, 'other incident')} noted" if of.flagged else ""
    figures.append(KeyFigure("Faults", grouped(of.faults), f"that ended the ranks; {lost}{noted}"))
    if of.faults:
        repaired = f"{duration(of.mttr_s)} until training went on"
        figures.append(KeyFigure("Time between faults", duration(of.mttf_s), f"mean, time down left out; {repaired}"))
    return figures


def _parts(of: Goodput) -> list[Part]:
    parts = (
        ("useful steps", of.useful_s, "each step that the weights are made of, once"),
        ("batches", of.data_s, "made before those steps"),
        ("checkpoints", of.checkpoint_s, "training stood still"),
        ("evaluations", of.evaluate_s, ""),
        ("steps lost", of.redone_s, "thrown away by going back to a checkpoint"),
        ("down", of.down_s, "from the last step before a fault until training went on"),
        ("rest", of.rest_s, "starting, preparing text, logging, samples"),
    )
    return [Part(name, duration(s), percent(s / of.wall_s), what) for name, s, what in parts]


def _row(one: Incident) -> dict[str, Any]:
    fault = FAULTS[one.signal]
    where = [f"rank {one.rank}" if one.rank is not None else "", one.node or ""]
    return {
        "time": one.time.replace("T", " ")[:19],
        "signal": one.signal.replace("_", " "),
        "what": fault.what,
        "category": fault.category,
        "step": grouped(one.step),
        "where": ", ".join(part for part in where if part) or MISSING,
        "action": one.action.replace("_", " "),
        "downtime": duration(one.downtime_s) if one.downtime_s is not None else MISSING,
        "evidence": _evidence(one.evidence),
    }


def _evidence(tree: dict[str, Any]) -> str:
    """Figures and words; stacks are in the folder `stacks`."""
    return "; ".join(f"{key.replace('_', ' ')}: {_flat(value)}" for key, value in tree.items() if key != "stacks")[:400]


def _flat(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_flat(inner)}" for key, inner in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _time_line(folder: Path, seen: Sequence[tuple[float, Incident]]) -> list[Plot]:
    """Steps over time: a line for each start of the ranks, a mark for each incident."""
    from plotly.graph_objects import Scatter

    starts = attempts_of(folder)
    if not starts:
        return []
    begin, unit, name = starts[0].started, *_unit(starts[-1].ended - starts[0].started)
    traces: list[object] = []
    for one in starts:
        first = one.first_step if one.first_step is not None else one.last_step
        hover = f"start {one.number + 1} on {plural(one.ranks, 'rank')}: steps {first} to {one.last_step}, {one.end}"
        traces.append(
            Scatter(
                x=np.array([one.started, one.moved or one.ended, one.ended]) / unit - begin / unit,
                y=[first, one.last_step, one.last_step],
                mode="lines",
                name="steps",
                legendgroup="steps",
                showlegend=one is starts[0],
                line={"color": BLUE, "width": 1.8},
                hovertext=[html.escape(hover)] * 3,
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )
    for category, colour in COLOURS.items():
        mine = [(when, one) for when, one in seen if FAULTS[one.signal].category == category]
        if not mine:
            continue
        traces.append(
            Scatter(
                x=[(when - begin) / unit for when, _ in mine],
                y=[one.step for _, one in mine],
                mode="markers",
                name=category,
                marker={"color": colour, "size": 11, "symbol": "x"},
                hovertext=[html.escape(_told(one)) for _, one in mine],
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )
    drawn = figure(traces, "steps done", height=300, hovermode="closest", showlegend=True)
    drawn.update_xaxes(title_text=f"time since {_when(begin)}, {name}", tickformat="~g", dtick=None)
    caption = "A line for each start of the ranks; a cross for each incident, in the colour of whose it is."
    return [Plot("faults", "Time line", caption, drawn, wide=True)]


def _told(one: Incident) -> str:
    who = f" of rank {one.rank}" if one.rank is not None else ""
    down = f", {duration(one.downtime_s)} lost" if one.downtime_s is not None else ""
    return f"{one.signal.replace('_', ' ')}{who} after step {one.step}: {one.action.replace('_', ' ')}{down}"


def _unit(seconds: float) -> tuple[float, str]:
    return (3600.0, "hours") if seconds > 2 * 3600 else (60.0, "minutes") if seconds > 300 else (1.0, "seconds")


def _when(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
