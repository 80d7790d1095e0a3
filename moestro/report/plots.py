"""The plots of learning and speed."""

from __future__ import annotations

import html

import numpy as np

from moestro.report.curves import smooth, thin
from moestro.report.phases import batch_plot, mark_phases
from moestro.report.read import FloatArray, RunData, number
from moestro.report.style import BLUE, MUTED, ORANGE, PALE_BLUE, TEAL, Plot, curve, figure
from moestro.report.text import grouped, plural, si

_REFERENCE_COLOURS = ("#8a5a00", "#7a3e9d", "#4d6b00", "#a03060", "#506070")
_DASHES = ("dash", "dot", "dashdot", "longdash", "longdashdot")


def learning_plots(run: RunData) -> list[Plot]:
    plots = [_loss(run)]
    if np.isfinite(run.evals.bits_per_byte).any():
        plots.append(_bits_per_byte(run))
    train = run.train
    if np.isfinite(train.lr).any():
        drawn = figure([curve(*thin(train.step, train.lr), "learning rate", TEAL)], "learning rate")
        drawn.update_yaxes(rangemode="tozero", exponentformat="power")
        plots.append(Plot("lr", "Learning rate", "The optimizer's rate at each logged step.", drawn))
    if np.isfinite(train.grad_norm).any():
        plots.append(_grad_norm(run))
    others = (train.aux_loss, train.z_loss, train.other_loss)
    if any(np.isfinite(values).any() and values.any() for values in others):
        plots.append(_router_losses(run))
    if np.isfinite(train.mtp_loss).any() and train.mtp_loss.any():
        drawn = figure([curve(*thin(train.step, train.mtp_loss), "further tokens", TEAL)], "nats per token")
        caption = "Of the tokens after the next one, mean over the depths; not part of the loss above."
        plots.append(Plot("mtp", "Multi-token prediction", caption, drawn))
    return mark_phases([*plots, *batch_plot(train)], train)


def speed_plots(run: RunData) -> list[Plot]:
    plots = []
    for key, title, values, unit in (
        ("rate", "Tokens per second", run.train.tokens_per_s, "tokens / s"),
        ("mfu", "Model FLOPs utilisation", 100 * run.train.mfu, "MFU, %"),
    ):
        if not np.isfinite(values).any():
            continue
        smoothed, window = smooth(values)
        traces = _raw_and_smoothed(run, values, smoothed, window)
        drawn = figure(traces, unit)
        drawn.update_yaxes(rangemode="tozero")
        plots.append(Plot(key, title, _speed_caption(run, key), drawn))
    return mark_phases(plots, run.train)


def gap_note(run: RunData) -> str:
    """One line on losses that are not numbers, or nothing."""
    bad = ~np.isfinite(run.train.loss)
    evals = int(np.sum(~np.isfinite(run.evals.loss)))
    if not bad.any() and not evals:
        return ""
    parts = []
    if bad.any():
        first = grouped(int(run.train.step[bad][0]))
        parts.append(f"the training loss is NaN or infinite at {plural(int(bad.sum()), 'step')} (first: step {first})")
    if evals:
        parts.append(f"the validation loss is NaN or infinite at {plural(evals, 'evaluation')}")
    text = " and ".join(parts)
    return f"{text[0].upper()}{text[1:]}; the plots show gaps there."


def _raw_and_smoothed(run: RunData, values: FloatArray, smoothed: FloatArray, window: int) -> list[object]:
    if window == 1:
        return [curve(*thin(run.train.step, values), "each step", BLUE)]
    name = f"mean of {window} steps" if _every_step(run) else f"mean of {window} logged steps"
    return [
        curve(*thin(run.train.step, values), "each step", PALE_BLUE, width=1.2, mode="lines"),
        curve(*thin(run.train.step, smoothed), name, BLUE, width=2.2, mode="lines"),
    ]


def _every_step(run: RunData) -> bool:
    step = run.train.step
    return len(step) == int(step[-1]) - int(step[0]) + 1


def _loss(run: RunData) -> Plot:
    smoothed, window = smooth(run.train.loss)
    traces = _raw_and_smoothed(run, run.train.loss, smoothed, window)
    traces[0].name = "training" if window == 1 else "training, each step"  # type: ignore[attr-defined]
    if window > 1:
        traces[1].name = f"training, {traces[1].name}"  # type: ignore[attr-defined]
    if run.evals.step.size:
        loss = thin(run.evals.step, run.evals.loss)
        traces.append(curve(*loss, "validation", ORANGE, width=1.6, mode="lines+markers", size=7))
    drawn = figure(traces, "loss, nats per token", height=380)
    caption = "Cross-entropy without the router's auxiliary losses."
    if window > 1:
        caption += f" The smooth line is a centred mean of {window} logged steps, so it does not lag."
    return Plot("loss", "Loss", caption, drawn, wide=True)


def _bits_per_byte(run: RunData) -> Plot:
    evals = run.evals
    bits = thin(evals.step, evals.bits_per_byte)
    traces: list[object] = [curve(*bits, "this run", ORANGE, mode="lines+markers", size=7, width=2)]
    low, high = float(min(run.train.step[0], evals.step[0])), float(max(run.train.step[-1], evals.step[-1]))
    ends = np.array([low, high] if high > low else [low - 1, low + 1], dtype=np.int64)
    for index, (name, value) in enumerate(sorted(run.references.items(), key=lambda item: -item[1])):
        traces.append(
            curve(
                ends,
                np.array([value, value]),
                f"{html.escape(name)} ({value:.3g})",
                _REFERENCE_COLOURS[index % len(_REFERENCE_COLOURS)],
                width=1.6,
                dash=_DASHES[index % len(_DASHES)],
                mode="lines",
            )
        )
    caption = "On the held-out text; lower is better."
    if run.references:
        caption += " Dashed: other methods on the same text."
    return Plot("bits", "Bits per byte", caption, figure(traces, "bits per byte", height=340))


def _grad_norm(run: RunData) -> Plot:
    train = run.train
    traces: list[object] = [curve(*thin(train.step, train.grad_norm), "gradient norm", BLUE, width=1.3)]
    finite = train.grad_norm[np.isfinite(train.grad_norm)]
    drawn = figure(traces, "L2 norm")
    drawn.update_yaxes(rangemode="nonnegative")
    caption = "Of all gradients together, before clipping."
    clip = number(run.config.get("train", {}).get("grad_clip") if isinstance(run.config.get("train"), dict) else None)
    if np.isfinite(clip) and finite.size:
        caption += f" Steps above {clip:g} are clipped ({100 * np.mean(finite > clip):.0f} % of them)."
        if finite.max() > 0.7 * clip:
            drawn.add_hline(clip, line={"color": MUTED, "width": 1.2, "dash": "dash"})
    if finite.size and finite.min() > 0 and finite.max() / finite.min() > 50:
        drawn.update_yaxes(type="log", nticks=6)
    return Plot("grad", "Gradient norm", caption, drawn)


def _router_losses(run: RunData) -> Plot:
    train = run.train
    traces = [
        curve(*thin(train.step, values), name, colour, width=1.4)
        for name, values, colour in (
            ("balance loss", train.aux_loss, TEAL),
            ("z-loss", train.z_loss, ORANGE),
            ("others, times their coefficients", train.other_loss, BLUE),
        )
        if np.isfinite(values).any() and values.any()
    ]
    drawn = figure(traces, "loss", showlegend=True)
    return Plot("router-loss", "Router losses", "As logged; none is part of the loss above.", drawn)


def _speed_caption(run: RunData, key: str) -> str:
    if key == "rate":
        return "Training tokens over the step's own time; evaluation and checkpoints are not in it."
    peak, dtype = number(run.environment.get("peak_flops_measured")), run.environment.get("peak_dtype")
    if not np.isfinite(peak):
        return "The peak it is against was not recorded."
    return f"Against {si(peak, 'FLOP/s')}{f' in {dtype}' if dtype else ''}, measured on this machine, not a data sheet."
