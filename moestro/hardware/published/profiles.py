"""Profiles of machines that are not here, made of public records alone."""

from functools import cache

from moestro.errors import MoestroError, nearest
from moestro.hardware.catalog import device_ids, load_device
from moestro.hardware.curves.alignment import rate
from moestro.hardware.curves.compute import MEMORY, PRODUCTS, Curve, Key, grouped, reports
from moestro.hardware.curves.gemm import GemmCurve
from moestro.hardware.curves.judge import fit_curves
from moestro.hardware.curves.network import held_out_table
from moestro.hardware.devices import Device
from moestro.hardware.profile import Machine, MachineProfile, Sample
from moestro.hardware.published.collectives import read_collectives
from moestro.hardware.published.gemm import read_gemm

_TORCH = {"NVIDIA": "cuda", "AMD": "cuda", "Intel": "xpu"}  # what torch calls a vendor's GPUs


@cache
def published_device_ids() -> tuple[str, ...]:
    """Devices of the catalog with public records."""
    return tuple(sorted({str(s.case.get("device", "")) for s in _published()} & set(device_ids())))


def published_profile(device_id: str) -> MachineProfile:
    """The public records of a device with the curves fitted to them; takes some seconds.

    constants: best_gflops_DTYPE and knee_gflop_DTYPE of single products; memory_gbps, of the records or else the
    catalog's achieved figure. There is no hardware of ours behind any of it: every sample names its source.

    Raises:
        MoestroError: no record of such a device.
    """
    known = published_device_ids()
    if device_id not in known:
        raise MoestroError(f"no public record of '{device_id}'.{nearest(device_id, known)} Devices: {', '.join(known)}")
    device = load_device(device_id)
    samples = [s for s in _published() if s.case.get("device") == device_id]
    curves, refused = fit_curves(grouped(samples))
    fits = [report for key, curve in curves.items() for report in reports(key, curve)]
    return MachineProfile(
        name=f"{device_id} (published records)",
        created_at="",
        mode="published",
        machine=_machine(device),
        samples=tuple(samples),
        fits=(*fits, *held_out_table(samples)),
        constants=_constants(device, samples, curves),
        notes=tuple(f"{count} rows: {reason}" for reason, count in refused.items()),
    )


@cache
def _published() -> tuple[Sample, ...]:
    return (*read_gemm()[0], *read_collectives()[0])


def _machine(device: Device) -> Machine:
    gb = device.memory.gb.nominal
    return Machine(
        device_id=device.id,
        device_name=device.name,
        device_type=_TORCH.get(device.vendor, device.kind) if device.kind == "gpu" else device.kind,
        num_devices=device.devices_per_node or 1,
        memory_bytes=None if gb is None else gb * 1e9,
        topology=device.links[0].topology if device.links else "unknown",
    )


def _constants(device: Device, samples: list[Sample], curves: dict[Key, Curve]) -> dict[str, float]:
    constants: dict[str, float] = {}
    for (_, op, dtype), curve in curves.items():
        if op == "gemm" and isinstance(curve, GemmCurve):
            best = max(rate(s) for s in samples if s.op in PRODUCTS and s.case.get("dtype") == dtype)
            constants[f"best_gflops_{dtype}"] = best / 1e9
            constants[f"knee_gflop_{dtype}"] = curve.knee_flops() / 1e9
    streams = [s.bytes_per_s for s in samples if s.op in MEMORY and s.bytes_per_s is not None]
    gbps = max(streams) / 1e9 if streams else device.memory.gbps.achieved
    return constants if gbps is None else constants | {"memory_gbps": gbps}
