"""What a device is: peaks by dtype, memory, links, power and price, each figure with its source."""

from typing import Literal, Self, cast

from pydantic import Field, model_validator

from moestro.config.base import Section
from moestro.hardware.figures import UNKNOWN, Figure

Dtype = Literal[
    "fp64",
    "fp32",
    "tf32",
    "bf16",
    "fp16",
    "fp8",
    "mxfp8",
    "fp8_block",
    "int32",
    "int16",
    "int8",
    "fp4",
    "nvfp4",
    "int4",
]
DTYPE_BYTES: dict[str, float] = {
    "fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "mxfp8": 1, "fp8_block": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "fp4": 0.5, "nvfp4": 0.5, "int4": 0.5,
}  # fmt: skip

Kind = Literal["gpu", "superchip", "tpu", "npu", "cpu", "soc", "pim"]
Topology = Literal["switch", "mesh", "ring", "torus", "hypercube_mesh", "pcie", "host", "none"]


class Support(Section):
    """Whether a device computes in a dtype.

    native: in its matrix or vector units. emulated: in another dtype or in software, `penalty` times slower than the
    device's peak in `via`. storage: it can hold the dtype, and computes after a cast to `via`. no: refused.
    """

    how: Literal["native", "emulated", "storage", "no"]
    via: Dtype | None = None
    penalty: float | None = Field(default=None, gt=0)  # times slower than a native operation of the same count in `via`
    # The penalty of "add", "multiply" …, where operations differ.
    by_operation: dict[str, float] = Field(default_factory=dict)
    source: str = ""
    note: str = ""


class Memory(Section):
    kind: str = ""
    gb: Figure = UNKNOWN  # 10⁹ bytes
    gbps: Figure = UNKNOWN  # 10⁹ bytes per second, of one device
    unified: bool = False  # one pool for host and device: nothing to offload to, and the host's use counts against it
    banks: int | None = None  # of a memory-centric device: each computes on its own bank only
    bank_mb: float | None = None
    bank_mbps: Figure = UNKNOWN


class Link(Section):
    """How devices of one node (or of one scale-up domain) reach each other."""

    name: str
    topology: Topology
    gbps: Figure = UNKNOWN  # one direction, of one device over all its links
    peer_gbps: Figure = UNKNOWN  # one direction, between two devices
    devices: int | None = None  # in such a domain
    latency_us: Figure = UNKNOWN
    host_mediated: bool = False  # no path between devices: every exchange goes through the host


class Nic(Section):
    per_device_gbit: Figure = UNKNOWN  # Gbit/s between nodes for each device, as usually sold
    per_node: int | None = None
    rails: int | None = None
    latency_us: Figure = UNKNOWN


class Price(Section):
    usd_per_hour_low: float | None = None
    usd_per_hour_high: float | None = None
    usd_to_buy: float | None = None
    as_of: str = ""
    source: str = ""
    confidence: Literal["read", "recalled", "secondary"] | None = None

    @model_validator(mode="after")
    def _sourced(self) -> Self:
        if self.known and self.confidence is None:
            raise ValueError("a price says its confidence (read, secondary, recalled)")
        return self

    @property
    def known(self) -> bool:
        return any(v is not None for v in (self.usd_per_hour_low, self.usd_per_hour_high, self.usd_to_buy))


class Device(Section):
    """One kind of device. Unknown figures are left out of its file.

    compute_units: streaming multiprocessors, compute units, cores, DPUs: what waves of tiles are cut over.
    logical_devices: as how many devices the software shows it (two dies: 2), each with that share of every figure.
    """

    id: str = ""  # the file's name; set on loading
    name: str
    vendor: str
    kind: Kind
    year: int
    aliases: tuple[str, ...] = ()  # names that drivers and public tables use
    compute_units: Figure = UNKNOWN
    clock_mhz: Figure = UNKNOWN
    cache_mb: Figure = UNKNOWN  # last level before memory
    # Dense matrix rates; integer dtypes in 10¹² operations per second.
    peak_tflops: dict[Dtype, Figure] = Field(default_factory=dict)
    vector_tflops: dict[Dtype, Figure] = Field(default_factory=dict)
    support: dict[Dtype, Support] = Field(default_factory=dict)
    knee_gflop: Figure = UNKNOWN  # work of one product at which its rate reaches 90 % of the best
    memory: Memory = Memory()
    host_link_gbps: Figure = UNKNOWN  # to the host's memory, one direction
    links: tuple[Link, ...] = ()
    nic: Nic = Nic()
    devices_per_node: int | None = None
    logical_devices: int = Field(default=1, ge=1)
    tdp_w: Figure = UNKNOWN
    price: Price = Price()
    note: str = ""

    @model_validator(mode="after")
    def _computable(self) -> Self:
        for dtype, support in self.support.items():
            if support.how in ("emulated", "storage"):
                target = None if support.via is None else self.support.get(support.via)
                if target is None or target.how != "native":
                    raise ValueError(f"support.{dtype}: '{support.how}' names in `via` a dtype with native support")
        return self

    def peak_flops(self, dtype: str, achieved: bool = False) -> float | None:
        """FLOP/s in `dtype` (nominal, or achieved where that is known), emulation penalties included; None: unknown.

        A stored dtype runs at the rate of the dtype it is cast to; an emulated one at that rate divided by its penalty,
        and where nobody has told the penalty its rate is unknown too.
        """
        name = cast(Dtype, dtype)  # any name may be asked for; one that is no dtype has no figures
        support = self.support.get(name)
        if support is not None and support.how == "no":
            return None
        if support is not None and support.how in ("emulated", "storage"):
            if support.via is None or (support.how == "emulated" and support.penalty is None):
                return None
            base = self.peak_flops(support.via, achieved)
            return None if base is None else base / (support.penalty or 1.0)
        figure = self.peak_tflops.get(name) or self.vector_tflops.get(name) or UNKNOWN
        value = figure.best if achieved else figure.nominal
        return None if value is None else value * 1e12


class ClusterLevel(Section):
    """One level of a network above the node: how many of the level below it joins, and how fast.

    gbps: one direction, of one device, through this level. oversubscription: 1 is full bisection.
    """

    name: str  # "rail", "slice", "spine", "region"
    members: int  # of the level below
    gbps: Figure = UNKNOWN
    oversubscription: float = 1.0
    latency_us: Figure = UNKNOWN


class Node(Section):
    """devices: (device id, how many). A node may mix devices."""

    devices: dict[str, int]
    link: str = ""  # the device's link that joins them; empty: its first
    nics: int | None = None
    nic_gbit: Figure = UNKNOWN
    rails: int | None = None  # NIC i of every node is on rail i % rails
    host: str = ""  # a device id of kind "cpu"
    host_memory_gb: float | None = None
    local_disk_tb: float | None = None
    storage_gbps: Figure = UNKNOWN  # of the separate storage network, GB/s


class Pool(Section):
    """`nodes` equal nodes in one region."""

    node: Node
    nodes: int = Field(ge=1)
    region: str = ""
    levels: tuple[ClusterLevel, ...] = ()  # from the nodes upwards


class Wan(Section):
    """A link between two regions."""

    regions: tuple[str, str]
    gbps: Figure = UNKNOWN
    latency_ms: Figure = UNKNOWN


class Optical(Section):
    """Circuits that are laid anew for an exchange, between the nodes of a region (MixNet, arXiv 2501.03905).

    Of a node's ports ocs_ports lead to the optical switch and eps_ports to the packet network; they are its NICs.
    """

    region_size: int = Field(ge=2)  # nodes that one optical switch joins
    ocs_ports: int = Field(ge=1)
    eps_ports: int = Field(ge=1)
    port_gbit: Figure = UNKNOWN  # one direction
    delay_ms: Figure = UNKNOWN  # for which exchanges stand still while circuits are laid


class Cluster(Section):
    """Pools of equal nodes, in one or more regions."""

    id: str = ""
    name: str
    pools: tuple[Pool, ...]
    wan: tuple[Wan, ...] = ()
    optical: Optical | None = None
    software: str = ""
    source: str = ""
    note: str = ""

    @property
    def num_devices(self) -> int:
        return sum(pool.nodes * sum(pool.node.devices.values()) for pool in self.pools)
