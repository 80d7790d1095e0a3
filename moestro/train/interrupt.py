"""Ctrl-C and SIGTERM as a request to stop after the current step."""

import signal
from types import FrameType
from typing import Self


class StopRequest:
    """While active, the first SIGINT or SIGTERM sets `requested`; a second SIGINT interrupts at once."""

    def __init__(self) -> None:
        self.requested: str | None = None

    def __enter__(self) -> Self:
        self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = signal.Signals(number).name
