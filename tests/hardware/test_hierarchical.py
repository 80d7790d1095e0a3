import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import MoestroError
from moestro.hardware.catalog import cluster_ids, load_cluster
from moestro.hardware.curves import hierarchical as module
from moestro.hardware.curves.hierarchical import (
    LAUNCH_S,
    MESSAGE_GAIN,
    PROTOCOLS,
    Fabric,
    fabric_of,
    hierarchical,
    nic_warning,
)

MIB = 2**20
# Nodes of 8 MI300X with 8 NICs of 400 Gbit/s: 48 GB/s a link, 42.5 GB/s a NIC.
ZAYA1 = Fabric(8, 336e9, 42.5e9, nics=8, mesh=True)
SWITCH = Fabric(8, 400e9, 40e9, nics=8)
GRADIENTS, PARAMETERS = 35.36e9, 17.68e9  # of 8.84 B parameters in fp32 and in bf16
OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


class TestWorkedNumbers:
    """ZAYA1's gradient step over 128 nodes."""

    def test_reduce_scatter_and_all_gather_on_all_nics(self) -> None:
        reduced = hierarchical("reduce_scatter", GRADIENTS, ZAYA1, 1024, 128)
        gathered = hierarchical("all_gather", PARAMETERS, ZAYA1, 1024, 128)
        assert (reduced.between_s, gathered.between_s) == pytest.approx((0.103, 0.052), abs=5e-4)
        assert (reduced.inside_s, gathered.inside_s) == pytest.approx((0.092, 0.046), abs=5e-4)
        assert reduced.between_s + gathered.between_s == pytest.approx(0.155, abs=5e-4)
        assert sum(t.inside_s + t.between_s for t in (reduced, gathered)) == pytest.approx(0.293, abs=5e-4)
        assert 0.155 < reduced.seconds + gathered.seconds < 0.293

    @pytest.mark.parametrize(("share", "expected"), [(0.73, (0.120, 0.060)), (0.9, (0.0975, 0.049))])
    def test_other_shares_of_line_rate(self, share: float, expected: tuple[float, float]) -> None:
        fabric = replace(ZAYA1, nic_bytes_per_s=share * 50e9)
        times = [
            hierarchical(op, size, fabric, 1024, 128).between_s
            for op, size in (("reduce_scatter", GRADIENTS), ("all_gather", PARAMETERS))
        ]
        assert times == pytest.approx(expected, abs=6e-4)

    def test_the_naive_model_is_one_nic_for_all(self) -> None:
        naive = replace(ZAYA1, nics=1)
        total = sum(
            hierarchical(op, size, naive, 1024, 128).between_s
            for op, size in (("reduce_scatter", GRADIENTS), ("all_gather", PARAMETERS))
        )
        assert total == pytest.approx(1.25 * 127 / 128, abs=5e-3)
        assert total == pytest.approx(8 * 0.155, rel=0.01)


class TestTerms:
    def test_overlap_hides_most_of_the_shorter_level(self) -> None:
        time = hierarchical("all_reduce", 2**33, SWITCH, 16, 2)
        assert time.overlap == 0.9
        short, long = sorted((time.inside_s, time.between_s))
        assert time.seconds == pytest.approx(long + 0.1 * short + time.overhead_s)
        assert hierarchical("all_reduce", 8 * 16 * MIB, SWITCH, 16, 2).overlap == pytest.approx(0.45)

    def test_all_reduce_is_both_halves(self) -> None:
        whole = hierarchical("all_reduce", 2**30, SWITCH, 32, 4)
        halves = [hierarchical(op, 2**30, SWITCH, 32, 4) for op in ("reduce_scatter", "all_gather")]
        assert whole.inside_s == pytest.approx(sum(half.inside_s for half in halves))
        assert whole.between_s == pytest.approx(sum(half.between_s for half in halves))
        assert whole.between_s == pytest.approx(2 * 0.75 * 2**30 / 8 / 40e9, rel=1e-2)

    def test_mesh_groups(self) -> None:
        assert [ZAYA1.inside_rate(n) / 1e9 for n in (2, 4, 8)] == pytest.approx([48, 144, 336])
        assert {SWITCH.inside_rate(n) for n in (2, 4, 8)} == {400e9}
        assert ZAYA1.inside_rate(8, exchange=True) == pytest.approx(336e9 * 0.88)
        assert ZAYA1.inside_rate(2, exchange=True) == pytest.approx(48e9 * (1 - 0.12 / 49))
        assert SWITCH.inside_rate(8, exchange=True) == 400e9

    def test_nics_of_the_devices_that_take_part(self) -> None:
        assert [SWITCH.active_nics(n) for n in (1, 2, 8)] == [1, 2, 8]
        assert [Fabric(4, 1e9, 1e9, nics=2).active_nics(n) for n in (1, 2, 4)] == [1, 1, 2]
        assert Fabric(4, 1e9, 1e9, nics=8).active_nics(1) == 2

    def test_small_messages_take_a_protocol_with_flags_in_the_packet(self) -> None:
        assert hierarchical("all_gather", 4, SWITCH, 8).protocol == "ll"
        assert hierarchical("all_gather", 4, SWITCH, 8).inside_s == pytest.approx(3 * 0.45e-6 + 8 / 400e9)
        assert hierarchical("all_gather", 4, SWITCH, 8, 8).between_s == pytest.approx(3 * 2e-6 + 8 / 40e9)
        assert hierarchical("all_gather", 2**20, SWITCH, 8).protocol == "ll128"
        assert hierarchical("all_gather", 2**30, SWITCH, 8).protocol == "simple"
        assert module._packed(8, 1.0, "simple") == (3, 16)
        assert {name: module._packed(121, 1.0, name)[1] for name in PROTOCOLS} == {
            "simple": 129,
            "ll": 248,
            "ll64": 192,
            "ll128": 256,
        }

    def test_ramp_of_a_nic(self) -> None:
        overhead = {
            size: hierarchical("all_reduce", size, SWITCH, 16, 2).overhead_s for size in (8, 8 * 16 * MIB, 8 * 32 * MIB)
        }
        assert overhead[8] == pytest.approx(200e-6 + LAUNCH_S + 260e-6)
        assert overhead[8 * 16 * MIB] == pytest.approx(200e-6 + LAUNCH_S + 260e-6 * (1 - 0.5**2.5))
        assert overhead[8 * 32 * MIB] == pytest.approx(200e-6 + LAUNCH_S)

    def test_all_to_all_over_nodes(self) -> None:
        two, four = (hierarchical("all_to_all", 2**30, SWITCH, 8 * nodes, nodes) for nodes in (2, 4))
        rate = 40e9 * MESSAGE_GAIN
        assert two.between_s == pytest.approx(2**30 * 8 / 16 / (rate * 0.96), rel=1e-3)
        assert four.between_s == pytest.approx(2**30 * 24 / 32 / (rate * 0.88), rel=1e-3)
        assert two.inside_s == pytest.approx(2**30 * 7 / 16 / 400e9, rel=1e-2)
        assert four.overhead_s == pytest.approx(150e-6 + LAUNCH_S + 24 * 0.45e-6)
        assert four.seconds == pytest.approx(four.between_s + four.overhead_s)
        sixteen, many = (hierarchical("all_to_all", 2**30, SWITCH, 8 * nodes, nodes) for nodes in (16, 64))
        assert many.between_s / sixteen.between_s == pytest.approx((63 / 64) / (15 / 16), rel=1e-3)

    def test_messages(self) -> None:
        near = hierarchical("send_recv", 2**30, ZAYA1, 2)
        far = hierarchical("send_recv", 2**30, ZAYA1, 2, 2)
        assert near.seconds == pytest.approx(2**30 / (48e9 * MESSAGE_GAIN), rel=1e-3)
        assert far.seconds == pytest.approx(2**30 / (42.5e9 * MESSAGE_GAIN), rel=1e-3)
        assert hierarchical("send_recv", 2**30, SWITCH, 2).seconds == pytest.approx(2**30 / 457e9, rel=1e-2)

    @given(
        op=st.sampled_from(OPS),
        size=st.floats(1, 1e11),
        nodes=st.sampled_from([1, 2, 16]),
        here=st.sampled_from([1, 2, 8]),
        mesh=st.booleans(),
    )
    def test_more_bytes_never_take_less_time_than_their_transfer(
        self, op: str, size: float, nodes: int, here: int, mesh: bool
    ) -> None:
        if here * nodes == 1:
            return
        fabric = replace(SWITCH, mesh=mesh)
        small, large = (hierarchical(op, s, fabric, here * nodes, nodes) for s in (size, 2 * size))
        assert max(small.inside_s, small.between_s) <= max(large.inside_s, large.between_s) * (1 + 1e-9)
        assert small.seconds >= max(small.inside_s, small.between_s) + small.overhead_s


class TestCatalog:
    def test_zaya1(self) -> None:
        fabric = fabric_of(load_cluster("zaya1"))
        assert fabric.mesh
        assert (fabric.node_size, fabric.nics) == (8, 8)
        assert (fabric.inside_bytes_per_s, fabric.nic_bytes_per_s) == pytest.approx((336e9, 42.5e9))
        assert fabric.message_gain == 1  # the NICs' rate was measured

    def test_nominal_rates_are_not_reached(self) -> None:
        fabric = fabric_of(load_cluster("ac922-4"))
        assert fabric.inside_bytes_per_s == pytest.approx(0.7 * 32e9)  # the CPUs' own link, not NVLink
        assert fabric.nic_bytes_per_s == pytest.approx(0.7 * 12e9)

    def test_measured_nics_count_as_they_are(self) -> None:
        fabric = fabric_of(load_cluster("p3dn-2"))
        assert (fabric.nics, fabric.nic_bytes_per_s) == (1, pytest.approx(1.25e9))

    def test_every_cluster_has_a_fabric_or_says_why_not(self) -> None:
        refused = []
        for name in cluster_ids():
            try:
                fabric_of(load_cluster(name))
            except MoestroError:
                refused.append(name)
        assert len(refused) <= 2

    def test_unknown_nics_stop_only_what_needs_them(self) -> None:
        fabric = fabric_of(load_cluster("ts4-2080ti"))
        assert hierarchical("all_reduce", 2**20, fabric, 8).seconds > 0
        with pytest.raises(MoestroError, match="NICs"):
            hierarchical("all_reduce", 2**20, fabric, 16, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: hierarchical("broadcast", 1, SWITCH, 8),
        lambda: hierarchical("all_reduce", 0, SWITCH, 8),
        lambda: hierarchical("all_reduce", math.nan, SWITCH, 8),
        lambda: hierarchical("all_reduce", 1, SWITCH, 1),
        lambda: hierarchical("all_reduce", 1, SWITCH, 9),
        lambda: hierarchical("all_reduce", 1, SWITCH, 15, 2),
        lambda: hierarchical("all_reduce", 1, SWITCH, 8, 0),
        lambda: hierarchical("send_recv", 1, SWITCH, 4),
        lambda: Fabric(0, 1, 1, 1),
        lambda: Fabric(8, 0, 1, 1),
        lambda: Fabric(8, 1, math.nan, 1),
    ],
)
def test_impossible_collectives(wrong) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(MoestroError):
        wrong()


def test_nics_that_ranks_do_not_see() -> None:
    assert nic_warning(ZAYA1, 8) == ""
    assert "1 of 8 NICs" in nic_warning(ZAYA1, 1)
    assert "8 times" in nic_warning(ZAYA1, 1)
