"""Many small training runs on a few cores: processes of one thread each, side by side."""

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

from papers.result import Progress

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")


def run_jobs(
    work: Callable[[Job], Outcome], jobs: Sequence[Job], progress: Progress, processes: int = 2
) -> list[Outcome]:
    """work(job) of every job, in the jobs' order. `work` is a function of a module, so that processes can find it.

    Threads of one small model spend more time waiting for each other than working, so the jobs run side by side.
    """
    # Not fork: a forked child of a process that has used OpenMP may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_one_thread) as pool:
        futures = [pool.submit(work, job) for job in jobs]
        try:
            for finished, future in enumerate(as_completed(futures), 1):
                future.result()
                progress(finished, len(jobs), "runs")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker at once and without a traceback
