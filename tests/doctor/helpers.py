"""A node that is not this one: a root folder with what the doctor reads, and a profile."""

from pathlib import Path
from typing import Any

from moestro.doctor.checks import Check, NodeReport
from moestro.doctor.limits import limits_of
from moestro.hardware.profile import Machine, MachineProfile, Sample

CPU, ACCELERATOR = limits_of("cpu"), limits_of("cuda")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def one(found: Check | list[Check]) -> Check:
    assert isinstance(found, Check), found
    return found


def by_name(report: NodeReport) -> dict[str, Check]:
    return {check.name: check for check in report.checks}


def node_report(*checks: Check, **changes: Any) -> NodeReport:
    fields: dict[str, Any] = {
        "node": "n", "tier": 1, "started_at": "", "seconds": 1.0, "checks": checks, "versions": {}, "rates": {},
    }  # fmt: skip
    return NodeReport(**(fields | changes))


def profile(*samples: Sample, **machine: Any) -> MachineProfile:
    of_machine = Machine(**({"device_name": "a CPU, 2 threads", "device_type": "cpu", "threads": 2} | machine))
    return MachineProfile(name="good", created_at="", mode="quick", machine=of_machine, samples=samples)


def gemm(dtype: str, size: int, rate: float, slow: float = 1.0, **case: Any) -> Sample:
    """A product at `rate` FLOP/s, whose p90 time is `slow` times the median."""
    seconds = 2 * size**3 / rate
    return Sample(
        op="gemm", case={"m": size, "n": size, "k": size, "dtype": dtype, **case}, median_s=seconds, low_s=seconds,
        high_s=seconds * slow, repeats=9, flops=2 * size**3,
    )  # fmt: skip
