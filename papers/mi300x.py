"""AMD MI300X GPU Performance Analysis (Ambati, Diep; arXiv 2510.27583).

The claim: MI300X has more memory and nominal compute than H100, but large models served on it realise less of both;
the gaps are in kernels, clock and collectives.

What is reproduced here, by arithmetic on the catalog and its curves (there is no MI300X here to measure):

* computed: the shares of peak from other public measurements than the paper's, what they say of a step that compute
  or memory binds, which of the published bandwidths are ceilings, and what of the serving throughput stays unexplained;
* simulated: which groups of a node a tensor-parallel job should use, from the curves of collectives.

What is not: its own measurements, which were read second-hand (notes of readers that agree), and where in the software
the loss arises. Nothing here is fitted to hide it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel

from moestro.hardware.catalog import cluster_ids, device_ids, load_cluster, load_device
from moestro.hardware.compare import compute_bound_ratio, memory_bound_ratio
from moestro.hardware.devices import Device
from moestro.hardware.figures import Figure
from papers.mi300x_links import (
    ALL_REDUCE_GBPS,
    MEASURED_GBPS,
    NEAR,
    SECOND_HAND,
    check_ceilings,
    check_groups,
    check_not_measured,
    check_repository,
    group_times,
)
from papers.result import Check, PaperResult, Progress, verdict_of


@dataclass(frozen=True)
class Shares:
    """Of the nominal peak."""

    matrix: float
    memory: float
    links: float

    def __str__(self) -> str:
        return f"{self.matrix:.0%} / {self.memory:.0%} / {self.links:.0%}"


PUBLISHED = {"mi300x": Shares(0.45, 0.81, 0.70), "h100-sxm": Shares(0.90, 0.90, 0.85)}
SERVING = (0.37, 0.66)  # of the throughput of H100 and H200


def run(progress: Progress) -> PaperResult:
    """Everything; 5 s."""
    groups = {name: group_times(load_device(name)) for name in PUBLISHED}
    progress(1, 2, "curves of collectives")
    checks = (
        check_order(),
        check_own_shares(),
        check_bound_steps(),
        check_unexplained(),
        check_served(),
        check_ceilings(),
        check_not_measured(),
        check_repository(),
        check_groups(groups),
        check_catalog(),
    )
    progress(2, 2, "checks")
    figures = {f"all-reduce ns/KiB {d} {n} ranks": round(t, 3) for d, times in groups.items() for n, t in times.items()}
    return PaperResult(checks, figures)


# Shares of peak, from other sources than the paper.


def share_of(figure: Figure) -> float:
    """achieved / nominal. Raises ValueError where the achieved figure is the paper's own."""
    if figure.nominal is None or figure.achieved is None or "2510.27583" in figure.achieved_source:
        raise ValueError(f"no measurement besides the paper's: {figure}")
    return figure.achieved / figure.nominal


def other_shares(device_id: str) -> Shares:
    device = load_device(device_id)
    links = share_of(device.links[0].gbps)
    if device_id == "mi300x":  # the catalog's figure is of single links; this is a collective
        links = MEASURED_GBPS[8] / ALL_REDUCE_GBPS[8]
    return Shares(share_of(device.peak_tflops["bf16"]), share_of(device.memory.gbps), links)


def check_order() -> Check:
    ours = {name: other_shares(name) for name in PUBLISHED}
    amd, nvidia = ours["mi300x"], ours["h100-sxm"]
    lower = [amd.matrix < nvidia.matrix, amd.memory < nvidia.memory, amd.links < nvidia.links]
    return Check(
        claim="MI300X realises less of its matrix rate, memory bandwidth and links than H100 of its own",
        published=f"{PUBLISHED['mi300x']} of peak against 90 to 93 / 90 / 85 % ({SECOND_HAND})",
        ours=f"{amd} against {nvidia}",
        how="computed",
        verdict=verdict_of(lower),
        note="From other public measurements: best bf16 product of a search over shapes, memory of the ZAYA1 report "
        "(second-hand), all-reduce over 8 MI300X and over 4 H100.",
    )


def check_own_shares() -> Check:
    ours, theirs = other_shares("mi300x"), PUBLISHED["mi300x"]
    pairs = [(ours.matrix, theirs.matrix), (ours.memory, theirs.memory), (ours.links, theirs.links)]
    near = [abs(a / b - 1) <= NEAR for a, b in pairs]
    return Check(
        claim="The shares that MI300X realises are the paper's, within a tenth, in other hands too",
        published=f"{theirs} ({SECOND_HAND})",
        ours=f"{ours}; {pairs[0][0] / pairs[0][1] - 1:+.1%} / {pairs[1][0] / pairs[1][1] - 1:+.1%} / "
        f"{pairs[2][0] / pairs[2][1] - 1:+.1%}",
        how="computed",
        verdict=verdict_of(near),
        note="The matrix rate depends on the software: 450 TFLOP/s (34 %) with ROCm 6.1, 668 with 6.3 and tuned "
        "products. No single share belongs to the device.",
    )


# What the shares say of a step.


def with_shares(device_id: str, shares: Shares) -> Device:
    """The device with the achieved rates that these shares give."""
    device = load_device(device_id)
    matrix, memory = device.peak_tflops["bf16"], device.memory.gbps
    return device.model_copy(
        update={
            "peak_tflops": {"bf16": _achieving(matrix, shares.matrix)},
            "memory": device.memory.model_copy(update={"gbps": _achieving(memory, shares.memory)}),
        }
    )


def _achieving(figure: Figure, share: float) -> Figure:
    assert figure.nominal is not None
    return figure.model_copy(update={"achieved": figure.nominal * share, "achieved_source": "a share of the nominal"})


def step_ratios() -> tuple[float, float]:
    """Speed of MI300X over H100 where compute binds, and where memory does, by the published shares."""
    amd, nvidia = (with_shares(name, shares) for name, shares in PUBLISHED.items())
    compute, memory = compute_bound_ratio(amd, nvidia), memory_bound_ratio(amd, nvidia)
    assert compute is not None
    assert memory is not None
    return compute, memory


def check_bound_steps() -> Check:
    compute, memory = step_ratios()
    amd, nvidia = (load_device(name) for name in PUBLISHED)
    also = compute_bound_ratio(amd, nvidia), memory_bound_ratio(amd, nvidia)
    assert also[0] is not None
    assert also[1] is not None
    right = [compute < 1 < memory, also[0] < 1 < also[1], abs(compute - 0.66) < 0.005, abs(memory - 1.42) < 0.005]
    return Check(
        claim="A step that compute binds is slower on MI300X than on H100; one that memory binds (decoding) is faster",
        published="0.66 times and 1.42 times (the project's arithmetic on the published shares)",
        ours=f"{compute:.2f} and {memory:.2f} times; {also[0]:.2f} and {also[1]:.2f} with the catalog's measurements",
        how="computed",
        verdict=verdict_of(right),
        note="Nominal rates: 1.32 times the bf16 compute of H100, 1.58 times its memory bandwidth.",
    )


def check_unexplained() -> Check:
    compute, memory = step_ratios()
    low, high = SERVING
    covered = [round(compute, 2) <= bound <= round(memory, 2) for bound in SERVING]
    return Check(
        claim="The shares of peak explain the published serving throughput",
        published=f"{low:.0%} to {high:.0%} of H100 and H200 ({SECOND_HAND})",
        ours=f"between {compute:.0%}, if compute binds all the time, and {memory:.0%}, if memory does",
        how="computed",
        verdict=verdict_of(covered),
        note="Decoding is bound by memory, so MI300X should serve faster than H100. It does not: "
        f"{memory / high:.1f} to {memory / low:.1f} times slower than its memory allows, {compute / high:.1f} to "
        f"{compute / low:.1f} times than its products. This is an unexplained loss in software; Moestro adds no factor "
        "for it, and its predictions for this device are too good until it is measured.",
    )


# Llama 3.1 405B in fp8 on 8 MI300X (vLLM, 128 tokens in and out; OCI's page): batch → tokens/s; and two latencies, s.
SERVED = {1: 36, 2: 71, 4: 137, 8: 258, 16: 468, 32: 798, 64: 1184, 128: 1585, 256: 1846}
LATENCY_S = {1: 3.53, 256: 17.75}
WEIGHTS, NODE, TOKENS_OUT = 405e9, 8, 128


def roofline_tokens_per_s(device: Device, batch: int) -> float:
    """Of decoding: all weights are read for a step of `batch` tokens, two operations a weight and token."""
    flops, gbps = device.peak_flops("fp8", achieved=True), device.memory.gbps.best
    assert flops is not None
    assert gbps is not None
    return batch / max(WEIGHTS / (NODE * gbps * 1e9), 2 * WEIGHTS * batch / (NODE * flops))


def check_served() -> Check:
    device = load_device("mi300x")
    shares = {batch: rate / roofline_tokens_per_s(device, batch) for batch, rate in SERVED.items()}
    closes = [abs(TOKENS_OUT * batch / SERVED[batch] / seconds - 1) <= 0.01 for batch, seconds in LATENCY_S.items()]
    return Check(
        claim="An independent serving curve stays below what memory and products of 8 MI300X allow, by more than twice",
        published=", ".join(f"{rate}" for rate in SERVED.values()) + " tokens/s at batch 1 to 256 (vendor's page)",
        ours=f"{shares[1]:.0%} of the roofline at batch 1, {shares[16]:.0%} at 16, {shares[256]:.0%} at 256",
        how="computed",
        verdict=verdict_of([max(shares.values()) <= 1, max(shares.values()) < 0.5, *closes]),
        note="Llama 3.1 405B in fp8, achieved rates of the catalog. Batch, rate and latency of the source agree. "
        "Attention, collectives and the prompt's own pass are in its times and not in the roofline.",
    )


# The catalog.


def figures_in(value: object) -> Iterator[Figure]:
    """Every figure of a device or cluster, however deep."""
    if isinstance(value, Figure):
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from figures_in(getattr(value, name))
    elif isinstance(value, dict | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from figures_in(item)


def check_catalog() -> Check:
    entries = [*map(load_device, device_ids()), *map(load_cluster, cluster_ids())]
    found = [figure for entry in entries for figure in figures_in(entry)]
    both = [(f.achieved, f.nominal) for f in found if f.achieved is not None and f.nominal is not None]
    above = sum(achieved > nominal for achieved, nominal in both)
    try:
        Figure(nominal=448, confidence="read", achieved=3468, achieved_source="a repository")
        refused = False
    except ValueError:
        refused = True
    return Check(
        claim="Achieved is at most nominal, everywhere in the catalog",
        published="a condition on profiles of machines",
        ours=f"{above} of {len(both)} pairs are above; {len(entries)} devices and clusters",
        how="computed",
        verdict=verdict_of([above == 0, len(both) > 0, refused]),
        note=f"A figure of 3,468 GB/s achieved on 448 is {'refused' if refused else 'accepted'} on loading.",
    )
