"""What a machine says of itself, read from made-up ones."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from moestro.hardware.links import amd_links, nvidia_links
from moestro.hardware.topology import Cpu, Disk, Limits, command_output, discover, driver_version, find_nics


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def nvidia(rows: Sequence[str], tail: str = "") -> str:
    """The matrix as the tool prints it, with an underlined header and columns of other things behind."""
    n = len(rows)
    header = (
        "\t\x1b[4m" + "\t".join([*(f"GPU{i}" for i in range(n)), "NIC0", "CPU Affinity", "NUMA Affinity"]) + "\x1b[0m"
    )
    lines = [f"GPU{i}\t" + "\t".join([*row.split(), "SYS", "0-51", "0"]) for i, row in enumerate(rows)]
    legend = "\nLegend:\n\n  X    = Self\n  NV#  = a bonded set of # NVLinks\n"
    return "\n".join([header, *lines, "NIC0\t" + "SYS\t" * n + " X", legend, tail])


def full(n: int, cell: str) -> list[str]:
    return [" ".join("X" if i == j else cell for j in range(n)) for i in range(n)]


CUBE = [  # eight devices, each with direct links to four others
    "X NV1 NV1 NV2 NV2 SYS SYS SYS",
    "NV1 X NV2 NV1 SYS NV2 SYS SYS",
    "NV1 NV2 X NV2 SYS SYS NV1 SYS",
    "NV2 NV1 NV2 X SYS SYS SYS NV1",
    "NV2 SYS SYS SYS X NV1 NV1 NV2",
    "SYS NV2 SYS SYS NV1 X NV2 NV1",
    "SYS SYS NV1 SYS NV1 NV2 X NV2",
    "SYS SYS SYS NV1 NV2 NV1 NV2 X",
]
RING = ["X NV4 SYS NV4", "NV4 X NV4 SYS", "SYS NV4 X NV4", "NV4 SYS NV4 X"]
BRIDGES = ["X NV12 SYS SYS", "NV12 X SYS SYS", "SYS SYS X NV12", "SYS SYS NV12 X"]


@pytest.mark.parametrize(
    ("rows", "kind", "evidence"),
    [
        (full(8, "NV18"), "switch", "8 GPUs, NV18 between pairs"),
        (full(8, "NV12"), "switch", "8 GPUs, NV12 between pairs"),
        (full(16, "NV6"), "switch", "16 GPUs, NV6 between pairs"),
        (full(4, "NV4"), "mesh", "4 GPUs, NV4 between pairs"),
        (full(4, "NV6"), "mesh", "4 GPUs, NV6 between pairs"),
        (full(2, "NV12"), "unknown", "2 GPUs, NV12 between pairs: two GPUs look alike with a bridge and with a switch"),
        (CUBE, "hypercube_mesh", "8 GPUs, PCIe, NV1, NV2 between pairs"),
        (RING, "ring", "4 GPUs, PCIe, NV4 between pairs"),
        (BRIDGES, "pcie", "4 GPUs, PCIe, NV12 between pairs"),
        (full(4, "PHB"), "pcie", "4 GPUs, PCIe between pairs"),
    ],
)
def test_nvidia_links(rows: list[str], kind: str, evidence: str) -> None:
    assert nvidia_links(nvidia(rows)) == (kind, evidence)


def amd(types: list[str], weights: list[str]) -> str:
    n = len(types)
    names = "       ".join(f"GPU{i}" for i in range(n))
    parts = ["============================ ROCm System Management Interface ============================"]
    for title, rows in (
        ("Weight between two GPUs", weights),
        ("Hops between two GPUs", full(n, "1")),
        ("Link Type between two GPUs", types),
    ):
        body = [
            f"GPU{i}   " + "   ".join("0" if cell == "X" else cell for cell in row.split())
            for i, row in enumerate(rows)
        ]
        parts += [
            f"================================ {title} ================================",
            f"       {names}",
            *body,
            "",
        ]
    return "\n".join([*parts, "======== Numa Nodes ========", "GPU[0]\t\t: (Topology) Numa Node: 0"])


@pytest.mark.parametrize(
    ("types", "weights", "kind"),
    [
        (full(8, "XGMI"), full(8, "15"), "mesh"),
        (full(4, "XGMI"), ["X 15 30 15", "15 X 15 30", "30 15 X 15", "15 30 15 X"], "hypercube_mesh"),
        (full(4, "PCIE"), full(4, "40"), "pcie"),
        (["X XGMI PCIE PCIE", "XGMI X PCIE PCIE", "PCIE PCIE X XGMI", "PCIE PCIE XGMI X"], full(4, "15"), "pcie"),
    ],
)
def test_amd_links(types: list[str], weights: list[str], kind: str) -> None:
    assert amd_links(amd(types, weights))[0] == kind


@pytest.mark.parametrize(
    "text", ["", "No devices were found", "GPU0 GPU1\nGPU0 X NV18\n", "GPU0 GPU1\nGPU0 X\nGPU1 NV4 X\n"]
)
def test_tables_that_cannot_be_read(text: str) -> None:
    assert nvidia_links(text) == ("unknown", "no table of GPUs")
    assert amd_links(text) == ("unknown", "no table of GPUs")


def test_processor_and_disks(tmp_path: Path) -> None:
    for cpu in range(8):  # two sockets of two cores of two threads
        core = cpu % 4
        write(
            tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology",
            {"physical_package_id": str(core // 2), "core_cpus_list": f"{core},{core + 4}"},
        )
    write(
        tmp_path,
        {
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU 9000\nflags\t: a b",
            "sys/devices/system/node/node0/x": "",
            "sys/devices/system/node/node1/x": "",
            "sys/devices/system/node/online": "0-1",
            "sys/block/nvme0n1/size": "2000",
            "sys/block/nvme0n1/device/model": "Fast 3000  ",
            "sys/block/nvme0n1/queue/rotational": "0",
            "sys/block/loop0/size": "8",
        },
    )
    found = discover(tmp_path, accelerators=())
    assert found.cpu == Cpu("Some CPU 9000", sockets=2, cores=4, threads=8, numa_nodes=2)
    assert found.disks == (Disk("nvme0n1", "Fast 3000", 1_024_000, rotational=False),)


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    found = discover(tmp_path, accelerators=())
    assert found.cpu == Cpu("", None, None, None, None)
    assert found.limits == Limits(None, None)
    assert (found.nics, found.disks) == ((), ())
    assert (found.link, found.link_evidence) == ("none", "0 accelerators")


def test_limits_of_a_control_group_and_those_above(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/jobs/job7",
            "sys/fs/cgroup/jobs/cpu.max": "150000 100000",
            "sys/fs/cgroup/jobs/memory.max": "max",
            "sys/fs/cgroup/jobs/job7/cpu.max": "max 100000",
            "sys/fs/cgroup/jobs/job7/memory.max": "1000000",
            "sys/fs/cgroup/memory.max": "5000000",
            "sys/fs/cgroup/cpu.max": "300000 100000",
            "sys/fs/cgroup/other/memory.max": "1",
        },
    )
    assert discover(tmp_path, accelerators=()).limits == Limits(1.5, 1_000_000)


def test_limits_of_version_1(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/seen/only/outside\n1:cpu,cpuacct:/box",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "400000",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert discover(tmp_path, accelerators=()).limits == Limits(4.0, None)


def test_nics(tmp_path: Path) -> None:
    write(
        tmp_path / "sys/class",
        {
            "infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
            "infiniband/mlx5_0/ports/1/phys_state": "5: LinkUp",
            "infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
            "infiniband/mlx5_1/ports/1/state": "1: DOWN",
            "infiniband/mlx5_1/ports/1/phys_state": "3: Disabled",
            "infiniband/mlx5_1/ports/1/rate": "2.5 Gb/sec (1X SDR)",
            "net/eth0/operstate": "up",
            "net/eth0/speed": "25000",
            "net/eth0/device/vendor": "0x1",
            "net/eth1/operstate": "down",
            "net/eth1/speed": "-1",
            "net/eth1/device/vendor": "0x1",
            "net/ib0/type": "32",
            "net/ib0/device/vendor": "0x1",
            "net/docker0/operstate": "up",
            "net/lo/operstate": "unknown",
        },
    )
    nics = find_nics(tmp_path)
    assert [str(nic) for nic in nics] == [
        "mlx5_0/1 infiniband, 400 Gbit/s, ACTIVE, LinkUp",
        "mlx5_1/1 infiniband, 2.5 Gbit/s, DOWN, Disabled",
        "eth0 ethernet, 25 Gbit/s, up",
        "eth1 ethernet, unknown rate, down",
    ]
    assert [nic.is_up for nic in nics] == [True, False, True, False]


def test_driver(tmp_path: Path) -> None:
    assert driver_version(tmp_path) == ""
    write(tmp_path, {"sys/module/amdgpu/version": "6.12.12"})
    assert driver_version(tmp_path) == "6.12.12"
    kernel_module = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build"
    write(tmp_path, {"proc/driver/nvidia/version": kernel_module + "\nGCC version: gcc 13.3.0"})
    assert driver_version(tmp_path) == "570.124.06"


def test_a_container_has_virtual_interfaces(tmp_path: Path) -> None:
    write(
        tmp_path / "sys/class/net",
        {"eth0/operstate": "up", "eth0/speed": "10000", "gre0/operstate": "down", "lo/operstate": "unknown"},
    )
    (nic,) = find_nics(tmp_path)
    assert str(nic) == "eth0 virtual, 10 Gbit/s, up"


def test_the_tool_that_answers_tells_the_link(tmp_path: Path) -> None:
    asked = []

    def rocm_only(command: Sequence[str]) -> str | None:
        asked.append(command[0])
        return amd(full(8, "XGMI"), full(8, "15")) if command[0] == "rocm-smi" else None

    found = discover(tmp_path, accelerators=["MI300X"] * 8, output_of=rocm_only)
    assert (found.link, asked) == ("mesh", ["nvidia-smi", "rocm-smi"])
    assert found.link_evidence == "rocm-smi --showtopo: 8 GPUs, XGMI with distances 15"
    silent = discover(tmp_path, accelerators=["a", "b"], output_of=lambda command: None)
    assert (silent.link, silent.link_evidence) == ("unknown", "neither nvidia-smi nor rocm-smi answers")


def test_this_machine() -> None:
    found = discover()
    assert found.cpu.cores is None or 0 < found.cpu.cores <= (found.cpu.threads or 0)
    assert found.limits.cpus is None or found.limits.cpus > 0


def test_commands_that_fail_say_nothing() -> None:
    assert command_output(["no-such-command-here"]) is None
    assert command_output(["false"]) is None
    assert command_output(["echo", "yes"]) == "yes\n"
