"""A plan placed anew: the instance agrees with the prediction, and the plan is never slower and always fits."""

from dataclasses import replace
from itertools import product

import pytest

from moestro.config import ModelConfig, MoEConfig
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.convert import overrides_of
from moestro.graph.count import count_step
from moestro.plan.ilp import instance
from moestro.plan.ilp.balance import balance, balanced
from moestro.plan.ilp.instance import placement_of, plan_of, stages_of
from moestro.plan.ilp.place import place
from moestro.plan.ilp.stages import even, rank_bytes, stage_seconds
from moestro.predict.memory import memory_of
from moestro.predict.pools import Part
from moestro.predict.predict import predict_step, price_step
from moestro.predict.step import pass_seconds
from moestro.predict.target import Target, target_of

MOE = MoEConfig(num_experts=8, top_k=2, expert_hidden_size=512)
MODEL = ModelConfig(vocab_size=32_000, hidden_size=1024, num_layers=6, num_heads=16, max_seq_len=4096, moe=MOE)
WORK = Workload(model=MODEL, seq_len=4096, global_batch_size=16)
PLAN = Plan(pp=2, dp=2, ep=2, zero=1)


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of("h100-sxm", 8)


def needed(work: Workload, plan: Plan, target: Target) -> float:
    return predict_step(work, plan, target).memory.needed


def seconds(work: Workload, plan: Plan, target: Target) -> float:
    return predict_step(work, plan, target, exact=True).step_s.value


@pytest.mark.parametrize("kind", ["none", "selective", "block"])
@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        PLAN.model_copy(update={"vpp": 3, "schedule": "interleaved"}),
        PLAN.model_copy(update={"tp": 2, "etp": 2, "ep": 2, "in_flight": (4, 1)}),
        PLAN.model_copy(update={"offload": "activations", "zero": 3}),
    ],
)
def test_the_instance_is_the_predictions(plan: Plan, kind: str, target: Target) -> None:
    """Of an even split: bytes of the fullest rank and seconds, but for what a step does once."""
    mtp = {"mtp": {"depth": 2}} if plan.tp == 1 else {}
    work = WORK.model_copy(update={"model": ModelConfig.model_validate({**MODEL.model_dump(), **mtp})})
    plan = plan.model_copy(update={"recompute": kind})
    kinds = ("none",) if kind == "none" else ("none", kind)
    some, send_s = stages_of(work, plan, target, [1e12] * 2, kinds)
    whole = even(some, len(kinds) - 1)
    needs = zip(rank_bytes(some, whole), some.limits_bytes, strict=True)
    ours = max(need + 1e12 - limit for need, limit in needs)
    assert ours == pytest.approx(needed(work, plan, target), rel=1e-6)
    costs = price_step(count_step(work, plan), work, plan, target)
    forward, backward, weight, _ = pass_seconds(costs, plan, target.constants_for(work, plan.world_size))
    near = 1e-6 if plan.zero == 1 else 0.03  # what gathers of weights hide behind differs with what is beside them
    ours_s = stage_seconds(some, whole)
    both = [b + w for b, w in zip(backward, weight, strict=True)]
    if plan.offload == "none":
        assert ours_s[0] == pytest.approx(forward, rel=near)
        assert ours_s[1] == pytest.approx(both, rel=near)
    else:  # every layer waits for its own copy, where a stage waits for all together; gathers as above
        wholes = [f + b for f, b in zip(forward, both, strict=True)]
        ours_of = [f + b for f, b in zip(*ours_s, strict=True)]
        assert all(0.93 * theirs <= mine <= 1.4 * theirs for mine, theirs in zip(ours_of, wholes, strict=True))
    assert send_s == pytest.approx(costs.stages[0].send_s * target.constants_for(work, 8).between)


@pytest.mark.parametrize("again", [None, (2, 0), (1, 4)])
def test_a_plan_is_a_placement(again: tuple[int, int] | None, target: Target) -> None:
    """There and back."""
    changes = {"layers_per_stage": (2, 4), "recompute": "block" if again else "none", "recompute_per_stage": again}
    plan = PLAN.model_copy(update=changes)
    stages, _ = stages_of(WORK, PLAN, target, [1e12] * 2, ("none", "block"))
    assert plan_of(plan, stages, placement_of(plan, stages, ("none", "block")), ("none", "block")) == plan
    assert placement_of(PLAN, stages, ("none", "block")) == even(stages)
    few = plan.model_copy(update={"recompute": "block", "recompute_per_stage": None, "recompute_layers": 1})
    graph = count_step(WORK, few)
    again = [sum(twice for _, twice in runs) for runs in placement_of(few, stages, ("none", "block"))]
    assert again == [sum(run.recomputed for run in stage.pieces) for stage in graph.stages]


def test_the_gap_is_the_plans_own(target: Target) -> None:
    found = balanced(WORK, PLAN, target)
    assert found.plan == balance(WORK, PLAN, target)
    assert found.even is not None
    assert found.step.step_s.value <= found.even[1].step_s.value
    assert 0 <= found.gap < 0.2  # solved at once; what is left is that the simulated step decides


def test_the_best_of_all_small_placements(target: Target) -> None:
    """By prediction, pass by pass, of every split and every number of recomputed layers."""
    room = needed(WORK, PLAN.model_copy(update={"recompute": "block"}), target)
    limit = room + 0.4 * (needed(WORK, PLAN, target) - room)
    found = balance(WORK, PLAN, target, limit)
    assert needed(WORK, found, target) <= limit
    best = float("inf")
    for size, kind in product(range(1, 6), ("selective", "block")):
        for again in product(range(size + 1), range(7 - size)):
            plan = PLAN.model_copy(
                update={"layers_per_stage": (size, 6 - size), "recompute": kind, "recompute_per_stage": again}
            )
            if needed(WORK, plan, target) <= limit:
                best = min(best, seconds(WORK, plan, target))
    assert seconds(WORK, found, target) <= 1.005 * best
    assert found.recompute_per_stage is not None


@pytest.mark.parametrize("share", [0.2, 0.8])
@pytest.mark.parametrize("trainer", ["megatron", "moestro"])
def test_never_slower_than_even(share: float, trainer: str, target: Target) -> None:
    work = WORK.model_copy(update={"trainer": trainer})
    plan = PLAN.model_copy(update={"vpp": 2, "schedule": "interleaved"})
    others = [plan.model_copy(update={"recompute": kind}) for kind in ("none", "selective", "block")]
    low, high = (needed(work, others[n], target) for n in (2, 0))
    limit = low + share * (high - low)
    found = balance(work, plan, target, limit)
    assert needed(work, found, target) <= limit
    fit = [seconds(work, one, target) for one in others if needed(work, one, target) <= limit]
    assert seconds(work, found, target) <= min(fit)
    assert Plan.model_validate(found.model_dump()) == found
    if trainer == "moestro":
        overrides_of(found)  # which the trainer takes


def test_without_a_pipeline_only_recomputation_is_left(target: Target) -> None:
    plan = Plan(dp=2, ep=2)
    low, high = (needed(WORK, plan.model_copy(update={"recompute": kind}), target) for kind in ("block", "none"))
    found = balance(WORK, plan, target, low + 0.5 * (high - low))
    assert found.layers_per_stage is None
    assert found.recompute_per_stage is not None
    assert 0 < found.recompute_per_stage[0] < 6 or found.recompute == "selective"


def test_no_room(target: Target) -> None:
    with pytest.raises(MoestroError, match="however much is recomputed"):
        balance(WORK, PLAN, target, 2e9)


def test_unlike_devices_get_unlike_layers(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second pool's kernels take twice as long."""
    parts = tuple(Part(name, target.place, target.curves, 2) for name in ("fast", "slow"))
    apart = replace(target, parts=parts, devices=4)
    usual = target.constants_for(WORK, 4)
    kernels = ("gemm", "grouped", "attention", "memory")
    slow = usual.model_copy(update={name: 2 * getattr(usual, name) for name in kernels} | {"launch_s": 0.0})
    monkeypatch.setattr(instance, "part_constants", lambda part, _: slow if part.name == "slow" else usual)
    some, _ = instance.stages_of(WORK, PLAN, apart, [80e9] * 2, ("none", "block"))
    assert some.pace[0] == 1.0 < some.pace[1] <= 2.0
    found = instance.plan_of(PLAN, some, place(some).placement, ("none", "block"))
    assert found.layers_per_stage in ((4, 2), (5, 1))


@pytest.mark.parametrize("kind", ["none", "block"])
def test_bytes_of_our_trainer(kind: str, target: Target) -> None:
    work = WORK.model_copy(update={"trainer": "moestro"})
    plan = PLAN.model_copy(update={"recompute": kind})
    some, _ = stages_of(work, plan, target, [1e12] * 2, (kind,))
    needs = zip(rank_bytes(some, even(some)), some.limits_bytes, strict=True)
    assert max(need + 1e12 - limit for need, limit in needs) == pytest.approx(needed(work, plan, target), rel=0.01)


def test_counts_of_a_stage_recompute_so_many() -> None:
    plan = PLAN.model_copy(update={"recompute": "block", "recompute_per_stage": (2, 0)})
    stages = count_step(WORK, plan).stages
    assert [sum(run.recomputed for run in stage.pieces) for stage in stages] == [2, 0]
    same = count_step(WORK, PLAN.model_copy(update={"recompute": "block", "recompute_layers": 2}))
    assert stages[0].saved == same.stages[0].saved
    assert memory_of(count_step(WORK, plan), WORK, plan)[0].needed > memory_of(same, WORK, PLAN)[0].needed * 0.5
    with pytest.raises(MoestroError, match="3 numbers for 2 stages"):
        count_step(WORK, PLAN.model_copy(update={"recompute_per_stage": (1, 1, 1)}))
    with pytest.raises(ValueError, match="give one of them"):
        Plan(recompute="block", recompute_layers=1, recompute_per_stage=(1,))
    with pytest.raises(MoestroError, match="no recompute_per_stage"):
        overrides_of(plan)


def test_an_answer_as_a_plan(target: Target) -> None:
    some, _ = stages_of(WORK, PLAN, target, [1e12] * 2, ("none", "block"))
    found = plan_of(PLAN, some, (((3, 1),), ((2, 0),)), ("none", "block"))
    assert (found.layers_per_stage, found.recompute, found.recompute_per_stage) == ((4, 2), "block", (1, 0))
    found = plan_of(PLAN, some, (((3, 0),), ((3, 0),)), ("none", "block"))
    assert (found.recompute, found.recompute_per_stage) == ("none", None)
