"""What the phases of a run look like in its plots."""

import numpy as np

from moestro.report.curves import thin
from moestro.report.read import TrainSeries
from moestro.report.style import MUTED, ORANGE, TEAL, Plot, curve, figure


def phase_starts(train: TrainSeries) -> list[int]:
    """The first logged step of each phase after the first."""
    changes = np.flatnonzero(np.diff(train.phase) > 0) + 1
    return [int(step) for step in train.step[changes]]


def mark_phases(plots: list[Plot], train: TrainSeries) -> list[Plot]:
    """The plots with a line where each phase begins."""
    for plot in plots:
        for start in phase_starts(train):
            plot.figure.add_vline(start, line={"color": MUTED, "width": 1, "dash": "dot"})
    return plots


def batch_plot(train: TrainSeries) -> list[Plot]:
    """Tokens of a batch and of a sequence, if the run had phases."""
    if not np.isfinite(train.batch_tokens).any():
        return []
    drawn = figure(
        [
            curve(*thin(train.step, train.batch_tokens), "batch", TEAL, line_shape="hv"),
            curve(*thin(train.step, train.seq_len), "sequence", ORANGE, line_shape="hv"),
        ],
        "tokens, padding included",
    )
    drawn.update_yaxes(type="log", nticks=6)
    caption = "Positions in a global batch and in a sequence. Dotted lines in all plots: a phase begins."
    return [Plot("batch", "Batch and context", caption, drawn)]
