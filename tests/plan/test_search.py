"""The search against going through everything."""

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moestro.config import load_config
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.convert import workload_of
from moestro.plan.candidates import Candidate, Found, front_of
from moestro.plan.objective import TIME, Goal
from moestro.plan.search import PARALLEL_FROM, balance_choice, leaner, search, sweep
from moestro.plan.space import Space, plan_of, space_of
from moestro.plan.workers import Told, in_processes
from moestro.predict.predict import device_bytes, predict_step
from moestro.predict.target import Target, target_of

SMALL = {
    "tp": (1, 2), "cp": (1,), "pp": (1, 2), "vpp": (1, 2), "ep": (1, 8), "micro_batch_size": (1, 4),
    "expert_chunks": (1,), "context": ("ring",),
}  # fmt: skip


def workload(name: str = "olmoe-1b-7b", **changes: object) -> Workload:
    return workload_of(load_config(name).config).model_copy(update={"global_batch_size": 64, **changes})


def everything(work: Workload, target: Target, space: Space) -> list[Candidate]:
    found = []
    for family in space.families(work):
        for pipeline in space.pipelines(family, work, 8):
            for variant in space.variants(family, work, pipeline):
                plan = plan_of(family, pipeline, variant, 8)
                one = predict_step(work, plan, target)
                found.append(Candidate(one.step_s.value, one.memory.needed, one.memory.total, plan))
    return found


@pytest.mark.parametrize("device", ["h100-sxm", "a100-sxm-40gb"])
def test_the_best_and_the_front_are_those_of_all_plans(device: str) -> None:
    """Whatever the rules leave out."""
    work, target = workload(), target_of(device, 8)
    space = space_of(work, 8, 8, SMALL)
    found = search(work, target, 8, space, keep=5, exact=3)
    there = device_bytes(target, 8)
    assert there is not None
    every = everything(work, target, space)
    fit = [one for one in every if one.total_bytes <= there]
    assert [one.step_s for one in found.best] == pytest.approx(sorted(one.step_s for one in fit)[:5])
    assert found.tally.plans == len(every)
    assert found.tally.too_big <= len(every) - len(fit)
    whole = sweep(work, target, 8, space, 5, list(space.families(work)), rules=False)
    assert (whole.tally.evaluated, whole.tally.too_big) == (len(every), len(every) - len(fit))
    expected = front_of(fit)
    assert found.front[0].step_s == pytest.approx(expected[0].step_s)
    for one in expected:  # in steps of a MiB
        near = [f for f in found.front if f.step_s <= one.step_s * (1 + 1e-9)]
        assert min(f.total_bytes for f in near) <= one.total_bytes + 2**21


def test_the_choice_is_simulated_pass_by_pass() -> None:
    work, target = workload(), target_of("h100-sxm", 8)
    found = search(work, target, 8, space_of(work, 8, 8, {**SMALL, "pp": (2, 4)}), exact=4)
    seconds = [one.step_s.value for _, one in found.exact]
    assert seconds == sorted(seconds)
    plan, one = found.exact[0]
    assert one.step_s.value == predict_step(work, plan, target, exact=True).step_s.value


def test_several_processes_find_the_same() -> None:
    work, target = workload(), target_of("h100-sxm", 8)
    small = {"vpp": (1,), "pp": (1, 2), "schedule": ("1f1b",), "zero": (1,), "cp": (1,), "ep": (1, 8)}
    space = space_of(work, 8, 8, small)
    assert len(list(space.families(work))) >= PARALLEL_FROM
    one, two = (search(work, target, 8, space, exact=1, workers=n) for n in (1, 2))
    assert [c.step_s for c in one.best] == pytest.approx([c.step_s for c in two.best])
    assert (one.tally.plans, one.tally.families) == (two.tally.plans, two.tally.families)
    assert [c.step_s for c in one.front] == pytest.approx([c.step_s for c in two.front])


def test_nothing_fits() -> None:
    work, target = workload("deepseek-v3"), target_of("h100-sxm", 8)
    space = space_of(work, 8, 8, {**SMALL, "zero": (1,)})
    least = min(one.total_bytes for one in everything(work, target, space))
    with pytest.raises(MoestroError, match=rf"none of .* plans fits: a device has 80.0 GB, .* {least / 1e9:.1f} GB"):
        search(work, target, 8, space)


def test_no_plan_at_all() -> None:
    work, target = workload(global_batch_size=3), target_of("h100-sxm", 8)
    with pytest.raises(MoestroError, match="no plan of the search uses 8 devices"):
        search(work, target, 8, space_of(work, 8, 8, {**SMALL, "pp": (1,), "tp": (1,)}))


def test_progress_is_told_up_to_the_end() -> None:
    work, target = workload(), target_of("h100-sxm", 8)
    seen = list[tuple[int, int]]()
    space = space_of(work, 8, 8, {**SMALL, "zero": (1,)})
    search(work, target, 8, space, exact=1, progress=lambda done, total: seen.append((done, total)))
    total = len(list(space.families(work)))
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def _for_ever(part: int, told: Told) -> int:
    while True:
        time.sleep(0.01)
        told()


def test_an_interrupt_ends_all_processes() -> None:
    """Where nobody told them they would never end, and neither would this."""

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    before = {child.pid for child in multiprocessing.active_children()}
    with pytest.raises(KeyboardInterrupt):
        in_processes(_for_ever, [1, 2], Told(10, interrupt))
    assert {child.pid for child in multiprocessing.active_children()} <= before


def test_processes_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    """Each writes its number when it starts; none is there a little after kill -9."""
    code = f"""
import os, time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from moestro.plan.workers import end_with
def work(n):
    open(f"{tmp_path}/{{os.getpid()}}", "w").close()
    time.sleep(60)
with ProcessPoolExecutor(2, get_context("fork"), initializer=end_with, initargs=(os.getpid(),)) as pool:
    list(pool.map(work, range(2)))
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    parent.kill()
    parent.wait()
    workers = [int(path.name) for path in tmp_path.iterdir()]
    until(lambda: not any(alive(worker) for worker in workers))


def until(done: Callable[[], bool], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end, f"not so after {limit_s:g} s"
        time.sleep(0.1)


def alive(pid: int) -> bool:
    """Not counting what has ended and waits to be reaped."""
    path = Path(f"/proc/{pid}/stat")
    try:
        return path.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("goal", "better"),
    [(TIME, True), (Goal(free_share=0.01), True), (Goal(free_bytes=40e9), False), (Goal(deadline_s=1e-3), False)],
)
def test_a_balanced_choice_keeps_to_the_goal(goal: Goal, better: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The faster plan takes 44 GB of 80."""
    work, target = workload(trainer="megatron"), target_of("h100-sxm", 8)
    slow = Plan(pp=4, dp=2, ep=2, micro_batch_size=2, zero=1, recompute="block")
    fast = slow.model_copy(update={"recompute": "none"})
    monkeypatch.setattr("moestro.plan.search.balance", lambda *_: fast)
    found = Found(exact=[(slow, predict_step(work, slow, target, exact=True))])
    assert balance_choice(found, work, target, goal) == better
    assert found.exact[0][0] == (fast if better else slow)


def test_a_choice_that_cannot_be_balanced_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Plan:
        raise MoestroError("nothing fits")

    work, target = workload(trainer="megatron"), target_of("h100-sxm", 8)
    plan = Plan(pp=4, dp=2, ep=2, zero=1)
    monkeypatch.setattr("moestro.plan.search.balance", refuse)
    found = Found(exact=[(plan, predict_step(work, plan, target))])
    assert not balance_choice(found, work, target, TIME)
    assert [one for one, _ in found.exact] == [plan]


def test_leaner_plans_are_simulated_as_the_choice_is() -> None:
    work, target = workload(), target_of("h100-sxm", 8)
    space = space_of(work, 8, 8, {"pp": (2,), "tp": (1,), "cp": (1,), "expert_chunks": (1,), "ep": (1, 2)})
    found = search(work, target, 8, space, exact=2)
    lean = leaner(found, work, target, TIME)
    assert lean
    sizes = [one.memory.total for _, one in (found.exact[0], *lean)]
    steps = [one.step_s.value for _, one in (found.exact[0], *lean)]
    assert sizes == sorted(sizes, reverse=True)
    assert steps[1:] == sorted(steps[1:])
    assert steps[1] > steps[0] * (1 - 1e-3)  # else it would be the choice
    for plan, one in lean:
        assert one.step_s.value == predict_step(work, plan, target, exact=True).step_s.value


def test_a_leaner_plan_that_simulates_better_becomes_the_choice() -> None:
    work, target = workload(), target_of("h100-sxm", 8)
    slow, fast = Plan(pp=4, dp=2, zero=1, micro_batch_size=4), Plan(pp=4, dp=2, zero=1, recompute="none")
    pairs = [(plan, predict_step(work, plan, target, exact=True)) for plan in (slow, fast)]
    (slow, one), (fast, other) = sorted(pairs, key=lambda pair: -pair[1].step_s.value)
    front = [Candidate(one.step_s.value * 1.1, 1.0, 1.0, fast)]  # by the closed form: slower, leaner
    found = Found(exact=[(slow, one)], front=front)
    leaner(found, work, target, TIME)
    assert [plan for plan, _ in found.exact] == [fast, slow]
    assert found.exact[0][1].step_s.value == other.step_s.value


def test_a_balanced_choice_has_to_fit_with_its_fragments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The integer program keeps to what is needed; a device holds fragments besides."""
    work, target = workload(trainer="megatron"), target_of("a100-sxm-40gb", 8)
    slow = Plan(pp=4, dp=2, ep=2, micro_batch_size=2, zero=1, recompute="block")
    fast = slow.model_copy(update={"recompute": "none"})
    monkeypatch.setattr("moestro.plan.search.balance", lambda *_: fast)
    before, after = (predict_step(work, plan, target, exact=True) for plan in (slow, fast))
    assert after.memory.total > 40e9
    assert after.step_s.value < before.step_s.value
    assert not balance_choice(Found(exact=[(slow, before)]), work, target, TIME)
