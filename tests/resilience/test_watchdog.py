"""Who holds the others up, from beats alone; the clock is a number."""

from dataclasses import replace

import pytest

from moestro.resilience.watchdog import KEPT, Hang, Patience, Watchdog, culprit
from moestro.train.heartbeat import Beat, Phase

PATIENCE = Patience(hang_factor=5, hang_floor_s=10, long_s=600, silent_s=20)


def beat(rank: int, step: int, phase: Phase = "passes", entered: int = 0, now: float = 0.0) -> Beat:
    return Beat(rank, 100 + rank, step, phase, 1.0, 1.0, 0.5, now, now, {"0": entered})


def trained(dog: Watchdog, ranks: int, steps: int = 5) -> float:
    """Two-second steps; the time after them."""
    now = 0.0
    for step in range(steps):
        now = 2.0 * step
        assert dog.look([beat(r, step, entered=step, now=now) for r in range(ranks)], {}, now) is None
    return now


def wait(dog: Watchdog, beats: list[Beat | None], start: float, seconds: float, states: dict[int, str]) -> Hang | None:
    """The beats stay as they are but for their clock, looked at every second."""
    for second in range(1, int(seconds) + 1):
        now = start + second
        found = dog.look([b and replace(b, monotonic=now, wall=now) for b in beats], states, now)
        if found is not None:
            return found
    return None


@pytest.mark.parametrize(("ranks", "late"), [(2, 0), (2, 1), (4, 2)])
def test_names_the_rank_that_did_not_enter(ranks: int, late: int) -> None:
    dog = Watchdog(ranks, PATIENCE, 0.0)
    now = trained(dog, ranks)
    stuck: list[Beat | None] = [beat(r, 5, entered=9 - (r == late)) for r in range(ranks)]
    found = wait(dog, stuck, now, 30, {})
    assert found is not None
    assert found.rank == late
    assert found.evidence["entered_fewer"] == 1
    assert found.evidence["limit_s"] == 10  # five times two seconds, and the floor


def test_no_name_where_nobody_is_behind() -> None:
    assert culprit([beat(0, 5, entered=3), beat(1, 5, entered=3)])[0] is None


def test_ranks_with_groups_of_their_own_are_not_compared() -> None:
    first, second = beat(0, 5, entered=9), replace(beat(1, 5), collectives={"0": 9, "1": 2})
    assert culprit([first, second])[0] is None
    assert culprit([first, replace(second, collectives={"0": 8, "1": 2})])[0] == 1


def test_a_long_step_is_no_hang() -> None:
    dog = Watchdog(2, PATIENCE, 0.0)
    now = trained(dog, 2)
    assert wait(dog, [beat(0, 5, entered=9), beat(1, 5, entered=8)], now, 9, {}) is None


@pytest.mark.parametrize("phase", ["start", "evaluate", "checkpoint", "end"])
def test_outside_of_steps_it_waits_long(phase: Phase) -> None:
    dog = Watchdog(2, PATIENCE, 0.0)
    now = trained(dog, 2)
    assert wait(dog, [beat(0, 5, phase), beat(1, 5)], now, 500, {}) is None
    assert wait(dog, [beat(0, 5, phase), beat(1, 5)], now + 500, 200, {}) is not None


def test_the_first_step_may_compile() -> None:
    dog = Watchdog(2, PATIENCE, 0.0)
    assert wait(dog, [beat(0, 0), beat(1, 0)], 0.0, 500, {}) is None


def test_a_stopped_process_is_seen_by_its_silence() -> None:
    dog = Watchdog(2, PATIENCE, 0.0)
    now = trained(dog, 2)
    quiet = beat(1, 5, now=now)
    found = None
    for second in range(1, 40):
        at = now + second
        found = found or dog.look([beat(0, 5, entered=second, now=at), quiet], {1: "T"}, at)
    assert found is not None
    assert found.rank == 1
    assert found.evidence["stopped"]
    assert 20 < found.waited_s <= 22


def test_a_rank_that_has_left_is_not_silent() -> None:
    dog = Watchdog(2, PATIENCE, 0.0)
    now = trained(dog, 2)
    gone = beat(1, 5, "end", now=now)
    for second in range(1, 100):
        at = now + second
        assert dog.look([beat(0, 5, "evaluate", entered=second, now=at), gone], {}, at) is None


def test_a_rank_that_never_spoke() -> None:
    dog = Watchdog(2, PATIENCE, 0.0)
    found = wait(dog, [beat(0, 0, "start"), None], 0.0, 700, {})
    assert found is not None
    assert found.rank == 1
    assert found.evidence["never_spoke"] == [1]


def test_slow_ranks() -> None:
    dog = Watchdog(3, PATIENCE, 0.0)
    for step in range(1, KEPT + 1):
        assert dog.slow_ranks() == {}
        own = [1.0, 1.0, 1.5 if step > 10 else 1.0]
        dog.look([replace(beat(r, step, now=step), own_s=own[r]) for r in range(3)], {}, float(step))
    assert dog.slow_ranks() == {2: 1.5}
