"""How much memory a step takes as the system sees it: resident bytes of a process of its own. For `gigapixel.py`."""

import ctypes
import multiprocessing
import os
import resource
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from papers.conv_stack import Stack, accumulate, build

M_MMAP_THRESHOLD = -3  # of glibc's mallopt
WARM_UP_SIDE = 96


def resident_peaks(stack: Stack, sides: tuple[int, ...]) -> list[int]:
    """The most that a step on a square image adds to the memory of a fresh process, by side; Linux.

    Sides in rising order, because a process only tells the most it ever had.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, stack, sides).result()


def _measure(stack: Stack, sides: tuple[int, ...]) -> list[int]:
    torch.set_num_threads(1)  # every thread has buffers of its own
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)  # what is freed goes back to the system
    model = build(stack, 0)
    peaks = []
    for side in (WARM_UP_SIDE, *sides):  # the first step also loads code
        before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        accumulate(model, torch.rand(1, stack.channels, side, side), 1)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
    return peaks[1:]
