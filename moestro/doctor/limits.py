"""The limits that a node is held to, from limits.toml."""

import tomllib
from functools import cache
from pathlib import Path

from moestro.config.base import Section


class Limits(Section):
    """Limits of one class of nodes: those with accelerators, or those with a CPU only."""

    device_answer_s: float
    allocate_mib: int
    gemm_size: int
    tool_answer_s: float
    kernel_log_minutes: float
    memory_available_gib: float
    locked_memory_gib: float  # 0: any limit will do
    shared_memory_mib: float
    open_files: int
    processes: int
    disk_free_gib: float
    clock_skew_s: float
    hog_cores: float
    load_share: float
    slow_rank: float
    share_of_profile: float
    share_of_catalog: float
    share_of_link: float
    reduce_mib: int


class PublishedFloors(Section):
    """Acceptance floors of one kind of device. GB/s are 10⁹ bytes per second; the all-reduce one is a bus bandwidth."""

    gemm_tflops: dict[str, float]  # by dtype
    memory_gbps: float | None = None
    all_reduce_gbps: float | None = None
    source: str


class _File(Section):
    cpu: Limits
    accelerator: Limits
    floors: dict[str, PublishedFloors]


@cache
def _file() -> _File:
    text = Path(__file__).with_name("limits.toml").read_text(encoding="utf-8")
    return _File.model_validate(tomllib.loads(text))


def limits_of(device_type: str) -> Limits:
    """The limits of a node whose devices are of torch's `device_type`."""
    return _file().cpu if device_type == "cpu" else _file().accelerator


def published_floors(device_id: str) -> PublishedFloors | None:
    return _file().floors.get(device_id)
