"""The sections of a measurement: what they are called, and which samples belong to which."""

from collections.abc import Collection, Iterable

from moestro.errors import MoestroError, nearest
from moestro.hardware.profile import Sample

# In the order of measuring. The first four are timed together, in rounds that go through all their cases.
COMPUTE = ("gemm", "memory", "attention", "elementwise")
SECTIONS = (*COMPUTE, "host", "storage", "collectives", "pairs")
SKIPPED = "skipped on request"  # how the note begins that names them

_GEMM = ("gemm", "batched_gemm", "grouped_gemm", "moe_experts")
_MEMORY = ("copy", "scale", "add", "triad", "dot", "read", "host_to_device", "device_to_host")
COLLECTIVES = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_uneven", "broadcast", "send_recv", "ring",
)  # fmt: skip


def section_of(sample: Sample) -> str:
    """The section that measures such a sample."""
    if sample.op in _GEMM:
        return "gemm"
    if sample.op in _MEMORY:
        return "memory"
    if sample.op == "attention":
        return "attention"
    if sample.op in COLLECTIVES:
        return "pairs" if "pair" in sample.case else "collectives"
    prefix = sample.op.split("_", 1)[0]
    return prefix if prefix in ("host", "storage") else "elementwise"


def check_skipped(names: Iterable[str]) -> Collection[str]:
    """The sections to leave out, names checked. Raises MoestroError for one that is none, or when nothing is left."""
    names = set(names)
    for name in sorted(names - set(SECTIONS)):
        raise MoestroError(f"no section '{name}' to skip.{nearest(name, SECTIONS)} Sections: {', '.join(SECTIONS)}")
    if names == set(SECTIONS):
        raise MoestroError("every section is skipped: nothing is left to measure")
    return names
