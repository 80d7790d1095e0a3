"""Objectives and limits: arrays against one plan after the other, and the choice against going through everything."""

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moestro.config import count, load_config
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.convert import workload_of
from moestro.plan.counts import search_counts
from moestro.plan.evaluate import Evaluator
from moestro.plan.objective import Failures, Goal, best_interval, numbers_of, outcome, score
from moestro.plan.search import search
from moestro.plan.space import Space, plan_of, space_of
from moestro.predict import goodput
from moestro.predict.cost import Rate, cost
from moestro.predict.energy import step_energy
from moestro.predict.predict import predict_step
from moestro.predict.recovery import Storage, state_bytes
from moestro.predict.target import Target, target_of
from moestro.predict.words import Prediction

SMALL = {
    "tp": (1,), "cp": (1,), "pp": (1, 2), "vpp": (1,), "ep": (1, 8), "micro_batch_size": (1, 4), "expert_chunks": (1,),
    "context": ("ring",), "overlap_dispatch": (False,),
}  # fmt: skip
FEW = {"tp": (1, 2), "cp": (1,), "expert_chunks": (1,), "micro_batch_size": (1, 2), "context": ("ring",), "vpp": (1, 2)}
SLOW = Storage(0.5e9, 0.125e9)
# Six hours between failures of the job: over slow storage what a layout reads again counts.
FAILS = Failures(8 * 6 * 3600.0, 600.0, None, SLOW)
GOALS = {
    "time": Goal(),
    "goodput": Goal("goodput", steps=1e5, failures=FAILS),
    "money": Goal("money", steps=1e5, usd_per_hour=2.0, failures=FAILS),
    "energy": Goal("energy", steps=1e5, watts=700.0),
    "memory": Goal("memory"),
}


def workload(name: str = "olmoe-1b-7b", **changes: object) -> Workload:
    return workload_of(load_config(name).config).model_copy(update={"global_batch_size": 64, **changes})


def everything(work: Workload, target: Target, space: Space) -> list[tuple[Plan, Prediction]]:
    return [
        (plan, predict_step(work, plan, target))
        for family in space.families(work)
        for pipeline in space.pipelines(family, work, 8)
        for variant in space.variants(family, work, pipeline)
        for plan in [plan_of(family, pipeline, variant, 8)]
    ]


@pytest.fixture(scope="module")
def small() -> tuple[Workload, Target, Space, list[tuple[Plan, Prediction]]]:
    work, target = workload(), target_of("h100-sxm", 8)
    space = space_of(work, 8, 8, SMALL)
    return work, target, space, everything(work, target, space)


Small = tuple[Workload, Target, Space, list[tuple[Plan, Prediction]]]


@pytest.mark.parametrize("objective", list(GOALS))
def test_the_choice_is_that_of_going_through_everything(objective: str, small: Small) -> None:
    work, target, space, every = small
    goal = GOALS[objective]
    found = search(work, target, 8, space, keep=4, exact=1, goal=goal)
    worth = []
    for plan, one in every:
        numbers = numbers_of(work, plan, one)
        if one.memory.total <= 80e9:
            worth.append(float(score(numbers, outcome(numbers, goal, 8), goal)))
    assert [one.score for one in found.best] == pytest.approx(sorted(worth)[:4], rel=1e-9)
    assert len(set(worth)) > 20


def chosen(small: Small, goal: Goal) -> Plan:
    work, target, space, _ = small
    return search(work, target, 8, space, keep=3, exact=3, goal=goal).exact[0][0]


def test_the_choice_flips_between_step_time_and_goodput(small: Small) -> None:
    """On as many devices: replicas that each read the whole state make every restart slow."""
    by_time, by_goodput = chosen(small, GOALS["time"]), chosen(small, GOALS["goodput"])
    assert (by_time.zero, by_goodput.zero) == (1, 3)
    rare = replace(FAILS, device_mtbf_s=100 * FAILS.device_mtbf_s)
    assert chosen(small, replace(GOALS["goodput"], failures=rare)) == by_time, "the control: failures that hardly come"
    assert chosen(small, GOALS["money"]) == by_goodput, "on as many devices dollars are hours"


def test_the_number_of_devices_flips_between_step_time_and_goodput() -> None:
    """Card 06's pair (papers/mofa_flip.py): the most devices have the shortest step, fewer finish first."""
    work = workload("deepseek-v3", seq_len=4096, global_batch_size=2048, trainer="megatron")
    given = {
        "pp": (8, 16), "ep": (64,), "tp": (1,), "cp": (1,), "etp": (1,), "vpp": (1,), "schedule": ("1f1b",),
        "zero": (1,), "micro_batch_size": (1,), "recompute": ("block",), "expert_chunks": (1,),
        "expert_recompute": (False,), "dispatch": ("two_hop",), "overlap_dispatch": (True,),
    }  # fmt: skip
    counts = (8192, 16384)
    targets = {count: target_of("h100-sxm", count) for count in counts}
    failures = Failures(2.7 * 3600 * 16384, 68 * 60.0, 4.0)

    def best(goal: Goal) -> int:
        return search_counts(work, targets, lambda n: space_of(work, n, 8, given), goal, exact=1).best

    assert best(Goal()) == 16384
    assert best(Goal("goodput", failures=failures)) == 8192
    assert best(Goal("goodput", failures=replace(failures, device_mtbf_s=100 * failures.device_mtbf_s))) == 16384


@pytest.mark.parametrize(
    ("name", "changes", "given"),
    [
        ("deepseek-v3", {"trainer": "megatron"}, {}),
        ("mixtral-8x7b", {"trainer": "megatron", "optimizer": "muon"}, {}),
        ("olmoe-1b-7b", {}, {}),
        # So little to compute that the host is waited for, in passes that run together.
        (
            "olmoe-1b-7b",
            {"trainer": "megatron", "seq_len": 256},
            {"schedule": ("dualpipe",), "overlap_dispatch": (True,)},
        ),
    ],
)
def test_arrays_tell_what_one_prediction_tells(
    name: str, changes: dict[str, object], given: dict[str, tuple[object, ...]]
) -> None:
    work, target = workload(name, global_batch_size=128, **changes), target_of("h100-sxm", 32)
    offload = ("none", "optimizer", "activations") if changes else ("none",)
    space = space_of(work, 32, 8, {**FEW, "offload": offload, **given})
    choose = random.Random(name)
    evaluator = Evaluator(work, target, 32, details=True)
    families = choose.sample(list(space.families(work)), 3)
    batches = [batch for family in families for batch in evaluator.batches(family, space)]
    for _ in range(20):
        batch = choose.choice(batches)
        i, j = choose.randrange(len(batch.pipelines)), choose.randrange(len(batch.variants))
        plan = plan_of(batch.family, batch.pipelines[i], batch.variants[j], 8)
        one = [float(number) for number in numbers_of(work, plan, predict_step(work, plan, target))]
        assert batch.more is not None
        ours = [float(values[i, j]) for values in (batch.step_s, batch.total_bytes, *batch.more)]
        assert ours == pytest.approx(one, rel=1e-9), plan


def test_one_plan_costs_what_predict_says(small: Small) -> None:
    work, target, _, every = small
    plan, one = every[3]
    numbers = numbers_of(work, plan, one)
    goal = Goal("money", steps=1e4, usd_per_hour=2.5, watts=700.0, failures=Failures(1e6, 500.0, 20.0))
    found = outcome(numbers, goal, 8)
    faults = goodput.Reliability(1e6 / 8, 20.0, 500.0)
    assert found.interval_s == pytest.approx(goodput.best_interval(faults))
    assert found.goodput == pytest.approx(goodput.goodput(goodput.best_interval(faults), faults))
    seconds = one.step_s.value * 1e4
    assert found.run_s == pytest.approx(seconds / found.goodput)
    assert found.usd == pytest.approx(cost(seconds, 8, Rate(2.5, ""), goodput=float(found.goodput)).usd)
    assert found.joules == pytest.approx(step_energy(one.time, target.place.device, 8).joules * 1e4)


def test_intervals_are_those_of_bisection() -> None:
    checkpoints = np.array([0.0, 1e-6, 0.5, 30.0, 1e4, 3e5, 1e7])
    ours = best_interval(checkpoints, 1e4)
    theirs = [goodput.best_interval(goodput.Reliability(1e4, float(c), 0.0)) for c in checkpoints]
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_every_number_of_the_state_is_written_once() -> None:
    """And read by all that hold it: AdamW's 12 bytes of a parameter."""
    work = workload()
    params = count(work.model, work.seq_len).total_params
    plan = Plan(dp=8, ep=4, dispatch="deduplicated")
    for zero, reads in ((0, 12), (1, 4), (3, 0)):
        found = state_bytes(work, plan.model_copy(update={"zero": zero}))
        assert found.written == pytest.approx(12 * params)
        assert found.most_written == pytest.approx(12 * params / 8)
        assert found.read > max(found.written, reads * params) * (1 - 1e-12)
    assert found.read == pytest.approx(found.written), "ZeRO-3: each rank its own part"


def test_limits_are_kept(small: Small) -> None:
    work, target, space, _ = small
    free = search(work, target, 8, space, keep=3, exact=1, goal=Goal(free_share=0.25))
    assert max(one.total_bytes for one in free.best) <= 60e9
    assert search(work, target, 8, space, keep=3, exact=1).best[0].total_bytes > 60e9
    lean = Goal("memory", steps=1e5, deadline_s=1.2 * 1e5)
    found = search(work, target, 8, space, keep=3, exact=3, goal=lean)
    assert all(one.step_s <= 1.2 for one in found.best)
    assert (
        found.best[0].total_bytes
        > search(work, target, 8, space, keep=1, exact=1, goal=Goal("memory")).best[0].total_bytes
    )


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        (Goal(steps=1e5, deadline_s=1e5), r"the --deadline of 1.157 days: the nearest takes 1.12 times"),
        (Goal(steps=1e5, usd_per_hour=2.0, budget_usd=300.0), r"the --budget of \$300: the nearest takes 1.66 times"),
        (Goal(free_bytes=70e9), r"has 80.0 GB, of which 70.0 GB stay free, and the smallest plan needs 19.0 GB"),
    ],
)
def test_what_nothing_meets_is_told_with_what_comes_nearest(small: Small, goal: Goal, message: str) -> None:
    work, target, space, _ = small
    with pytest.raises(MoestroError, match=message):
        search(work, target, 8, space, goal=goal)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "goodput"}, "give --mtbf-hours"),
        ({"objective": "money"}, "give --usd-per-hour"),
        ({"budget_usd": 5.0}, "give --usd-per-hour"),
        ({"objective": "energy"}, "rated power"),
        ({"deadline_s": 0.0}, "--deadline must be above 0"),
        ({"free_share": 1.0}, "--headroom"),
    ],
)
def test_goals_that_lack_something(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MoestroError, match=message):
        Goal(**changes)


def test_failures_that_cannot_be(small: Small) -> None:
    with pytest.raises(MoestroError, match="above 0"):
        Failures(0.0)
    with pytest.raises(MoestroError, match="--storage-gbps"):
        Failures(1e6, checkpoint_s=None)
    work, _, _, every = small
    hopeless = outcome(numbers_of(work, *every[0]), Goal(failures=Failures(0.5)), 8)
    assert math.isinf(hopeless.run_s), "it never ends, and says so without a warning"
