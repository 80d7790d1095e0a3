"""What a step is predicted for: devices of the catalog, a cluster, or a measured machine."""

from collections import defaultdict
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median

from moestro.config.plan import Workload
from moestro.errors import MoestroError, nearest
from moestro.hardware.catalog import cluster_ids, device_ids, load_cluster, load_device
from moestro.hardware.catalog.reading import read_tree
from moestro.hardware.curves.hierarchical import Fabric, fabric_of
from moestro.hardware.curves.optical import OpticalTier
from moestro.hardware.curves.transfer import TransferCurve, fit_transfer
from moestro.hardware.devices import Cluster, Device, Memory, Nic, Node, Pool, Wan
from moestro.hardware.figures import Figure
from moestro.hardware.profile import MachineProfile, Sample
from moestro.predict.cache import known_curves
from moestro.predict.constants import Constants, generation, load_calibration
from moestro.predict.costs import KERNEL_CLASSES
from moestro.predict.curves import DeviceCurves, profile_curves
from moestro.predict.pools import Line, Part
from moestro.predict.processes import CALLS, in_steps, of_processes
from moestro.predict.recovery import Storage
from moestro.predict.step import Place

# A profile holds kernels as they are launched, on an idle machine: nothing is multiplied on top of it.
AS_MEASURED = Constants(
    gemm=1, gemm_low=1, grouped=1, grouped_low=1, attention=1, memory=1, optimizer=1, inside=1, between=1,
    launch_s=0, collective_host_s=0, step_s=0, hidden=0, contention=0,
)  # fmt: skip

ELEMENTWISE = ("rmsnorm", "rmsnorm_backward", "residual_norm", "swiglu", "rope", "gather", "scatter", "router")


@dataclass(frozen=True)
class Target:
    """devices: how many there are (None: as many as the plan asks for). profile: in words, for the output.

    cores, threads: of a measured CPU, whose processes share the cores and whose host computes; else None. threads: of
    each process, as the curves were measured.
    constants: None: of the calibration.
    """

    place: Place
    curves: DeviceCurves
    devices: int | None
    profile: str
    cores: int | None = None
    threads: int | None = None
    memory_bytes: float | None = None  # of one device; None: the catalog's
    peak_flops: float | None = None  # measured; None: the catalog's nominal peak
    constants: Constants | None = None
    fabric: Fabric | None = None  # of a cluster with several nodes
    optical: OpticalTier | None = None
    parts: tuple[Part, ...] = ()  # pools of unlike devices or several regions; place and curves are the first one's
    lines: tuple[Line, ...] = ()  # between regions
    storage: Storage | None = None  # for checkpoints; of a cluster its storage network, however fast what is behind
    notes: tuple[str, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether a profile prices it, and not the shipped records."""
        return self.memory_bytes is not None or self.cores is not None

    @property
    def host_computes(self) -> bool:
        return self.cores is not None

    def turns(self, ranks: int) -> float:
        """Processes of a CPU that share a core; 1 on devices, which have no others to wait for."""
        return max(1.0, ranks / self.cores) if self.cores else 1.0

    def constants_for(self, workload: Workload, ranks: int) -> Constants:
        """Of a training step with `ranks` processes.

        Those of one CPU share its cores: each kernel is slower by the threads that it lacks, and the host's part where
        there are more processes than cores.
        """
        if self.constants is None:
            return load_calibration().of(self.place.device.id, generation(workload))
        if self.cores is None:
            return self.constants
        lacks = max(1.0, ranks * (self.threads or 1) / self.cores)
        slower = {name: lacks * getattr(self.constants, name) for name in KERNEL_CLASSES}
        launch_s = self.constants.launch_s * self.turns(ranks)
        return self.constants.model_copy(update={**slower, "launch_s": launch_s})


def target_of(name: str, devices: int | None = None) -> Target:
    """A device or a cluster of the catalog, or a TOML file of one.

    Raises:
        MoestroError: no such thing; more devices than the cluster has; nodes of unlike devices; missing figures.
    """
    own_file = name.endswith(".toml")
    if name.lower() in cluster_ids() or (own_file and "pools" in read_tree(Path(name))):
        return target_of_cluster(load_cluster(name), devices)
    try:
        device = load_device(name)
    except MoestroError as error:
        if own_file:
            raise
        hint = nearest(name.lower(), (*device_ids(), *cluster_ids()))
        raise MoestroError(f"no device or cluster '{name}'.{hint} `moestro hardware list` shows them all.") from error
    count = device.devices_per_node or 1
    note = () if device.devices_per_node else (f"nodes of one device: the catalog does not say more of {device.id}",)
    return Target(Place.of(device, count), known_curves(device), devices, f"{device.id}, public records", notes=note)


def target_of_cluster(cluster: Cluster, devices: int | None = None) -> Target:
    """Raises MoestroError: as target_of."""
    if devices is not None and devices > cluster.num_devices:
        raise MoestroError(f"{cluster.id} has {cluster.num_devices} devices, not {devices}")
    kinds = {device_id for pool in cluster.pools for device_id in pool.node.devices}
    several = len(kinds) > 1 or len({pool.region for pool in cluster.pools}) > 1
    parts = tuple(_part(cluster, pool) for pool in (cluster.pools if several else cluster.pools[:1]))
    first = parts[0]
    notes = [f"{cluster.id}: every node taken as one of the first pool"] if cluster.pools[1:] and not several else []
    if several:
        notes.append("no public training runs mix devices or regions: constants are each device's own")
    return Target(
        first.place,
        first.curves,
        devices or cluster.num_devices,
        f"{cluster.id} ({', '.join(dict.fromkeys(part.place.device.id for part in parts))}), public records",
        fabric=first.fabric,
        optical=_optical(cluster),
        parts=parts if several else (),
        lines=tuple(_line(cluster, wan) for wan in cluster.wan) if several else (),
        storage=_storage(cluster.pools[0], first.place.device),
        notes=tuple(notes),
    )


def _part(cluster: Cluster, pool: Pool) -> Part:
    node = pool.node
    if len(node.devices) > 1:
        raise MoestroError(
            f"{cluster.id} has nodes that mix {', '.join(sorted(node.devices))}; a step is predicted over pools of "
            "equal nodes: make it several [[pools]]"
        )
    ((name, per_node),) = node.devices.items()
    if cluster.optical is not None:  # all but the exchanges of experts have the other ports
        node = node.model_copy(update={"nics": cluster.optical.eps_ports})
    device = _with_nics(load_device(name), node, per_node)
    fabric = _fabric(cluster.model_copy(update={"pools": (pool.model_copy(update={"node": node}),)}))
    place = Place.of(device, per_node)
    return Part(name, place, known_curves(device), pool.nodes * per_node, pool.region, fabric)


def _line(cluster: Cluster, wan: Wan) -> Line:
    gbps, latency_ms = wan.gbps.best, wan.latency_ms.best
    if gbps is None or latency_ms is None:
        raise MoestroError(
            f"{cluster.id}: [[wan]] needs gbps and latency_ms; the way between regions has no price else"
        )
    return Line(frozenset(wan.regions), gbps * 1e9, latency_ms * 1e-3)


def _fabric(cluster: Cluster) -> Fabric | None:
    """Of the first pool. None: one node, or nothing is known of what joins several."""
    if cluster.pools[0].nodes == 1:
        return None
    try:
        fabric = fabric_of(cluster)
    except MoestroError:
        return None
    if fabric.nics < fabric.node_size:  # in training all devices of a node send at once, each over its share
        share = fabric.nic_bytes_per_s * fabric.nics / fabric.node_size
        fabric = replace(fabric, nics=fabric.node_size, nic_bytes_per_s=share)
    return fabric if fabric.nic_bytes_per_s else None


def _optical(cluster: Cluster) -> OpticalTier | None:
    """Raises MoestroError where the file leaves out a rate or the delay."""
    tier = cluster.optical
    if tier is None:
        return None
    gbit, delay_ms = tier.port_gbit.best, tier.delay_ms.best
    if gbit is None or delay_ms is None:
        raise MoestroError(f"{cluster.id}: [optical] needs port_gbit and delay_ms; circuits cannot be priced without")
    return OpticalTier(tier.region_size, tier.ocs_ports, tier.eps_ports, gbit / 8 * 1e9, delay_ms * 1e-3)


def _storage(pool: Pool, device: Device) -> Storage | None:
    gbps = pool.node.storage_gbps.best
    if gbps is None:
        return None
    return Storage(inf, gbps * 1e9 / pool.node.devices[device.id], "the cluster's storage network")


def _with_nics(device: Device, node: Node, per_node: int) -> Device:
    """The device with the cluster's own NICs, where it names them, and the link that joins its nodes first."""
    changes: dict[str, object] = {}
    rate = node.nic_gbit.best
    if node.nics and rate:
        each = Figure(nominal=node.nics * rate / per_node, source=node.nic_gbit.source, confidence="derived")
        if each.nominal != device.nic.per_device_gbit.nominal:
            changes["nic"] = Nic(**{**dict(device.nic), "per_device_gbit": each, "rails": node.rails})
    if node.link and device.links and device.links[0].name != node.link:
        changes["links"] = tuple(sorted(device.links, key=lambda link: link.name != node.link))
    return device.model_copy(update=changes) if changes else device


def target_of_profile(profile: MachineProfile, devices: int | None = None) -> Target:
    """A measured machine. Its devices count as one node."""
    machine = profile.machine
    cpu = machine.device_type == "cpu"
    known = load_device(machine.device_id) if machine.device_id in device_ids() else None
    device = known or Device(
        id=machine.device_id or "measured", name=machine.device_name, vendor="unknown", kind="cpu" if cpu else "gpu",
        year=2000, memory=_memory(profile),
    )  # fmt: skip
    call_s, note = _call_s(profile)
    threads = machine.threads or 1
    if cpu:
        profile, threads = of_processes(profile, devices or 1)
    curves = profile_curves(profile, device)
    curves.copy = _memory_curve(profile) or curves.copy
    if known is not None and not cpu and load_calibration().devices.get(known.id):
        constants = None  # what training adds to such kernels is known
    else:
        constants = AS_MEASURED.model_copy(
            update={
                "launch_s": call_s * (CALLS if cpu else 1),
                "optimizer": _over_memory(profile, curves.copy, "adamw"),
            }
        )
        if cpu:
            constants = in_steps(profile, devices or 1, curves, constants)
    disk = profile.constants.get("storage_write_mbps")
    notes = [note] if note else []
    if machine.load_average is not None and machine.load_average > 0.5:
        load = f"load {machine.load_average:.1f}"
        notes.append(f"the machine was busy while it was measured ({load}): the profile is suspect")
    return Target(
        place=Place(device, 1_000_000 if cpu else max(1, machine.num_devices)),  # processes of one CPU: one node
        curves=curves,
        devices=devices,
        profile=f"{profile.name} ({machine.device_name}), measured {profile.created_at[:10]}",
        cores=(machine.cores or 1) if cpu else None,
        threads=threads if cpu else None,
        memory_bytes=machine.memory_bytes,
        peak_flops=None if known and not cpu else _best_rate(profile),
        constants=constants,
        storage=Storage(disk * 1e6, source="measured") if disk else None,
        notes=tuple(notes),
    )


def _call_s(profile: MachineProfile) -> tuple[float, str]:
    """Host time of one call: T1, between calls, and T4, a call that computes next to nothing."""
    means = [s.median_s for op in ("host_t1", "host_t4") for s in profile.of(op, what="mean")]
    if means:
        return sum(means), ""
    return 0.0, "the profile has no host section: the host's time between operations is not in the step"


def _memory(profile: MachineProfile) -> Memory:
    """Its bandwidth, for profiles with too few sizes of copies for a curve."""
    gbps = profile.constants.get("memory_gbps")
    return Memory() if gbps is None else Memory(gbps=Figure(achieved=gbps, achieved_source="the profile"))


def _memory_curve(profile: MachineProfile) -> TransferCurve | None:
    """Time over bytes moved of what training does beside products: norms, activations, gathers, of the sizes measured;
    of smaller ones that of copies. None where the profile has no such operations: then copies stand for all.
    """
    rates = defaultdict[float, list[Sample]](list)
    for sample in profile.samples:
        if sample.op in ELEMENTWISE and sample.bytes_moved and "tokens" in sample.case:
            rates[sample.number("tokens")].append(sample)
    points = []
    for some in rates.values():
        size = median(s.bytes_moved or 0.0 for s in some)
        points.append((size, size * median(s.median_s / (s.bytes_moved or 1.0) for s in some)))
    if not points:
        return None
    least = min(points)[0] / 4
    small = [(2 * s.number("bytes"), s.median_s) for s in profile.of("copy") if 2 * s.number("bytes") < least]
    sizes, seconds = zip(*sorted(small + points), strict=True)
    return fit_transfer(sizes, seconds, forms=("piecewise",))


def _over_memory(profile: MachineProfile, curve: TransferCurve | None, op: str) -> float:
    """Time of an operation over what the curve says of its bytes, the median over samples; 1 without any."""
    samples = [sample for sample in profile.samples if sample.op == op and sample.bytes_moved]
    if curve is None or not samples:
        return 1.0
    return median(s.median_s / float(curve.seconds(s.bytes_moved or 0.0)) for s in samples)


def _best_rate(profile: MachineProfile) -> float | None:
    rates = sorted(s.flops_per_s for s in profile.samples if s.op == "gemm" and s.flops_per_s)
    return median(rates[-3:]) if rates else None
