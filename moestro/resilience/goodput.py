"""Where the time of a run went: useful steps, stalls, lost work and restarts; and what the model of faults says to it.

All is read from the run's folder: `metrics.jsonl`, `events.jsonl`, `audit.jsonl` and, of a supervised run,
`attempts.jsonl`. Seconds of the wall clock.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from moestro.errors import MoestroError
from moestro.predict.goodput import Reliability, goodput
from moestro.train.incidents import AUDIT, Incident, incidents

Record = Mapping[str, Any]
ATTEMPTS = "attempts.jsonl"  # of the supervisor: every start of the ranks
STOPPED = ("restart", "shrink", "grow", "stop")  # actions after which the ranks had ended


@dataclass(frozen=True)
class Goodput:
    """Of one run so far. The parts add up to `wall_s`, `rest_s` being what is left of it: starting, and logging."""

    wall_s: float
    useful_s: float  # the steps that the weights are made of, each once
    data_s: float  # before these steps, making their batches
    checkpoint_s: float  # training stood still
    evaluate_s: float
    redone_s: float  # steps that a restart or a roll-back threw away
    down_s: float  # from the last step before a fault to the first one after it
    rest_s: float
    steps: int
    redone_steps: int
    redone_tokens: int
    faults: int  # that ended the ranks
    restarts: int  # after those, and to let a node take part again
    flagged: int  # other incidents
    interval_s: float  # of useful work between two checkpoints; NaN: there were less than two

    @property
    def goodput(self) -> float:
        """Share of the time that was useful."""
        return self.useful_s / self.wall_s if self.wall_s > 0 else math.nan

    @property
    def mttf_s(self) -> float:
        """Mean time between faults, time down left out; inf without any."""
        return (self.wall_s - self.down_s) / self.faults if self.faults else math.inf

    @property
    def mttr_s(self) -> float:
        """Mean time until training goes on after a restart; NaN without one."""
        return self.down_s / self.restarts if self.restarts else math.nan

    @property
    def predicted(self) -> float:
        """What `moestro.predict.goodput` expects at the interval, stall, rate of faults and repair that were measured
        here, in a run that does nothing but train; NaN without faults or checkpoints."""
        if not self.faults or not math.isfinite(self.interval_s):
            return math.nan
        saves = max(1, round((self.useful_s + self.data_s) / self.interval_s))
        faults = Reliability(self.trained_s / self.restarts, self.checkpoint_s / saves, self.mttr_s)
        return goodput(self.interval_s, faults)

    @property
    def trained_s(self) -> float:
        """Of what the model knows: useful steps, stalls, lost work and time down."""
        return self.useful_s + self.data_s + self.checkpoint_s + self.redone_s + self.down_s

    @property
    def training(self) -> float:
        """The useful share of `trained_s`, to hold beside `predicted`."""
        return (self.useful_s + self.data_s) / self.trained_s if self.trained_s > 0 else math.nan


def measure_goodput(folder: Path) -> Goodput:
    """Of the run in a folder, finished or not.

    Raises:
        MoestroError: no step was logged there.
    """
    metrics, events = list(_lines(folder / "metrics.jsonl")), list(_lines(folder / "events.jsonl"))
    steps, redone = _timeline(metrics)
    if not steps:
        raise MoestroError(f"{folder} holds no training step, so there is no goodput; give a run's folder")
    audit = incidents(folder)
    ended = [one for one in audit if one.action in STOPPED and one.signal not in ("node_lost", "unfit_node")]
    every = _log_every(steps)
    useful_s, data_s = (every * sum(_number(one.get(key)) for one in steps.values()) for key in ("step_s", "data_s"))
    redone_s = every * sum(_number(one.get("step_s")) + _number(one.get("data_s")) for one in redone)
    tokens = every * sum(_tokens(one) for one in redone)
    checkpoint_s = sum(_number(one.get("stall_s", one.get("copy_s"))) for one in events)
    evaluate_s = sum(_number(one.get("eval_s")) for one in metrics)
    down_s = sum(one.downtime_s or 0.0 for one in ended)
    wall_s = _wall(folder, events, steps.values())
    known = useful_s + data_s + checkpoint_s + evaluate_s + redone_s + down_s
    return Goodput(
        wall_s=max(wall_s, known),
        useful_s=useful_s,
        data_s=data_s,
        checkpoint_s=checkpoint_s,
        evaluate_s=evaluate_s,
        redone_s=redone_s,
        down_s=down_s,
        rest_s=max(0.0, wall_s - known),
        steps=max(steps),
        redone_steps=round(len(redone) * every),
        redone_tokens=round(tokens),
        faults=sum(one.action != "grow" for one in ended),
        restarts=len(ended),
        flagged=len(audit) - len(ended),
        interval_s=_interval(events) * (useful_s + data_s) / max(steps),
    )


def is_watched_run(folder: Path) -> bool:
    """Whether there is anything to tell about faults: a supervisor was there, or something was noted."""
    return (folder / ATTEMPTS).exists() or (folder / AUDIT).exists()


class Start(NamedTuple):
    """One start of the ranks, as `resilience.supervisor.Attempt` was written; seconds since 1970."""

    number: int
    ranks: int
    started: float
    ended: float
    first_step: int | None
    last_step: int
    moved: float | None
    end: str


def attempts_of(folder: Path) -> list[Start]:
    """The starts of a supervised run that have ended; [] of one that nobody watched."""
    keys = Start._fields
    return [Start(*(one[key] for key in keys)) for one in _lines(folder / ATTEMPTS) if set(keys) <= one.keys()]


def timeline(folder: Path) -> list[tuple[float, Incident]]:
    """Incidents with the time of the wall clock, seconds since 1970."""
    found = [(_moment(one.time), one) for one in incidents(folder)]
    return [(when, one) for when, one in found if when is not None]


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            tree = json.loads(line)
        except ValueError:  # torn by a killed writer
            continue
        if isinstance(tree, dict):
            yield tree


def _timeline(metrics: Iterable[Record]) -> tuple[dict[int, Record], list[Record]]:
    """The record of each step as the run finally went, and those that were thrown away by going back."""
    kept: dict[int, Record] = {}
    redone: list[Record] = []
    for one in metrics:
        step = one.get("step")
        if one.get("kind") != "train" or not isinstance(step, int):
            continue
        for stale in [earlier for earlier in reversed(kept) if earlier >= step]:
            redone.append(kept.pop(stale))
        kept[step] = one
    return kept, redone


def _log_every(steps: Mapping[int, Record]) -> float:
    """Steps that a logged one stands for."""
    return max(steps) / len(steps)


def _wall(folder: Path, events: list[dict[str, Any]], steps: Iterable[Record]) -> float:
    """From the first start to the last end, of each time that the run was supervised; pauses before restarts count."""
    starts = attempts_of(folder)
    if starts:
        begins = [i for i, one in enumerate(starts) if one.number == 0 or i == 0]
        return sum(starts[end - 1].ended - starts[begin].started for begin, end in pairwise([*begins, len(starts)]))
    moments = [when for one in events if (when := _moment(one.get("time"))) is not None]
    if len(moments) > 1:
        return moments[-1] - moments[0]
    return sum(_number(one.get("step_s")) for one in steps)


def _interval(events: list[dict[str, Any]]) -> float:
    """Steps between two checkpoints, the median."""
    steps = [one["step"] for one in events if one.get("event") == "checkpoint" and isinstance(one.get("step"), int)]
    gaps = sorted(later - earlier for earlier, later in pairwise(steps) if later > earlier)
    return float(gaps[len(gaps) // 2]) if gaps else math.nan


def _tokens(one: Record) -> float:
    return _number(one.get("tokens_per_s")) * _number(one.get("step_s"))


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _moment(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None
