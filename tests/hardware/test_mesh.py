import pytest

from moestro.errors import MoestroError
from moestro.hardware.curves.mesh import EXPECTED, detect_derate, judge_derate, mesh_bandwidth
from moestro.hardware.profile import Sample
from moestro.hardware.published.collectives import read_collectives


def reduce(ranks, busbw_gbps, size=2**30, **case):
    seconds = size * 2 * (ranks - 1) / ranks / (busbw_gbps * 1e9)
    return Sample(op="all_reduce", case={"bytes": size, "ranks": ranks, "nodes": 1, **case}, median_s=seconds)


def test_links_in_reach():
    assert [mesh_bandwidth(n, 8, 64) for n in (2, 4, 8)] == [64, 192, 448]
    assert [mesh_bandwidth(n, 8, 48) for n in (2, 4, 8)] == [48, 144, 336]
    assert mesh_bandwidth(1, 8, 64) == 0
    assert pytest.approx(313.6) == EXPECTED * mesh_bandwidth(8, 8, 64)


def test_effective_links_are_within_a_tenth_of_the_published_measurement():
    """All-reduce of 4 GiB on 8 MI300X (stas00/ml-engineering): 47.7 GB/s with 2 devices, 312.9 with 8."""
    assert mesh_bandwidth(2, 8, 48) == pytest.approx(47.7, rel=0.1)
    assert mesh_bandwidth(8, 8, 48) == pytest.approx(312.9, rel=0.1)


@pytest.mark.parametrize(("ranks", "node", "link"), [(0, 8, 64), (9, 8, 64), (2, 8, 0), (2, 8, float("nan"))])
def test_no_such_mesh(ranks, node, link):
    with pytest.raises(MoestroError):
        mesh_bandwidth(ranks, node, link)


def test_published_mesh_is_told():
    found = detect_derate([reduce(2, 47.7), reduce(8, 312.9)])
    assert found.topology == "mesh"
    assert found.node_size == 8
    assert found.share[2] == pytest.approx(0.152, abs=0.001)
    assert "full node" in found.warning
    assert "15%" in found.warning
    assert "44.7" in found.reason


@pytest.mark.parametrize("wobble", [0.9, 1.0, 1.1])
def test_three_group_sizes_of_a_mesh(wobble):
    assert judge_derate({2: 48 * wobble, 4: 144 / wobble, 8: 330}).topology == "mesh"


def test_switch_is_told():
    found = judge_derate({2: 315, 4: 349, 8: 400})
    assert found.topology == "switch"
    assert found.warning == ""


def test_public_devices_behind_switches():
    samples, _ = read_collectives()
    for device in ("a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200", "b300", "gb200"):
        assert detect_derate([s for s in samples if s.case["device"] == device]).topology == "switch", device


def test_neither_stays_unknown():
    assert judge_derate({2: 20, 4: 5.6, 8: 1.5}).topology == "unknown"  # groups that get slower: one bus for all
    assert judge_derate({4: 70, 8: 100}).topology == "unknown"  # half way between
    assert judge_derate({8: 100}).topology == "unknown"
    assert judge_derate({}).topology == "unknown"
    assert detect_derate([]).node_size == 0


def test_sizes_that_all_groups_have_are_compared():
    samples = [reduce(2, 45, 2**20), reduce(2, 300, 2**34), reduce(8, 312, 2**20)]
    assert detect_derate(samples).busbw_gbps == pytest.approx({2: 45, 8: 312})
    assert detect_derate(samples[1:]).busbw_gbps == pytest.approx({2: 300, 8: 312})


def test_several_nodes_and_busy_sub_groups_do_not_count():
    samples = [reduce(2, 47.7), reduce(8, 312.9), reduce(4, 300, groups="all"), reduce(16, 300, nodes=2)]
    assert set(detect_derate(samples).busbw_gbps) == {2, 8}
