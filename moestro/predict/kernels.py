"""Seconds of a kernel on a device: by the curves of its measured samples, or of its class where there are none."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from moestro.config.plan import RoutingConfig
from moestro.errors import MoestroError
from moestro.hardware.curves.gemm import GemmCurve, fit_gemm
from moestro.hardware.devices import DTYPE_BYTES, Device, Dtype
from moestro.hardware.profile import MachineProfile
from moestro.graph.words import Kernel


@dataclass(frozen=True)
class DeviceConstants:
    """What a kernel costs beyond its curve, and what a class of devices reaches where it has no samples."""

    memory_share: float = 0.80  # of the nominal bandwidth, by large fused passes
    memory_overhead_s: float = 4e-6  # of a kernel that moves next to nothing
    attention_share: float = 0.60  # of the 16-bit peak, forward
    attention_backward_share: float = 0.45
    launch_s: float = 6e-6  # of host time for one kernel in an eager framework
    gemm_factor: float = 1.0  # in a training step ÷ alone in a loop: other clocks, cold caches


@dataclass
class KernelPricer:
    """Prices kernels of one device. Curves are fitted on first use and shared by all pricers of the process."""

    device: Device
    profile: MachineProfile | None
    routing: RoutingConfig
    experts_ranks: int
    constants: DeviceConstants = DeviceConstants()
    _seen: dict[tuple[object, ...], float] = field(default_factory=dict)

    def seconds(self, kernel: Kernel) -> float:
        """Of one of them.

        Raises:
            MoestroError: the device cannot compute in the dtype, or neither samples nor the catalog know how fast.
        """
        key = (kernel.op, kernel.dims, kernel.dtype, kernel.bytes_moved, kernel.launches)
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = self._seconds(kernel)
        return found

    def _seconds(self, kernel: Kernel) -> float:
        if kernel.op == "gemm":
            batch, m, n, k = kernel.dims
            return self.constants.gemm_factor * self._curve(kernel.dtype).seconds(m, n, k, batch)
        if kernel.op == "grouped_gemm":
            groups, rows, n, k = kernel.dims
            each = max(1.0, rows / groups)
            busiest = self._skew()
            return self.constants.gemm_factor * busiest * self._curve(kernel.dtype).seconds(each, n, k, groups)
        if kernel.op in ("attention", "attention_backward"):
            return self._attention(kernel)
        return self._memory(kernel.bytes_moved, kernel.launches)

    def _attention(self, kernel: Kernel) -> float:
        constants = self.constants
        share = constants.attention_share if kernel.op == "attention" else constants.attention_backward_share
        peak = self._peak(kernel.dtype)
        return max(kernel.flops / (share * peak), self._memory(kernel.bytes_moved, kernel.launches))

    def _memory(self, size: float, launches: int) -> float:
        return size / (self.constants.memory_share * self.bytes_per_s) + launches * self.constants.memory_overhead_s

    @property
    def bytes_per_s(self) -> float:
        nominal = self.device.memory.gbps.nominal or self.device.memory.gbps.achieved
        if nominal is None:
            raise MoestroError(f"the catalog knows no memory bandwidth of {self.device.id}; measure it there")
        return nominal * 1e9

    def _peak(self, dtype: str) -> float:
        peak = self.device.peak_flops(_dtype(dtype))
        if peak is None:
            raise MoestroError(f"the catalog knows no rate of {self.device.id} in {dtype}")
        return peak

    def _skew(self) -> float:
        """How much longer the busiest rank's experts take than the mean's."""
        routing = self.routing
        if routing.kind == "measured" and routing.max_over_mean:
            return routing.max_over_mean
        if routing.kind == "power_law":
            from moestro.hardware.curves.experts import DEFAULT_SKEW

            nearest = min(DEFAULT_SKEW, key=lambda ep: abs(ep - self.experts_ranks))
            return DEFAULT_SKEW[nearest]
        return 1.0

    def _curve(self, dtype: str) -> GemmCurve:
        return device_curve(self.device.id, dtype)


def _dtype(name: str) -> Dtype:
    if name not in DTYPE_BYTES:
        raise MoestroError(f"unknown dtype {name}")
    return name  # type: ignore[return-value]


class HasSamples(Protocol):
    samples: tuple[object, ...]


@lru_cache(maxsize=64)
def device_curve(device_id: str, dtype: str) -> GemmCurve:
    """The products of a device of the catalog: from public samples, or by its class."""
    from moestro.hardware.catalog import load_device
    from moestro.hardware.published.gemm import read_gemm

    device = load_device(device_id)
    wanted = {"fp16": "bf16", "tf32": "bf16", "mxfp8": "fp8"}.get(dtype, dtype)
    samples, _ = _gemm_samples()
    own = [s for s in samples if s.case.get("device") == device_id and s.op in ("gemm", "grouped_gemm")]
    own = [s for s in own if s.case.get("dtype") == wanted]
    if dtype == "tf32":
        own = []
    peak = device.peak_flops(_dtype(dtype)) or device.peak_flops("fp32")
    units = device.compute_units.best
    bandwidth = device.memory.gbps.nominal
    return fit_gemm(
        own, wanted if own else dtype, peak, bandwidth * 1e9 if bandwidth else None, int(units) if units else None
    )


@lru_cache(maxsize=1)
def _gemm_samples():  # type: ignore[no-untyped-def]
    from moestro.hardware.published.gemm import read_gemm

    return read_gemm()
