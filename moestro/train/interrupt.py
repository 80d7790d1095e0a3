"""Ctrl-C and SIGTERM as a request to stop after the current step."""

import signal
import time
from types import FrameType
from typing import Self

from moestro.parallel.process import world_size

# torchrun sends its ranks the Ctrl-C that the terminal has sent them already; a person's second one comes later.
ECHO_S = 1.0


class StopRequest:
    """While active, the first SIGINT or SIGTERM sets `requested`; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self._echo_s = ECHO_S if world_size() > 1 else 0.0
        self._first_s = 0.0

    def __enter__(self) -> Self:
        self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested, self._first_s = signal.Signals(number).name, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._first_s >= self._echo_s:
            raise KeyboardInterrupt
