"""What calls of a step take by curves instead of by measuring each: for calls that no one has measured.

Two sources: a machine's profile; or other steps that were taken apart, where an operation's time is a line in its FLOPs
and bytes. Σ of the calls and the host's gaps is a prediction of the step (the composition of ProfileDNN's primitives).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

import numpy as np
from scipy.optimize import nnls

from moestro.errors import MoestroError
from moestro.hardware.curves.attention import AttentionCurve, fit_attention
from moestro.hardware.curves.gemm import GemmCurve, fit_gemm
from moestro.hardware.profile import MachineProfile, Sample
from moestro.measure.primitives import Call
from moestro.measure.step_work import ATTENTION

FEWEST = 5  # measured products that a curve is fitted to; of other operations, measured calls


class Curves(Protocol):
    """gap_s: the host's time between two calls."""

    @property
    def gap_s(self) -> float: ...
    def seconds(self, call: Call) -> float: ...


def compose(calls: Sequence[Call], curves: Curves) -> float:
    """Seconds of a step that makes these calls."""
    known: dict[str, float] = {}
    for call in calls:
        if call.key not in known:
            known[call.key] = curves.seconds(call)
    return sum(known[call.key] for call in calls) + curves.gap_s * len(calls)


@dataclass(frozen=True)
class Line:
    """fixed_s + FLOPs · per_flop_s + bytes · per_byte_s; none of them negative."""

    fixed_s: float
    per_flop_s: float
    per_byte_s: float

    def seconds(self, call: Call) -> float:
        return self.fixed_s + call.flops * self.per_flop_s + call.bytes_moved * self.per_byte_s


@dataclass(frozen=True)
class StepCurves:
    """Fitted to steps. An operation that none of them had is priced as the others of its kind, or as all others.

    scale: by kind. A fit goes through the middle of the times; this makes up for those that an interrupted call adds.
    """

    products: Mapping[str, GemmCurve]  # by dtype
    operations: Mapping[str, Line]
    kinds: Mapping[str, Line]
    gap_s: float
    scale: Mapping[str, float] = field(default_factory=dict)

    def seconds(self, call: Call) -> float:
        return self.scale.get(call.kind, 1.0) * self._fitted(call)

    def _fitted(self, call: Call) -> float:
        if call.gemm is not None and call.dtype in self.products:
            batch, m, n, k = (max(size, 1) for size in call.gemm)
            return self.products[call.dtype].seconds(m, n, k, batch)
        line = self.operations.get(call.op) or self.kinds.get(call.kind) or self.kinds[""]
        return line.seconds(call)


def fit_steps(measured: Sequence[tuple[Call, float]], gap_s: float) -> StepCurves:
    """Curves from calls and their seconds, of one machine; of calls that are alike the median. gap_s: the mean gap.

    Raises:
        MoestroError: nothing was measured.
    """
    if not measured:
        raise MoestroError("curves of a step need measured calls; take a step apart first")
    same = defaultdict[str, list[float]](list)
    for call, seconds in measured:
        same[call.key].append(seconds)
    typical = {key: median(times) for key, times in same.items()}
    by_op, by_kind = defaultdict[str, list[tuple[Call, float]]](list), defaultdict[str, list[tuple[Call, float]]](list)
    products = defaultdict[str, list[Sample]](list)
    for call in {call.key: call for call, _ in measured if typical[call.key] > 0}.values():
        seconds = typical[call.key]
        for rows in (by_op[call.op], by_kind[call.kind], by_kind[""]):
            rows.append((call, seconds))
        if call.gemm is not None and min(call.gemm) > 0:
            batch, m, n, k = call.gemm
            case = {"batch": batch, "m": m, "n": n, "k": k, "dtype": call.dtype}
            products[call.dtype].append(Sample(op="gemm", case=case, median_s=seconds, flops=call.flops))
    curves = StepCurves(
        products={d: fit_gemm(s, d, None, None, None) for d, s in products.items() if len(s) >= FEWEST},
        operations={op: fit_line(rows) for op, rows in by_op.items() if len(rows) >= FEWEST},
        kinds={kind: fit_line(rows) for kind, rows in by_kind.items()},
        gap_s=gap_s,
    )
    return replace(curves, scale=_scale(measured, curves))


def _scale(measured: Sequence[tuple[Call, float]], curves: StepCurves) -> dict[str, float]:
    """Σ measured ÷ Σ fitted of each kind."""
    sums = defaultdict[str, list[float]](lambda: [0.0, 0.0])
    fitted = {call.key: curves.seconds(call) for call in {call.key: call for call, _ in measured}.values()}
    for call, seconds in measured:
        sums[call.kind][0] += seconds
        sums[call.kind][1] += fitted[call.key]
    return {kind: found / expected for kind, (found, expected) in sums.items() if expected > 0}


def fit_line(rows: Sequence[tuple[Call, float]]) -> Line:
    """Least squares of relative errors, so that small calls count as much as large ones."""
    seconds = np.array([s for _, s in rows])
    work = np.array([(1.0, call.flops, call.bytes_moved) for call, _ in rows])
    scale = np.maximum(work.max(axis=0), 1e-30)
    found, _ = nnls(work / scale / seconds[:, None], np.ones(len(rows)))
    fixed, per_flop, per_byte = (found / scale).tolist()
    return Line(fixed, per_flop, per_byte)


@dataclass(frozen=True)
class ProfileCurves:
    """A machine's profile as curves for calls: products, attention, and for everything else the copy of as many bytes.

    A profile does not know how long Python takes between calls: gap_s is 0.
    """

    products: Mapping[str, GemmCurve]  # by dtype
    attention: Mapping[str, AttentionCurve]
    copies: Sequence[tuple[float, float]]  # (bytes moved, seconds), smallest first
    gap_s: float = 0.0

    def seconds(self, call: Call) -> float:
        if call.gemm is not None and call.dtype in self.products:
            batch, m, n, k = (max(size, 1) for size in call.gemm)
            return self.products[call.dtype].seconds(m, n, k, batch)
        if call.kind == ATTENTION and call.dtype in self.attention:
            return self._attention(call)
        sizes, seconds = zip(*self.copies, strict=True)
        if call.bytes_moved >= sizes[-1]:
            return float(seconds[-1] * call.bytes_moved / sizes[-1])
        return float(np.interp(call.bytes_moved, sizes, seconds))

    def _attention(self, call: Call) -> float:
        backward = int("backward" in call.op)
        query, key, value = (operand.shape for operand in call.operands[backward : backward + 3])
        full = (4.0 if backward else 2.0) * query[0] * query[1] * query[2] * key[2] * (query[3] + value[3])
        return self.attention[call.dtype].seconds(
            *(query[0], query[2], query[1], key[1], query[3], value[3]),
            causal=call.flops < 0.75 * full,
            phase="bwd" if backward else "fwd",
        )


def curves_of_profile(profile: MachineProfile) -> ProfileCurves:
    """Raises MoestroError: the profile has no samples of copies or of products."""
    copies = sorted((s.bytes_moved, s.median_s) for s in profile.of("copy") if s.bytes_moved)
    products = [s for op in ("gemm", "batched_gemm", "grouped_gemm") for s in profile.of(op)]
    if not copies or not products:
        missing = "copies" if not copies else "products"
        raise MoestroError(f"profile '{profile.name}' has no samples of {missing}; measure the whole machine again")
    attention = profile.of("attention")
    return ProfileCurves(
        products={d: fit_gemm(products, d, None, None, None) for d in _dtypes(products)},
        attention={d: fit_attention(attention, d, None, None, None) for d in _dtypes(attention)},
        copies=copies,
    )


def _dtypes(samples: Sequence[Sample]) -> list[str]:
    return sorted({str(s.case["dtype"]) for s in samples if "dtype" in s.case})
