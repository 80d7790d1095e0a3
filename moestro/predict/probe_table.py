"""A table of dry runs as a CSV file: a line for each stage, whose peak is filled in when it has been run."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from moestro.config.files import write_whole
from moestro.errors import MoestroError
from moestro.predict.dry_run import MIDDLE, Probe

UNITS = {"peak_bytes": 1.0, "peak_mb": 1e6, "peak_mib": 2.0**20, "peak_gb": 1e9, "peak_gib": 2.0**30}
OWN = ("round", "stage", "end", "in_flight")  # columns; all others but the peak's are kinds of recomputation


@dataclass(frozen=True)
class ProbeTable:
    """probes with their peaks, and where each stands: "round 2, stage 1", or its line."""

    probes: list[Probe]
    peaks_bytes: list[float]
    names: list[str]


def write_probes(path: Path, probes: Sequence[Sequence[Probe]], peaks_bytes: Mapping[tuple[int, int], float]) -> None:
    """probes: [round][stage]. peaks_bytes: by (round, stage); the others are left empty.

    Raises:
        MoestroError: the file cannot be written.
    """
    kinds = list(dict.fromkeys(kind for stages in probes for probe in stages for kind in probe.layers))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*OWN, *kinds, "peak_bytes"])
    for number, stages in enumerate(probes):
        for stage, probe in enumerate(stages):
            peak = peaks_bytes.get((number, stage))
            layers = [probe.layers.get(kind, 0) for kind in kinds]
            writer.writerow([number, stage, probe.end, probe.in_flight, *layers, "" if peak is None else round(peak)])
    try:
        write_whole(path, text.getvalue())
    except OSError as error:
        raise MoestroError(f"cannot write {path}: {error.strerror}") from error


def read_probes(path: Path) -> ProbeTable:
    """Of a CSV with the columns in_flight, one for each kind of recomputation (how many layers), and a peak; "end",
    "round" and "stage" where there are ends and several runs.

    Raises:
        MoestroError: it cannot be read, a column is missing, or a line is wrong; the message says which.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            columns = [name.strip() for name in reader.fieldnames or ()]
            reader.fieldnames = columns
            lines = [(reader.line_num, line) for line in reader]
    except OSError as error:
        raise MoestroError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise MoestroError(
            f"{path} is no CSV file in UTF-8; `moestro probe plan --out` writes one to fill in"
        ) from error
    peak, kinds = _columns(path, columns)
    probes, peaks, names, seen = list[Probe](), list[float](), list[str](), dict[tuple[object, ...], int]()
    for number, line in lines:
        where = f"{path}, line {number}"
        if None in line or None in line.values():
            raise MoestroError(f"{where} has another number of cells than the {len(columns)} columns")
        counts = {kind: _whole(where, kind, line[kind]) for kind in kinds}
        probe = Probe(counts, _whole(where, "in_flight", line["in_flight"], 1), (line.get("end") or MIDDLE).strip())
        size = _size(where, peak, line[peak]) * UNITS[peak]
        placed = (line.get("round", "").strip(), line.get("stage", "").strip())
        key = placed if placed[1] else (*sorted(counts.items()), probe.in_flight, probe.end, size)
        if key in seen:
            raise MoestroError(f"{where} repeats line {seen[key]}: leave one of them out")
        seen[key] = number
        probes.append(probe)
        peaks.append(size)
        names.append(" ".join(placed).strip() or f"line {number}")
    return ProbeTable(probes, peaks, names)


def _columns(path: Path, columns: Sequence[str]) -> tuple[str, list[str]]:
    """The peak's column, and those of kinds."""
    if twice := sorted({name for name in columns if columns.count(name) > 1}):
        raise MoestroError(f"{path} has two columns '{twice[0]}'")
    peaks = [name for name in columns if name in UNITS]
    if len(peaks) != 1:
        raise MoestroError(f"{path} needs one column of peaks: {', '.join(UNITS)}")
    if "in_flight" not in columns:
        raise MoestroError(
            f"{path} has no column 'in_flight': the micro-batches that a stage holds, with 1F1B pp - stage"
        )
    kinds = [name for name in columns if name and name not in (*OWN, *UNITS)]
    if not kinds:
        raise MoestroError(f"{path} has no column of layers: one for each kind of recomputation, as 'none' and 'block'")
    return peaks[0], kinds


def _whole(where: str, name: str, text: str, least: int = 0) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < least:
        raise MoestroError(f"{where}: {name} = '{text.strip()}' must be a whole number of at least {least}")
    return value


def _size(where: str, name: str, text: str) -> float:
    if not text.strip():
        raise MoestroError(f"{where} has no {name}: run that stage and fill it in, or take the line out")
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or value <= 0:
        raise MoestroError(
            f"{where}: {name} = '{text.strip()}' must be a number above 0; take out stages that ran out of memory"
        )
    return value
