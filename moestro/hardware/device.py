"""Which device a run uses, and its name."""

import platform
from pathlib import Path

import torch

from moestro.errors import MoestroError


def resolve_device(name: str, setting: str = "run.device") -> torch.device:
    """ "auto": the current accelerator, or the CPU. Raises MoestroError for a device that is not here.

    setting: where the name was given, for the message.
    """
    if name == "auto":
        if torch.accelerator.is_available():
            return torch.device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
        return torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError, AttributeError) as error:
        here = ["cpu"]
        if torch.accelerator.is_available():
            here.append(str(torch.accelerator.current_accelerator()))
        raise MoestroError(
            f"{setting} = '{name}' is not usable here: {str(error).splitlines()[0].rstrip('. ')}. "
            f"Available: {', '.join(here)}"
        ) from error
    return device


def device_name(device: torch.device) -> str:
    if device.type == "cuda":  # ROCm answers here too
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{_cpu_name()}, {torch.get_num_threads()} threads"
    return device.type


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
