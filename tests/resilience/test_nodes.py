"""States of nodes: only allowed transitions, all logged, and no node is forgotten."""

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.errors import MoestroError
from moestro.resilience.nodes import ALLOWED, TRIAGE_OF, Nodes, State, read_log, way
from moestro.resilience.taxonomy import EXITS, FAULTS, Category, exit_of
from moestro.train.incidents import Action, Signal

STATES = st.sampled_from(get_args(State))


def test_tables_are_whole() -> None:
    assert set(ALLOWED) == set(get_args(State))
    assert all(after in ALLOWED for ways in ALLOWED.values() for after in ways)
    assert set(FAULTS) == set(get_args(Signal))
    assert set(TRIAGE_OF) == set(get_args(Category))
    assert all(set(fault.answers) <= set(get_args(Action)) and fault.answers for fault in FAULTS.values())
    assert all(one.signal is None or one.signal in FAULTS for one in EXITS.values())


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), STATES), max_size=60))
def test_no_transition_that_is_not_allowed(moves: list[tuple[str, State]]) -> None:
    nodes = Nodes()
    for host, after in moves:
        before = nodes.state(host)
        if after in ALLOWED[before]:
            assert nodes.move(host, after, "test").before == before
            assert nodes.state(host) == after
        else:
            with pytest.raises(MoestroError, match="cannot become"):
                nodes.move(host, after, "test")
            assert nodes.state(host) == before


@pytest.mark.parametrize("state", [s for s in get_args(State) if s not in ("available", "deallocated_capacity")])
def test_every_node_can_come_back(state: State) -> None:
    assert way(state, ["available"])[-1] == "available"


def test_a_cordoned_node_is_validated_again_by_the_shortest_way() -> None:
    assert way("cordoned", ["validating"]) == ["triaged_user", "validating"]
    assert way("available", ["available"]) == []
    assert way("deallocated_capacity", ["available"]) == []


def test_the_log_makes_them_again(tmp_path: Path) -> None:
    log = tmp_path / "nodes.jsonl"
    nodes = Nodes(log)
    moves: list[tuple[str, State]] = [
        ("n1", "validating"), ("n1", "available"), ("n2", "validating"), ("n2", "cordoned"),
    ]  # fmt: skip
    for host, after in moves:
        nodes.move(host, after, "doctor", "disk")
    with log.open("a") as file:
        file.write('{"host": "n1", "bef')  # killed while writing
    again = Nodes(log)
    assert again.state("n1") == "available"
    assert again.hosts("cordoned") == again.waiting() == ["n2"]
    assert [one.detail for one in read_log(log)] == ["disk"] * 4


def test_a_log_with_an_impossible_transition(tmp_path: Path) -> None:
    log = tmp_path / "nodes.jsonl"
    Nodes(log).move("n1", "validating", "doctor")
    log.write_text(log.read_text().replace('"validating"', '"ua"'))
    with pytest.raises(MoestroError, match="new to ua is no transition"):
        Nodes(log)


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path / "none" / "nodes.jsonl")
    with pytest.raises(MoestroError, match="cannot write"):
        nodes.move("n1", "validating", "doctor")
    assert nodes.state("n1") == "new"


@pytest.mark.parametrize(
    ("status", "signal", "reaction"),
    [(0, None, "never"), (2, "user_error", "never"), (-9, "killed", "retry"), (137, "killed", "retry"),
     (3, "lost_peer", "retry"), (130, None, "never"), (-34, "killed", "retry"), (77, "exit", "retry")],
)  # fmt: skip
def test_exit_statuses(status: int, signal: str | None, reaction: str) -> None:
    assert (exit_of(status).signal, exit_of(status).reaction) == (signal, reaction)
