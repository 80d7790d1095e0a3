"""Several processes for one search: how far they are, and how they end."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from functools import partial
from multiprocessing import get_context
from typing import TypeVar

Progress = Callable[[int, int], None]
Part = TypeVar("Part")
Result = TypeVar("Result")
ORPHAN_S = 1.0  # after which a process sees that its parent is gone
SHOWN_S = 0.2  # between two looks at how far they are


class Told:
    """How far a search is, counted by all its processes together. Once stopped, each of them ends at its next call.

    progress: called with how many of `total` are done, in the process that has made this.
    """

    def __init__(self, total: int, progress: Progress | None = None) -> None:
        self.total, self.progress = total, progress
        context = get_context("fork")
        self._done, self._stopped = context.Value("q", 0), context.Value("b", 0)

    def __call__(self) -> None:
        """One more is done."""
        if self._stopped.value:
            raise KeyboardInterrupt
        with self._done.get_lock():
            self._done.value += 1
        self.show()

    def show(self) -> None:
        if self.progress is not None:
            self.progress(self._done.value, self.total)

    def stop(self) -> None:
        self._stopped.value = 1


def in_processes(work: Callable[[Part, Told], Result], parts: Sequence[Part], told: Told) -> list[Result]:
    """`work` of every part, each in a process of its own. It calls what it is given, often.

    Raises:
        KeyboardInterrupt: on Ctrl-C, when all processes have ended.
    """
    begin = partial(_begin, os.getpid(), told)
    with ProcessPoolExecutor(len(parts), get_context("fork"), initializer=begin) as pool:
        try:
            futures = [pool.submit(_work, work, part) for part in parts]
            while wait(futures, SHOWN_S, return_when=FIRST_EXCEPTION).not_done:
                told.show()
                if any(future.done() and future.exception() for future in futures):
                    break
            return [future.result() for future in futures]
        except BaseException:  # Ctrl-C too: leaving here waits for the others, which would go on to their end
            told.stop()
            raise


_told: Told | None = None  # of a process that was started for a part


def _work(work: Callable[[Part, Told], Result], part: Part) -> Result:
    assert _told is not None
    return work(part, _told)


def _begin(parent: int, told: Told) -> None:
    """An interrupt is the parent's to tell, and this process ends soon after a parent that was killed."""
    global _told
    _told, told.progress = told, None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(parent)


def end_with(parent: int) -> None:
    """End this process soon after its parent, which may have been killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def default_workers() -> int:
    """Processes to search with."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
