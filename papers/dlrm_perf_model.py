"""Building a Performance Model for DLRM Training on GPUs (Lin, Feng, Ardestani, Lee and others; arXiv 2201.07821).

The claim: the time of a training batch that leaves the GPU idle is predicted by a walk over its operations which adds
the host's overheads (T1 … T5) to the kernels' own times, 7.96 % wrong in the mean on three GPUs.

What is reproduced here:

* exact: the walk on graphs small enough to be added up by hand;
* computed: the fit of the three-part curve of bandwidth to samples of a known law with 3 % noise; the work of the three
  published recommendation models;
* simulated on a V100 by its published rates: what leaving the host out does to those models, by batch.

What is not: the published errors, which need the GPUs, and raw timings that the repository does not hold; learned
models of kernels; embedding look-ups by the hit rate of the cache; overheads pooled over workloads (10.15 %). The
host's times below are assumed, and the same for all operations.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from moestro.graph.classic import DLRM_DDP, DLRM_DEFAULT, DLRM_MLPERF, Dlrm, dlrm
from moestro.graph.words import Collective, Node
from moestro.hardware.catalog import load_device
from moestro.hardware.curves.heldout import errors
from moestro.hardware.curves.shapes import Sigmoid
from moestro.hardware.curves.transfer import TransferCurve, fit_transfer
from moestro.predict.constants import Constants
from moestro.predict.program import stage_ops
from moestro.predict.timeline import NO_HOST, HostTimes, Op, RankClass, Timeline, walk
from papers.result import Check, PaperResult, Progress, majority_of, verdict_of

SHAPES = {"DLRM_default": DLRM_DEFAULT, "DLRM_DDP": DLRM_DDP, "DLRM_MLPerf": DLRM_MLPERF}
BATCHES = (32, 128, 512, 2048, 8192, 32768)
DEVICE = "v100-sxm-16gb"
KERNEL_S = 5e-6  # what a kernel costs beside its work: a constant of the authors' code
# Assumed: a launch of 10 µs is in the authors' code, where gaps of T1 end at 200 µs; the others are of usual size.
HOST = HostTimes(t1_s=10e-6, t2_s=8e-6, t3_s=4e-6, t4_s=10e-6, t5_s=5e-6)
FAR = 3.0  # times too fast, for a model of tiny kernels without the host
NEAR = 0.10  # of the time with the host, at the largest batch
SEEDS = 8
# A law of the paper's form: up to 64 KiB 6 µs, then a sigmoid, from 256 MiB on 900 GB/s; without jumps between them.
LAW = Sigmoid(6e-6, 900e9, 16.0, 28.0, 2.2089, 19.5, 0.55, 9.7571)
NOISE, RECOVERED, HELD_OUT = 0.03, 0.05, 0.10


def run(progress: Progress) -> PaperResult:
    """Everything; 3 s."""
    ratios = host_ratios()
    progress(1, 2, "walks")
    checks = (check_host_counts(ratios), check_walk(), check_curve(fitted_curves()), check_workloads())
    progress(2, 2, "checks")
    figures = {f"{name}, batch {b}": round(r, 3) for name, by in ratios.items() for b, r in by.items()}
    return PaperResult(checks, figures)


# With and without the host.


@lru_cache(maxsize=1)
def rates() -> tuple[float, float]:
    """FLOP/s in fp32 and bytes/s of the device, as the authors measured them."""
    device = load_device(DEVICE)
    flops, gbps = device.vector_tflops["fp32"].achieved, device.memory.gbps.achieved
    assert flops is not None
    assert gbps is not None
    return flops * 1e12, gbps * 1e9


def kernel_seconds(node: Node) -> float:
    """max(FLOPs / peak, bytes / bandwidth) and a fixed cost: the paper's heuristic."""
    assert not isinstance(node, Collective)
    flops_per_s, bytes_per_s = rates()
    return max(node.flops / flops_per_s, node.bytes_moved / bytes_per_s) + KERNEL_S


def ops_of(shape: Dlrm, batch: int, host: HostTimes) -> list[Op]:
    ops = stage_ops(dlrm(shape, batch), 0, kernel_seconds, Constants())
    return [op._replace(host=host) for op in ops]


def alone(ops: Sequence[Op]) -> Timeline:
    return walk([RankClass("rank", ops)])[0]


def host_ratios() -> dict[str, dict[int, float]]:
    """Time with the host over time without, by workload and batch."""
    return {
        name: {b: alone(ops_of(shape, b, HOST)).total_s / alone(ops_of(shape, b, NO_HOST)).total_s for b in BATCHES}
        for name, shape in SHAPES.items()
    }


def check_host_counts(ratios: Mapping[str, Mapping[int, float]]) -> Check:
    smallest, largest = BATCHES[0], BATCHES[-1]
    parts = []
    for by in ratios.values():
        falls = all(later <= earlier + 1e-9 for earlier, later in pairwise(by[batch] for batch in BATCHES))
        parts += [by[smallest] >= FAR, by[largest] <= 1 + NEAR, falls]
    shown = "; ".join(f"{name} {by[smallest]:.2f} → {by[largest]:.2f} ×" for name, by in ratios.items())
    return Check(
        claim="A batch of small kernels takes far longer than its kernels: the host's idle time must be in the model",
        published="GPU-active time 4.61 % wrong, the batch with its idle time 7.96 % (authors' notebook, three GPUs)",
        ours=f"{shown} of the time without a host, batch {smallest} → {largest}",
        how="simulated",
        verdict=verdict_of(parts),
        note=f"V100 by its measured fp32 rate and bandwidth, {KERNEL_S * 1e6:.0f} µs a kernel. Assumed host "
        f"times: T1 to T5 of {' / '.join(f'{t * 1e6:.0f}' for t in HOST)} µs. Asked for: {FAR:.0f} times or more at "
        f"the smallest batch, within {NEAR:.0%} at the largest, and falling. A control of the walk, not of the "
        "published errors.",
    )


# By hand.

TIMES = HostTimes(1, 2, 4, 8, 16)  # sums of such numbers are exact


def hand_cases() -> dict[str, tuple[float, float]]:
    """What the walk says, and what is right."""
    tiny = [Op("tiny", (0.5, 0.5), TIMES)] * 6
    heavy = [Op("heavy", (64.0, 128.0), TIMES)] * 6
    sent = [Op("first", (4.0,)), Op("send", (8.0,), stream="comm", needs=(0,))]
    copy = [Op("compute", (32.0,), TIMES), Op("copy", (2.0,), TIMES, blocks=True), Op("next", (4.0,), TIMES)]
    synchronised = TIMES.t1_s + TIMES.t2_s + TIMES.t4_s + 32 + 2 + TIMES.t1_s + TIMES.t2_s + TIMES.t4_s + 4
    return {
        "launch-bound": (alone(tiny).total_s, 6 * (1 + 2 + 8 + 16 + 8 + 4)),
        "kernel-bound": (alone(heavy).total_s, 1 + 2 + 8 + 6 * (64 + 128)),
        "host only": (alone([Op("python", (), TIMES)] * 3).total_s, 3 * (1 + 16)),
        "overlap": (alone([*sent, Op("second", (5.0,))]).total_s, 4 + 8),
        "exposed": (alone([*sent, Op("second", (5.0,))]).exposed_s("comm"), 3),
        "hidden": (alone([*sent, Op("second", (32.0,))]).total_s, 4 + 32),
        "join": (alone([*sent, Op("second", (5.0,), needs=(1,))]).total_s, 4 + 8 + 5),
        "blocking copy": (alone(copy).total_s, synchronised),
    }


def check_walk() -> Check:
    cases = hand_cases()
    equal = [ours == right for ours, right in cases.values()]
    return Check(
        claim="The walk: host ahead of streams, kernels after their launch and their stream, joins, blocking copies",
        published="pseudo-code; chains add up to T1 … T5 or to their kernels",
        ours=f"{sum(equal)} of {len(equal)} equal to the last bit: {', '.join(cases)}",
        how="computed",
        verdict=verdict_of(equal),
        note="Two differences from the authors' code: what consumes a collective waits for it, not for all "
        "streams; and the 1 µs between kernels of a stream belongs to the kernels' own seconds.",
    )


# Curves.


def fitted_curves() -> list[tuple[TransferCurve, float]]:
    """For each seed: a curve fitted to every other size of a noisy law, and its median error on the sizes between."""
    sizes = 2.0 ** np.arange(10, 32.01, 0.5)
    found = []
    for seed in range(SEEDS):
        times = LAW.seconds(sizes) * np.exp(np.random.default_rng(seed).normal(0, NOISE, len(sizes)))
        curve = fit_transfer(sizes[::2], times[::2], forms=("sigmoid",))
        found.append((curve, errors(list(curve.seconds(sizes[1::2])), list(times[1::2])).median))
    return found


def check_curve(curves: Sequence[tuple[TransferCurve, float]]) -> Check:
    rate = [abs(curve.parameters["bandwidth"] / LAW.bytes_per_s - 1) for curve, _ in curves]
    latency = [abs(curve.parameters["alpha_s"] / LAW.alpha_s - 1) for curve, _ in curves]
    unseen = [error for _, error in curves]
    good = [max(a, b) <= RECOVERED and error <= HELD_OUT for a, b, error in zip(rate, latency, unseen, strict=True)]
    return Check(
        claim="Latency, a sigmoid of log size, then the peak: the curve is found again from noisy samples",
        published="kernel models below 10 % in the geometric mean",
        ours=f"bandwidth {max(rate):.1%}, latency {max(latency):.1%} off at most; {max(unseen):.1%} on held-out sizes",
        how="computed",
        verdict=majority_of(good),
        note=f"{sum(good)} of {len(good)} seeds within {RECOVERED:.0%} and {HELD_OUT:.0%}. A law of this form with "
        f"{NOISE:.0%} noise, 1 KiB to 4 GiB; fitted to powers of two, judged at the sizes between.",
    )


# Workloads.


def counted_by_hand(shape: Dlrm, batch: int) -> tuple[int, int, int]:
    """(FLOPs of a batch's products, parameters of the networks, parameters of the tables)."""
    vectors = shape.tables + 1
    top = (vectors * (vectors - 1) // 2 + shape.dim, *shape.top)
    pairs = [*pairwise(shape.bottom), *pairwise(top)]
    products = sum(a * b for a, b in pairs)
    first = shape.bottom[0] * shape.bottom[1]  # whose input wants no gradient
    flops = 2 * batch * (3 * products - first) + 3 * 2 * batch * vectors**2 * shape.dim
    return flops, products + sum(b for _, b in pairs), shape.tables * shape.rows * shape.dim


def check_workloads() -> Check:
    batch, equal, shown = 2048, [], []
    for name, shape in SHAPES.items():
        graph = dlrm(shape, batch)
        held = graph.stages[0].parameters
        equal.append((graph.model_flops, held.dense, held.expert) == counted_by_hand(shape, batch))
        shown.append(
            f"{name} {held.dense / 1e6:.2f} M + {held.expert / 1e6:,.0f} M, {graph.model_flops / 1e9:.1f} GFLOP"
        )
    return Check(
        claim="The published workloads can be written down as graphs: networks, look-ups, pairwise products",
        published="layer sizes and tables of DLRM_default, DLRM_DDP and DLRM_MLPerf",
        ours="; ".join(shown),
        how="computed",
        verdict=verdict_of(equal),
        note=f"Parameters of networks + tables, products of a batch of {batch}; equal to a count by hand. MLPerf's "
        "tables have very different numbers of rows: here all have their mean.",
    )
