"""Seconds of a kernel on a device: by the curves of its samples, or of its class where there are none."""

from dataclasses import dataclass, field
from functools import lru_cache

from moestro.config.plan import RoutingConfig
from moestro.errors import MoestroError
from moestro.graph.words import Kernel
from moestro.hardware.curves.experts import DEFAULT_SKEW
from moestro.predict.curves import DeviceCurves
from moestro.predict.traffic import hot_rank

# Without samples of memory: what large fused passes reach of the nominal bandwidth, and what a small kernel costs.
MEMORY_SHARE = 0.80
MEMORY_OVERHEAD_S = 4e-6


@lru_cache(maxsize=256)
def kernel_pricer(curves: DeviceCurves, routing: RoutingConfig, ep: int) -> "KernelPricer":
    """One for all predictions on these curves: what it has priced it remembers."""
    return KernelPricer(curves, routing, ep)


@dataclass
class KernelPricer:
    """Prices kernels of one device and remembers them."""

    curves: DeviceCurves
    routing: RoutingConfig
    ep: int
    _seen: dict[tuple[object, ...], float] = field(default_factory=dict)

    def seconds(self, kernel: Kernel) -> float:
        """Of one of them.

        Raises:
            MoestroError: the device cannot compute in the dtype, or neither samples nor the catalog know how fast.
        """
        key = (kernel.op, kernel.name, kernel.dims, kernel.dtype, kernel.bytes_moved, kernel.launches)
        found = self._seen.get(key)
        if found is None:
            found = self._seen[key] = self._seconds(kernel)
        return found

    def _seconds(self, kernel: Kernel) -> float:
        if kernel.op == "gemm":
            batch, m, n, k = kernel.dims
            return self.curves.product(kernel.dtype).seconds(m, n, k, batch)
        if kernel.op == "grouped_gemm":
            return self._grouped(kernel) * self._skew()
        if kernel.op in ("attention", "attention_backward"):
            return self._attention(kernel)
        return self.memory_s(kernel.bytes_moved, kernel.launches)

    def _grouped(self, kernel: Kernel) -> float:
        """One product of equal groups; how unequal ones add up is the skew's business."""
        groups, rows, n, k = kernel.dims
        # The residual of single products says nothing of many small ones side by side: the tiles alone.
        return self.curves.product(kernel.dtype).model.seconds(max(1.0, rows / groups), n, k, groups)

    def _attention(self, kernel: Kernel) -> float:
        batch, seq_q, seq_k, heads, kv_heads, qk_dim, v_dim = kernel.dims
        phase = "fwd" if kernel.op == "attention" else "bwd"
        curve = self.curves.attention(kernel.dtype)
        # Causal over the square of the keys. A context rank has a part of the queries: as much work, in as many blocks
        # for the units to share, as a part of a sequence. Queries beyond a window's keys are the window over again.
        share = seq_q / seq_k
        once = curve.seconds(batch * min(1.0, share), seq_k, heads, kv_heads, qk_dim, v_dim, True, phase)
        seconds = once * max(1.0, share)
        return max(seconds, self.memory_s(kernel.bytes_moved, kernel.launches))

    def memory_s(self, size: float, launches: int) -> float:
        """A kernel that moves `size` bytes."""
        copy = self.curves.copy
        if copy is not None:
            return launches * float(copy.seconds(max(1.0, size / launches)))
        nominal = self.curves.device.memory.gbps.nominal or self.curves.device.memory.gbps.achieved
        if nominal is None:
            raise MoestroError(f"the catalog knows no memory bandwidth of {self.curves.device.id}; measure it there")
        return size / (MEMORY_SHARE * nominal * 1e9) + launches * MEMORY_OVERHEAD_S

    def _skew(self) -> float:
        """How much longer the busiest rank's experts take than the mean's."""
        routing = self.routing
        if routing.loads:
            return hot_rank(routing, len(routing.loads[0]), 1, self.ep)
        if routing.kind == "measured" and routing.max_over_mean:
            return routing.max_over_mean
        if routing.kind == "power_law":
            return DEFAULT_SKEW[min(DEFAULT_SKEW, key=lambda ep: abs(ep - self.ep))]
        return 1.0
