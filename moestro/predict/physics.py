"""Holds claimed figures against bounds that no machine beats: FLOPs over peak, bytes over bandwidth, a queue's load."""

from dataclasses import dataclass
from functools import lru_cache

from moestro.config.counts import count
from moestro.config.model import ModelConfig
from moestro.config.plan import Precision, Workload
from moestro.hardware.devices import Device

# Peaks are nominal and clocks vary a little; a figure within this share of the bound is not called impossible.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Claim:
    """`seconds` for work on `devices` equal devices. flops, bytes: that the work needs, on all devices together.

    requests_per_s: of such work, where the claim is a time under load.
    """

    name: str
    seconds: float
    devices: int
    flops: float = 0.0
    bytes: float = 0.0
    requests_per_s: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """possible False: the claim breaks a bound, which `reason` names with its figures."""

    name: str
    possible: bool
    floor_s: float
    reason: str


def check(claim: Claim, peak_flops: float, bytes_per_s: float | None = None) -> Verdict:
    """peak_flops, bytes_per_s: of one device, in the precision of the claim."""
    compute_s = claim.flops / (claim.devices * peak_flops)
    memory_s = claim.bytes / (claim.devices * bytes_per_s) if bytes_per_s else 0.0
    floor_s = max(compute_s, memory_s)
    if claim.seconds < floor_s * (1 - TOLERANCE):
        if compute_s >= memory_s:
            what = f"{claim.flops:.3g} FLOPs on {claim.devices} devices of {peak_flops / 1e12:,.0f} TFLOP/s"
        else:
            what = f"{claim.bytes:.3g} bytes on {claim.devices} devices of {(bytes_per_s or 0) / 1e9:,.0f} GB/s"
        return Verdict(claim.name, False, floor_s, f"{what} take at least {_time(floor_s)}, not {_time(claim.seconds)}")
    load = claim.requests_per_s * floor_s
    if load >= 1:
        reason = f"{claim.requests_per_s:g} requests a second of at least {_time(floor_s)} each: a load of {load:.2f}"
        return Verdict(claim.name, False, floor_s, reason)
    return Verdict(claim.name, True, floor_s, f"at least {_time(floor_s)}; claimed {_time(claim.seconds)}")


def check_step(workload: Workload, device: Device, devices: int, step_s: float, name: str = "step") -> Verdict | None:
    """A training step's model FLOPs against the devices' peak; None: no peak in this precision is known.

    Only a part of a step runs in 8 or 4 bits, so its bound is a loose one.
    """
    peak = device.peak_flops(_dtype(workload.precision))
    if peak is None:
        return None
    flops = _flops_per_token(workload.model, workload.seq_len) * workload.tokens
    if workload.adapter_rank is not None:
        flops *= 2 / 3  # gradients of frozen weights are not computed
    return check(Claim(name, step_s, devices, flops), peak)


def mfu_verdict(mfu: float, name: str = "MFU") -> Verdict:
    """A utilisation above 1 (or not above 0) is an error of counting."""
    possible = 0 < mfu <= 1 + TOLERANCE
    return Verdict(name, possible, 0.0, f"{mfu:.1%} of peak" + ("" if possible else " is outside of 0 to 100 %"))


@lru_cache(maxsize=1024)  # a table repeats its models
def _flops_per_token(model: ModelConfig, seq_len: int) -> float:
    return count(model, seq_len).train_flops_per_token


def _dtype(precision: Precision) -> Precision:
    return "fp8" if precision == "mxfp8" else precision


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
