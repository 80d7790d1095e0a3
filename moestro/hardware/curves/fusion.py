"""How large the buffers should be in which gradients and parameters are fused for one collective each."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moestro.errors import MoestroError
from moestro.hardware.curves.transfer import TransferCurve, fit_transfer

SHARE = 0.9  # of the best bandwidth that a bucket should reach
SCALES = (0.25, 1.0, 4.0)  # times the recommended bucket, whose exposed time is told for comparison


@dataclass(frozen=True)
class Bucket:
    """A fusion buffer. Sizes by operation are in bytes of that operation.

    params, bytes: of the bucket; bytes of the operation that takes the most for a parameter.
    half_bytes, knee_bytes: where each operation reaches 50 and 90 % of its best bandwidth.
    limited_by: "knee": as small as 90 % of the bandwidth allows; "overlap": smaller, so that the last bucket, which
        nothing hides, is short; "model": the whole model is no larger.
    count, best_count: buckets of the whole model, and how many would leave the least time exposed; None without one.
    exposed_s: time that backward does not hide, by the scale of the bucket (0.25, 1 and 4 times).
    megatron_params: what Megatron-LM takes by default, max(40 M, 1 M × data-parallel ranks).
    """

    params: float
    bytes: float
    half_bytes: dict[str, float]
    knee_bytes: dict[str, float]
    limited_by: str
    count: float | None
    best_count: float | None
    exposed_s: dict[float, float]
    megatron_params: float


def recommend_bucket(
    curves: Mapping[str, TransferCurve],
    bytes_per_param: Mapping[str, float] | float,
    ranks: int,
    *,
    params: float | None = None,
    hidden: float = 0.0,
) -> Bucket:
    """The bucket that brings every operation to 90 % of its bandwidth, unless its last one would stay exposed for long.

    Over k buckets of together T seconds of pure transfer, about k·α·(1 - hidden) + T/k stay exposed: the start-ups, and
    the last bucket, which follows the end of backward. The best k is √(T / (α·(1 - hidden))); α is what a bucket takes
    beyond its transfer at full bandwidth.

    Args:
        curves: by operation, for example of reduce_scatter (gradients) and all_gather (parameters) over `ranks`.
        bytes_per_param: of each operation, or one number for all.
        ranks: data-parallel ranks.
        params: that are reduced in one step; None: only the knee counts.
        hidden: share of the start-ups that computing hides, below 1.

    Raises:
        MoestroError: no curves; numbers outside their range; a curve that never reaches 90 % of its bandwidth.
    """
    size = {op: bytes_per_param if isinstance(bytes_per_param, int | float) else bytes_per_param[op] for op in curves}
    if not curves or min(size.values()) <= 0 or ranks < 1:
        raise MoestroError("a bucket needs at least one curve, bytes for each parameter above zero, and a rank")
    if not 0 <= hidden < 1 or (params is not None and params <= 0):
        raise MoestroError(f"hidden is a share below 1, not {hidden:g}, and params is above zero, not {params}")
    half = {op: measured_size_at(curve, 0.5) for op, curve in curves.items()}
    knee = {op: measured_size_at(curve, SHARE) for op, curve in curves.items()}
    bucket, limited_by, best_count = max(knee[op] / size[op] for op in curves), "knee", None
    if not math.isfinite(bucket):
        raise MoestroError("no bucket reaches 90 % of the bandwidth on these curves; measure larger messages")
    if params is not None:
        best_count = _best_count(curves, size, params, bucket, hidden)
        limit = params / best_count
        if limit < bucket:
            bucket, limited_by = limit, "model" if best_count == 1 else "overlap"
    scales = {} if params is None else {s: _exposed(curves, size, params, bucket * s, hidden) for s in SCALES}
    return Bucket(
        params=bucket,
        bytes=bucket * max(size.values()),
        half_bytes=half,
        knee_bytes=knee,
        limited_by=limited_by,
        count=None if params is None else max(1.0, params / bucket),
        best_count=best_count,
        exposed_s=scales,
        megatron_params=max(40e6, 1e6 * ranks),
    )


def measured_size_at(curve: TransferCurve, share: float) -> float:
    """S_50, S_90: of α-β fitted to the points, or where the points themselves get there, whichever is larger.

    α-β alone underestimates the 90 % point where a switch adds values up on the way (NVLS): 116 instead of 257 MB on
    eight H200. The points alone do so where they end before the bandwidth levels off.
    """
    sizes, times = curve.points.sizes_bytes, curve.points.times_s
    return max(fit_transfer(sizes, times, curve.factor, (form,)).size_at(share) for form in ("alpha_beta", "piecewise"))


def _transfer_s(curve: TransferCurve, size_bytes: float) -> float:
    """At the best bandwidth."""
    return size_bytes * curve.factor / curve.parameters["bandwidth"]


def _best_count(
    curves: Mapping[str, TransferCurve], size: Mapping[str, float], params: float, bucket: float, hidden: float
) -> float:
    transfer_s = sum(_transfer_s(curve, params * size[op]) for op, curve in curves.items())
    start_s = sum(
        max(_start_s(curve, min(bucket, params) * size[op]), curve.parameters["alpha_s"])
        for op, curve in curves.items()
    )
    if start_s == 0:  # no cost of small messages was seen
        return max(1.0, params / bucket)
    return max(1.0, math.sqrt(transfer_s / (start_s * (1 - hidden))))


def _start_s(curve: TransferCurve, size_bytes: float) -> float:
    """What one bucket takes beyond its transfer at full bandwidth; the α of α-β."""
    return max(0.0, curve.seconds(size_bytes) - _transfer_s(curve, size_bytes))


def _exposed(
    curves: Mapping[str, TransferCurve], size: Mapping[str, float], params: float, bucket: float, hidden: float
) -> float:
    count = max(1.0, params / bucket)
    each = {op: params / count * size[op] for op in curves}
    starts_s = count * (1 - hidden) * sum(_start_s(curve, each[op]) for op, curve in curves.items())
    return starts_s + sum(_transfer_s(curve, each[op]) for op, curve in curves.items())
