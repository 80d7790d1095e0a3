"""What the timed operations work on, and how fast a device multiplies in each dtype."""

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from moestro.errors import MoestroError
from moestro.hardware.device import synchronize

TORCH_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
CANDIDATES = {"cpu": ("fp32", "bf16")}  # by device type; every accelerator:
ACCELERATOR_CANDIDATES = ("bf16", "fp16", "fp32", "fp8")
USABLE_SHARE = 0.25  # of fp32's rate; a dtype below it is done in software and no one trains in it
PROBE_TRIES = 3


def operand(shape: tuple[int, ...], dtype: str, device: torch.device) -> Tensor:
    """A tensor of ordinary numbers, touched, so that no timing meets a first page fault.

    Random on an accelerator, whose clock depends on how many bits flip; constant on a CPU, where that does not matter
    and making random numbers would take longer than most timings.
    """
    if device.type == "cpu":
        return torch.full(shape, 0.5, dtype=TORCH_DTYPES[dtype])
    if dtype == "fp8":
        return torch.randn(shape, dtype=torch.bfloat16, device=device).to(torch.float8_e4m3fn)
    return torch.randn(shape, dtype=TORCH_DTYPES[dtype], device=device)


def free_bytes(device: torch.device) -> int:
    """Memory that may be had on the device now; on a system that does not say, half of what it has."""
    if device.type != "cpu":
        return int(torch.accelerator.get_memory_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def product(m: int, n: int, k: int, dtype: str, device: torch.device, layout: str = "nn") -> Callable[[], object]:
    """A call that multiplies a [m, k] by b [k, n] into memory that is there already.

    layout: how a and b lie in memory, "t" for transposed; "nt" is nn.Linear's forward, "tn" its weight gradient. fp8
    has one scale a tensor, lies as "nt" (its units take nothing else) and gives bf16; quantising is not in it.
    """
    if dtype == "fp8":
        a, b = operand((m, k), dtype, device), operand((n, k), dtype, device).t()
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
    a = operand((k, m), dtype, device).t() if layout[0] == "t" else operand((m, k), dtype, device)
    b = operand((n, k), dtype, device).t() if layout[1] == "t" else operand((k, n), dtype, device)
    out = torch.empty(m, n, dtype=TORCH_DTYPES[dtype], device=device)
    return lambda: torch.mm(a, b, out=out)


@cache
def product_rates(device: torch.device) -> dict[str, float]:
    """FLOP/s of a square product in each dtype that the device multiplies at all, fastest first.

    A look that takes a fraction of a second, to choose dtypes and sizes by; not a measurement.
    """
    size = 256 if device.type == "cpu" else 4096
    rates = {}
    for dtype in CANDIDATES.get(device.type, ACCELERATOR_CANDIDATES):
        try:
            call = product(size, size, size, dtype, device)
            call()
            synchronize(device)
            best = float("inf")
            for _ in range(PROBE_TRIES):
                start = time.perf_counter()
                call()
                synchronize(device)
                best = min(best, time.perf_counter() - start)
        except (RuntimeError, TypeError, ValueError):  # what vendors raise for a dtype that they lack
            continue
        rates[dtype] = 2 * size**3 / best
    return dict(sorted(rates.items(), key=lambda item: -item[1]))


def usable_dtypes(device: torch.device) -> list[str]:
    """Dtypes at a rate worth training in, the one to train in first: bf16 if it is among them, else the fastest.

    Raises MoestroError for a device that multiplies in none.
    """
    rates = product_rates(device)
    if not rates:
        raise MoestroError(f"{device} multiplies in none of the dtypes that were tried; is its driver in order?")
    slowest = USABLE_SHARE * rates.get("fp32", 0.0)
    usable = [dtype for dtype, rate in rates.items() if rate >= slowest]
    return sorted(usable, key=lambda dtype: (dtype != "bf16", dtype == "fp8"))
