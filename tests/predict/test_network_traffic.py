"""Who sends how much in an expert all-to-all, and what that makes of its price."""

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from moestro.config.plan import Plan, RoutingConfig
from moestro.errors import MoestroError
from moestro.graph.trace.routing import Routing
from moestro.graph.words import Collective, Kernel, Node
from moestro.hardware.catalog import load_device
from moestro.hardware.curves.hierarchical import Fabric, hierarchical
from moestro.hardware.curves.network import CollectiveModel
from moestro.hardware.curves.optical import OpticalTier
from moestro.predict.costs import pricer_of
from moestro.predict.curves import DeviceCurves
from moestro.predict.kernels import KernelPricer
from moestro.predict.network import TOLD, Around, NetworkPricer
from moestro.predict.traffic import demand, hot_rank, rank_shares

SKEWED = RoutingConfig(kind="power_law", alpha=1.2)
LOADS = RoutingConfig(kind="measured", loads=((4, 2, 1, 1), (1, 1, 1, 1)))
FABRIC = Fabric(node_size=8, inside_bytes_per_s=200e9, nic_bytes_per_s=35e9, nics=8)
TIER = OpticalTier(region_size=8, ocs_ports=6, eps_ports=2, port_bytes_per_s=12.5e9, delay_s=0.01)
MEGABYTES = 64e6


def sent(op: str = "all_to_all", dimension: str = "ep", ranks: int = 8, size: float = MEGABYTES) -> Collective:
    return Collective(op, "dispatch", "dispatch", dimension, ranks, size, "bf16")  # type: ignore[arg-type]


def network(plan: Plan, routing: RoutingConfig, around: Around, distinct: bool = False) -> NetworkPricer:
    model = CollectiveModel([], load_device("a100-sxm-80gb"))
    return NetworkPricer(model, plan, 8, routing, around, distinct)


class TestShares:
    def test_balanced(self) -> None:
        assert rank_shares(RoutingConfig(), 64, 8, 8).tolist() == [[1 / 8] * 8]
        assert hot_rank(RoutingConfig(), 64, 8, 8) == 1

    @pytest.mark.parametrize("routing", [SKEWED, LOADS, RoutingConfig(kind="measured", max_over_mean=3)])
    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_add_up(self, routing: RoutingConfig, ranks: int) -> None:
        assert rank_shares(routing, 4, 2, ranks).sum(axis=1) == pytest.approx(1.0)

    def test_one_expert_a_rank_has_what_was_measured(self) -> None:
        assert hot_rank(RoutingConfig(kind="measured", max_over_mean=2.5), 16, 4, 16) == pytest.approx(2.5, rel=1e-6)

    def test_loads_are_summed_by_rank(self) -> None:
        assert rank_shares(LOADS, 4, 2, 2).tolist() == [[0.75, 0.25], [0.5, 0.5]]
        assert hot_rank(LOADS, 4, 2, 2) == pytest.approx((1.5 + 1.0) / 2)

    def test_grows_with_ranks_and_steepness(self) -> None:
        by_ranks = [hot_rank(SKEWED, 64, 8, ranks) for ranks in (1, 2, 4, 8, 16, 64)]
        assert by_ranks == sorted(by_ranks)
        assert by_ranks[0] == 1
        assert by_ranks[-1] > 2
        flat, steep = (hot_rank(RoutingConfig(kind="power_law", alpha=a), 64, 8, 8) for a in (0.3, 2.0))
        assert 1 < flat < hot_rank(SKEWED, 64, 8, 8) < steep

    def test_no_rank_gets_more_than_all_tokens(self) -> None:
        steepest = RoutingConfig(kind="power_law", alpha=8.0)
        assert hot_rank(steepest, 8, 2, 8) <= 8 / 2 + 1e-9  # each token goes to two of eight
        assert hot_rank(steepest, 64, 8, 8, distinct=True) < hot_rank(steepest, 64, 8, 8)

    def test_is_what_a_router_would_draw(self) -> None:
        drawn = Routing(SKEWED).order(20_000, 64)[:, :8].flatten().bincount(minlength=64).double() / 160_000
        largest = drawn.sort(descending=True).values.numpy()
        ours = np.sort(rank_shares(SKEWED, 64, 8, 64)[0])[::-1]
        assert ours == pytest.approx(largest, rel=0.1)

    def test_every_expert_chosen(self) -> None:
        assert rank_shares(SKEWED, 4, 4, 2) == pytest.approx(0.5)

    def test_is_the_same_every_time(self) -> None:
        first = rank_shares(SKEWED, 32, 4, 8).copy()
        rank_shares.cache_clear()
        assert (rank_shares(SKEWED, 32, 4, 8) == first).all()

    def test_demand(self) -> None:
        assert demand(np.array([0.25, 0.75]), 8.0).tolist() == [[2.0, 6.0], [2.0, 6.0]]

    def test_mistakes(self) -> None:
        with pytest.raises(MoestroError, match="shared out"):
            rank_shares(SKEWED, 6, 2, 4)
        with pytest.raises(MoestroError, match="of 4 experts; the model has 8"):
            rank_shares(LOADS, 8, 2, 4)
        for wrong in ({"kind": "measured", "loads": ((1, 2), (1,))}, {"loads": ((1, 2),)},
                      {"kind": "measured", "loads": ((0, 0),)}, {"kind": "measured", "loads": ((-1, 2),)}):  # fmt: skip
            with pytest.raises(ValidationError):
                RoutingConfig.model_validate(wrong)


class TestPrices:
    def test_a_hot_rank_slows_dispatch_and_nothing_else(self) -> None:
        plan, around = Plan(dp=8, ep=8), Around(64, 8)
        even, skewed = network(plan, RoutingConfig(), Around()), network(plan, SKEWED, around)
        larger = sent(size=MEGABYTES * hot_rank(SKEWED, 64, 8, 8))
        assert skewed.of(sent()).seconds == even.of(larger).seconds > 1.5 * even.of(sent()).seconds
        for other in (sent("all_reduce"), sent("all_gather"), sent(ranks=1)):
            assert skewed.of(other) == even.of(other)

    def test_deduplicated_tokens_are_less_uneven(self) -> None:
        plan, around = Plan(dp=8, ep=8), Around(64, 8)
        assert network(plan, SKEWED, around, True).of(sent()) < network(plan, SKEWED, around).of(sent())

    def test_two_hops(self) -> None:
        """Between nodes by what a node gets, inside by the busiest rank of all."""
        plan, around = Plan(dp=32, ep=32), Around(64, 8)
        even, skewed = network(plan, RoutingConfig(), Around()), network(plan, SKEWED, around)
        between, inside = sent(dimension="ep_between", ranks=4), sent(ranks=8)
        hot = hot_rank(SKEWED, 64, 8, 4, distinct=True), hot_rank(SKEWED, 64, 8, 32)
        assert skewed.of(between).seconds == even.of(between._replace(bytes=MEGABYTES * hot[0])).seconds
        assert skewed.of(inside).seconds == even.of(inside._replace(bytes=MEGABYTES * hot[1])).seconds

    def test_what_nobody_measured_goes_by_the_clusters_links(self) -> None:
        plan = Plan(dp=32, ep=32)
        found = network(plan, RoutingConfig(), Around(fabric=FABRIC))
        assert found.of(sent("all_reduce", "dp", 32)).basis == "steps"
        steps = hierarchical("all_reduce", MEGABYTES, FABRIC, 32, 4).seconds
        assert found.of(sent("all_reduce", "dp", 32)).seconds == steps
        inside = network(Plan(dp=8), RoutingConfig(), Around(fabric=FABRIC)).of(sent("all_reduce", "dp", 8))
        assert inside.basis == "catalog"
        assert not inside.between
        uneven = network(Plan(dp=12), RoutingConfig(), Around(fabric=FABRIC)).of(sent("all_reduce", "dp", 9))
        assert uneven.basis == "catalog"  # nine ranks on two nodes: no steps are known
        assert {"steps", "catalog"} <= set(TOLD)

    def test_circuits(self) -> None:
        """One rank of a group on each of 8 nodes, and 8 groups beside each other: 8 times the bytes of a rank."""
        plan, around = Plan(dp=8, tp=8, ep=8, etp=8), Around(8, 2, optical=TIER)
        pricer = network(plan, RoutingConfig(), around)
        found = pricer.of(sent(), window_s=0.02)
        start_s = pricer.model.seconds("all_to_all", 1.0, 8, 8).seconds
        wire_s = 8 * MEGABYTES / 8 / (0.7 * 12.5e9)  # even circuits: a pair has one, the opposite 2 packet ports
        assert found.seconds == pytest.approx(start_s + wire_s)
        assert (found.basis, found.between) == ("even", True)
        assert pricer.of(sent(), window_s=0.0).basis == "fixed"
        skewed = network(plan, SKEWED, around).of(sent(), window_s=0.02)
        assert skewed.seconds > 1.5 * found.seconds
        assert set(TOLD) >= {"greedy", "even", "fixed"}

    def test_circuits_are_for_exchanges_between_nodes(self) -> None:
        pricer = network(Plan(dp=8, ep=8), RoutingConfig(), Around(8, 2, optical=TIER))
        assert pricer.of(sent(), window_s=1.0).basis == "catalog"
        wide = network(Plan(dp=64, ep=8), RoutingConfig(), Around(8, 2, optical=TIER))
        assert wide.of(sent("all_reduce", "dp", 64), window_s=1.0).basis == "catalog"

    def test_several_ranks_of_a_group_on_a_node(self) -> None:
        """Half of 16 ranks' bytes stay inside; two nodes have all six circuits between them."""
        pricer = network(Plan(dp=16, ep=16), RoutingConfig(), Around(16, 2, optical=TIER))
        start_s = pricer.model.seconds("all_to_all", 1.0, 16, 2).seconds
        wire_s = 8 * MEGABYTES / 2 / 6 / (0.7 * 12.5e9)
        assert pricer.of(sent(ranks=16), window_s=1.0).seconds == pytest.approx(start_s + wire_s)

    def test_ranks_that_fill_nodes_unevenly(self) -> None:
        """Nine ranks on two nodes: no demand of nodes to lay circuits for, and experts that nodes do not share out."""
        pricer = network(Plan(dp=9, ep=9), SKEWED, Around(9, 2, optical=TIER))
        assert pricer.of(sent(ranks=9), window_s=1.0).basis == "catalog"
        assert pricer.of(sent(dimension="ep_between", ranks=2)).seconds > 0

    def test_pricers_are_told_apart(self) -> None:
        device = load_device("a100-sxm-80gb")
        curves = DeviceCurves(device, [], CollectiveModel([], device))
        plan = Plan(dp=8, ep=8)
        once = Plan(dp=8, ep=8, dispatch="deduplicated")
        around = Around(64, 8)
        slower = Around(64, 8, optical=replace(TIER, delay_s=1.0))
        found = {id(pricer_of(curves, SKEWED, p, 8, a)) for p, a in ((plan, around), (once, around), (plan, slower))}
        assert len(found) == 3
        assert pricer_of(curves, SKEWED, plan, 8, around) is pricer_of(curves, SKEWED, plan, 8, Around(64, 8))


class TestPieces:
    def test_circuits_are_laid_behind_what_comes_before_the_dispatch(self) -> None:
        device = load_device("a100-sxm-80gb")
        curves = DeviceCurves(device, [], CollectiveModel([], device))
        plan = Plan(dp=8, tp=8, ep=8, etp=8)
        pricer = pricer_of(curves, RoutingConfig(), plan, 8, Around(8, 2, optical=TIER))
        product = Kernel("gemm", "attention", "qkv", (1, 32768, 16384, 16384), "bf16", 1.8e13, 0.0)
        assert pricer.nodes([product]).kernels["gemm"] > TIER.delay_s
        for part, basis in (("attention", "even"), ("norms", "even"), ("experts", "fixed"), ("dispatch", "fixed")):
            before: tuple[Node, ...] = (product._replace(part=part), sent())
            for nodes in (before, before[::-1]):
                assert pricer.nodes(nodes).guessed == {(basis, "ep")}

    def test_measured_loads_slow_the_experts_too(self) -> None:
        device = load_device("a100-sxm-80gb")
        curves = DeviceCurves(device, [], CollectiveModel([], device))
        product = Kernel("grouped_gemm", "experts", "gate_up", (2, 4096, 1024, 1024), "bf16", 8.6e9, 0.0)
        even, uneven = (KernelPricer(curves, routing, 2).seconds(product) for routing in (RoutingConfig(), LOADS))
        assert uneven == pytest.approx(even * hot_rank(LOADS, 4, 1, 2))
