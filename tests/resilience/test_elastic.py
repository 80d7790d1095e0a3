"""Who takes part: nodes are left out, examined, and let back in; their states never jump."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.config.supervise import SuperviseConfig
from moestro.errors import MoestroError
from moestro.resilience.elastic import Crew
from moestro.resilience.nodes import Nodes, read_log
from moestro.resilience.policy import End
from moestro.resilience.taxonomy import Category

BACK_S = 100.0


def end(rank: int | None, category: Category = "platform") -> End:
    return End("killed", category, "retry", {"status": "SIGKILL", "what": "killed"}, rank)


class Doctor:
    """Says what it is told to, by node."""

    def __init__(self) -> None:
        self.unfit: dict[str, str] = {}
        self.asked: list[str] = []

    def __call__(self, node: str) -> str | None:
        self.asked.append(node)
        return self.unfit.get(node)


def divides(*allowed: int) -> Callable[[int], None]:
    def layout(ranks: int) -> None:
        if ranks not in allowed:
            raise MoestroError(f"a batch of 4 does not divide among {ranks}")

    return layout


def crew(nodes: Nodes, says: Doctor, ranks: int = 4, allowed: tuple[int, ...] = (1, 2, 4), **changes: object) -> Crew:
    values = {"elastic": True, "ranks_per_node": 2, "back_after_s": BACK_S, **changes}
    made = Crew(ranks, "host", SuperviseConfig.model_validate(values), nodes, divides(*allowed), says)
    assert made.join() is None
    return made


def test_one_fault_is_no_reason_to_shrink() -> None:
    nodes = Nodes()
    some = crew(nodes, Doctor())
    assert some.after(end(3), 0.0).action == "restart"
    assert some.ranks == 4
    assert nodes.hosts("available") == ["host:0", "host:1"]


def test_shrinks_when_a_node_fails_again_and_grows_when_it_is_back() -> None:
    nodes, doctor = Nodes(), Doctor()
    some = crew(nodes, doctor, doctor=True)
    some.after(end(2), 0.0)
    verdict = some.after(end(3), 10.0)
    assert (verdict.action, some.ranks) == ("shrink", 2)
    assert "host:1 ended the run 2 times; 2 of 4 ranks go on" in verdict.why
    assert nodes.state("host:1") == "triaged_platform"
    assert some.returning(10.0 + BACK_S - 1) is None
    doctor.unfit["host:1"] = "disk: full"
    assert some.returning(10.0 + BACK_S) is None  # asked, and found unfit: it waits twice as long
    doctor.unfit.clear()
    assert some.returning(10.0 + 2 * BACK_S) is None
    assert some.returning(10.0 + 3 * BACK_S) == "host:1"
    assert (some.ranks, nodes.state("host:1")) == (4, "available")


def test_ranks_are_numbered_anew_without_a_node() -> None:
    some = crew(Nodes(), Doctor(), ranks=6, allowed=(2, 4, 6))
    for now in (0.0, 1.0):
        some.after(end(0), now)
    assert [some.name_of(rank) for rank in range(4)] == ["host:1", "host:1", "host:2", "host:2"]
    assert some.name_of(None) is None


def test_faults_long_ago_are_forgotten() -> None:
    some = crew(Nodes(), Doctor(), lost_within_s=50)
    assert [some.after(end(0), now).action for now in (0.0, 51.0, 102.0)] == ["restart"] * 3


def test_never_a_layout_that_is_not_allowed() -> None:
    nodes = Nodes()
    some = crew(nodes, Doctor(), allowed=(4,))
    some.after(end(0), 0.0)
    verdict = some.after(end(0), 1.0)
    assert (verdict.action, some.ranks) == ("restart", 4)
    assert "but 2 ranks are not allowed (a batch of 4 does not divide among 2)" in verdict.why
    assert nodes.hosts("available") == ["host:0", "host:1"]


def test_idle_ranks_rather_than_none() -> None:
    some = crew(Nodes(), Doctor(), ranks=6, allowed=(6, 3, 1))
    for now in (0.0, 1.0):
        verdict = some.after(end(5), now)
    assert (verdict.action, some.ranks) == ("shrink", 3)


def test_the_doctor_stops_what_cannot_go_on_without_the_node() -> None:
    doctor, nodes = Doctor(), Nodes()
    some = crew(nodes, doctor, doctor=True, elastic=False)
    doctor.unfit["host:0"] = "memory: 3 errors"
    verdict = some.after(end(1), 0.0)
    assert (verdict.action, verdict.unfit) == ("stop", True)
    assert "node host:0 is unfit: memory: 3 errors, and supervise.elastic is off" in verdict.why
    assert nodes.waiting() == ["host:0"]


def test_an_unfit_node_is_left_out_at_once() -> None:
    doctor = Doctor()
    some = crew(Nodes(), doctor, doctor=True)
    doctor.unfit["host:0"] = "clock"
    assert (some.after(end(1), 0.0).action, some.ranks) == ("shrink", 2)


def test_a_node_that_is_unfit_from_the_beginning() -> None:
    doctor = Doctor()
    doctor.unfit["host"] = "no device"
    one = Crew(2, "host", SuperviseConfig(doctor=True), Nodes(), divides(2), doctor)
    assert one.join() == "node host is unfit: no device"


def test_without_the_doctor_nobody_is_asked() -> None:
    doctor = Doctor()
    some = crew(Nodes(), doctor)
    some.after(end(0), 0.0)
    some.after(end(0), 1.0)
    some.returning(1e6)
    assert doctor.asked == []


def test_nodes_of_unequal_size_are_refused() -> None:
    with pytest.raises(MoestroError, match="ranks_per_node = 3 does not divide the 4 ranks"):
        Crew(4, "host", SuperviseConfig(ranks_per_node=3), Nodes(), divides(4), Doctor())


CATEGORIES = st.sampled_from(["hardware", "user", "platform", "numeric", "unknown"])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), CATEGORIES, st.booleans(), st.floats(0.0, 500.0)), max_size=12))
def test_whatever_happens(tmp_path_factory: pytest.TempPathFactory, faults: list[tuple[int, str, bool, float]]) -> None:
    """All transitions are allowed (else `move` raises), the log reads back, the ranks are ones that the run allows, and
    in the end, when all are fit, every node that was cordoned has been validated again."""
    log = tmp_path_factory.mktemp("nodes") / "nodes.jsonl"
    doctor, now = Doctor(), 0.0
    some = crew(Nodes(log), doctor, doctor=True)
    for rank, category, unfit, later in faults:
        now += later
        doctor.unfit = {name: "sick" for name in ("host:0", "host:1") if unfit}
        verdict = some.after(end(rank % some.ranks, category), now)
        assert some.ranks in (1, 2, 4)
        if verdict.action == "stop":
            assert unfit
            break
        some.returning(now)
    doctor.unfit.clear()
    for _ in range(20):
        now += BACK_S * 2**14
        some.returning(now)
    again = crew(Nodes(log), doctor, doctor=True)
    assert again.ranks == 4
    assert Nodes(log).waiting() == []
    last = {one.host: one.after for one in read_log(Path(log))}
    assert set(last.values()) == {"available"}
