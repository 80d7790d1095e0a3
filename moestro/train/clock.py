"""Where the time of a step goes: seconds of its parts, by the device's own clock where it has one."""

import time
from typing import Any

import torch


class StepClock:
    """Seconds between marks. On an accelerator the marks are events in its stream, as the host runs ahead of it."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._marks = device, list[tuple[str, Any]]()
        self.mark("")

    def mark(self, part: str) -> None:
        """`part` ends here; it began at the mark before, or when this clock was made."""
        if self._device.type == "cpu":
            self._marks.append((part, time.perf_counter()))
            return
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        self._marks.append((part, event))

    def seconds(self) -> dict[str, float]:
        """By part. Call it when the device has caught up with the last mark."""
        return {part: self._between(at, self._marks[i][1]) for i, (part, at) in enumerate(self._marks[1:])}

    def _between(self, later: Any, earlier: Any) -> float:
        if self._device.type == "cpu":
            return float(later - earlier)
        return float(earlier.elapsed_time(later)) / 1e3
