"""What the figures of a device say together: peaks by dtype, balance of compute and memory, price of compute."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from moestro.hardware.devices import DTYPE_BYTES, Device, Dtype
from moestro.hardware.figures import UNKNOWN, Figure

DTYPES: tuple[Dtype, ...] = get_args(Dtype)


def peak_figure(device: Device, dtype: Dtype) -> Figure:
    """The figure that `device.peak_flops(dtype)` starts from: that of the dtype in which the product is computed."""
    support = device.support.get(dtype)
    computed = dtype
    if support is not None and support.how in ("emulated", "storage") and support.via is not None:
        computed = support.via
    return device.peak_tflops.get(computed) or device.vector_tflops.get(computed) or UNKNOWN


def is_native(device: Device, dtype: Dtype) -> bool:
    """Whether it computes in the dtype; a dtype that has a peak and no word of support counts as native."""
    support = device.support.get(dtype)
    return support.how == "native" if support is not None else peak_figure(device, dtype).known


def link_figure(device: Device) -> Figure:
    """Between devices, one direction, of one device over all links of its usual kind; unknown without a link."""
    return device.links[0].gbps if device.links else UNKNOWN


@dataclass(frozen=True)
class Balance:
    """A device in one dtype. ridge: FLOP for each byte moved from memory at which compute and memory take equally long.

    The achieved values use the best rate that was measured, and the nominal one where none was.
    """

    nominal_flops: float | None
    achieved_flops: float | None
    nominal_ridge: float | None
    achieved_ridge: float | None
    usd_per_pflop_hour: float | None  # lowest hourly price of an hour at 10¹⁵ achieved FLOP/s


def balance(device: Device, dtype: Dtype = "bf16") -> Balance:
    nominal, achieved = device.peak_flops(dtype), device.peak_flops(dtype, achieved=True)
    memory, price = device.memory.gbps, device.price.usd_per_hour_low
    return Balance(
        nominal_flops=nominal,
        achieved_flops=achieved,
        nominal_ridge=nominal / (memory.nominal * 1e9) if nominal and memory.nominal else None,
        achieved_ridge=achieved / (memory.best * 1e9) if achieved and memory.best else None,
        usd_per_pflop_hour=price / (achieved / 1e15) if price and achieved else None,
    )


def compute_bound_ratio(a: Device, b: Device, dtype: Dtype = "bf16") -> float | None:
    """Speed of `a` over `b` where compute binds, at achieved rates; above 1: `a` is faster. None: a rate is unknown."""
    first, second = a.peak_flops(dtype, achieved=True), b.peak_flops(dtype, achieved=True)
    return first / second if first and second else None


def memory_bound_ratio(a: Device, b: Device) -> float | None:
    """Speed of `a` over `b` where memory binds, at achieved bandwidths."""
    first, second = a.memory.gbps.best, b.memory.gbps.best
    return first / second if first and second else None


def native_dtypes(devices: Sequence[Device]) -> list[Dtype]:
    """The dtypes that at least one of the devices computes in natively, widest first."""
    return sorted((t for t in DTYPES if any(is_native(d, t) for d in devices)), key=lambda t: -DTYPE_BYTES[t])
