"""Optical circuits: how they are laid, and what an exchange over them takes in the limits that are known."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from moestro.errors import MoestroError
from moestro.hardware.curves.optical import (
    OpticalTier,
    circuit_s,
    circuits,
    even_circuits,
    exchange,
    packet_s,
)

Floats = NDArray[np.float64]
TIER = OpticalTier(region_size=8, ocs_ports=6, eps_ports=2, port_bytes_per_s=10.0, delay_s=0.025)


def drawn(skew: float, seed: int, servers: int = 8) -> Floats:
    found = np.random.default_rng(seed).lognormal(0.0, skew, (servers, servers))
    np.fill_diagonal(found, 0.0)
    return found


class TestCircuits:
    @pytest.mark.parametrize("ports", [0, 1, 2, 5, 6, 9])
    @pytest.mark.parametrize("skew", [0.0, 1.0, 3.0])
    def test_symmetric_and_within_the_ports(self, ports: int, skew: float) -> None:
        for servers in (2, 3, 5, 8):
            for laid in (circuits(drawn(skew, servers, servers), ports), even_circuits(servers, ports)):
                assert (laid == laid.T).all()
                assert (laid.diagonal() == 0).all()
                assert laid.sum(axis=1).max(initial=0) <= ports

    def test_the_largest_pair_first_and_again_when_half_of_it_is_the_largest(self) -> None:
        demand = np.zeros((4, 4))
        demand[0, 1], demand[0, 2], demand[2, 3] = 10.0, 4.0, 1.0
        assert circuits(demand, 1)[0].tolist() == [0, 1, 0, 0]
        assert circuits(demand, 3)[0].tolist() == [0, 2, 1, 0]
        assert circuits(demand, 3)[2].tolist() == [1, 0, 0, 2]  # 1, then 1/2: all that is left with ports

    def test_directions_count_together(self) -> None:
        demand = np.array([[0.0, 3.0, 0.0], [3.0, 0.0, 5.0], [0.0, 0.0, 0.0]])
        assert circuits(demand, 1)[1].tolist() == [1, 0, 0]

    def test_what_a_server_sends_itself_takes_no_port(self) -> None:
        assert circuits(np.diag([5.0, 5.0]), 2).sum() == 0

    def test_equal_demand_strands_a_server(self) -> None:
        laid = circuits(1 - np.eye(8), 6)
        assert laid.sum(axis=1).tolist() == [6] * 7 + [0]

    def test_even_circuits_reach_the_nearest(self) -> None:
        assert even_circuits(8, 6)[0].tolist() == [0, 1, 1, 1, 0, 1, 1, 1]
        assert even_circuits(8, 7)[0].tolist() == [0, 1, 1, 1, 1, 1, 1, 1]
        assert even_circuits(2, 6).tolist() == [[0, 6], [6, 0]]
        assert even_circuits(1, 6).tolist() == [[0]]

    @pytest.mark.parametrize("demand", [np.ones(3), np.ones((2, 3)), -np.ones((2, 2)), np.full((2, 2), np.nan)])
    def test_not_a_demand(self, demand: Floats) -> None:
        with pytest.raises(MoestroError, match="square"):
            circuits(demand, 2)
        with pytest.raises(MoestroError, match="square"):
            exchange(demand, TIER, 1.0)


class TestTimes:
    def test_packets_wait_for_the_busiest_port(self) -> None:
        demand = np.array([[9.0, 4.0, 0.0], [0.0, 9.0, 1.0], [0.0, 2.0, 9.0]])
        assert packet_s(demand, 2.0) == pytest.approx(6.0 / 2)  # into the second; the diagonal stays at home

    def test_pairs_without_a_circuit_share_the_packet_ports(self) -> None:
        demand = np.array([[0.0, 40.0, 60.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
        laid = np.array([[0, 2, 0], [2, 0, 0], [0, 0, 0]])
        assert circuit_s(demand, laid, TIER) == pytest.approx(max(40 / 2 / 10, 60 / 20))

    def test_with_many_ports_it_is_a_network_that_never_blocks(self) -> None:
        demand, ports = drawn(1.5, 3) + drawn(1.5, 3).T, 1000  # circuits are as wide both ways, so alike both ways
        tier = replace(TIER, ocs_ports=ports, port_bytes_per_s=1 / ports)
        assert exchange(demand, tier, 1.0).seconds == pytest.approx(packet_s(demand, 1.0), rel=0.02)

    def test_two_servers_are_joined_by_all_circuits(self) -> None:
        demand = np.array([[0.0, 60.0], [60.0, 0.0]])
        assert exchange(demand, replace(TIER, region_size=2), 1.0).seconds == pytest.approx(1.0)

    def test_never_slower_than_even_circuits_and_faster_the_more_uneven(self) -> None:
        shares = []
        for skew in (0.5, 1.0, 2.0):
            greedy = even = 0.0
            for seed in range(40):
                demand = drawn(skew, seed)
                found = exchange(demand, TIER, 1.0).seconds
                fixed = circuit_s(demand, even_circuits(8, 6), TIER)
                assert found <= fixed
                greedy, even = greedy + found, even + fixed
            shares.append(greedy / even)
        assert shares == sorted(shares, reverse=True)
        assert shares[0] < 1

    def test_equal_demand_takes_even_circuits(self) -> None:
        found = exchange(1 - np.eye(8), TIER, 1.0)
        assert (found.how, found.seconds) == ("even", pytest.approx(0.1))

    def test_no_circuits_are_laid_when_that_takes_longer_than_the_computation(self) -> None:
        demand = drawn(2.0, 1)
        assert exchange(demand, TIER, TIER.delay_s).how == "greedy"
        late = exchange(demand, TIER, TIER.delay_s * 0.99)
        assert late.how == "fixed"
        assert late.seconds == circuit_s(demand, even_circuits(8, 6), TIER)

    def test_other_regions_are_reached_by_packets(self) -> None:
        demand = np.zeros((4, 4))
        demand[0, 1] = demand[0, 2] = 60.0
        tier = replace(TIER, region_size=2)
        assert exchange(demand, tier, 1.0).seconds == pytest.approx(max(60 / 60, 60 / 20))

    @pytest.mark.parametrize("change", [{"region_size": 1}, {"eps_ports": 0}, {"port_bytes_per_s": 0.0}])
    def test_not_a_tier(self, change: dict[str, float]) -> None:
        with pytest.raises(MoestroError, match="optical tier"):
            replace(TIER, **change)  # type: ignore[arg-type]
