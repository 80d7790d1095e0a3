"""A search for the best plans in a process of its own, so that the page stays live and the search can be stopped."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

from moestro.errors import MoestroError
from moestro.plan.candidates import Found
from moestro.plan.search import search
from moestro.plan.workers import default_workers, end_with
from moestro.ui.goal import goal_of
from moestro.ui.near import pinned_space
from moestro.ui.offer import Offer
from moestro.ui.picked import Picked
from moestro.ui.state import setting_of

TOP = 10  # plans that are simulated and shown
TELL_S = 0.1  # between two words of how far it is
STOP_S = 2.0  # that a search has to end by itself


@dataclass(frozen=True)
class Progress:
    """done, total: families. found, error: how it ended, and neither while it runs."""

    done: int = 0
    total: int = 0
    found: Found | None = None
    error: str = ""

    @property
    def over(self) -> bool:
        return self.found is not None or bool(self.error)


class Search:
    """Started when it is made. workers: processes."""

    def __init__(self, picked: Picked, offer: Offer, workers: int | None = None) -> None:
        context = get_context("spawn")  # this process has threads, which must not be forked
        self.picked, self.since = picked, time.monotonic()
        self._ear, mouth = context.Pipe(duplex=False)
        self._stop = context.Event()
        arguments = (os.getpid(), mouth, self._stop, picked, offer, workers or default_workers())
        self._process = context.Process(target=_run, args=arguments, name="moestro ui search")
        self._process.start()
        mouth.close()
        self._last = Progress()
        _running.add(self)

    def progress(self) -> Progress:
        """The newest that the process has told."""
        try:
            while not self._last.over and not self._ear.closed and self._ear.poll():
                self._last = self._ear.recv()
        except EOFError:
            self._last = Progress(error="the search ended without a word; it may have been out of memory")
        return self._last

    @property
    def pid(self) -> int | None:
        return self._process.pid

    @property
    def seconds(self) -> float:
        """Since it started."""
        return time.monotonic() - self.since

    def cancel(self) -> None:
        """End it. Returns when it has ended."""
        _running.discard(self)
        self._stop.set()
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._ear.close()


_running: set[Search] = set()


def cancel_all() -> None:
    """When the server ends."""
    for one in tuple(_running):
        one.cancel()


def _run(parent: int, mouth: Connection, stop: Event, picked: Picked, offer: Offer, workers: int) -> None:
    """In the process."""
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to tell
    try:
        mouth.send(Progress(found=find(picked, offer, workers, _teller(mouth, stop))))
    except MoestroError as error:
        mouth.send(Progress(error=str(error)))
    except KeyboardInterrupt:
        pass


def find(picked: Picked, offer: Offer, workers: int, told: Callable[[int, int], None] | None = None) -> Found:
    """The best plans by what was wished for, pins kept.

    Raises:
        MoestroError: no plan fits, or keeps to the limits; it says what comes nearest.
    """
    setting = setting_of(picked, offer)
    steps = picked.tokens / setting.workload.tokens
    goal = goal_of(picked.wish, setting.target, steps, picked.usd_per_hour)
    space = pinned_space(setting.space, picked)
    return search(
        setting.workload, setting.target, setting.devices, space, keep=max(20, TOP), exact=TOP, workers=workers,
        goal=goal, progress=told,
    )  # fmt: skip


def _teller(mouth: Connection, stop: Event) -> Callable[[int, int], None]:
    last = 0.0

    def told(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last < TELL_S:
            return
        last = time.monotonic()
        if stop.is_set():
            raise KeyboardInterrupt
        mouth.send(Progress(done, total))

    return told
