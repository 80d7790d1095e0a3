"""What tier 2 runs, and the rates that a node has to reach in it.

A floor comes from the first of: a profile of such a machine, published acceptance floors (limits.toml), what the
catalog says was achieved on the device. Where none says anything the rate is told without a verdict.
"""

from dataclasses import dataclass, replace
from typing import Any

from moestro.doctor.limits import Limits, published_floors
from moestro.hardware.curves.busbw import bus_factor
from moestro.hardware.devices import Device
from moestro.hardware.figures import UNKNOWN
from moestro.hardware.profile import MachineProfile, Sample

MOST_COPY_BYTES = 2**29  # each of two arrays


@dataclass(frozen=True)
class Floor:
    """rate: FLOP/s, or bytes per second (bus bandwidth for a collective)."""

    rate: float
    source: str


@dataclass(frozen=True)
class Work:
    """What is run on each rank, and the floors (None: no verdict).

    threads: of the one process that computes on a CPU; 0: torch's own choice. ranks: of the collective, one for each
    accelerator.
    """

    device_type: str
    ranks: int
    dtype: str
    shape: tuple[int, int, int]  # m, n, k
    copy_bytes: int
    reduce_bytes: int
    threads: int = 0
    gemm: Floor | None = None
    copy: Floor | None = None
    all_reduce: Floor | None = None


def plan_work(
    device_type: str, ranks: int, limits: Limits, profile: MachineProfile | None = None, device: Device | None = None
) -> Work:
    """The cases of `profile` where it is given, so that like is held against like; else large round ones.

    device: of the catalog, where the name of the devices is known there. A CPU is not held to it: a node may own a
    share of the socket only.
    """
    work = Work(device_type, ranks, "bf16", (8192, 8192, 8192), MOST_COPY_BYTES, limits.reduce_mib * 2**20)
    if device_type == "cpu":
        work = replace(work, dtype="fp32", shape=(1024, 1024, 1024), copy_bytes=2**26)
    elif device is not None:
        work = replace(work, **_catalog_floors(work, device, limits))
        work = replace(work, **_published(work, device))
    return replace(work, **_profiled(work, profile, limits.share_of_profile)) if profile is not None else work


def _catalog_floors(work: Work, device: Device, limits: Limits) -> dict[str, Any]:
    link = device.links[0].gbps if device.links and work.ranks == device.devices_per_node else UNKNOWN
    product = next((figure for name, figure in device.peak_tflops.items() if name == work.dtype), UNKNOWN)
    achieved = {
        "gemm": (product.achieved, 1e12, limits.share_of_catalog),
        "copy": (device.memory.gbps.achieved, 1e9, limits.share_of_catalog),
        "all_reduce": (link.achieved, 1e9, limits.share_of_link),  # of a whole node only: part of a mesh is slower
    }
    return {
        name: Floor(share * value * unit, f"{share:.0%} of the best that the catalog knows of {device.name}")
        for name, (value, unit, share) in achieved.items()
        if value is not None
    }


def _published(work: Work, device: Device) -> dict[str, Any]:
    floors = published_floors(device.id)
    if floors is None:
        return {}
    stated = {
        "gemm": (floors.gemm_tflops.get(work.dtype), 1e12),
        "copy": (floors.memory_gbps, 1e9),
        "all_reduce": (floors.all_reduce_gbps if work.ranks == device.devices_per_node else None, 1e9),
    }
    return {name: Floor(value * unit, floors.source) for name, (value, unit) in stated.items() if value is not None}


def _profiled(work: Work, profile: MachineProfile, share: float) -> dict[str, Any]:
    """The cases that the profile has, with its floors; what it lacks stays as planned.

    A floor is `share` of the rate at the slow end of the profile's spread (its 90th percentile of the time).
    """
    source = f"{share:.0%} of the slow end in the profile {profile.name}"
    changes: dict[str, Any] = {"threads": (profile.machine.threads or 0) if work.device_type == "cpu" else 0}
    gemm = best_gemm(profile)
    if gemm is not None and gemm.flops:
        m, n, k = (int(gemm.number(key)) for key in "mnk")
        rate = share * gemm.flops / (gemm.high_s or gemm.median_s)
        changes |= {"dtype": str(gemm.case["dtype"]), "shape": (m, n, k), "gemm": Floor(rate, source)}
    copies = [s for s in profile.of("copy") if s.bytes_moved and s.number("bytes") <= MOST_COPY_BYTES]
    if copies:
        copy = max(copies, key=lambda s: s.number("bytes"))
        rate = share * (copy.bytes_moved or 0.0) / (copy.high_s or copy.median_s)
        changes |= {"copy_bytes": int(copy.number("bytes")), "copy": Floor(rate, source)}
    reduces = [s for s in profile.of("all_reduce", ranks=work.ranks, nodes=1) if s.case.get("groups", "one") == "one"]
    reduces = [s for s in reduces if s.number("bytes") <= work.reduce_bytes and s.case.get("dtype", "fp32") == "fp32"]
    if reduces:
        reduce = max(reduces, key=lambda s: s.number("bytes"))
        size = reduce.number("bytes")
        rate = share * size * bus_factor("all_reduce", work.ranks) / (reduce.high_s or reduce.median_s)
        changes |= {"reduce_bytes": int(size), "all_reduce": Floor(rate, source)}
    return changes


def best_gemm(profile: MachineProfile) -> Sample | None:
    """The fastest plain product, in bf16 unless that is slow there (emulated): then in fp32."""
    plain = [s for s in profile.of("gemm") if s.flops_per_s and s.case.get("layout", "nn") == "nn" and not s.noisy]
    best = {
        dtype: max((s for s in plain if s.case.get("dtype") == dtype), key=lambda s: s.flops_per_s or 0, default=None)
        for dtype in ("bf16", "fp32")
    }
    low, full = best["bf16"], best["fp32"]
    if low is None or full is None:
        return low or full
    return low if (low.flops_per_s or 0) > (full.flops_per_s or 0) / 2 else full
