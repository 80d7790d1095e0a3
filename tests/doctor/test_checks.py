"""Verdicts, and checks that hang or break."""

import io
import sys
import threading
import time

import pytest
from rich.console import Console

from doctor.helpers import node_report
from moestro.doctor.checks import EXIT_CODES, Check, Status, failed, hung, overall, passed, run_bounded, skipped, warned
from moestro.doctor.commands import ask, kill_running
from moestro.doctor.report import as_data, last_line, page

GOOD, BAD = passed("a", "fine"), failed("b", "broken", "mend it")
UNSURE = Check(name="c", status="error", reason="?")


@pytest.mark.parametrize(
    ("checks", "verdict"),
    [
        ((GOOD,), "fit"),
        ((GOOD, warned("w", "hm", "look"), skipped("s", "no")), "fit"),
        ((GOOD, UNSURE), "undecided"),
        ((UNSURE, BAD), "unfit"),
        ((), "undecided"),
    ],
)
def test_verdict(checks: tuple[Check, ...], verdict: str) -> None:
    assert node_report(*checks).verdict == verdict


def test_one_bad_node_makes_all_unfit_and_nobody_is_undecided() -> None:
    good, bad, unsure = node_report(GOOD), node_report(BAD), node_report(UNSURE)
    assert overall([good, good]) == "fit"
    assert overall([good, unsure]) == "undecided"
    assert overall([unsure, good, bad]) == "unfit"
    assert overall([]) == "undecided"
    assert EXIT_CODES == {"fit": 0, "unfit": 3, "undecided": 4}  # 1 is a crash, 2 a user error


def test_lists_name_each_node_with_its_reasons() -> None:
    data = as_data([node_report(GOOD, node="n1"), node_report(GOOD, BAD, node="n2", rank=1)])
    assert data["passing"] == ["n1"]
    assert data["failing"] == [{"node": "n2", "rank": 1, "verdict": "unfit", "reasons": ["b: broken"]}]
    assert (data["verdict"], data["exit_code"]) == ("unfit", 3)


def test_last_line_says_fit_or_what_is_not() -> None:
    assert last_line(node_report(GOOD, warned("w", "hm", "look"))) == "fit (2 checks, 1 warning, 1.0 s)"
    assert last_line(node_report(BAD, BAD, GOOD, UNSURE)) == "unfit: b"
    assert last_line(node_report(GOOD, UNSURE)) == "undecided: c"


def test_page_of_several_nodes_shows_what_is_wrong_and_both_lists() -> None:
    reports = [
        node_report(GOOD, node="n1"),
        node_report(GOOD, BAD, node="n2", rank=1),
        node_report(warned("w", "odd [1]", "look"), node="n3", rank=2),
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(page(reports))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert "✗  b  broken" in lines
    assert "      → mend it" in lines
    assert "!  w  odd [1]" in lines
    assert not any("fine" in line for line in lines)  # what passed is not listed
    assert lines[-4:] == [
        "passing, 2 of 3: n1, n3", "failing, 1 of 3:", "  n2 (rank 1): unfit: b", "unfit: n2 (rank 1)",
    ]  # fmt: skip
    console.print(page(reports[::2]))
    assert console.export_text().rstrip().splitlines()[-1].strip() == "fit"


class TestRunBounded:
    def test_keeps_the_order_and_several_findings_of_one_check(self) -> None:
        def slow() -> Check:
            time.sleep(0.05)
            return GOOD

        found = run_bounded({"a": slow, "two": lambda: [BAD, GOOD]}, 5)
        assert [check.name for check in found] == ["a", "b", "a"]
        assert found[0].seconds >= 0.05

    def test_one_that_hangs_is_named_and_the_others_are_told(self) -> None:
        end = threading.Event()
        start = time.monotonic()

        def hang() -> Check:
            end.wait(20)
            return GOOD

        found = run_bounded({"dead disk": hang, "a": lambda: GOOD}, 0.2)
        assert time.monotonic() - start < 10
        assert [(c.name, c.status) for c in found] == [("dead disk", "failed"), ("a", "passed")]
        assert "no answer within 0.2 s" in found[0].reason
        assert hung()
        end.set()
        deadline = time.monotonic() + 10
        while hung() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not hung()

    @pytest.mark.parametrize(("error", "said"), [(ValueError("no\nmore"), "ValueError: no"), (KeyError(), "KeyError")])
    def test_one_that_breaks_is_undecided(self, error: Exception, said: str) -> None:
        def broken() -> Check:
            raise error

        (check,) = run_bounded({"x": broken}, 5)
        status: Status = "error"
        assert (check.name, check.status) == ("x", status)
        assert check.reason == f"could not be decided: {said}"


class TestAsk:
    def test_answers(self) -> None:
        answer = ask([sys.executable, "-c", "import sys; print('out'); sys.stderr.write('err'); sys.exit(7)"], 30)
        assert (answer.how, answer.code, answer.out, answer.err) == ("ended", 7, "out\n", "err")
        assert not answer.good

    def test_missing(self) -> None:
        assert ask(["/no/such/tool"], 1).how == "missing"

    def test_hung_one_is_killed_with_its_children_and_what_it_said_is_kept(self) -> None:
        start = time.monotonic()
        answer = ask(["sh", "-c", "echo begun; sleep 60 & sleep 60"], 0.3)  # the child holds the pipe open
        assert answer.how == "hung"
        assert answer.out == "begun\n"
        assert time.monotonic() - start < 15

    def test_those_of_other_threads_end_when_the_doctor_is_interrupted(self) -> None:
        codes = []
        thread = threading.Thread(target=lambda: codes.append(ask(["sleep", "60"], 60).code))
        thread.start()
        deadline = time.monotonic() + 10
        while thread.is_alive() and time.monotonic() < deadline:
            kill_running()
            time.sleep(0.02)
        thread.join(1)
        assert codes == [-9]
