"""What ends a run, and when it may start again: from statuses, words and counts."""

import errno
from pathlib import Path

import pytest
import torch

from moestro.config.supervise import SuperviseConfig
from moestro.errors import DamagedDataError, MissingDataError, MoestroError
from moestro.parallel.process import PeerError, RankError
from moestro.parallel.ranks import RankFailure
from moestro.resilience.policy import HOUR_S, End, Restarts, reaction_to, what_ended
from moestro.resilience.taxonomy import FAULTS
from moestro.resilience.watchdog import Hang
from moestro.train.cause import cause_of, tell_cause
from moestro.train.heartbeat import WATCHED, LastWords, read_words
from moestro.train.incidents import AUDIT, Incident, Signal, complete, incidents, record
from moestro.train.step import NonFiniteError

KILLED = what_ended(None, (1, -9), {})


def words(rank: int, signal: Signal) -> LastWords:
    return LastWords(rank, signal, 5, "why")


class TestWhatEnded:
    def test_done_and_asked_to_stop_are_no_incidents(self) -> None:
        assert what_ended(None, None, {}).signal is None
        assert what_ended(None, (0, 130), {}).signal is None

    def test_a_hang_goes_before_the_statuses_of_ranks_that_were_killed_for_it(self) -> None:
        end = what_ended(Hang(2, 9.0, {"what": "x"}), (0, -9), {})
        assert (end.signal, end.rank, end.reaction) == ("hang", 2, "retry")

    def test_a_kill(self) -> None:
        assert (KILLED.signal, KILLED.rank, KILLED.evidence["status"]) == ("killed", 1, "SIGKILL")

    def test_a_ranks_words_go_before_its_status(self) -> None:
        end = what_ended(None, (0, 2), {0: words(0, "disk_full")})
        assert (end.signal, end.reaction, end.category) == ("disk_full", "retry", "platform")
        assert what_ended(None, (0, 2), {}).reaction == "never"

    @pytest.mark.parametrize("status", [2, 3])
    def test_a_rank_that_followed_another(self, status: int) -> None:
        """It takes the other's status and says nothing: the culprit is the one that spoke."""
        end = what_ended(None, (0, status), {1: words(1, "missing_data")})
        assert (end.signal, end.rank) == ("missing_data", 1)

    def test_words_do_not_excuse_a_kill(self) -> None:
        assert what_ended(None, (0, -9), {1: words(1, "user_error")}).signal == "killed"

    @pytest.mark.parametrize(
        ("signal", "reaction"),
        [("out_of_memory", "never"), ("corrupt_data", "never"), ("user_error", "never"), ("missing_data", "retry"),
         ("disk_full", "retry"), ("exit", "retry"), ("non_finite", "never")],
    )  # fmt: skip
    def test_reactions(self, signal: Signal, reaction: str) -> None:
        assert reaction_to(signal) == reaction


class TestRestarts:
    def test_a_loop_at_one_step_ends(self) -> None:
        restarts = Restarts(SuperviseConfig(max_without_progress=3))
        for _ in range(3):
            restarts.ended(7, None)
            assert restarts.reason_to_stop(KILLED, 0.0) is None
        restarts.ended(7, None)
        reason = restarts.reason_to_stop(KILLED, 0.0)
        assert reason is not None
        assert "4 attempts in a row ended at step 7 without a new step" in reason
        assert "killed by SIGKILL" in reason

    def test_progress_starts_the_count_again(self) -> None:
        restarts = Restarts(SuperviseConfig(max_without_progress=1, max_restarts_per_hour=100))
        for step in range(20):
            restarts.ended(step, None)
            assert restarts.reason_to_stop(KILLED, 0.0) is None

    def test_going_back_is_no_progress(self) -> None:
        restarts = Restarts(SuperviseConfig(max_without_progress=1))
        for step, stops in ((9, False), (5, True)):
            restarts.ended(step, None)
            assert (restarts.reason_to_stop(KILLED, 0.0) is not None) == stops

    @pytest.mark.parametrize(("limit", "name"), [({"max_restarts": 2}, "max_restarts"),
                                                 ({"max_restarts_per_hour": 2}, "max_restarts_per_hour")])  # fmt: skip
    def test_limits(self, limit: dict[str, int], name: str) -> None:
        restarts = Restarts(SuperviseConfig.model_validate(limit))
        for step in range(2):
            restarts.ended(step, None)
            assert restarts.reason_to_stop(KILLED, 0.0) is None
        restarts.ended(2, None)
        assert f"supervise.{name} = 2 is used up" in str(restarts.reason_to_stop(KILLED, 1.0))
        later = restarts.reason_to_stop(KILLED, HOUR_S + 1.0)
        assert (later is None) == (name == "max_restarts_per_hour")

    def test_never_is_never(self) -> None:
        restarts = Restarts(SuperviseConfig())
        restarts.ended(1, None)
        end = End("out_of_memory", "user", "never", {"status": 2, "error": "out of memory on cpu"})
        assert "is not mended by starting again" in str(restarts.reason_to_stop(end, 0.0))
        assert restarts.count == 0

    def test_data_that_were_never_there_are_a_mistake(self) -> None:
        restarts = Restarts(SuperviseConfig())
        end = End("missing_data", "platform", "retry", {"status": 2, "error": "no such file"})
        restarts.ended(-1, None)
        assert restarts.reason_to_stop(end, 0.0) == "missing_data before the first step (no such file)"
        restarts.ended(1, None)
        restarts.ended(-1, None)
        assert restarts.reason_to_stop(end, 0.0) is None  # they were there when the run began

    def test_back_off_doubles_and_is_limited(self) -> None:
        restarts = Restarts(SuperviseConfig(backoff_s=1, backoff_most_s=10))
        seen = []
        for _ in range(6):
            restarts.ended(1, None)
            seen.append(restarts.pause_s())
        assert seen == [1, 2, 4, 8, 10, 10]
        restarts.ended(2, None)
        assert restarts.pause_s() == 1

    def test_a_command_without_steps_gets_on_by_living(self) -> None:
        restarts = Restarts(SuperviseConfig(max_without_progress=1, backoff_most_s=10))
        for lived_s in (11.0, 12.0, 13.0):
            restarts.ended(-1, lived_s)
            assert restarts.reason_to_stop(KILLED, 0.0) is None
        restarts.ended(-1, 1.0)
        assert restarts.reason_to_stop(KILLED, 0.0) is not None


def wrapped(inner: BaseException, outer: BaseException) -> BaseException:
    outer.__cause__ = inner
    return outer


FULL = OSError(errno.ENOSPC, "No space left on device")
CAUSES: list[tuple[BaseException, Signal | None]] = [
    (wrapped(RankFailure(1, FULL), MoestroError("cannot write checkpoint")), "disk_full"),
    (MoestroError("cannot write x: rank 1: [Errno 28] No space left on device"), "disk_full"),
    (wrapped(torch.OutOfMemoryError("x"), MoestroError("out of memory")), "out_of_memory"),
    (MemoryError(), "out_of_memory"),
    (wrapped(NonFiniteError.__new__(NonFiniteError), MoestroError("diverged")), "non_finite"),
    (MissingDataError("no such file"), "missing_data"),
    (wrapped(DamagedDataError("altered"), RankError("altered")), "corrupt_data"),
    (MoestroError("unknown key"), "user_error"),
    (ZeroDivisionError(), "exit"),
    (wrapped(DamagedDataError("altered"), PeerError(2)), None),
    (KeyboardInterrupt(), None),
]


@pytest.mark.parametrize(("error", "signal"), CAUSES, ids=[f"{i}-{signal}" for i, (_, signal) in enumerate(CAUSES)])
def test_causes(error: BaseException, signal: Signal | None) -> None:
    assert cause_of(error) == signal
    assert signal is None or signal in FAULTS


def test_last_words_go_to_the_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WATCHED, str(tmp_path))
    tell_cause(tmp_path, 3, 12, MissingDataError("no such file or folder: x"))
    assert read_words(tmp_path, 3) == LastWords(3, "missing_data", 12, "no such file or folder: x")
    assert read_words(tmp_path, 2) is None
    assert not (tmp_path / AUDIT).exists()


def test_without_one_to_the_audit_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WATCHED, raising=False)
    tell_cause(tmp_path, 0, 12, MoestroError("a mistake"))
    assert incidents(tmp_path) == []
    tell_cause(tmp_path, 0, 12, FULL)
    (seen,) = incidents(tmp_path)
    assert (seen.signal, seen.action, seen.step) == ("disk_full", "stop", 12)
    tell_cause(tmp_path / "none", 0, 12, FULL)  # no folder: nowhere to write, and no reason to hide the error


def test_a_downtime_that_is_known_later(tmp_path: Path) -> None:
    first, second = Incident("killed", "restart", 3), Incident("hang", "restart", 5, {"downtime_s": "null"}, rank=1)
    record(tmp_path, first)
    record(tmp_path, second)
    size = (tmp_path / AUDIT).stat().st_size
    complete(tmp_path, second, 12.345)
    assert [one.downtime_s for one in incidents(tmp_path)] == [None, 12.35]
    complete(tmp_path, first, 86400.0)
    assert [one.downtime_s for one in incidents(tmp_path)] == [86400.0, 12.35]
    assert (tmp_path / AUDIT).stat().st_size == size
    complete(tmp_path, Incident("exit", "restart", 9), 1.0)  # never recorded
    assert (tmp_path / AUDIT).stat().st_size == size
