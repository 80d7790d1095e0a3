"""The process that touches a device for the doctor, so that one that hangs or crashes takes nothing else with it.

`python -m moestro.doctor.probe` lists the devices, and examines the CPU where there are no others;
`python -m moestro.doctor.probe cuda:3` examines that device. The answer is one line of JSON on the standard output;
each stage is named on the standard error as it begins, so that the last one tells where a hung probe hangs.
"""

import json
import math
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from moestro.doctor.limits import limits_of
from moestro.hardware.device import device_name

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
PATTERNS = (0x55, 0xAA)  # alternating bits, both ways round

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def inventory() -> dict[str, Any]:
    """Type, number and name of the devices here, and the versions of what drives them."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(accelerator.type if accelerator else "cpu")
    found: dict[str, Any] = {
        "type": device.type,
        "count": torch.accelerator.device_count() if accelerator else 1,
        "name": device_name(device).rpartition(", ")[0] if device.type == "cpu" else device_name(device),
        "versions": {"torch": torch.__version__},
    }
    for name, version in (("cuda", torch.version.cuda), ("rocm", torch.version.hip)):
        if version:
            found["versions"][name] = version
    if device.type == "cuda" and torch.distributed.is_nccl_available():
        found["versions"]["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    if device.type == "cpu":
        found["examined"] = examine(device)
    return found


def examine(device: torch.device, multiply: Multiply = torch.mm) -> dict[str, Any]:
    """Allocate, write and read back, and multiply in every usable dtype: the problems met, an empty list for none."""
    limits, problems = limits_of(device.type), list[str]()
    usable, unusable = list[str](), list[str]()
    _stage(f"the allocation of {limits.allocate_mib} MiB")
    try:
        for pattern in PATTERNS:
            buffer = torch.full((limits.allocate_mib * 2**20,), pattern, dtype=torch.uint8, device=device)
            if wrong := int((buffer != pattern).sum()):
                problems.append(f"memory: {wrong:,} of {buffer.numel():,} bytes read back wrong")
            del buffer
    except RuntimeError as error:
        problems.append(f"allocation of {limits.allocate_mib} MiB: {_first_line(error)}")
    for name, dtype in DTYPES.items():
        _stage(f"the {name} product")
        try:
            problem = wrong_product(device, dtype, limits.gemm_size, multiply)
        except (RuntimeError, TypeError) as error:
            if isinstance(error, TypeError) or "not implemented" in str(error) or "not support" in str(error):
                unusable.append(name)
                continue
            problem = _first_line(error)
        if problem:
            problems.append(f"{name} product: {problem}")
        else:
            usable.append(name)
    return {"device": str(device), "problems": problems, "usable": usable, "unusable": unusable}


def wrong_product(device: torch.device, dtype: torch.dtype, size: int, multiply: Multiply = torch.mm) -> str:
    """What is wrong with a product of two matrices [size, size] of -1, 0 and 1; empty when it is exact.

    With such entries every sum is a small whole number, exact in each dtype. The product C = A·B is checked as
    C·x = A·(B·x) for a vector x of signs, on the host in fp64 (Freivalds): size² work instead of size³.
    """
    generator = torch.Generator().manual_seed(20)
    a, b = (torch.randint(-1, 2, (size, size), generator=generator, dtype=torch.int8) for _ in range(2))
    x = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    out = multiply(a.to(device, dtype), b.to(device, dtype)).cpu().double()
    if nonfinite := int((~out.isfinite()).sum()):
        return f"{nonfinite:,} of {out.numel():,} elements are not finite"
    wrong_rows = int((out @ x != a.double() @ (b.double() @ x)).sum())
    return f"{wrong_rows:,} of {size:,} rows are wrong" if wrong_rows else ""


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _stage(name: str) -> None:
    sys.stderr.write(f"stage: {name}\n")
    sys.stderr.flush()


def main() -> None:
    torch.set_num_threads(1)  # a pool of threads that cannot start is found by the checks of limits, not here
    device = torch.device(sys.argv[1]) if len(sys.argv) > 1 else None
    # The system ends this process when the time is up, even inside a driver's call that lets no Python run.
    signal.alarm(math.ceil(limits_of(device.type if device else "accelerator").device_answer_s))
    if device is not None:
        answer = examine(device)
    else:
        _stage("the list of devices")
        answer = inventory()
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
