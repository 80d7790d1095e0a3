"""MixNet: exchanges of the recorded kind, and checks that can fail."""

import numpy as np
import pytest

from moestro.graph.count import count_step
from moestro.predict.costs import Cost, StageCost, StepCost
from papers import mixnet


class TestExchanges:
    def test_the_more_uneven_the_better(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mixnet, "DRAWS", 40)
        times = {skew: mixnet.mean_times(skew) for skew in (0.5, 3.0)}
        assert times[0.5]["greedy"] == pytest.approx(1.88, abs=0.08)
        assert times[0.5]["even"] == pytest.approx(2.29, rel=0.1)
        assert times[3.0]["greedy"] == pytest.approx(1.54, abs=0.2)
        assert mixnet.check_skew(times).verdict == "holds"
        assert mixnet.check_skew({0.5: times[3.0], 3.0: times[0.5]}).verdict == "holds in part"
        swapped = {skew: {"greedy": pair["even"], "even": pair["greedy"]} for skew, pair in times.items()}
        assert mixnet.check_skew(swapped).verdict == "does not hold"

    def test_checks_of_limits(self) -> None:
        assert mixnet.check_ties().verdict == "holds"
        assert mixnet.check_ties().ours.startswith("4.00 times a network that never blocks, even circuits 1.14")
        assert mixnet.check_alike().verdict == "holds"
        assert mixnet.check_limits().verdict == "holds"

    def test_greedy_against_the_best(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mixnet, "BEST_DRAWS", 1)
        monkeypatch.setattr(mixnet, "SKEWS", (0.5, 3.0))
        found = mixnet.check_best()
        assert found.verdict in ("holds in part", "does not hold")  # greedy takes 1.3 times as long at σ = 0.5
        monkeypatch.setattr(mixnet, "NEAR", 9.0)
        assert mixnet.check_best().verdict == "holds"

    def test_a_check_of_limits_fails_without_the_way_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mixnet, "circuits", lambda demand, ports: np.full(demand.shape, ports))
        assert mixnet.check_limits().verdict == "holds in part"


class TestSteps:
    def test_comparable(self) -> None:
        near, far = {"circuits": 1.1, "fat-tree": 1.0}, {"circuits": 1.3, "fat-tree": 1.0}
        assert mixnet.check_steps({0.0: near}).verdict == "holds"
        assert mixnet.check_steps({0.0: near, 1.0: far}).verdict == "holds in part"
        assert mixnet.check_steps({1.0: far}).verdict == "does not hold"

    def test_delay(self) -> None:
        assert mixnet.check_delay(30.0, 10.0).verdict == "holds"
        assert mixnet.check_delay(10.0, 20.0).verdict == "holds in part"
        assert mixnet.check_delay(5.0, 17.0).verdict == "does not hold"

    def test_only_exchanges_are_exchanged(self) -> None:
        mine = Cost(collectives={("ep", True, False): 9.0, ("dp", True, True): 1.0})
        other = Cost(collectives={("ep", True, False): 2.0, ("dp", True, True): 7.0})

        def step(cost: Cost) -> StepCost:
            return StepCost((StageCost(0, cost, cost, Cost(), 0.0),), (), 1)

        found = mixnet.with_exchanges(step(mine), step(other), 3.0).stages[0].forward.collectives
        assert found == {("ep", True, False): 6.0, ("dp", True, True): 1.0}

    def test_the_example_is_the_papers(self) -> None:
        assert mixnet.PLAN.world_size == 1024
        graph = count_step(mixnet.WORKLOAD, mixnet.PLAN)
        assert graph.micro_batches == 8
