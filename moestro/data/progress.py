"""A progress bar over documents: how far into the source, at what rate, how long yet."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from moestro.data.readers import Document

# A redraw costs more than a short document.
_CHARS_PER_UPDATE = 200_000


class Meter:
    """Follows streams of documents on one rich display."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars

    def watch(self, title: str, documents: Iterator[Document], total: float | None) -> Iterator[Document]:
        """Pass the documents through, showing their position out of `total` and megacharacters per second."""
        task = self._bars.add_task(title, total=total, rate="")
        chars = shown_chars = 0
        for document in documents:
            yield document
            chars += len(document.text)
            if chars - shown_chars >= _CHARS_PER_UPDATE:
                shown_chars = chars
                elapsed_s = self._bars.tasks[task].elapsed or 0.0
                rate = f"{chars / 1e6 / elapsed_s:.1f} Mchar/s" if elapsed_s else ""
                self._bars.update(task, completed=document.position, rate=rate)
        self._bars.update(task, completed=total, total=total)


@contextmanager
def track(enabled: bool) -> Iterator[Meter]:
    """A display on stderr for the time of the block."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not enabled) as bars:
        yield Meter(bars)
