"""The curves of one device: of its own samples, or of the class where it has none. Fitted once a process."""

from collections.abc import Sequence
from functools import lru_cache

from moestro.errors import MoestroError
from moestro.hardware.catalog import load_device
from moestro.hardware.curves.attention import AttentionCurve, fit_attention
from moestro.hardware.curves.compute import PRODUCTS, data_sheet
from moestro.hardware.curves.experts import ExpertsCurve, fit_experts
from moestro.hardware.curves.gemm import GemmCurve, fit_gemm
from moestro.hardware.curves.network import CollectiveModel
from moestro.hardware.curves.transfer import TransferCurve, fit_transfer
from moestro.hardware.devices import Device
from moestro.hardware.profile import MachineProfile, Sample

# The dtype whose samples stand for one that was not measured: the same units work on both.
STANDS_FOR = {"fp16": "bf16", "mxfp8": "fp8", "fp8": "mxfp8"}
FEW = 4  # memory samples, below which the data sheet is trusted more


class DeviceCurves:
    """samples: of this device alone."""

    def __init__(self, device: Device, samples: Sequence[Sample], network: CollectiveModel) -> None:
        self.device, self._samples, self.network = device, samples, network
        self._products: dict[str, GemmCurve] = {}
        self._experts: dict[str, ExpertsCurve | None] = {}
        self._attention: dict[str, AttentionCurve] = {}
        moved = [s for s in samples if s.op == "copy" and "bytes" in s.case]
        self.copy: TransferCurve | None = None
        if len(moved) >= FEW:
            self.copy = fit_transfer([2 * s.number("bytes") for s in moved], [s.median_s for s in moved])

    def product(self, dtype: str) -> GemmCurve:
        if dtype not in self._products:
            own, used = self._of(PRODUCTS[:2], dtype)
            self._products[dtype] = fit_gemm(own, used, *self._sheet(used if own else dtype))
        return self._products[dtype]

    def experts(self, dtype: str) -> ExpertsCurve | None:
        """None: no samples; then experts are priced as products."""
        if dtype not in self._experts:
            own, used = self._of(("moe_experts",), dtype)
            self._experts[dtype] = fit_experts(own, used, *self._sheet(used)) if own else None
        return self._experts[dtype]

    def attention(self, dtype: str) -> AttentionCurve:
        if dtype not in self._attention:
            own, used = self._of(("attention",), dtype)
            self._attention[dtype] = fit_attention(own, used, *self._sheet(used if own else dtype))
        return self._attention[dtype]

    def _of(self, ops: Sequence[str], dtype: str) -> tuple[list[Sample], str]:
        """The samples of a dtype, or of one that stands for it where that has more, and which dtype that is."""
        found: list[Sample] = []
        used = dtype
        for name in (dtype, STANDS_FOR.get(dtype, dtype)):
            own = [s for s in self._samples if s.op in ops and s.case.get("dtype") == name]
            if len(own) > len(found):
                found, used = own, name
        return found, used

    def _sheet(self, dtype: str) -> tuple[float | None, float | None, int | None]:
        peak, bandwidth, units = data_sheet(self.device, dtype)
        if peak is None and not any(s.case.get("dtype") == dtype for s in self._samples):
            raise MoestroError(f"{self.device.id} does not compute in {dtype}, or the catalog does not know how fast")
        return peak, bandwidth, units


@lru_cache(maxsize=32)
def published_curves(device_id: str) -> DeviceCurves:
    """Of a device of the catalog, by the shipped public samples."""
    device = load_device(device_id)
    own = [s for s in _compute_samples() if s.case.get("device") == device_id]
    return DeviceCurves(device, own, CollectiveModel(_network_samples(), device))


def profile_curves(profile: MachineProfile, device: Device) -> DeviceCurves:
    """Of a measured machine. device: its entry of the catalog, or one made up of what was measured."""
    return DeviceCurves(device, profile.samples, CollectiveModel(profile.samples, device))


@lru_cache(maxsize=1)
def _compute_samples() -> tuple[Sample, ...]:
    from moestro.hardware.published.gemm import read_gemm

    return tuple(read_gemm()[0])


@lru_cache(maxsize=1)
def _network_samples() -> tuple[Sample, ...]:
    from moestro.hardware.published.collectives import read_collectives

    return tuple(read_collectives()[0])
