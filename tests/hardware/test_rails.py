import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import MoestroError
from moestro.hardware.catalog import load_cluster
from moestro.hardware.rails import (
    RailMap,
    between_nodes,
    doubling_steps,
    off_rail,
    rail_groups,
    rail_map,
    ring_steps,
)

ZAYA1 = RailMap(128, 8, nics=8, rails=8, slice_nodes=30)


def test_catalog_cluster() -> None:
    assert rail_map(load_cluster("zaya1")) == ZAYA1
    assert rail_map(load_cluster("ac922-4")) == RailMap(4, 4, nics=2, rails=1)  # its level is no slice


def test_a_cluster_without_nics_is_refused() -> None:
    with pytest.raises(MoestroError, match="NICs"):
        rail_map(load_cluster("dgx-2"))


def test_every_step_of_two_levels_stays_on_its_rail() -> None:
    inside, along = rail_groups(ZAYA1, range(ZAYA1.ranks))
    assert (len(inside), {len(g) for g in inside}) == (128, {8})
    assert (len(along), {len(g) for g in along}) == (8, {128})
    for steps in (ring_steps, doubling_steps):
        taken = [step for group in along for step in steps(group)]
        assert between_nodes(ZAYA1, taken) == taken
        assert off_rail(ZAYA1, taken) == []
    assert not between_nodes(ZAYA1, [step for group in inside for step in ring_steps(group)])


def test_a_ring_over_the_ranks_in_their_order_leaves_its_rail_at_every_node() -> None:
    wrong = off_rail(ZAYA1, ring_steps(range(ZAYA1.ranks)))
    assert len(wrong) == 128
    assert wrong[0] == (7, 8)


def test_a_ring_along_a_rail_passes_each_slice_once() -> None:
    _, along = rail_groups(ZAYA1, range(ZAYA1.ranks))
    crossings = [sum(ZAYA1.slice_of(a) != ZAYA1.slice_of(b) for a, b in ring_steps(group)) for group in along]
    assert crossings == [5] * 8
    assert RailMap(4, 8, 8, 8).slice_of(31) == 0


def test_devices_share_nics_in_their_order() -> None:
    assert [RailMap(1, 8, nics=4, rails=4).rail_of(r) for r in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [RailMap(1, 8, nics=8, rails=4).rail_of(r) for r in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [RailMap(2, 4, nics=1, rails=1).rail_of(r) for r in range(8)] == [0] * 8


@given(
    nodes=st.integers(1, 6),
    size=st.integers(1, 8),
    nics=st.integers(1, 8),
    rails=st.integers(1, 8),
    picked=st.sets(st.integers(0, 47)),
)
def test_groups_hold_every_rank_once_and_one_rank_of_a_node_along_a_rail(
    nodes: int, size: int, nics: int, rails: int, picked: set[int]
) -> None:
    there = RailMap(nodes, size, nics, rails)
    group = [rank for rank in picked if rank < there.ranks]
    inside, along = rail_groups(there, group)
    for groups in (inside, along):
        assert sorted(rank for one in groups for rank in one) == sorted(group)
    for one in along:
        assert len({there.node_of(rank) for rank in one}) == len(one)
        assert off_rail(there, ring_steps(one)) == []


def test_a_group_that_lies_unlike_on_two_nodes_shares_the_rails_that_both_have() -> None:
    assert rail_groups(RailMap(2, 8, 8, 8), [9, 1, 8, 1]) == (((1,), (8, 9)), ((8,), (1, 9)))
    assert rail_groups(RailMap(2, 4, nics=1, rails=1), [0, 1, 5])[1] == ((0, 5), (1,))


def test_steps() -> None:
    assert ring_steps([3]) == []
    assert doubling_steps([3]) == []
    assert ring_steps([3, 5, 9]) == [(3, 5), (5, 9), (9, 3)]
    assert doubling_steps([0, 1, 2, 3]) == [(0, 1), (1, 0), (2, 3), (3, 2), (0, 2), (1, 3), (2, 0), (3, 1)]
    assert len(doubling_steps(range(3))) == 4


@pytest.mark.parametrize(
    "wrong", [lambda: RailMap(0, 8, 8, 8), lambda: RailMap(1, 8, 8, 8, 0), lambda: RailMap(1, 8, 8, 8).rail_of(8)]
)
def test_no_such_map(wrong) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(MoestroError):
        wrong()
