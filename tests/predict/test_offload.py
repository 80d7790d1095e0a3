"""Copies to the host and back: bytes over the link's rate, where nothing hides them."""

from dataclasses import replace

import pytest

from moestro.config import load_config
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.convert import workload_of
from moestro.graph.count import count_step
from moestro.hardware.figures import UNKNOWN, Figure
from moestro.plan.space import Pipeline, space_of
from moestro.predict.memory import passing_bytes
from moestro.predict.offload import REACHED, host_rate, optimizer_bytes, with_copies
from moestro.predict.predict import predict_step, price_step
from moestro.predict.step import pass_seconds
from moestro.predict.target import Target, target_of

PLAN = Plan(pp=4, dp=2, ep=2, zero=1, dispatch="deduplicated")


def workload() -> Workload:
    found = workload_of(load_config("olmoe-1b-7b").config)
    return found.model_copy(update={"global_batch_size": 32, "trainer": "megatron"})


def linked(gbps: float) -> Target:
    target = target_of("h100-sxm", 8)
    device = target.place.device.model_copy(update={"host_link_gbps": Figure(achieved=gbps, achieved_source="a test")})
    return replace(target, place=replace(target.place, device=device))


@pytest.mark.parametrize("what", ["optimizer", "activations"])
def test_a_fast_link_costs_nothing_and_a_slow_one_what_the_bytes_take(what: str) -> None:
    work, plan = workload(), PLAN.model_copy(update={"offload": what})
    bare = predict_step(work, PLAN, linked(1e6))
    fast = predict_step(work, plan, linked(1e6))
    assert fast.step_s.value == pytest.approx(bare.step_s.value)
    assert fast.memory.total < bare.memory.total
    target, graph = linked(0.5), count_step(work, plan)
    slow = predict_step(work, plan, target)
    if what == "optimizer":
        stage = max(graph.stages, key=lambda stage: stage.parameters.total)
        moved = optimizer_bytes(work, plan, stage.parameters)
        assert moved == pytest.approx(predict_step(work, PLAN, target).memory.optimizer, rel=0.02)
        assert slow.time.optimizer == pytest.approx(moved / 0.5e9, rel=0.02)
        assert slow.time.compute == pytest.approx(bare.time.compute)
        return
    sizes = [passing_bytes(work, plan, stage, 4)[0] for stage in graph.stages]
    forward, backward, _, _ = pass_seconds(price_step(graph, work, plan, target), plan, target.constants_for(work, 8))
    assert forward == pytest.approx([size / 0.5e9 for size in sizes])
    assert backward == pytest.approx([size / 0.5e9 for size in sizes])
    assert slow.time.communication > bare.time.communication, "what nothing hides is told there"


def test_where_there_is_nothing_to_offload_to() -> None:
    work, plan = workload(), PLAN.model_copy(update={"offload": "optimizer"})
    unknown = linked(1.0).place.device.model_copy(update={"host_link_gbps": UNKNOWN})
    assert host_rate(unknown) is None
    costs = price_step(count_step(work, PLAN), work, PLAN, linked(1.0))
    with pytest.raises(MoestroError, match="nothing to offload to"):
        with_copies(costs, count_step(work, plan), work, plan, unknown)
    unified = linked(1.0).place.device
    unified = unified.model_copy(update={"memory": unified.memory.model_copy(update={"unified": True})})
    assert host_rate(unified) is None


def test_a_nominal_rate_is_not_reached() -> None:
    device = target_of("h100-sxm", 8).place.device
    assert device.host_link_gbps.achieved is None
    assert host_rate(device) == pytest.approx(REACHED * 63e9)


def test_it_is_searched_where_the_trainer_can_and_a_pipeline_holds_several() -> None:
    work = workload()
    space = space_of(work, 8, 8, offloads=True)
    assert space.offload == ("none", "optimizer", "activations")
    assert space_of(work.model_copy(update={"trainer": "moestro"}), 8, 8, offloads=True).offload == ("none",)
    family = next(space.families(work))
    pipelines = [Pipeline(pp, 4, 1, "1f1b", None, 2) for pp in (1, 2)]
    kinds = [{variant.offload for variant in space.variants(family, work, one)} for one in pipelines]
    assert kinds == [{"none", "optimizer"}, {"none", "optimizer", "activations"}]
