"""The link between every two ranks: its latency and bandwidth, and which ranks belong together by them.

After DeepCEE's profiler (arXiv 2505.15536): each pair sends a minimal and a large message there and back.
"""

import socket
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from moestro.hardware.device import synchronize
from moestro.hardware.grouping import Grouping, group_devices
from moestro.hardware.profile import Sample
from moestro.measure.exchanges import Place, build
from moestro.measure.rounds import Control

SMALL_BYTES = 8
ALONE = 16  # ranks up to which one pair is measured at a time; above, disjoint pairs send at once
SPREAD_LIMIT = 0.5

Trips = dict[tuple[int, int, int], list[float]]  # first rank, second, bytes: seconds of each trip


@dataclass(frozen=True)
class PairResult:
    """latency_s, gbps: [ranks, ranks], both directions equal; NaN on the diagonal and where there was no time.

    compute_flops: [ranks] of a small fp32 matrix product, all ranks at once. grouping: None if pairs are missing.
    """

    latency_s: np.ndarray
    gbps: np.ndarray
    compute_flops: np.ndarray
    samples: tuple[Sample, ...]
    grouping: Grouping | None
    notes: tuple[str, ...]


def measure_pairs(
    device: torch.device, *, large_bytes: int, repeats: int = 10, dtype: str = "fp32", deadline: float | None = None
) -> PairResult:
    """Probe all pairs of ranks of the default process group, each of which must call this.

    A trip takes latency + bytes / bandwidth, which the two sizes tell apart. deadline: of rank 0's time.monotonic().
    """
    world, me = dist.get_world_size(), dist.get_rank()
    control = Control(device)
    mine: Trips = {}
    rounds = pair_rounds(world, together=world > ALONE)
    for pairs in rounds:
        if control.left_s(deadline) <= 0:
            break
        pair = next((pair for pair in pairs if me in pair), None)
        for size_bytes in (SMALL_BYTES, large_bytes):
            if pair is not None:
                size, times_s = _trips(pair, me, size_bytes, repeats, dtype, device)
                if me == pair[0]:
                    mine[*pair, size] = times_s
        control.barrier()
    host = socket.gethostname()
    everyone: list[tuple[Trips, str, float]] = [(mine, host, 0.0)] * world
    control.barrier()
    dist.all_gather_object(everyone, (mine, host, _compute_flops(device)))
    return _result(everyone, dtype)


def pair_rounds(world: int, together: bool) -> list[list[tuple[int, int]]]:
    """All pairs, each once: one at a time, or in rounds of disjoint pairs (the circle method of tournaments)."""
    if not together:
        return [[(a, b)] for a in range(world) for b in range(a + 1, world)]
    seats = list(range(world + world % 2))  # an odd one out sits opposite a rank that does not exist
    rounds = []
    for _ in range(len(seats) - 1):
        opposite = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        rounds.append([(min(pair), max(pair)) for pair in opposite if max(pair) < world])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _trips(
    pair: tuple[int, int], me: int, size_bytes: int, repeats: int, dtype: str, device: torch.device
) -> tuple[int, list[float]]:
    """The true size, and seconds of each trip. Needs no barrier: the second rank waits for the next message."""
    exchange = build("send_recv", Place(None, pair, pair.index(me)), size_bytes, dtype, device)
    times_s = []
    for number in range(2 + repeats):
        begin = time.perf_counter()
        exchange.start()()
        synchronize(device)
        if number >= 2:  # the first two warm up
            times_s.append((time.perf_counter() - begin) / exchange.trips)
    return exchange.bytes, times_s


def _compute_flops(device: torch.device) -> float:
    """The best of a few products: what a device can do, little disturbed by what else happens."""
    n = 256 if device.type == "cpu" else 4096
    a = torch.ones(n, n, device=device)
    out = torch.empty_like(a)
    times_s = []
    for _ in range(7):
        begin = time.perf_counter()
        torch.mm(a, a, out=out)
        synchronize(device)
        times_s.append(time.perf_counter() - begin)
    return 2 * n**3 / min(times_s)


def _result(everyone: list[tuple[Trips, str, float]], dtype: str) -> PairResult:
    world = len(everyone)
    latency_s, gbps = np.full((world, world), np.nan), np.full((world, world), np.nan)
    samples = []
    hosts = [host for _, host, _ in everyone]
    for trips, _, _ in everyone:
        for (a, b, size), times_s in sorted(trips.items()):
            nodes = len({hosts[a], hosts[b]})
            samples.append(_sample(f"{a}-{b}", size, times_s, nodes, dtype, world))
        for a, b in {(a, b) for a, b, _ in trips}:
            (small, small_s), (large, large_s) = sorted(
                (size, float(np.median(times_s))) for (x, y, size), times_s in trips.items() if (x, y) == (a, b)
            )
            latency_s[a, b] = latency_s[b, a] = small_s
            gbps[a, b] = gbps[b, a] = pair_gbps(small, small_s, large, large_s)
    compute = np.array([flops for *_, flops in everyone])
    pairs = world * (world - 1) // 2
    probed = int(np.isfinite(gbps).sum()) // 2
    if probed < pairs:
        return PairResult(
            latency_s, gbps, compute, tuple(samples), None, (f"{probed} of {pairs} pairs of ranks fit into the time",)
        )
    return PairResult(latency_s, gbps, compute, tuple(samples), group_devices(gbps, compute), ())


def pair_gbps(small_bytes: int, small_s: float, large_bytes: int, large_s: float) -> float:
    """10⁹ bytes per second of a link, from the times of a minimal and of a large message."""
    if large_s <= small_s:  # noise: the large one's whole time, latency included, is a lower bound
        return large_bytes / large_s / 1e9
    return (large_bytes - small_bytes) / (large_s - small_s) / 1e9


def _sample(pair: str, size_bytes: int, times_s: list[float], nodes: int, dtype: str, world: int) -> Sample:
    low, median, high = np.quantile(times_s, (0.1, 0.5, 0.9)).tolist()
    return Sample(
        op="send_recv",
        case={
            "bytes": size_bytes,
            "ranks": 2,
            "nodes": nodes,
            "dtype": dtype,
            "world": world,
            "groups": "one" if world <= ALONE else "all",
            "pair": pair,
        },
        median_s=median,
        low_s=low,
        high_s=high,
        repeats=len(times_s),
        noisy=(high - low) / median > SPREAD_LIMIT,
        bytes_moved=size_bytes,
    )
