"""The time of attention: blocks of queries in waves, or memory traffic, a fixed overhead, and a residual.

    t = (max(waves of blocks · block work / rate, bytes / bandwidth) + overhead) · exp(residual)

A kernel gives each compute unit blocks of BLOCK queries of one head of one sequence. FLOPs are those of published.gemm:
2·batch·seq²·heads·(head_dim + v_head_dim), half of it where attention is causal, 2.5 times it for the backward pass.
A decode step is one query a sequence over a cache of `seq`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moestro.errors import MoestroError
from moestro.hardware.curves.fitting import Floats, error_in_folds, fit_positive
from moestro.hardware.curves.gemm import SPREAD_UNKNOWN, kernel_of
from moestro.hardware.curves.heldout import HeldOut
from moestro.hardware.curves.residual import Residual, fit_residual, no_residual
from moestro.hardware.devices import DTYPE_BYTES
from moestro.hardware.profile import FitReport, Sample

BLOCK = 128  # queries of one block
BACKWARD = 2.5  # FLOPs ÷ forward's: five products where forward has two
PHASES = ("fwd", "bwd", "decode")
# Shares of peak and bandwidth, and overhead, without samples: the medians over the devices of published/gemm.csv.xz;
# those of decode, of which it has no rows, are those of memory.
DEFAULT: dict[str, tuple[float, float, float]] = {
    "fwd": (0.56, 0.8, 24e-6),
    "bwd": (0.43, 0.8, 14e-6),
    "decode": (0.56, 0.8, 24e-6),
}
SPREAD = (0.5, 0.1, 0.7)


@dataclass(frozen=True)
class Pass:
    """One phase on one device."""

    rate_flops: float
    bytes_per_s: float
    overhead_s: float
    residual: Residual
    samples: int
    basis: str
    held_out: HeldOut | None = None


@dataclass(frozen=True)
class AttentionCurve:
    """Made by `fit_attention`. phases: fwd, bwd and decode, each with its own numbers, basis and held_out."""

    dtype: str
    compute_units: int | None
    phases: Mapping[str, Pass]

    def seconds(
        self,
        batch: float,
        seq: float,
        heads: float,
        kv_heads: float,
        head_dim: float,
        v_head_dim: float | None = None,
        causal: bool = True,
        phase: str = "fwd",
        kernel: str | None = None,
    ) -> float:
        case = [batch, seq, heads, kv_heads, head_dim, v_head_dim or head_dim, float(causal)]
        return float(self.seconds_many(np.array([case], dtype=np.float64), phase, kernel)[0])

    def seconds_many(self, cases: ArrayLike, phase: str = "fwd", kernel: str | None = None) -> Floats:
        """cases [cases, 7]: batch, seq, heads, kv_heads, head_dim, v_head_dim, causal (0 or 1)."""
        if phase not in self.phases:
            raise MoestroError(f"attention has no phase '{phase}': {', '.join(PHASES)}")
        rows, of = np.asarray(cases, dtype=np.float64), self.phases[phase]
        element = DTYPE_BYTES[self.dtype]
        physical = _physical((of.rate_flops, of.bytes_per_s, of.overhead_s), rows, phase, self.compute_units, element)
        return np.asarray(physical * np.exp(of.residual.many(_features(rows), kernel)))

    def transferred(self, peak_ratio: float, bandwidth_ratio: float, units: int | None, of: str) -> "AttentionCurve":
        """The same shares and residual on a device without samples; see `GemmCurve.transferred`."""
        phases = {
            phase: replace(
                each,
                rate_flops=each.rate_flops * peak_ratio,
                bytes_per_s=each.bytes_per_s * bandwidth_ratio,
                samples=0,
                basis=f"shares of {of}",
                held_out=None,
            )
            for phase, each in self.phases.items()
        }
        return AttentionCurve(self.dtype, units, phases)

    def report(self, what: str, phase: str = "fwd") -> FitReport:
        of = self.phases[phase]
        return FitReport(
            what=what,
            form=f"blocks in waves, {of.basis}",
            parameters={"flops_per_s": of.rate_flops, "bytes_per_s": of.bytes_per_s, "overhead_s": of.overhead_s},
            samples=of.samples,
            held_out_median=of.held_out.median if of.held_out else None,
            held_out_p90=of.held_out.p90 if of.held_out else None,
        )


def attention_flops(rows: Floats, phase: str) -> Floats:
    """rows [cases, 7] as of `AttentionCurve.seconds_many` -> FLOPs [cases]."""
    batch, seq, heads, _, head_dim, v_head_dim, causal = rows.T
    if phase == "decode":
        return np.asarray(2.0 * batch * seq * heads * (head_dim + v_head_dim))
    square = 2.0 * batch * seq**2 * heads * (head_dim + v_head_dim) * (1.0 - 0.5 * causal)
    return np.asarray(square * (BACKWARD if phase == "bwd" else 1.0))


def fit_attention(
    samples: Sequence[Sample],
    dtype: str,
    peak_flops: float | None,
    bytes_per_s: float | None,
    compute_units: int | None,
) -> AttentionCurve:
    """The curves of one device from its attention samples in `dtype` (others are passed over); see `fit_gemm`.

    Raises:
        MoestroError: a case that is not complete, or no sample and no peak and bandwidth either.
    """
    used = [s for s in samples if s.op == "attention" and s.case.get("dtype", dtype) == dtype]
    phases = [str(s.case.get("phase", "fwd")) for s in used]
    strange = sorted(set(phases) - set(PHASES))
    if strange:
        raise MoestroError(f"attention has no phase '{strange[0]}': {', '.join(PHASES)}")
    rows, seconds, spread = case_rows(used), np.array([s.median_s for s in used]), list(SPREAD)
    if peak_flops is None or bytes_per_s is None:
        if not used:
            raise MoestroError(f"no sample of {dtype} attention, and no peak and memory bandwidth to predict from")
        parts = [(attention_flops(rows[i : i + 1], phases[i])[0], seconds[i]) for i in range(len(used))]
        peak_flops = peak_flops or max(work / t for work, t in parts)
        moved = [_moved(rows[i : i + 1], DTYPE_BYTES[dtype], phases[i])[0] for i in range(len(used))]
        bytes_per_s = bytes_per_s or 2.0 * float(np.max(np.array(moved) / seconds))
        spread[0] = spread[1] = SPREAD_UNKNOWN
    made = {}
    for phase in PHASES:
        these = np.array([i for i, other in enumerate(phases) if other == phase], dtype=np.int64)
        kernels = [kernel_of(used[i]) for i in these]
        rate, bandwidth, overhead = DEFAULT[phase]
        start = Pass(
            rate * peak_flops, bandwidth * bytes_per_s, overhead, no_residual(7), 0, "class default of attention"
        )
        made[phase] = _fit_phase(start, spread, rows[these], seconds[these], kernels, phase, compute_units, dtype)
    return AttentionCurve(dtype, compute_units, made)


def case_rows(samples: Sequence[Sample]) -> Floats:
    rows = []
    for s in samples:
        sizes = [s.number(name) for name in ("batch", "seq", "heads", "kv_heads", "head_dim")]
        if min(sizes) < 1:
            raise MoestroError(f"sizes of attention are 1 or more, not {s.case}")
        values = s.number("v_head_dim") if "v_head_dim" in s.case else sizes[-1]
        rows.append([*sizes, values, float(s.number("causal") > 0) if "causal" in s.case else 1.0])
    return np.array(rows, dtype=np.float64).reshape(len(rows), 7)


def _moved(rows: Floats, element_bytes: float, phase: str) -> Floats:
    """Bytes of queries, keys, values and output, each with its gradient in bwd; of a decode step those of the cache."""
    batch, seq, heads, kv_heads, head_dim, v_head_dim, _ = rows.T
    moved = {"fwd": heads + kv_heads, "bwd": 2.0 * (heads + kv_heads), "decode": kv_heads}[phase]
    return np.asarray(batch * seq * moved * (head_dim + v_head_dim) * max(element_bytes, 2.0))


def _physical(values: Sequence[float], rows: Floats, phase: str, units: int | None, element_bytes: float) -> Floats:
    rate, bandwidth, overhead = values
    batch, seq, heads = rows.T[:3]
    work, moved = attention_flops(rows, phase), _moved(rows, element_bytes, phase)
    if phase == "decode":
        return np.asarray(np.maximum(work / rate, moved / bandwidth) + overhead)
    blocks = batch * heads * np.ceil(seq / BLOCK)
    # A last wave that is part full costs as much as a full one; causal blocks differ in length and even that out.
    waste = np.ceil(blocks / units) * units / blocks if units else 1.0
    return np.asarray(np.maximum(work * waste / rate, moved / bandwidth) + overhead)


def _features(rows: Floats) -> Floats:
    """[cases, 7]: octaves of batch, seq, heads, heads a kv head, head_dim, v_head_dim; and causal."""
    batch, seq, heads, kv_heads, head_dim, v_head_dim, causal = rows.T
    sizes = np.log2(np.stack([batch, seq, heads, heads / kv_heads, head_dim, v_head_dim], axis=1))
    return np.concatenate([sizes, 2.0 * causal[:, None]], axis=1)


def _fit_phase(
    start: Pass,
    spread: Sequence[float],
    rows: Floats,
    seconds: Floats,
    kernels: Sequence[str],
    phase: str,
    units: int | None,
    dtype: str,
) -> Pass:
    if not len(rows):
        return start
    element, features = DTYPE_BYTES[dtype], _features(rows)

    def fit(at: NDArray[np.int64], like: Residual | None = None) -> Pass:
        guess = (start.rate_flops, start.bytes_per_s, start.overhead_s)
        values, _ = fit_positive(
            lambda values: _physical(values, rows[at], phase, units, element), guess, spread, seconds[at]
        )
        beyond = np.log(seconds[at] / _physical(values, rows[at], phase, units, element))
        residual = fit_residual(features[at], beyond, [kernels[i] for i in at], like)
        rate, bandwidth, overhead = values
        return Pass(rate, bandwidth, overhead, residual, len(at), f"{len(at)} samples")

    whole = fit(np.arange(len(rows)))

    def predict(inside: NDArray[np.int64], outside: NDArray[np.int64]) -> Floats:
        part = fit(inside, whole.residual)
        values = (part.rate_flops, part.bytes_per_s, part.overhead_s)
        physical = _physical(values, rows[outside], phase, units, element)
        beyond = [part.residual.at(list(features[i]), kernels[i]) for i in outside]
        return np.asarray(physical * np.exp(beyond))

    return replace(whole, held_out=error_in_folds(seconds, predict))
