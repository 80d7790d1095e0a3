"""Rules never drop what a search is to find: against the same search without them."""

from itertools import pairwise

import pytest

from moestro.config import load_config
from moestro.config.plan import Workload
from moestro.graph.convert import workload_of
from moestro.plan.candidates import Found
from moestro.plan.evaluate import Evaluator
from moestro.plan.objective import OBJECTIVES, TIME, Failures, Goal, Objective
from moestro.plan.rules import Bounds, bounds_of, least_score
from moestro.plan.search import sweep
from moestro.plan.space import Space, space_of
from moestro.predict.predict import device_bytes
from moestro.predict.recovery import Storage
from moestro.predict.target import Target, target_of

MIB = 2.0**20
FEW = {"micro_batch_size": (1, 8), "expert_chunks": (1, 4), "vpp": (1, 2, 3), "tp": (1, 2), "cp": (1,)}
CASES = [  # model, device, devices, changes of the workload, of the space
    ("olmoe-1b-7b", "h100-sxm", 8, {}, {"zero": (0, 1, 3), "ep": (1, 8), "context": ("ring",)}),
    ("olmoe-1b-7b", "a100-sxm-40gb", 8, {"trainer": "megatron"}, {"recompute_layers": (None, 1), "ep": (1, 4)}),
    ("deepseek-v3", "h100-sxm", 64, {"trainer": "megatron", "precision": "fp8"}, {"ep": (16,), "zero": (1,)}),
    ("gpt-oss-20b", "h100-sxm", 16, {"attention_kernel": "math", "fused_loss": False, "trainer": "megatron"},
     {"ep": (1, 8), "offload": ("none", "optimizer", "activations"), "expert_chunks": (1,), "zero": (1,)}),
    ("zaya1-8b", "h100-sxm", 16, {}, {"ep": (1, 8), "zero": (0, 2), "expert_chunks": (1,)}),
]  # fmt: skip


def case(number: int) -> tuple[Workload, Target, int, Space]:
    name, device, devices, changes, given = CASES[number]
    work = workload_of(load_config(name).config).model_copy(update={"global_batch_size": 128, **changes})
    target = target_of(device, devices)
    return work, target, devices, space_of(work, devices, target.place.node_size, {**FEW, **given})


def both(number: int, goal: Goal = TIME, memory: float | None = None) -> tuple[Found, Found]:
    """With and without rules. memory: as if the device had so many bytes."""
    work, target, devices, space = case(number)
    there = device_bytes(target, devices)
    if memory is not None and there is not None:
        goal = Goal(**{**goal.__dict__, "free_bytes": there - memory})
    families = list(space.families(work))
    ruled, whole = (sweep(work, target, devices, space, 6, families, goal, rules=rules) for rules in (True, False))
    return ruled, whole


def same(ruled: Found, whole: Found) -> None:
    assert [one.score for one in ruled.best] == pytest.approx([one.score for one in whole.best], rel=1e-12)
    for one, other in ((ruled.front, whole.front), (whole.front, ruled.front)):  # in steps of a MiB
        for point in one:
            assert any(p.step_s <= point.step_s and p.total_bytes <= point.total_bytes + 2 * MIB for p in other)
    fastest = min((one.step_s for one in whole.front), default=float("inf"))
    if whole.faster is not None and whole.faster.step_s < fastest:
        assert ruled.faster is not None
        assert ruled.faster.step_s == whole.faster.step_s
    if not whole.front:
        assert ruled.least is not None
        assert whole.least is not None
        assert ruled.least.total_bytes == whole.least.total_bytes
    assert ruled.tally.plans == whole.tally.plans == whole.tally.evaluated
    assert ruled.tally.evaluated + sum(ruled.tally.skipped.values()) == whole.tally.plans
    assert ruled.tally.too_big <= whole.tally.too_big


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, len(CASES)))])
def test_what_a_search_finds_is_the_same_without_rules(number: int) -> None:
    ruled, whole = both(number)
    same(ruled, whole)
    assert ruled.tally.skipped, "no rule left anything out"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("share", [0.02, 0.3, 0.7])
def test_with_less_memory(number: int, share: float) -> None:
    """Down to where nothing fits."""
    _, target, devices, _ = case(number)
    there = device_bytes(target, devices)
    assert there is not None
    same(*both(number, memory=share * there))


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("number", [0, 3])
def test_by_every_objective(number: int, objective: Objective) -> None:
    failures = Failures(3e7, checkpoint_s=None, storage=Storage(2e9, 1e9))
    same(*both(number, Goal(objective, steps=1e4, usd_per_hour=2.0, watts=700.0, failures=failures)))


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, len(CASES)))])
def test_no_plan_falls_short_of_its_groups_bounds(number: int) -> None:
    """And the bounds are near enough to be of use."""
    work, target, devices, space = case(number)
    evaluator = Evaluator(work, target, devices)
    nearest = [0.0, 0.0]
    for family in list(space.families(work))[:: 5 if number == 0 else 1]:
        groups = evaluator.groups(family, space)
        for least, group in zip(bounds_of(evaluator, groups), groups, strict=True):
            batch = evaluator.batch(group)
            shares = least.step_s / batch.step_s.min(), least.total_bytes / batch.total_bytes.min()
            assert max(shares) <= 1.0, (group.base.family, group.pipelines[0], group.variants)
            nearest = [max(pair) for pair in zip(nearest, shares, strict=True)]
    assert nearest[0] > 0.9
    assert nearest[1] > 0.5


def test_scores_are_least_where_time_and_memory_are() -> None:
    failures = Failures(3e7)
    for objective in OBJECTIVES:
        goal = Goal(objective, steps=10.0, usd_per_hour=2.0, watts=700.0, failures=failures)
        grid = [[least_score(Bounds(s, b), goal, 8) for b in (1e9, 2e9, 5e10)] for s in (0.5, 1.0, 30.0)]
        for row in (*grid, *zip(*grid, strict=True)):
            assert all(one <= other for one, other in pairwise(row)), objective
