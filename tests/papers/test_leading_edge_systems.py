"""Leading-edge systems: checks hold and can fail, the reading of measured rates, and (slow) the whole row."""

from dataclasses import replace
from typing import Any

import pytest

from moestro.hardware.curves.busbw import bus_factor
from moestro.hardware.profile import Sample
from papers import leading_edge_systems as paper
from papers.leading_edge_systems import ALL_TO_ALL, MEASURED, MIB, WORLDS, Ring


def samples(gbps: dict[str, float]) -> list[Sample]:
    """What ranks would measure with these bus bandwidths, and with half of them at a smaller size."""
    return [
        Sample(
            op=op,
            case={"bytes": size, "ranks": ranks, "nodes": 1},
            median_s=size * bus_factor(op, ranks) / (gbps[op] * share * 1e9),
        )
        for ranks in WORLDS
        for op in MEASURED
        for size, share in ((4 * MIB, 0.5), (16 * MIB, 1.0))
    ]


EQUAL = dict.fromkeys(MEASURED, 2.0)


class TestAgreement:
    def test_the_best_size_counts(self) -> None:
        assert paper.bus_rates(samples(EQUAL), 4) == pytest.approx(EQUAL)

    @pytest.mark.parametrize(
        ("changed", "verdict"),
        [
            ({}, "holds"),
            ({"broadcast": 2.1, "all_gather": 1.9}, "holds"),
            ({"broadcast": 3.0}, "holds in part"),
            ({"broadcast": 3.0, "all_gather": 1.0, "all_to_all": 1.0}, "does not hold"),
        ],
    )
    def test_verdict(self, changed: dict[str, float], verdict: str) -> None:
        assert paper.check_agreement(samples(EQUAL | changed)).verdict == verdict

    def test_collectives_that_did_not_fit_into_the_time(self) -> None:
        some = [s for s in samples(EQUAL) if s.op != "broadcast" or s.case["ranks"] == 2]
        check = paper.check_agreement(some)
        assert check.verdict == "not reproducible here"
        assert check.ours.startswith("4 of 5 collectives over 4 ranks")

    def test_spread_is_told_with_and_without_the_factor(self) -> None:
        assert "from 2.0 to 1.0 times over 2 ranks; 2.0 to 1.0 times over 4 ranks" in (
            paper.check_agreement(samples(EQUAL)).note
        )


class TestFactors:
    def test_holds(self) -> None:
        check = paper.check_factors()
        assert check.verdict == "holds"
        assert "all_reduce 7/4" in check.ours

    def test_another_factor_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(paper, "bus_factor", lambda op, n: bus_factor(op, n) if op != "all_reduce" else 2.0)
        assert paper.check_factors().verdict == "holds in part"

    def test_an_algorithm_with_a_step_too_few_is_not_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def short(ring: Ring) -> None:
            for turn in range(ring.ranks - 2):
                ring.step(lambda rank, turn=turn: rank - turn, add=True)  # type: ignore[misc]

        monkeypatch.setattr(Ring, "reduce_scatter", short)
        with pytest.raises(AssertionError):
            paper.sent_share("all_reduce", 4)


class TestAllToAll:
    def test_holds_but_for_the_switch(self) -> None:
        check = paper.check_all_to_all()
        assert check.verdict == "holds"
        assert "at 4 MiB where the protocol changes" in check.ours

    def test_switch_is_where_a_larger_message_is_faster(self) -> None:
        assert paper.switch_sizes({1: 1.0, 2: 1.5, 4: 1.2, 8: 2.0}) == [2]
        assert paper.switch_sizes({1: 1.0, 2: 1.05, 4: 1.0}) == []

    def test_a_size_far_off_the_line_is_seen(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(paper, "ALL_TO_ALL", ALL_TO_ALL | {1024: 20.0})
        assert paper.check_all_to_all().verdict == "holds in part"


class TestSystems:
    def test_order(self) -> None:
        check = paper.check_order()
        assert check.verdict == "holds"
        assert "12 of 12" in check.ours

    def test_systems_changed_about(self) -> None:
        found = paper.fabrics()
        swapped = found | {"2 × p3dn": replace(found["2 × p3dn"], nic_bytes_per_s=100e9)}
        assert paper.check_order(swapped).verdict == "holds in part"

    def test_slow_network(self) -> None:
        assert paper.check_slow_network().verdict == "holds"

    @pytest.mark.parametrize(("name", "size"), [("LARGE", 2**20), ("SMALL", 2**32)])
    def test_sizes_at_which_it_is_otherwise(self, name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(paper, name, size)
        assert paper.check_slow_network().verdict == "holds in part"


@pytest.mark.slow
def test_whole_row() -> None:
    seen: list[Any] = []
    result = paper.run(lambda *state: seen.append(state))
    assert [check.verdict for check in result.checks[1:]] == ["holds"] * 4
    assert result.checks[0].how == "measured"
    assert len(result.figures) == len(WORLDS) * len(MEASURED)
    assert seen[-1][:2] == (3, 3)
