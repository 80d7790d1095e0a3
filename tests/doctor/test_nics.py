"""The roll-call of NICs on a node of eight RDMA ports."""

from pathlib import Path

import pytest

from doctor.helpers import write
from moestro.doctor.nics import expected_names, nics_check, ports
from moestro.hardware.topology import find_nics

GOOD = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "gids/0": "fe80::1"}
NAMES = tuple(f"mlx5_{i}/1" for i in range(8))


def rdma(root: Path, name: str, **changes: str) -> None:
    files = GOOD | {key.replace("gid", "gids/0"): value for key, value in changes.items()}
    write(root, {f"sys/class/infiniband/{name}/ports/1/{key}": f"{value}\n" for key, value in files.items()})


@pytest.fixture
def node(tmp_path: Path) -> Path:
    for name in NAMES:
        rdma(tmp_path, name.removesuffix("/1"))
    write(tmp_path, {
        "sys/class/net/eth0/operstate": "up\n", "sys/class/net/eth0/speed": "25000\n",
        "sys/class/net/eth0/device/vendor": "0x8086\n",
        "sys/class/net/lo/operstate": "unknown\n", "sys/class/net/docker0/operstate": "down\n",
    })  # fmt: skip
    return tmp_path


def test_all_present(node: Path) -> None:
    assert {port.name for port in ports(node)} == {*NAMES, "eth0"}  # no bridge, no loopback
    check = nics_check(ports(node), 8, NAMES)
    assert (check.name, check.status, check.value, check.limit) == ("nics", "passed", 8, 8)
    assert "400 Gbit/s each" in check.reason


def test_one_is_missing(node: Path) -> None:
    (node / "sys/class/infiniband/mlx5_3").rename(node / "gone")
    check = nics_check(ports(node), 8)
    assert (check.status, check.value) == ("failed", 7)
    assert "7 of 8" in check.reason
    check = nics_check(ports(node), None, NAMES)
    assert (check.status, check.reason) == ("failed", "mlx5_3/1 is missing")
    assert nics_check(ports(node), None).status == "passed"  # nobody expects it


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"state": "1: DOWN", "phys_state": "3: Disabled"}, "mlx5_5/1 is DOWN, Disabled"),
        ({"state": "2: INIT"}, "mlx5_5/1 is INIT"),
        ({"gid": "0000:0000:0000:0000:0000:0000:0000:0000"}, "mlx5_5/1 has no address (GID)"),
    ],
)
def test_one_is_down(node: Path, changes: dict[str, str], said: str) -> None:
    rdma(node, "mlx5_5", **changes)
    for check in (nics_check(ports(node), 8), nics_check(ports(node), None, NAMES)):
        assert check.status == "failed"
        assert said in check.reason
    assert nics_check(ports(node), None).status == "warned"  # perhaps it is not cabled on purpose


def test_one_that_runs_slower_than_the_others(node: Path) -> None:
    rdma(node, "mlx5_2", rate="200 Gb/sec (2X NDR)")
    check = nics_check(ports(node), 8)
    assert check.status == "warned"
    assert "mlx5_2/1 runs at 200 Gbit/s, others at 400" in check.reason


def test_two_ports_of_one_device(tmp_path: Path) -> None:
    rdma(tmp_path, "bnxt_0")
    write(tmp_path, {f"sys/class/infiniband/bnxt_0/ports/2/{key}": value for key, value in GOOD.items()})
    assert [port.name for port in ports(tmp_path)] == ["bnxt_0/1", "bnxt_0/2"]
    assert nics_check(ports(tmp_path), 2, ("bnxt_0/1",)).status == "passed"


def test_a_node_without_rdma_counts_its_other_interfaces(tmp_path: Path) -> None:
    base = "sys/class/net/eth{}/{}"
    files = {base.format(i, "device/x"): "" for i in (0, 1)}
    root = write(tmp_path, {**files, base.format(0, "operstate"): "up", base.format(1, "operstate"): "down"})
    write(root, {base.format(0, "speed"): "-1"})  # what drivers answer that do not know
    assert nics_check(ports(root), 1).status == "warned"
    check = nics_check(ports(root), 2)
    assert check.status == "failed"
    assert "1 of 2 NICs up: eth1 is down" in check.reason


def test_none_at_all(tmp_path: Path) -> None:
    assert nics_check(ports(tmp_path), None).status == "skipped"
    assert nics_check(ports(tmp_path), 0).status == "skipped"
    assert nics_check(ports(tmp_path), 1).status == "failed"


def test_a_profile_expects_those_that_were_up() -> None:
    of_profile = (
        "mlx5_0/1 infiniband, 400 Gbit/s, ACTIVE, LinkUp", "mlx5_1/1 infiniband, 2.5 Gbit/s, DOWN, Disabled",
        "eth0 ethernet, unknown rate, up", "eth1 ethernet, unknown rate, down", "mlx5_9/1",
    )  # fmt: skip
    assert expected_names(of_profile) == ["mlx5_0/1", "eth0", "mlx5_9/1"]
    assert expected_names([str(nic) for nic in find_nics(Path("/")) if nic.is_up]) == [
        nic.name for nic in find_nics(Path("/")) if nic.is_up
    ]
