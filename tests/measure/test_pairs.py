"""Pairs of ranks, sub-groups, and the groups that slow links make, on four gloo ranks."""

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.measure import pairs
from moestro.measure.collectives import CollectiveResult, WrongResult, measure_collectives
from moestro.measure.exchanges import OPS, Exchange, Place, build
from moestro.measure.pairs import PairResult, measure_pairs, pair_gbps, pair_rounds
from moestro.measure.rounds import teams_of
from moestro.parallel.local import run_on_ranks

CPU = torch.device("cpu")
SLOW_S = 0.03


def far_apart(rank: int) -> PairResult:
    """Large messages between {0, 2} and {1, 3} are held up: for real, so that only a lower bound is sure."""
    real = dist.isend

    def held_up(tensor: torch.Tensor, dst: int, *args: Any, **kwargs: Any) -> Any:
        if tensor.nbytes > 1000 and (rank + dst) % 2:
            time.sleep(SLOW_S)
        return real(tensor, dst, *args, **kwargs)

    dist.isend = held_up
    try:
        return measure_pairs(CPU, large_bytes=2**15, repeats=3)
    finally:
        dist.isend = real


def planted(rank: int) -> PairResult:
    """The same links with times that are made up: 1 µs, and 10 GB/s or 1 GB/s."""
    real = pairs._trips

    def made_up(pair: tuple[int, int], me: int, size_bytes: int, *rest: Any) -> tuple[int, list[float]]:
        gbps = 1.0 if sum(pair) % 2 else 10.0
        return size_bytes, [1e-6 + size_bytes / gbps / 1e9] * 3

    pairs._trips = made_up
    try:
        return measure_pairs(CPU, large_bytes=2**20)
    finally:
        pairs._trips = real


def among_any_ranks(rank: int) -> dict[str, int]:
    """Wrong elements in groups of ranks that are not consecutive, of which two exchange at once."""
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 3), (1, 2))}
    mine = (0, 3) if rank in (0, 3) else (1, 2)
    wrong = {}
    for op in OPS:
        exchange = build(op, Place(groups[mine], mine, mine.index(rank)), 1001, "fp32", CPU)
        exchange.refill()
        exchange.start()()
        wrong[op] = exchange.wrong()
        exchange.refill()
        wrong[f"{op}, not run"] = exchange.wrong()
    return wrong


def on_four_ranks(rank: int) -> dict[str, Any]:
    return {
        "groups": measure_collectives(CPU, OPS, [999], [2, 3, 4], warmup=1, repeats=1, rounds=1),
        "teams": [(team.size, team.groups, team.members, team.place is not None) for team in teams_of(3)],
        "any": among_any_ranks(rank),
        "far": far_apart(rank),
        "planted": planted(rank),
        "late": measure_pairs(CPU, large_bytes=4096, deadline=time.monotonic() - 1),
    }


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    return run_on_ranks(on_four_ranks, 4)


def test_groups_of_every_size_alone_and_all_at_once(four_ranks: list[dict[str, Any]]) -> None:
    result: CollectiveResult = four_ranks[0]["groups"]
    assert not any(isinstance(finding, WrongResult) for finding in result.findings)
    teams = {(sample.case["ranks"], sample.case["groups"]) for sample in result.samples}
    assert teams == {(2, "one"), (2, "all"), (3, "one"), (4, "one")}
    assert {sample.case["world"] for sample in result.samples} == {4}
    pairwise = {sample.case["ranks"] for sample in result.samples if sample.op == "send_recv"}
    assert pairwise == {2}
    assert [met["groups"] == result for met in four_ranks] == [True] * 4


def test_a_rank_that_is_left_over_looks_on(four_ranks: list[dict[str, Any]]) -> None:
    assert [met["teams"] for met in four_ranks] == [[(3, "one", ((0, 1, 2),), rank < 3)] for rank in range(4)]


def test_ranks_that_are_not_consecutive(four_ranks: list[dict[str, Any]]) -> None:
    for met in four_ranks:
        assert [met["any"][op] for op in OPS] == [0] * len(OPS)


def test_an_operation_that_does_nothing_is_wrong(four_ranks: list[dict[str, Any]]) -> None:
    for rank, met in enumerate(four_ranks):
        unchanged = {op for op in OPS if met["any"][f"{op}, not run"] == 0}
        assert unchanged == ({"broadcast"} if rank < 2 else set())  # the root has the right values beforehand


def test_slow_links_make_groups(four_ranks: list[dict[str, Any]]) -> None:
    found: PairResult = four_ranks[0]["planted"]
    assert found.grouping is not None
    assert found.grouping.groups == ((0, 2), (1, 3))
    expected = np.array([[0, 1, 10, 1], [1, 0, 1, 10], [10, 1, 0, 1], [1, 10, 1, 0]], dtype=float)
    np.fill_diagonal(expected, np.nan)
    assert np.allclose(found.gbps, expected, equal_nan=True)
    assert np.isnan(found.latency_s.diagonal()).all()
    assert found.latency_s[1, 3] == found.latency_s[3, 1] == pytest.approx(1e-6, rel=1e-2)
    assert (found.compute_flops > 1e6).all()
    assert found.notes == ()


def test_pairs_are_samples(four_ranks: list[dict[str, Any]]) -> None:
    samples = four_ranks[3]["far"].samples
    names = ["0-1", "0-2", "0-3", "1-2", "1-3", "2-3"]
    assert sorted((s.case["pair"], s.case["bytes"]) for s in samples) == [(p, b) for p in names for b in (8, 2**15)]
    assert {(s.op, s.case["ranks"], s.case["groups"], s.repeats) for s in samples} == {("send_recv", 2, "one", 3)}
    held_up = next(s for s in samples if s.case["pair"] == "1-2" and s.case["bytes"] == 2**15)
    assert held_up.median_s > SLOW_S


def test_pairs_that_do_not_fit_into_the_time(four_ranks: list[dict[str, Any]]) -> None:
    late: PairResult = four_ranks[1]["late"]
    assert late.samples == ()
    assert late.grouping is None
    assert late.notes == ("0 of 6 pairs of ranks fit into the time",)


@settings(deadline=None)
@given(world=st.integers(1, 40), together=st.booleans())
def test_every_pair_once_in_disjoint_rounds(world: int, together: bool) -> None:
    rounds = pair_rounds(world, together)
    every = [pair for one in rounds for pair in one]
    assert sorted(every) == [(a, b) for a in range(world) for b in range(a + 1, world)]
    for one in rounds:
        ranks = [rank for pair in one for rank in pair]
        assert len(ranks) == len(set(ranks))
    if together and world > 1:
        assert len(rounds) == world - 1 + world % 2


@settings(deadline=None)
@given(latency_us=st.floats(0.1, 1e4), gbps=st.floats(1e-3, 1e3))
def test_two_sizes_tell_latency_from_bandwidth(latency_us: float, gbps: float) -> None:
    times_s = [latency_us * 1e-6 + size / gbps / 1e9 for size in (8, 2**22)]
    assert pair_gbps(8, times_s[0], 2**22, times_s[1]) == pytest.approx(gbps, rel=1e-3)


def test_a_trip_is_half_of_there_and_back_and_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 10.0, 13.0, 20.0, 23.0, 30.0, 33.0])  # the beginnings of two warm-ups, then both ends
    started = []
    exchange = Exchange(64, 2, lambda: None, lambda: lambda: started.append(1), lambda: 0)
    monkeypatch.setattr(pairs, "build", lambda *args: exchange)
    monkeypatch.setattr(pairs.time, "perf_counter", lambda: next(ticks))
    assert pairs._trips((0, 1), 0, 64, 3, "fp32", CPU) == (64, [1.5] * 3)
    assert len(started) == 5


def test_a_large_message_that_was_no_slower() -> None:
    assert pair_gbps(8, 2e-3, 10**6, 1e-3) == pytest.approx(1.0)


def test_ranks_left_over_do_not_join_the_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 5)
    monkeypatch.setattr(dist, "new_group", tuple)
    for rank in range(5):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        one, all_at_once = teams_of(2)
        assert (one.members, all_at_once.members) == (((0, 1),), ((0, 1), (2, 3)))
        assert (one.barrier, all_at_once.barrier) == ((0, 1), (0, 1, 2, 3))
        assert (one.place is not None, all_at_once.place is not None) == (rank < 2, rank < 4)
        if all_at_once.place is not None:
            assert all_at_once.place.ranks[all_at_once.place.me] == rank
        (everyone,) = teams_of(5)
        assert everyone.barrier is None
