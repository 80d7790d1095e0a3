"""Tier 1, versions: what this node runs, against a reference profile and against the other nodes."""

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import moestro
from moestro.doctor.checks import Check, failed, passed, skipped, warned
from moestro.hardware.topology import driver_version

# Nodes that differ in one of these may not understand each other, or compute differently; the rest is worth a warning.
BINDING = ("torch", "cuda", "rocm", "nccl", "driver")


def host_versions(root: Path, of_torch: Mapping[str, str]) -> dict[str, str]:
    """Versions of this node: those that torch told, and those of the kernel, Python and the device driver."""
    versions = {
        "moestro": moestro.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        **of_torch,
    }
    if driver := driver_version(root):
        versions["driver"] = driver
    return versions


def versions_check(here: Mapping[str, str], reference: Mapping[str, str] | None, what: str = "the profile") -> Check:
    """Whether this node runs what `reference` (None: nothing to compare with) ran, where both say so."""
    told = ", ".join(f"{name} {here[name]}" for name in (*BINDING, "python") if name in here)
    if reference is None:
        return passed("versions", told)
    shared = sorted(here.keys() & reference.keys())
    if not shared:
        return skipped("versions", f"{told}; {what} names no versions")
    differing = [name for name in shared if here[name] != reference[name]]
    if not differing:
        return passed("versions", f"as in {what}: {told}")
    reason = "; ".join(f"{name} {here[name]}, {reference[name]} in {what}" for name in differing)
    if any(name in BINDING for name in differing):
        return failed("versions", reason, "install the same versions on all nodes, or measure a new profile")
    return warned("versions", reason, "keep all nodes alike")


def usual_versions(nodes: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Of several nodes, the version of each thing that most of them have; nothing where no version is on most."""
    usual = {}
    for name in dict.fromkeys(name for node in nodes for name in node):
        version, count = Counter(node.get(name, "") for node in nodes).most_common(1)[0]
        if version and count > len(nodes) / 2:
            usual[name] = version
    return usual
