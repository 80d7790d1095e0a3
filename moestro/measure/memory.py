"""Memory bandwidth to time: STREAM's four loops, reading alone, and copies between host and device.

Bytes moved are STREAM's count: each operand once, the result once (copy and scale 2, add and triad 3 arrays, dot 2,
read 1). A CPU that fetches a line before it overwrites it moves more than that, so its figure stays below the bus.
"""

from collections.abc import Callable

import torch

from moestro.hardware.devices import DTYPE_BYTES
from moestro.measure.operands import TORCH_DTYPES, free_bytes, operand
from moestro.measure.timing import Case

DTYPE = "fp32"
ARRAYS = {"copy": 2, "scale": 2, "add": 3, "triad": 3, "dot": 2, "read": 1}  # operands and results
SHARE_OF_FREE = 0.25  # that one case may take
SMALLEST = 2**10


def memory_cases(device: torch.device, quick: bool) -> list[Case]:
    """Ops copy, scale, add, triad, dot, read over sizes of one array from 1 KiB; host_to_device and device_to_host.

    Quick: copy and triad at every fourth size, the others at the largest only.
    """
    largest = 2**32 if device.type != "cpu" else 2**26 if quick else 2**27
    cases = []
    for op, arrays in ARRAYS.items():
        top = _power_of_two_below(min(largest, free_bytes(device) * SHARE_OF_FREE / arrays))
        sizes = _sizes(top, 2 if quick else 1)
        cases += [memory_case(device, op, size) for size in (sizes if not quick or op in ("copy", "triad") else [top])]
    if device.type != "cpu":
        top = _power_of_two_below(min(2**30, free_bytes(torch.device("cpu")) * SHARE_OF_FREE))
        for size in _sizes(top, 4 if quick else 2):
            cases += [transfer_case(device, to, size, pinned) for to in ("device", "host") for pinned in (1, 0)]
    return cases


def memory_case(device: torch.device, op: str, size_bytes: int) -> Case:
    """op: a key of ARRAYS. size_bytes: of each array."""
    count = int(size_bytes / DTYPE_BYTES[DTYPE])

    def prepare() -> Callable[[], object]:
        a, b, out = (operand((count,), DTYPE, device) for _ in range(3)) if ARRAYS[op] == 3 else _two(count, device)
        loops: dict[str, Callable[[], object]] = {
            "copy": lambda: out.copy_(a),
            "scale": lambda: torch.mul(a, 3.0, out=out),
            "add": lambda: torch.add(a, b, out=out),
            "triad": lambda: torch.add(a, b, alpha=3.0, out=out),
            "dot": lambda: torch.dot(a, out),
            "read": lambda: torch.sum(a),
        }
        return loops[op]

    moved = ARRAYS[op] * count * DTYPE_BYTES[DTYPE]
    return Case(op, {"bytes": size_bytes, "dtype": DTYPE}, None, moved, prepare)


def _two(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a, out = operand((count,), DTYPE, device), operand((count,), DTYPE, device)
    return a, a, out


def transfer_case(device: torch.device, to: str, size_bytes: int, pinned: int) -> Case:
    """A copy from the host's memory "to" the "device", or to the "host". Bytes moved count once, as links do."""
    count = int(size_bytes / DTYPE_BYTES[DTYPE])

    def prepare() -> Callable[[], object]:
        here = torch.zeros(count, dtype=TORCH_DTYPES[DTYPE], pin_memory=bool(pinned))
        there = torch.zeros(count, dtype=TORCH_DTYPES[DTYPE], device=device)
        source, target = (here, there) if to == "device" else (there, here)
        return lambda: target.copy_(source, non_blocking=bool(pinned))

    op = "host_to_device" if to == "device" else "device_to_host"
    return Case(op, {"bytes": size_bytes, "dtype": DTYPE, "pinned": pinned}, None, float(size_bytes), prepare)


def _sizes(top: int, step: int) -> list[int]:
    """Powers of two from SMALLEST, each 2^step times the one before, ending at `top`."""
    exponents = range(top.bit_length() - 1, SMALLEST.bit_length() - 2, -step)
    return [2**e for e in reversed(exponents)]


def _power_of_two_below(limit: float) -> int:
    return int(max(2 ** (int(limit).bit_length() - 1), SMALLEST))
