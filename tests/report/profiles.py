"""Machine profiles made by formulas: every operation, with known start-up times, bandwidths and peaks."""

from collections.abc import Iterator
from functools import cache

from moestro.hardware.profile import Machine, MachineProfile, Sample, Value
from moestro.measure.constants import with_curves
from moestro.measure.curves import Curves

PEAK_FLOPS = {"fp32": 120e9, "bf16": 60e9}
MEMORY_BYTES_PER_S, CACHE_BYTES_PER_S, CACHE_BYTES = 16e9, 48e9, 2**20
ALPHA_S, LINK_BYTES_PER_S = 200e-6, 1e9


def sample(
    op: str, median_s: float, flops: float | None = None, moved: float | None = None, spread: float = 0.1, **case: Value
) -> Sample:
    return Sample(
        op=op,
        case=case,
        median_s=median_s,
        low_s=median_s * (1 - spread / 2),
        high_s=median_s * (1 + spread / 2),
        repeats=30,
        noisy=spread > 0.25,
        flops=flops,
        bytes_moved=moved,
    )


def product(m: int, n: int, k: int, dtype: str = "fp32", op: str = "gemm", **case: Value) -> Sample:
    """Odd widths run at 60 %, multiples of four at 80 %, of sixteen at full speed; 5 µs come on top."""
    flops = 2.0 * m * n * k * int(case.get("groups", 1))
    share = min(1.0 if width % 16 == 0 else 0.8 if width % 4 == 0 else 0.6 for width in (n, k))
    return sample(op, 5e-6 + flops / (share * PEAK_FLOPS[dtype]), flops, m=m, n=n, k=k, dtype=dtype, **case)


def products() -> Iterator[Sample]:
    for dtype in PEAK_FLOPS:
        yield from (product(2**e, 2**e, 2**e, dtype) for e in range(6, 12))
    for offset in (-64, -16, -8, -4, -2, -1, 1, 2, 4, 8, 16, 64):
        yield product(512, 512 + offset, 512)
        yield product(512, 512, 512 + offset)
    yield from (product(256, hidden, hidden) for hidden in range(104, 1025, 40))
    yield from (product(128, vocab, 128) for vocab in (8191, 8192, 32000, 50257, 50304, 50260))


def memory() -> Iterator[Sample]:
    for op, arrays in (("copy", 2), ("triad", 3)):
        for power in range(10, 27, 2):
            rate = CACHE_BYTES_PER_S if 2**power <= CACHE_BYTES else MEMORY_BYTES_PER_S
            moved = arrays * 2.0**power
            yield sample(op, 1e-7 + moved / rate, moved=moved, bytes=2**power, dtype="fp32")


def attention() -> Iterator[Sample]:
    for phase, factor in (("fwd", 1.0), ("bwd", 2.5)):
        for seq in (128, 256, 512, 1024, 2048):
            flops = factor * 2 * 8 * seq * seq * 64
            case = {"batch": 1, "seq": seq, "heads": 8, "kv_heads": 2, "head_dim": 64}
            yield sample("attention", 2e-5 + flops / 50e9, flops, dtype="fp32", causal=1, phase=phase, **case)


def collectives(worlds: tuple[int, ...] = (2, 4)) -> Iterator[Sample]:
    factors = {"all_reduce": lambda n: 2 * (n - 1) / n, "all_gather": lambda n: (n - 1) / n}
    for op, factor in factors.items():
        for ranks in worlds:
            for power in range(10, 27, 2):
                seconds = ALPHA_S + 2.0**power * factor(ranks) / LINK_BYTES_PER_S
                spread = 0.6 if power == 12 else 0.1
                yield sample(
                    op, seconds, bytes=2**power, ranks=ranks, nodes=1, dtype="fp32", groups="one", spread=spread
                )


def pairs(ranks: int = 4) -> Iterator[Sample]:
    """Two islands: links inside run ten times as fast as those between."""
    for a in range(ranks):
        for b in range(a + 1, ranks):
            rate = 1e9 if a // 2 == b // 2 else 1e8
            for size in (8, 2**22):
                yield sample(
                    "send_recv", 2e-5 + size / rate, bytes=size, ranks=2, nodes=1, dtype="fp32", pair=f"{a}-{b}"
                )


def host() -> Iterator[Sample]:
    yield sample("host_launch", 2e-6, what="add")
    yield sample("host_launch", 2e-8, what="python call")
    yield sample("host_t1", 3e-6, what="forward")
    yield sample("host_t1", 4e-6, what="mean")


def storage() -> Iterator[Sample]:
    yield sample("storage_write", 0.5, bytes=2**26, block_bytes=2**20)
    yield sample("storage_read", 0.25, bytes=2**26, block_bytes=2**20)
    yield sample("storage_random_read", 1e-4, bytes=2**26, block_bytes=4096, depth=1)
    yield sample("storage_random_read", 2e-5, bytes=2**26, block_bytes=4096, depth=16)
    yield sample("storage_scatter", 0.4, moved=1.25 * 2**26, bytes=2**26, block_bytes=16384, advice="random")


def machine_profile(samples: list[Sample] | None = None, **changes: object) -> MachineProfile:
    """All of the above, or the given samples, of a machine with four cores."""
    if samples is None:
        samples = [*products(), *memory(), *attention(), *host(), *storage(), *collectives(), *pairs()]
    machine = Machine(
        device_name="Test CPU, 2 threads", device_type="cpu", hostname="box", cpu="Test CPU", cores=4, threads=2,
        memory_bytes=16e9, load_average=0.1, versions={"torch": "2.11.0"},
    )  # fmt: skip
    fields = {"name": "box-1", "created_at": "2026-03-04T05:06:07+00:00", "seconds": 41.0, "mode": "quick",
              "machine": machine, "samples": tuple(samples), "notes": ("elementwise: no room",)}  # fmt: skip
    return MachineProfile.model_validate({**fields, **changes})


@cache
def complete_profile() -> tuple[MachineProfile, Curves]:
    """The profile of all samples, with its curves; fitting them takes some seconds."""
    return with_curves(machine_profile())
