"""HetuMoE: the simulated network by hand, checks that can fail, and (slow) the whole row."""

from dataclasses import replace

import pytest
import torch

from papers import hetumoe
from papers.hetumoe import Report, Seen
from papers.network import Network, Route, break_even, leader_speed_up, rounds, simulate, two_hop_speed_up


class TestNetwork:
    network = Network(2, card=1.0, port=10.0, card_latency=1.0, port_latency=0.5)

    def test_a_card_sends_one_message_at_a_time(self) -> None:
        assert simulate(self.network, [(0, 2, 3.0)]) == 4
        assert simulate(self.network, [(0, 2, 3.0), (1, 3, 3.0)]) == 8  # nodes 0 → 1 twice
        assert simulate(self.network, [(0, 2, 3.0), (3, 1, 3.0)]) == 4  # both ways at once
        assert simulate(self.network, [(0, 2, 3.0), (4, 3, 3.0)]) == 8  # one receiver

    def test_ports_inside_are_a_devices_own(self) -> None:
        assert simulate(self.network, [(0, 1, 5.0)]) == 1
        assert simulate(self.network, [(0, 1, 5.0), (2, 3, 5.0), (0, 4, 3.0)]) == 4

    def test_nothing_takes_no_time(self) -> None:
        assert simulate(self.network, [(0, 0, 5.0), (0, 2, 0.0)]) == 0

    def test_rounds_are_all_pairs(self) -> None:
        assert sorted(rounds(2, 2)) == [(a, b) for a in range(4) for b in range(4) if a != b]

    def test_leader_times_are_the_sums_of_their_messages(self) -> None:
        size = 7.0
        flat = 2 * 2 * 2 * (1 + size)  # G²(N - 1) messages one after the other, 3 nodes
        between = 2 * (1 + 4 * size)
        inside = 0.5 + 6 * size / 10  # one other device's buffer for 6 devices, there and back
        assert leader_speed_up(self.network, 3, size) == pytest.approx(flat / (between + 2 * inside))

    def test_break_even_is_where_both_take_equally_long(self) -> None:
        route = Route(nodes=3, devices=4, visited=1, experts=2, tokens=1024)
        ratio = break_even(route)
        assert two_hop_speed_up(route, ratio) == pytest.approx(1, abs=0.02)
        assert ratio == pytest.approx(route.predicted(), rel=0.1)
        assert route.predicted() == pytest.approx(0.75 * 2)
        assert Route(experts=1).predicted() == float("inf")


class TestSimulatedAndExactChecks:
    @pytest.mark.parametrize("check", [hetumoe.check_break_even, hetumoe.check_flat_chosen, hetumoe.check_slots])
    def test_holds(self, check) -> None:  # type: ignore[no-untyped-def]
        assert check().verdict == "holds"

    def test_break_even_check_needs_the_right_formula(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Route, "predicted", lambda route, latency=0.0: route.experts / (route.experts - 1))
        assert hetumoe.check_break_even().verdict == "does not hold"

    def test_leader_exchange_pays_for_small_messages_only(self) -> None:
        assert hetumoe.check_leader_speed().verdict == "holds in part"

    def test_leader_exchange_does_not_pay_where_messages_are_free(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hetumoe, "CLUSTER", replace(hetumoe.CLUSTER, card_latency=0.0))
        assert hetumoe.check_leader_speed().verdict == "does not hold"

    def test_second_choices_behind_second_choices_overwrite(self) -> None:
        ids = torch.tensor([[0, 1], [0, 1], [1, 0]])  # expert 0: first choices at 0, 1; expert 1: one first choice
        assert hetumoe.lost_pairs(ids, 2, first_choices_count=True) == 0
        assert hetumoe.lost_pairs(ids, 2, first_choices_count=False) == 1  # expert 0's second choice at place 1


def ranks() -> list[list[Seen]]:
    """What two nodes of two devices must report when each token goes to both devices of the other node."""
    owners = torch.tensor([[0, 1, 2, 3]] * hetumoe.TOKENS)
    row, tensors = 64, [torch.ones(3), torch.ones(2)]
    reports = {
        "all_to_all": Report(tensors, 2, 2 * hetumoe.TOKENS * row),
        "two_hop": Report(tensors, 1, hetumoe.TOKENS * row),
        "all_gather": Report(tensors, 2, 0),
    }
    first = reports | {"leader": Report(tensors, 1, 4 * hetumoe.TOKENS * row)}
    other = reports | {"leader": Report(tensors, 0, 0)}
    return [[Seen(rank, 2, owners, dict(other if rank % 2 else first)) for rank in range(4)]]


class TestMeasuredChecks:
    @pytest.mark.parametrize("check", [hetumoe.check_equal, hetumoe.check_messages, hetumoe.check_two_hop_bytes])
    def test_holds(self, check) -> None:  # type: ignore[no-untyped-def]
        assert check(ranks()).verdict == "holds"

    @pytest.mark.parametrize(("name", "off"), [("leader", 1e-7), ("two_hop", 1e-5), ("all_gather", 1e-5)])
    def test_results_that_differ(self, name: str, off: float) -> None:
        seen = ranks()
        report = seen[0][2].reports[name]
        seen[0][2].reports[name] = replace(report, results=[report.results[0] + off, report.results[1]])
        assert hetumoe.check_equal(seen).verdict == "does not hold"

    @pytest.mark.parametrize("change", [{"messages": 3}, {"bytes": 1}])
    def test_messages_that_differ(self, change: dict[str, int]) -> None:
        seen = ranks()
        seen[0][1].reports["all_to_all"] = replace(seen[0][1].reports["all_to_all"], **change)
        assert hetumoe.check_messages(seen).verdict == "does not hold"

    def test_two_copies_to_a_node(self) -> None:
        seen = ranks()
        seen[0][3].reports["two_hop"] = replace(seen[0][3].reports["two_hop"], bytes=2 * hetumoe.TOKENS * 64)
        assert hetumoe.check_two_hop_bytes(seen).verdict == "does not hold"


@pytest.mark.slow
def test_whole_row() -> None:
    result = hetumoe.run(lambda done, total, what: None)
    assert [check.verdict for check in result.checks] == ["holds in part"] + ["holds"] * 6
    assert len(result.figures) == 12
