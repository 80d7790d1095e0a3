"""Experts, circuits and regions: greedy and exact placements against all there are."""

from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import MoestroError
from moestro.hardware.curves.optical import OpticalTier, circuit_s, circuits, even_circuits, packet_s
from moestro.plan.ilp.circuits import lay_circuits, solve_circuits
from moestro.plan.ilp.experts import Experts, balanced_experts, exact_experts, pack, replicate
from moestro.plan.ilp.regions import Group, layers_over
from papers.deepseek_v3_eplb import LOADS, PLACED

TIER = OpticalTier(region_size=4, ocs_ports=2, eps_ports=1, port_bytes_per_s=1e9, delay_s=0.0)


class TestExperts:
    @pytest.mark.parametrize("layer", [0, 1])
    def test_the_public_example(self, layer: int) -> None:
        found = balanced_experts(LOADS[layer], 16, 8, groups=4, nodes=2)
        assert tuple(found.experts.tolist()) == PLACED[layer]
        assert found.load(LOADS[layer]).sum() == pytest.approx(sum(LOADS[layer]))

    def test_groups_stay_in_a_node(self) -> None:
        found = balanced_experts(LOADS[0], 16, 8, groups=4, nodes=2)
        nodes = [set((half // 3).tolist()) for half in np.split(found.experts, 2)]
        assert not nodes[0] & nodes[1]

    def test_groups_that_do_not_share_out(self) -> None:
        whole = balanced_experts(LOADS[0], 16, 8, groups=3, nodes=2)
        assert whole.experts.tolist() == balanced_experts(LOADS[0], 16, 8).experts.tolist()

    def test_replicas_go_to_the_busiest(self) -> None:
        assert replicate([6.0, 1.0, 2.9], 6).tolist() == [0, 1, 2, 0, 0, 2]

    def test_packs_are_of_equal_size(self) -> None:
        assert pack([5, 4, 3, 3, 2, 1], 3) == [[0, 5], [1, 4], [2, 3]]
        with pytest.raises(MoestroError, match="do not share out"):
            pack([1, 2, 3], 2)

    @given(st.lists(st.integers(0, 30), min_size=2, max_size=4), st.integers(0, 2**16))
    @settings(max_examples=10, deadline=None)
    def test_nothing_is_better(self, loads: list[int], seed: int) -> None:
        devices = 2 + seed % 2
        places = devices * -(-(len(loads) + 1) // devices)
        found, _ = exact_experts(loads, places, devices)
        best = min(one.load(loads).max() for one in _all(len(loads), places, devices))
        assert set(found.experts.tolist()) == set(range(len(loads)))
        assert found.load(loads).max() == pytest.approx(best, rel=1e-5, abs=1e-6)
        assert balanced_experts(loads, places, devices).load(loads).max() >= best - 1e-9

    @pytest.mark.parametrize(
        ("loads", "places", "devices", "match"),
        [([1, 2, 3], 2, 1, "2 places for 3"), ([1, 2, 3], 5, 2, "multiples"), ([1, -2], 2, 1, "zero or more"),
         ([], 0, 1, "zero or more")],
    )  # fmt: skip
    def test_bad_input(self, loads: list[float], places: int, devices: int, match: str) -> None:
        for way in (balanced_experts, exact_experts):
            with pytest.raises(MoestroError, match=match):
                way(loads, places, devices)
        with pytest.raises(MoestroError, match="over 2 nodes"):
            balanced_experts([1, 2, 3, 4], 9, 3, 2, 2)


def _all(experts: int, places: int, devices: int) -> list[Experts]:
    """Every multiset of experts on every device."""
    room = places // devices
    sets = list(combinations_with_replacement(range(experts), room))
    found = []
    for choice in combinations_with_replacement(sets, devices):
        placed = [e for own in choice for e in own]
        if len(set(placed)) == experts:
            found.append(Experts(np.array(placed), devices))
    return found


class TestCircuits:
    @given(st.integers(0, 2**16))
    @settings(max_examples=8, deadline=None)
    def test_nothing_is_faster(self, seed: int) -> None:
        demand = np.random.default_rng(seed).integers(0, 9, (4, 4)).astype(float)
        found, _ = solve_circuits(demand, TIER)
        assert (found == found.T).all()
        assert (found.sum(axis=1) <= TIER.ocs_ports).all()
        pairs = list(zip(*np.triu_indices(4, 1), strict=True))
        best = float("inf")
        for counts in product(range(TIER.ocs_ports + 1), repeat=len(pairs)):
            laid = np.zeros((4, 4), dtype=np.int64)
            for (a, b), count in zip(pairs, counts, strict=True):
                laid[a, b] = laid[b, a] = count
            if (laid.sum(axis=1) <= TIER.ocs_ports).all():
                best = min(best, circuit_s(demand, laid, TIER))
        assert circuit_s(demand, found, TIER) == pytest.approx(best)
        for other in (circuits(demand, TIER.ocs_ports), even_circuits(4, TIER.ocs_ports)):
            assert circuit_s(demand, other, TIER) >= best * (1 - 1e-9)

    def test_bad_demand(self) -> None:
        with pytest.raises(MoestroError, match="square"):
            solve_circuits(np.ones((2, 3)), TIER)
        assert solve_circuits(np.zeros((3, 3)), TIER)[0].shape == (3, 3)
        for bad in (np.ones((2, 3)), np.array([[0, np.nan], [1, 0]]), np.array([[0, -1.0], [1, 0]])):
            with pytest.raises(MoestroError, match="square"):
                lay_circuits(bad, TIER)
        with pytest.raises(MoestroError, match="nothing to lay circuits for"):
            lay_circuits(np.eye(4), TIER)

    @given(st.integers(0, 2**16), st.integers(4, 9))
    @settings(max_examples=4, deadline=None)
    def test_regions_of_an_exchange(self, seed: int, servers: int) -> None:
        """Each `region_size` servers, the last fewer; never slower than even or greedy ones."""
        demand = np.random.default_rng(seed).lognormal(sigma=1.5, size=(servers, servers))
        found = lay_circuits(demand, TIER)
        region = np.arange(servers) // TIER.region_size
        assert not found.counts[region[:, None] != region].any()
        assert (found.counts == found.counts.T).all()
        assert (found.counts.sum(axis=1) <= TIER.ocs_ports).all()
        assert found.seconds == circuit_s(demand * (1 - np.eye(servers)), found.counts, TIER)
        assert found.bound_s * (1 - 1e-6) <= found.seconds <= min(found.even_s, found.greedy_s)
        assert found.unblocked_s == packet_s(demand, 3e9)
        if servers == TIER.region_size:
            assert found.gap < 1e-4

    def test_a_server_alone_in_its_region(self) -> None:
        found = lay_circuits(np.ones((5, 5)), TIER)
        assert not found.counts[4].any()


class TestRegions:
    @given(st.lists(st.tuples(st.floats(0.5, 3), st.integers(1, 2), st.integers(2, 6)), min_size=1, max_size=3),
           st.integers(0, 4))  # fmt: skip
    @settings(max_examples=40, deadline=None)
    def test_nothing_is_faster(self, some: list[tuple[float, int, int]], more: int) -> None:
        groups = [Group(stages, layer_s, most, extra_s=0.3) for layer_s, stages, most in some]
        stages = [(g.layer_s, 0.3 * (n == g.stages - 1), g.most_layers or 0) for g in groups for n in range(g.stages)]
        layers = min(len(stages) + more, sum(most for *_, most in stages))
        found = layers_over(groups, layers)

        def times(sizes: tuple[int, ...]) -> tuple[float, float]:
            each = [n * layer_s + extra for n, (layer_s, extra, _) in zip(sizes, stages, strict=True)]
            return max(each), sum(each)

        every = [
            sizes
            for sizes in product(*(range(1, most + 1) for *_, most in stages))
            if sum(sizes) == layers
        ]  # fmt: skip
        assert found in every
        assert times(found) == pytest.approx(min(times(sizes) for sizes in every))

    def test_layers_by_speed(self) -> None:
        assert layers_over([Group(2, 1.0), Group(2, 3.0)], 16) == (6, 6, 2, 2)

    def test_no_room(self) -> None:
        with pytest.raises(MoestroError, match="the groups hold 6 layers, the model has 7"):
            layers_over([Group(2, 1.0, 3)], 7)
        with pytest.raises(MoestroError, match="3 stages for 2 layers"):
            layers_over([Group(3, 1.0)], 2)
