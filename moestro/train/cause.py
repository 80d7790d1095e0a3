"""What an error that ends a rank means, told before it ends: to the supervisor, or to the run's audit log."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from moestro.errors import DamagedDataError, MissingDataError, MoestroError
from moestro.parallel.process import PeerError
from moestro.parallel.ranks import RankFailure
from moestro.train.heartbeat import watched_folder, words_of
from moestro.train.incidents import Incident, Signal, record
from moestro.train.step import NonFiniteError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# That a run which nobody watches notes by itself; the rest is a mistake to mend, or noted where it was seen.
NOTED: tuple[Signal, ...] = ("out_of_memory", "disk_full", "missing_data", "corrupt_data")
LONGEST = 600  # characters of an error's text


def cause_of(error: BaseException) -> Signal | None:
    """The incident that an error is; None: another rank's, or the user's wish to stop."""
    chain = list(_chain(error))
    if any(isinstance(one, PeerError | KeyboardInterrupt) for one in chain):
        return None
    for one in chain:
        if isinstance(one, torch.OutOfMemoryError | MemoryError) or getattr(one, "errno", None) == errno.ENOMEM:
            return "out_of_memory"
        if getattr(one, "errno", None) in FULL or "No space left on device" in str(one):
            return "disk_full"
        if isinstance(one, NonFiniteError):
            return "non_finite"
        if isinstance(one, MissingDataError):
            return "missing_data"
        if isinstance(one, DamagedDataError):
            return "corrupt_data"
    return "user_error" if any(isinstance(one, MoestroError) for one in chain) else "exit"


def tell_cause(folder: Path, rank: int, step: int, error: BaseException) -> None:
    """Leave a rank's last words for its supervisor; without one, note in the run's audit log what is no mistake."""
    signal = cause_of(error)
    if signal is None:
        return
    text = str(error) if isinstance(error, MoestroError) else f"{type(error).__name__}: {error}"
    text, watched = text[:LONGEST], watched_folder()
    try:
        if watched is not None:
            words_of(watched, rank).write_text(json.dumps({"rank": rank, "signal": signal, "step": step, "text": text}))
        elif signal in NOTED and folder.is_dir():
            record(folder, Incident(signal, "stop", step, {"error": text}, rank))
    except (OSError, MoestroError):  # the disk is full: the error itself is on its way
        return


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those that it came from."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__, one.error if isinstance(one, RankFailure) else None]
