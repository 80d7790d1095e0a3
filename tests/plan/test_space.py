"""The space of plans: every one of them fits, and nothing that fits is missing."""

import random
from itertools import product

import pytest

from moestro.config import load_config
from moestro.config.plan import Plan, Schedule, Workload, misfits
from moestro.errors import MoestroError
from moestro.graph.convert import overrides_of, workload_of
from moestro.parallel.layout import resolve_layout
from moestro.plan.space import _runs, plan_of, space_of
from moestro.predict.orders import pipeline_orders


def workload(name: str = "olmoe-1b-7b", batch: int = 64, **changes: object) -> Workload:
    found = workload_of(load_config(name).config)
    return found.model_copy(update={"global_batch_size": batch, **changes})


def plans(work: Workload, devices: int, node: int = 8, **given: tuple[object, ...]) -> list[Plan]:
    space = space_of(work, devices, node, given)
    return [
        plan_of(family, pipeline, variant, node)
        for family in space.families(work)
        for pipeline in space.pipelines(family, work, devices)
        for variant in space.variants(family, work, pipeline)
    ]


FEW = {"expert_chunks": (1,), "expert_recompute": (False,), "recompute": ("none",), "micro_batch_size": (1, 2)}


@pytest.mark.parametrize("trainer", ["moestro", "megatron"])
def test_every_plan_fits_the_workload_and_uses_all_devices(trainer: str) -> None:
    work = workload(trainer=trainer)
    found = plans(work, 8, **FEW, vpp=(1, 2, 3))
    assert len(found) > 300
    assert len({plan.model_dump_json() for plan in found}) == len(found), "a plan is there twice"
    for plan in found:
        assert plan.world_size == 8
        assert misfits(work, plan) == [], plan


def test_the_trainer_starts_every_plan_of_its_space() -> None:
    given = {
        "expert_chunks": (1, 2),
        "micro_batch_size": (1, 4),
        "vpp": (1, 2),
        "tp": (1, 2),
        "cp": (1, 2),
        "ep": (1, 8),
    }
    found = plans(workload(batch=16), 8, **given)
    assert {"zbv", "dualpipev", "zero_bubble", "interleaved"} <= {plan.schedule for plan in found}
    assert {0, 1, 2, 3} == {plan.zero for plan in found}
    for plan in random.Random(0).sample(found, 60):
        config = load_config("olmoe-1b-7b", ["train.global_batch_size=16", *overrides_of(plan)]).config
        layout = resolve_layout(config, 8)
        assert (layout.pp, layout.cp, layout.tp, layout.ep) == (plan.pp, plan.cp, plan.tp, plan.ep)


def test_micro_batches_do_not_depend_on_the_number_of_devices() -> None:
    for devices in (1, 2, 6, 64):
        assert space_of(workload(), devices, 8).micro_batch_size == (1, 2, 4, 8, 16)
    assert {plan.micro_batch_size for plan in plans(workload(batch=12), 1, recompute=("none",))} == {1, 2, 4}


def test_nothing_that_fits_is_missing() -> None:
    """Against a plain loop over the same fields."""
    work = workload("olmoe-1b-7b", 16, trainer="megatron")
    given = {
        "tp": (1, 2), "cp": (1,), "ep": (1, 2, 4), "etp": (1,), "pp": (1, 2), "vpp": (1,), "schedule": ("1f1b",),
        "micro_batch_size": (1, 2, 4), "recompute": ("none",), "expert_chunks": (1,), "expert_recompute": (False,),
        "dispatch": ("deduplicated",), "overlap_dispatch": (False,), "zero": (0, 1),
    }  # fmt: skip
    found = {plan.model_dump_json() for plan in plans(work, 4, **given)}
    expected = set()
    for tp, ep, pp, size, zero in product((1, 2), (1, 2, 4), (1, 2), (1, 2, 4), (0, 1)):
        dp = 4 // (tp * pp)
        if (dp == 1 and zero) or (dp * tp) % ep or 16 % (dp * size):
            continue
        plan = Plan(
            tp=tp, ep=ep, pp=pp, dp=dp, micro_batch_size=size, zero=zero,
            dispatch="deduplicated" if ep > 1 else "all_to_all",
        )  # fmt: skip
        assert not misfits(work, plan)
        expected.add(plan.model_dump_json())
    assert found == expected


def test_tensor_parallelism_beyond_the_heads_of_keys_is_not_tried() -> None:
    work = workload("mixtral-8x7b")  # 8 heads of keys
    assert max(space_of(work, 64, 64).tp) == 8
    assert max(space_of(work, 64, 4).tp) == 4, "beyond the fast links"


def test_one_device_has_one_layout() -> None:
    found = plans(workload(batch=1), 1, **FEW)
    assert {(plan.pp, plan.dp, plan.tp, plan.cp, plan.ep, plan.zero) for plan in found} == {(1, 1, 1, 1, 1, 0)}


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(MoestroError, match=r"no plan\.dp"):
        space_of(workload(), 8, 8, {"dp": (8,)})


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "dualpipe"])
def test_few_micro_batches_tell_whether_many_run(schedule: Schedule) -> None:
    """A schedule that exists for an odd number, or a multiple of the ranks, is known by a smaller one alike."""
    vpp = 2 if schedule == "interleaved" else 1
    for pp, micro_batches in product((2, 3, 4), (4, 9, 12, 15, 16, 27, 30)):
        try:
            pipeline_orders(schedule, pp, vpp, micro_batches)
            there = True
        except MoestroError:
            there = False
        assert _runs(schedule, pp, vpp, micro_batches) == there, (pp, micro_batches)
