"""Several nodes: reports reach rank 0, whoever is silent is named, and what shows between nodes only is found."""

import threading
import time
from collections.abc import Callable

import pytest

from doctor.helpers import by_name, node_report
from moestro.doctor import together
from moestro.doctor.checks import NodeReport, failed, overall, passed
from moestro.doctor.together import compare_nodes, report_to_rank_0
from moestro.errors import MoestroError
from moestro.parallel.launch import free_port
from moestro.parallel.process import Rank

GOOD, BAD = passed("memory", "fine"), failed("disk", "full", "empty it")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., threading.Thread]:
    """Runs one rank in a thread of this process; its reports, or its error, are put into a dict by rank."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))

    def run(told: dict[int, object], me: Rank, report: NodeReport, limit_s: float = 20) -> threading.Thread:
        def work() -> None:
            try:
                told[me.rank] = report_to_rank_0(me, lambda: report.model_copy(update={"rank": me.rank}), limit_s)
            except MoestroError as error:
                told[me.rank] = error

        thread = threading.Thread(target=work)
        thread.start()
        return thread

    return run


def test_two_nodes_of_which_one_is_unfit(start: Callable[..., threading.Thread]) -> None:
    told = dict[int, object]()
    threads = [
        start(told, Rank(0, 3), node_report(GOOD, node="n0")),
        start(told, Rank(1, 3), node_report(GOOD, BAD, node="n1")),
        start(told, Rank(2, 3, local_rank=1, local_world_size=2), node_report(BAD, node="n1 again")),
    ]
    for thread in threads:
        thread.join(60)
    reports = told[0]
    assert isinstance(reports, list)
    assert [(report.node, report.rank, report.verdict) for report in reports] == [("n0", 0, "fit"), ("n1", 1, "unfit")]
    assert overall(reports) == "unfit"
    own = told[1]
    assert isinstance(own, list)
    assert [report.node for report in own] == ["n1"]  # a node's own exit status is that of its own verdict
    assert told[2] is None  # a further rank of a node has nothing to say
    skew, uncertainty = reports[1].clock_s, reports[1].clock_uncertainty_s
    assert skew is not None
    assert uncertainty is not None
    assert abs(skew) <= uncertainty + 0.01  # the same clock


def test_a_silent_node_is_named_and_the_report_is_still_told(start: Callable[..., threading.Thread]) -> None:
    told, begin = dict[int, object](), time.monotonic()
    start(told, Rank(0, 2), node_report(GOOD, node="n0"), 0.5).join(60)
    assert time.monotonic() - begin < 30
    reports = told[0]
    assert isinstance(reports, list)
    assert [(report.node, report.verdict) for report in reports] == [("n0", "fit"), ("of rank 1", "unfit")]
    assert "rank 1 did not report within 0.5 s" in reports[1].checks[0].reason


def test_without_rank_0_a_node_tells_its_own_report(start: Callable[..., threading.Thread]) -> None:
    told = dict[int, object]()
    start(told, Rank(1, 2), node_report(GOOD, node="n1"), 0.5).join(60)
    (report,) = told[1]  # type: ignore[misc]
    assert report.met_nobody
    assert by_name(report)["meeting"].status == "warned"
    assert report.verdict == "fit"


def test_rank_0_whose_port_is_taken_is_a_mistake_to_mend(
    start: Callable[..., threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(*args: object) -> None:
        raise RuntimeError("The server socket has failed to listen\nmore")

    monkeypatch.setattr(together, "_meet", taken)
    told = dict[int, object]()
    start(told, Rank(0, 2), node_report(GOOD)).join(60)
    assert isinstance(told[0], MoestroError)
    assert "failed to listen; set MASTER_ADDR and MASTER_PORT" in str(told[0])


class TestCompareNodes:
    def test_equal_nodes_get_nothing_new(self) -> None:
        nodes = [node_report(GOOD, versions={"torch": "2"}, rates={"gemm": 5.0}) for _ in range(3)]
        assert compare_nodes(nodes) == nodes

    def test_one_with_other_versions(self) -> None:
        versions = ("2.13", "2.13", "2.12", "2.13")
        compared = compare_nodes([node_report(GOOD, versions={"torch": version}) for version in versions])
        assert [report.verdict for report in compared] == ["fit", "fit", "unfit", "fit"]
        assert by_name(compared[2])["versions"].reason == "torch 2.12, 2.13 in most nodes"

    def test_two_that_differ_have_no_majority(self) -> None:
        compared = compare_nodes([node_report(GOOD, versions={"torch": version}) for version in ("2.13", "2.12")])
        assert [report.verdict for report in compared] == ["fit", "fit"]

    @pytest.mark.parametrize(("skew", "verdict"), [(0.5, "fit"), (-0.5, "fit"), (1.2, "unfit"), (-30.0, "unfit")])
    def test_clock_apart(self, skew: float, verdict: str) -> None:
        (report,) = compare_nodes([node_report(GOOD, clock_s=skew, clock_uncertainty_s=0.05)])
        assert report.verdict == verdict
        if verdict == "unfit":
            assert ("ahead of" if skew > 0 else "behind") in by_name(report)["clock skew"].reason

    def test_a_skew_within_its_uncertainty_is_none(self) -> None:
        (report,) = compare_nodes([node_report(GOOD, clock_s=3.0, clock_uncertainty_s=2.5)])
        assert report.verdict == "fit"

    def test_slow_node(self) -> None:
        rates = (700.0, 690.0, 500.0, 710.0)
        compared = compare_nodes([node_report(GOOD, rates={"gemm": rate}) for rate in rates])
        assert [report.verdict for report in compared] == ["fit", "fit", "unfit", "fit"]
        assert "gemm is 500, the median node has 695" in by_name(compared[2])["slow node"].reason
