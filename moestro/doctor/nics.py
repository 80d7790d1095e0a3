"""Tier 1, the network: every NIC that the node should have is there, up, and as fast as its neighbours."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moestro.doctor.checks import Check, failed, passed, skipped, warned
from moestro.hardware.topology import Nic, find_nics

UP = ("up", "LinkUp", "ACTIVE")  # last words of a NIC that was up when a profile was measured


@dataclass(frozen=True)
class Port:
    """A network port. rdma: it is listed as an RDMA device. problem: empty when it carries traffic."""

    name: str
    rdma: bool
    gbit: float | None
    problem: str


def ports(root: Path) -> list[Port]:
    """The RDMA ports of the node, and its other physical network interfaces."""
    return [_port(root, nic) for nic in find_nics(root) if nic.kind != "virtual"]


def _port(root: Path, nic: Nic) -> Port:
    rdma = nic.kind == "infiniband"
    problem = "" if nic.is_up or (not rdma and nic.state == "unknown") else f"is {nic.state}"
    if rdma and not problem:
        device, _, number = nic.name.partition("/")
        gids = [_text(path) for path in (root / f"sys/class/infiniband/{device}/ports/{number}/gids").glob("*")]
        if gids and not any(gid.replace(":", "").strip("0") for gid in gids):
            problem = "has no address (GID)"
    return Port(nic.name, rdma, nic.gbit, problem)


def expected_names(nics: Sequence[str]) -> list[str]:
    """Of a profile's NICs ("mlx5_0/1 infiniband, 400 Gbit/s, ACTIVE, LinkUp", or bare names), those that were up."""
    return [text.split()[0] for text in nics if "," not in text or text.rpartition(", ")[2] in UP]


def nics_check(found: Sequence[Port], expected: int | None, names: Sequence[str] = ()) -> Check:
    """Roll-call of the NICs.

    expected: how many should be up, and names: which (of a reference profile). Without either, a port that is down is
    only worth a warning: it may not be cabled on purpose. RDMA ports are counted where there are any, else the others.
    """
    rdma = [port for port in found if port.rdma]
    counted = rdma or list(found)
    up = [port for port in counted if not port.problem]
    down = [f"{port.name} {port.problem}" for port in counted if port.problem]
    known = {port.name: port.problem for port in found}
    absent = [f"{name} {known.get(name, 'is missing')}" for name in names if known.get(name, "?")]
    kind = "RDMA port" if rdma else "network interface"
    figures = {"value": len(up), "limit": expected, "unit": "ports"}
    mend = "see to the cable, the switch port and the driver of each (ibstat, ip link, lspci)"
    if expected is not None and len(up) < expected:
        which = "; ".join(dict.fromkeys(absent + down))
        return failed("nics", f"{len(up)} of {expected} NICs up{': ' + which if which else ''}", mend, **figures)
    if absent:
        return failed("nics", "; ".join(absent), mend, **figures)
    if not counted:
        return skipped("nics", "there are none, and none are expected")
    if down:
        return warned("nics", f"{len(up)} of {len(counted)} {kind}s up: {'; '.join(down)}", mend, **figures)
    best = max((port.gbit or 0 for port in up), default=0)
    if slow := [f"{port.name} runs at {port.gbit:g} Gbit/s" for port in up if rdma and port.gbit and port.gbit < best]:
        return warned("nics", f"{'; '.join(slow)}, others at {best:g}", mend, **figures)
    speed = f", {best:g} Gbit/s each" if best and all(port.gbit == best for port in up) else ""
    several = "s" if len(up) > 1 else ""
    return passed("nics", f"{len(up)} {kind}{several} up{speed}: {', '.join(port.name for port in up)}", **figures)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
