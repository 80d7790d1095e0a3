"""The measured GEMM rate that MFU is quoted against."""

import time

import torch

from moestro.hardware.device import synchronize

SECONDS = 0.4  # of measuring; short, since it runs before every training


def measure_gemm_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Best rate, in FLOP/s, of a square matrix product on `device` in `dtype`.

    A CPU gets 1024³ and an accelerator 8192³: large enough that launch and blocking costs do not show.
    """
    size = 1024 if device.type == "cpu" else 8192
    a = torch.ones(size, size, device=device, dtype=dtype)
    b = torch.ones(size, size, device=device, dtype=dtype)
    out = a @ b
    synchronize(device)
    best, until = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < until:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
