"""What went wrong in a run and what was done about it, as one line each of `audit.jsonl` in the run's folder."""

import json
import os
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from moestro.errors import MoestroError

# What was seen. How each is classed and answered is resilience/taxonomy.py's.
Signal = Literal[
    "exit", "killed", "out_of_memory", "hang", "lost_peer", "slow_rank", "non_finite", "loss_spike", "grad_spike",
    "update_anomaly", "collapse", "dead_experts", "corrupt_weights", "corrupt_compute", "corrupt_checkpoint",
    "disk_full", "missing_data", "corrupt_data", "clock_jump", "unfit_node", "node_lost", "node_back", "user_error",
]  # fmt: skip
# What was done. The first two leave the run as it was.
Action = Literal["none", "flag", "skip_step", "roll_back", "restart", "shrink", "grow", "cordon", "stop"]
AUDIT = "audit.jsonl"
ROOM = 12  # characters of a downtime


@dataclass(frozen=True)
class Incident:
    """rank, node: where it was, if known. step: the last one done. evidence: the numbers or words it was seen by.

    downtime_s: from the last useful moment until training went on; None: not known yet, or none.
    """

    signal: Signal
    action: Action
    step: int
    evidence: dict[str, Any] = field(default_factory=dict)
    rank: int | None = None
    node: str | None = None
    downtime_s: float | None = None
    time: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))


def record(folder: Path, incident: Incident) -> None:
    """Append to the audit log in one write, as several processes may.

    Raises:
        MoestroError: the file cannot be written.
    """
    line = _line(incident)
    try:
        file = os.open(folder / AUDIT, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line)
        finally:
            os.close(file)
    except OSError as error:
        raise MoestroError(f"cannot write {folder / AUDIT}: {error.strerror}") from error


def complete(folder: Path, incident: Incident, downtime_s: float) -> None:
    """Write into the line of an incident that was recorded how long it cost; the log keeps its length.

    Raises:
        MoestroError: the file cannot be written.
    """
    before, after = _line(incident), _line(replace(incident, downtime_s=round(downtime_s, 2)))
    path = folder / AUDIT
    try:
        at = path.read_bytes().rfind(before)
        if at >= 0 and len(before) == len(after):
            file = os.open(path, os.O_WRONLY)
            try:
                os.pwrite(file, after, at)
            finally:
                os.close(file)
    except OSError as error:
        raise MoestroError(f"cannot write {path}: {error.strerror}") from error


def incidents(folder: Path) -> list[Incident]:
    """All of a run's, in the order of writing; torn or foreign lines are passed over."""
    path = folder / AUDIT
    found: list[Incident] = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        try:
            tree = json.loads(line)
            if tree["signal"] in get_args(Signal) and tree["action"] in get_args(Action):
                found.append(Incident(**tree))
        except (ValueError, TypeError, KeyError):
            continue
    return found


def _line(incident: Incident) -> bytes:
    """With room for a downtime that is known later."""
    tree = asdict(incident)
    downtime = json.dumps(tree.pop("downtime_s"))
    return f'{json.dumps(tree)[:-1]}, "downtime_s": {downtime:<{ROOM}}}}\n'.encode()
