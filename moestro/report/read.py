"""A run folder as typed arrays: everything the report shows is read here and nowhere else."""

import json
import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestro.errors import MoestroError

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Record = dict[str, Any]


@dataclass(frozen=True)
class LayerSeries:
    """One MoE layer over the logged steps; a step without a figure holds NaN."""

    layer: int
    load: FloatArray  # [steps, experts], shares of the routed assignments
    load_entropy: FloatArray  # [steps], 1 is uniform
    max_over_mean: FloatArray  # [steps], 1 is uniform
    dropped: FloatArray  # [steps], share of assignments
    token_entropy: FloatArray  # [steps], 1 is undecided

    @property
    def num_experts(self) -> int:
        return int(self.load.shape[1])


@dataclass(frozen=True)
class TrainSeries:
    """The logged steps in order, each step once."""

    step: IntArray
    loss: FloatArray  # nats per token
    aux_loss: FloatArray
    z_loss: FloatArray
    other_loss: FloatArray  # the other balance losses, coefficients included
    mtp_loss: FloatArray  # of multi-token prediction, nats per token
    lr: FloatArray
    grad_norm: FloatArray
    tokens: FloatArray  # cumulative
    tokens_per_s: FloatArray
    mfu: FloatArray  # fraction of the measured peak
    step_s: FloatArray
    passes_s: FloatArray  # of step_s, as the next two: forward and backward
    reduce_s: FloatArray  # exchange of gradients, with the wait for other ranks
    update_s: FloatArray
    data_s: FloatArray  # before the step: making its batches
    checkpoint_s: FloatArray  # after it
    phase: FloatArray  # NaN in a run without phases, as the two that follow
    seq_len: FloatArray
    batch_tokens: FloatArray  # positions in a global batch
    layers: tuple[LayerSeries, ...]


@dataclass(frozen=True)
class EvalSeries:
    step: IntArray
    loss: FloatArray  # nats per token
    bits_per_byte: FloatArray
    tokens: FloatArray
    bytes: FloatArray
    eval_s: FloatArray


@dataclass(frozen=True)
class Sample:
    step: int | None
    prompt: str
    text: str
    temperature: float  # NaN when not recorded
    top_p: float


@dataclass(frozen=True)
class Event:
    time: datetime | None
    event: str
    step: int | None
    details: Record  # every other key


@dataclass(frozen=True)
class RunData:
    folder: Path
    config: Record
    config_text: str
    environment: Record
    train: TrainSeries
    evals: EvalSeries
    samples: tuple[Sample, ...]
    events: tuple[Event, ...]
    references: dict[str, float]  # bits per byte of other methods on the same held-out text
    wall_time_s: float
    redone_steps: int  # records thrown away because a resume went back behind them
    notes: tuple[str, ...]  # what could not be read, in words

    @property
    def name(self) -> str:
        return str(table(self.config, "run").get("name") or self.folder.resolve().name)


def table(values: Record, key: str) -> Record:
    """The sub-table `key`, or an empty one."""
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def number(value: object) -> float:
    """The value as a float; NaN for everything that is not a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def whole(value: object) -> int | None:
    found = number(value)
    return int(found) if math.isfinite(found) else None


def read_run(run_dir: Path) -> RunData:
    """Read a run folder. Raises MoestroError when there is nothing to report; lesser damage becomes a note."""
    metrics = run_dir / "metrics.jsonl"
    if not run_dir.is_dir():
        raise MoestroError(
            f"no run folder at {run_dir}. Give the folder that `moestro train` wrote (run.dir/run.name)."
        )
    if not metrics.is_file():
        raise MoestroError(
            f"{run_dir} holds no metrics.jsonl, so it is not a training run. "
            "Give the folder that `moestro train` wrote (run.dir/run.name)."
        )
    notes: list[str] = []
    records = _read_jsonl(metrics, notes)
    train, evals, redone = _last_timeline(records)
    if not train:
        raise MoestroError(
            f"{metrics} holds no training step yet. Wait for the first logged step (train.log_every), "
            "or look in events.jsonl for why the run stopped."
        )
    config, config_text = _read_config(run_dir / "config.toml", notes)
    references = {name: number(value) for name, value in _read_json(run_dir / "references.json", notes).items()}
    return RunData(
        folder=run_dir,
        config=config,
        config_text=config_text,
        environment=_read_json(run_dir / "environment.json", notes),
        train=_train_series(train),
        evals=_eval_series(evals),
        samples=tuple(_sample(r) for r in _read_jsonl(run_dir / "samples.jsonl", notes)),
        events=tuple(_event(r) for r in _read_jsonl(run_dir / "events.jsonl", notes)),
        references={name: value for name, value in references.items() if math.isfinite(value)},
        wall_time_s=_wall_time([r for r in records if r.get("kind") == "train"]),
        redone_steps=redone,
        notes=tuple(notes),
    )


def _read_jsonl(path: Path, notes: list[str]) -> list[Record]:
    if not path.is_file():
        return []
    records: list[Record] = []
    unreadable = 0
    # A killed writer leaves a torn last line, which a resumed one may continue: damage can sit anywhere.
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        else:
            unreadable += 1
    if unreadable:
        lines = "1 unreadable line" if unreadable == 1 else f"{unreadable} unreadable lines"
        notes.append(f"{path.name}: skipped {lines}, as a killed process leaves behind.")
    return records


def _read_json(path: Path, notes: list[str]) -> Record:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    notes.append(f"{path.name}: not a JSON object, so it is left out.")
    return {}


def _read_config(path: Path, notes: list[str]) -> tuple[Record, str]:
    if not path.is_file():
        notes.append("config.toml is missing: the configuration is unknown.")
        return {}, ""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        return tomllib.loads(text), text
    except tomllib.TOMLDecodeError as error:
        notes.append(f"config.toml is not valid TOML ({error}); it is shown as it is.")
        return {}, text


def _last_timeline(records: Iterable[Record]) -> tuple[dict[int, Record], dict[int, Record], int]:
    """The train and eval records by step as the run finally went.

    A resume goes back to a checkpoint; what was logged behind that point belongs to a past that was thrown away.
    Taking the last record of each step alone would let it stay in the plots until the new run has passed it.
    """
    train: dict[int, Record] = {}
    evals: dict[int, Record] = {}
    last, redone = -1, 0
    for record in records:
        step = whole(record.get("step"))
        if step is None or record.get("kind") not in ("train", "eval"):
            continue
        if record["kind"] == "eval":
            evals[step] = record
            continue
        if step <= last:
            stale = [s for s in train if s >= step]
            redone += len(stale)
            for s in stale:
                del train[s]
            for s in [s for s in evals if s > step]:
                del evals[s]
        train[step] = record
        last = step
    return train, dict(sorted(evals.items())), redone


def _wall_time(records: Sequence[Record]) -> float:
    """Seconds from the start of the first step to the end of the last, per stretch between resumes, summed.

    Only differences of `time_s` are used, so it does not matter whether the clock restarts with the process.
    """
    total, previous = 0.0, None
    for record in records:
        time, step, step_s = (number(record.get(key)) for key in ("time_s", "step", "step_s"))
        if previous is not None and time >= previous[0] and step > previous[1]:
            total += time - previous[0]
        elif math.isfinite(step_s):
            total += step_s
        previous = (time, step)
    return total


def _column(records: Sequence[Record], key: str) -> FloatArray:
    return np.array([number(record.get(key)) for record in records], dtype=np.float64)


def _train_series(by_step: dict[int, Record]) -> TrainSeries:
    records = list(by_step.values())
    losses = ("loss", "aux_loss", "z_loss", "other_loss", "mtp_loss")
    times = ("step_s", "passes_s", "reduce_s", "update_s", "data_s", "checkpoint_s")
    keys = (*losses, "lr", "grad_norm", "tokens", "tokens_per_s", "mfu", *times, "phase", "seq_len", "batch_tokens")
    columns = {key: _column(records, key) for key in keys}
    return TrainSeries(step=np.array(list(by_step), dtype=np.int64), layers=_layers(records), **columns)


def _layers(records: Sequence[Record]) -> tuple[LayerSeries, ...]:
    per_layer: dict[int, dict[int, Record]] = {}
    for row, record in enumerate(records):
        layers = record.get("layers")
        for entry in layers if isinstance(layers, list) else []:
            layer = whole(entry.get("layer")) if isinstance(entry, dict) else None
            if layer is not None:
                per_layer.setdefault(layer, {})[row] = entry
    return tuple(_layer(layer, rows, len(records)) for layer, rows in sorted(per_layer.items()))


def _layer(layer: int, rows: dict[int, Record], num_records: int) -> LayerSeries:
    loads = {row: entry["load"] for row, entry in rows.items() if isinstance(entry.get("load"), list)}
    load = np.full((num_records, max((len(v) for v in loads.values()), default=0)), np.nan)
    for row, values in loads.items():
        load[row, : len(values)] = _floats(values)
    entries = [rows.get(row, {}) for row in range(num_records)]
    columns = {key: _column(entries, key) for key in ("load_entropy", "max_over_mean", "dropped", "token_entropy")}
    return LayerSeries(layer=layer, load=load, **columns)


def _floats(values: list[object]) -> FloatArray:
    try:
        return np.array(values, dtype=np.float64)  # ten times faster than one by one, and nearly all of the reading
    except (TypeError, ValueError):
        return np.array([number(value) for value in values], dtype=np.float64)


def _eval_series(by_step: dict[int, Record]) -> EvalSeries:
    records = list(by_step.values())
    columns = {key: _column(records, key) for key in ("loss", "bits_per_byte", "tokens", "bytes", "eval_s")}
    return EvalSeries(step=np.array(list(by_step), dtype=np.int64), **columns)


def _sample(record: Record) -> Sample:
    return Sample(
        step=whole(record.get("step")),
        prompt=str(record.get("prompt") or ""),
        text=str(record.get("text") or ""),
        temperature=number(record.get("temperature")),
        top_p=number(record.get("top_p")),
    )


def _event(record: Record) -> Event:
    return Event(
        time=parse_time(record.get("time")),
        event=str(record.get("event", "?")),
        step=whole(record.get("step")),
        details={key: value for key, value in record.items() if key not in ("time", "event", "step")},
    )


def parse_time(value: object) -> datetime | None:
    """A moment from Unix seconds or ISO 8601, in UTC where it names no zone; None when it is neither."""
    try:
        if isinstance(value, str):
            moment = datetime.fromisoformat(value)
            return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        seconds = number(value)
        return datetime.fromtimestamp(seconds, UTC) if math.isfinite(seconds) else None
    except (ValueError, OverflowError, OSError):
        return None
