"""Commands that may hang: a vendor's management tool, a process that touches a sick device."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

KILLED_S = 2.0  # how long a killed process has to be gone
_running: set[subprocess.Popen[str]] = set()


@dataclass(frozen=True)
class Answer:
    """How a command ended. stuck: not even SIGKILL ended it, so that it hangs inside the kernel."""

    how: Literal["ended", "hung", "stuck", "missing"]
    code: int = 0
    out: str = ""
    err: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.how == "ended" and self.code == 0


def ask(command: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> Answer:
    """Run `command` for at most `limit_s`; then it and its children are killed. Never raises, never waits longer."""
    start = time.monotonic()
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            env=None if env is None else {**os.environ, **env},
        )
    except OSError as error:
        return Answer("missing", err=str(error))
    _running.add(process)
    how: Literal["ended", "hung", "stuck"] = "ended"
    out = err = ""
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        how = "hung"
        _kill(process)
        try:
            out, err = process.communicate(timeout=KILLED_S)
        except subprocess.TimeoutExpired:
            how = "stuck"
    finally:
        _running.discard(process)
    return Answer(how, process.returncode or 0, out, err, time.monotonic() - start)


def kill_running() -> None:
    """Kill what is still being asked, in whatever thread: when the doctor itself is interrupted."""
    for process in tuple(_running):
        _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """With its children: it leads a session of its own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
