"""The figures a reader looks for first, shared by the page and the terminal."""

import math
import warnings
from dataclasses import dataclass

import numpy as np

from moestro.report.read import FloatArray, RunData, number, table, whole
from moestro.report.text import duration, fixed, grouped, percent, si


@dataclass(frozen=True)
class KeyFigure:
    label: str
    value: str
    detail: str = ""
    warn: bool = False


@dataclass(frozen=True)
class Status:
    word: str  # one of finished, interrupted, failed, running
    detail: str


def last_finite(values: FloatArray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if finite.size else math.nan


def run_status(run: RunData) -> Status:
    """The state by the last event that tells one; a killed process writes none, so that reads as running."""
    step = int(run.train.step[-1])
    for event in reversed(run.events):
        at = f"at step {grouped(event.step if event.step is not None else step)}"
        if event.event == "finish":
            return Status("finished", at)
        if event.event.startswith("interrupt"):
            return Status("interrupted", at)
        if event.event in ("non_finite", "error", "fail", "failed", "crash"):
            return Status("failed", at)
        if event.event in ("start", "resume"):
            break
    return Status("running", f"or killed: no finish event, last logged step {grouped(step)}")


def key_figures(run: RunData) -> list[KeyFigure]:
    """All are measured, except parameters, which are counted."""
    return [*_quality(run), *_amount(run), *_speed(run), *_experts(run)]


def _quality(run: RunData) -> list[KeyFigure]:
    evals, train_loss = run.evals, last_finite(run.train.loss)
    if not evals.step.size:
        return [
            KeyFigure("Validation", "–", "no evaluation in this run"),
            KeyFigure("Training loss", fixed(train_loss), "nats per token, last step", not math.isfinite(train_loss)),
        ]
    bits, loss = float(evals.bits_per_byte[-1]), float(evals.loss[-1])
    at = f"step {grouped(int(evals.step[-1]))}"
    best = ""
    if np.isfinite(evals.bits_per_byte).any() and int(np.nanargmin(evals.bits_per_byte)) != len(evals.step) - 1:
        index = int(np.nanargmin(evals.bits_per_byte))
        best = f"; best {fixed(float(evals.bits_per_byte[index]))} at step {grouped(int(evals.step[index]))}"
    return [
        KeyFigure("Validation bits / byte", fixed(bits), at + best, not math.isfinite(bits)),
        KeyFigure(
            "Validation loss",
            fixed(loss),
            f"nats per token; training {fixed(float(run.train.loss[-1]))}",
            not math.isfinite(loss),
        ),
    ]


def _amount(run: RunData) -> list[KeyFigure]:
    train, environment = run.train, run.environment
    planned = whole(table(run.config, "train").get("steps"))
    step = int(train.step[-1])
    tokens = last_finite(train.tokens)
    total, active = (number(environment.get(key)) for key in ("total_params", "active_params"))
    redone = f"; {grouped(run.redone_steps)} redone after a resume" if run.redone_steps else ""
    return [
        KeyFigure("Steps", grouped(step), (f"of {grouped(planned)} planned" if planned else "") + redone),
        KeyFigure("Training tokens", si(tokens), _passes(run, tokens)),
        KeyFigure("Parameters", si(total), _active(total, active)),
        KeyFigure("Wall time", duration(run.wall_time_s), "evaluations and checkpoints included, start-up not"),
    ]


def _passes(run: RunData, tokens: float) -> str:
    available = number(table(run.environment, "data").get("train_tokens"))
    if not (math.isfinite(tokens) and available > 0):
        return "" if math.isfinite(tokens) else "not recorded"
    return f"{tokens / available:.2g} passes over {si(available)}"


def _active(total: float, active: float) -> str:
    if not math.isfinite(active):
        return "" if math.isfinite(total) else "not recorded"
    return f"{si(active)} active per token" + (f" ({percent(active / total)})" if total > 0 else "")


def _speed(run: RunData) -> list[KeyFigure]:
    rate, mfu = run.train.tokens_per_s, run.train.mfu
    rate, mfu = rate[np.isfinite(rate)], mfu[np.isfinite(mfu)]
    spread = "not recorded"
    if rate.size == 1:
        spread = "one logged step, so no spread"
    elif rate.size:
        low, high = np.percentile(rate, [10, 90])
        spread = f"median of {grouped(rate.size)} steps; 10–90\u00a0%: {si(low)} – {si(high)}"
    peak = number(run.environment.get("peak_flops_measured"))
    dtype = run.environment.get("peak_dtype")
    against = f"median; of {si(peak, 'FLOP/s')} measured{f' in {dtype}' if dtype else ''}"
    if not math.isfinite(peak):
        against = "median; the peak it is against was not recorded"
    return [
        KeyFigure("Tokens / s", si(float(np.median(rate))) if rate.size else "–", spread),
        KeyFigure("MFU", percent(float(np.median(mfu))) if mfu.size else "–", against if mfu.size else "not recorded"),
    ]


def _experts(run: RunData) -> list[KeyFigure]:
    layers = run.train.layers
    if not layers:
        return [
            KeyFigure("Worst load imbalance", "–", "a dense model: no experts to balance"),
            KeyFigure("Dropped assignments", "–", "a dense model: no router, nothing to drop"),
        ]
    worst = np.stack([layer.max_over_mean for layer in layers])  # [layers, steps]
    dropped = np.stack([layer.dropped for layer in layers])
    figures = [KeyFigure("Worst load imbalance", "–", "not recorded")]
    if np.isfinite(worst).any():
        row, column = np.unravel_index(int(np.nanargmax(worst)), worst.shape)
        figures = [
            KeyFigure(
                "Worst load imbalance",
                f"{worst[row, column]:.2f} ×",
                f"max / mean, layer {layers[row].layer}, step {grouped(int(run.train.step[column]))}; "
                f"worst layer at the end {fixed(_nanmax(worst[:, -1]), 2)} ×" + _null_choices(run),
            )
        ]
    if not np.isfinite(dropped).any():
        return [*figures, KeyFigure("Dropped assignments", "–", "not recorded")]
    mean, most = float(np.nanmean(dropped)), float(np.nanmax(dropped))
    detail = f"mean of all layers and steps; most {percent(most)}; " + _capacity(run)
    return [*figures, KeyFigure("Dropped assignments", percent(mean), detail)]


def _null_choices(run: RunData) -> str:
    null = whole(table(table(run.config, "model"), "moe").get("null_experts"))
    return f"; {null} null {'choice' if null == 1 else 'choices'} counted as experts" if null else ""


def _capacity(run: RunData) -> str:
    router = table(table(table(run.config, "model"), "moe"), "router")
    factor = router.get("capacity_factor")
    return "no capacity limit" if factor in (None, "none") else f"capacity factor {factor}"


def _nanmax(values: FloatArray) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all NaN: the answer is NaN, and that is what we print
        return float(np.nanmax(values))
