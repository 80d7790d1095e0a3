"""The progress bar of a training run: on a terminal a live bar, elsewhere a line now and then."""

from contextlib import suppress
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from moestro.train.heartbeat import status_of, watched_folder


class TrainProgress:
    """Shows step, loss, tokens/s, MFU, load imbalance (max/mean of the worst layer), held-out bits per byte and ETA.

    Of several ranks only the main one shows anything.
    """

    def __init__(self, steps: int, done: int, main: bool = True) -> None:
        self.console = Console(stderr=True, quiet=not main)
        self._steps, self._latest_eval = steps, ""
        self._every = max(steps // 20, 1)
        watched = watched_folder()
        self._status = None if watched is None or not main else status_of(watched)
        self._bar = Progress(
            TextColumn("[bold]training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("eta"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=done, figures="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, step: int, loss: float, tokens_per_s: float, mfu: float, imbalance: float | None) -> None:
        balance = "" if imbalance is None else f"  max/mean load {imbalance:.2f}"
        figures = f"loss {loss:.3f}  {tokens_per_s:,.0f} tok/s  mfu {mfu:.0%}{balance}{self._latest_eval}"
        if self._status is not None and self.console.is_terminal:
            with suppress(OSError):
                figures += f"  ({self._status.read_text()})"
        self._bar.update(self._task, completed=step, figures=figures)
        if not self.console.is_terminal and (step % self._every == 0 or step == self._steps):
            self.say(f"step {step}/{self._steps}  {figures}")

    def evaluated(self, bits_per_byte: float) -> None:
        self._latest_eval = f"  held-out {bits_per_byte:.3f} bits/byte"

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
