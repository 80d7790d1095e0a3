"""ZAYA1's cluster: each check holds, and with a planted bug does not."""

from dataclasses import replace

import pytest

from moestro.hardware.curves.hierarchical import Fabric
from moestro.hardware.rails import RailMap
from papers import zaya1_machine as machine


def test_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    check = machine.check_storage()
    assert check.verdict == "holds"
    assert check.ours == "64 MiB, 16,384 pages, 6,554 · σ IOPS, 0.234 · σ s"
    assert "1.87 s" in check.note
    monkeypatch.setattr(machine.StorageDemand, "pages_per_iteration", 16_000)
    assert machine.check_storage().verdict == "holds in part"


def test_derate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.check_derate().verdict == "holds"
    monkeypatch.setattr(machine, "mesh_bandwidth", lambda n, size, link: size * link)
    assert machine.check_derate().verdict == "does not hold"


def test_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.check_fusion().verdict == "holds"
    monkeypatch.setattr(machine, "bus_factor", lambda op, ranks: 1.0)
    assert machine.check_fusion().verdict == "holds in part"  # start-up and sizes stay, bandwidth does not


def test_gradient_step(monkeypatch: pytest.MonkeyPatch) -> None:
    check = machine.check_gradient_step()
    assert check.verdict == "holds"
    assert "0.103 + 0.052 s" in check.ours
    assert "1.24 s through one NIC" in check.ours

    def naive(cluster: object) -> Fabric:
        return replace(Fabric(8, 336e9, 42.5e9, nics=8, mesh=True), nics=1)

    monkeypatch.setattr(machine, "fabric_of", naive)
    assert machine.check_gradient_step().verdict == "holds in part"


def test_rails(monkeypatch: pytest.MonkeyPatch) -> None:
    check = machine.check_rails()
    assert check.verdict == "holds"
    assert check.ours.startswith("0 of 8,192 steps")
    plain = ((tuple(range(1024)),), tuple(tuple(range(i * 128, i * 128 + 128)) for i in range(8)))
    monkeypatch.setattr(machine, "rail_groups", lambda rails, group: plain)
    assert machine.check_rails().verdict == "holds in part"


def test_steps_of_a_small_cluster() -> None:
    assert machine.stays_on_rail(RailMap(2, 2, nics=2, rails=2)) == (8, 0, 2)
