"""Stages of experts priced: against predictions of each stage, and stages that make no sense."""

import pytest

from moestro.config import count, load_config
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.convert import workload_of
from moestro.plan.growth import Growth, price_growth, with_experts
from moestro.predict.predict import predict_step
from moestro.predict.target import target_of

STAGES = ((16, 0.25), (32, 0.25), (64, 0.5))
ONE_PLAN: dict[str, tuple[object, ...]] = {
    "tp": (1,), "cp": (1,), "pp": (1,), "ep": (1,), "zero": (1,), "recompute": ("none",), "expert_chunks": (1,),
    "expert_recompute": (False,), "micro_batch_size": (1,),
}  # fmt: skip


def work() -> Workload:
    return workload_of(load_config("olmoe-1b-7b").config).model_copy(update={"global_batch_size": 16})


def priced(stages: tuple[tuple[int, float], ...] = STAGES, **given: tuple[object, ...]) -> Growth:
    return price_growth(work(), target_of("h200-8"), 8, stages, 1000, {**ONE_PLAN, **given})


def test_stages_are_predictions_of_models_with_so_many_experts() -> None:
    found = priced()
    plan, target = Plan(dp=8, zero=1), target_of("h200-8")
    for stage, (experts, share) in zip(found.stages, STAGES, strict=True):
        model, moe = work().model, work().model.moe
        assert moe is not None
        model = model.model_copy(update={"moe": moe.model_copy(update={"num_experts": experts})})
        one = predict_step(work().model_copy(update={"model": model}), plan, target, exact=True)
        assert (stage.experts, stage.share) == (experts, share)
        assert stage.step_s == pytest.approx(one.step_s.value)
        assert stage.total_params == count(model, 4096).total_params
    first, second, last = (stage.step_s for stage in found.stages)
    assert found.hours == pytest.approx(8 * 1000 * (0.25 * first + 0.25 * second + 0.5 * last) / 3600)
    assert found.whole_hours == pytest.approx(8 * 1000 * last / 3600)
    assert found.saving == pytest.approx(1 - found.hours / found.whole_hours)
    assert 0 < found.saving < found.most_saving


def test_each_stage_has_its_fastest_plan() -> None:
    """Fewer experts leave room for larger micro-batches."""
    found = priced(micro_batch_size=(1, 2, 4, 8), zero=(1, 3))
    assert all(free.step_s <= tied.step_s for free, tied in zip(found.stages, priced().stages, strict=True))
    assert found.stages[0].plan.micro_batch_size > 1


def test_shares_that_were_rounded_are_made_whole() -> None:
    found = priced(((16, 0.499), (64, 0.5)))
    assert sum(stage.share for stage in found.stages) == pytest.approx(1)


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        (((64, 1.0),), "two stages or more"),
        (((32, 0.5), (16, 0.5)), "more experts than the one before"),
        (((16, 0.0), (32, 1.0)), "share above zero"),
        (((16, 0.5), (32, 0.6)), "add up to 1.1"),
        (((16, float("nan")), (32, 0.5)), "share above zero"),
        (((16, float("inf")), (32, 0.5)), "add up to inf"),
        (((4, 0.5), (32, 0.5)), "cannot have 4 experts: top_k = 8"),
    ],
)
def test_stages_that_make_no_sense(stages: tuple[tuple[int, float], ...], why: str) -> None:
    with pytest.raises(MoestroError, match=why):
        priced(stages)


def test_models_that_cannot_grow() -> None:
    dense = workload_of(load_config("mm1-3b-moe", ("model.moe=none", "model.intermediate_size=8192")).config)
    with pytest.raises(MoestroError, match="has none to grow"):
        price_growth(dense, target_of("h200-8"), 8, STAGES, 1)
    fine = load_config("olmoe-1b-7b", ("model.moe.granularity=8", "model.moe.num_experts=8", "model.moe.top_k=1",
                                       "model.moe.expert_hidden_size=8192")).config.model  # fmt: skip
    with pytest.raises(MoestroError, match=r"12 experts are no multiple of moe.granularity = 8"):
        with_experts(fine, 12)
    moe = with_experts(fine, 16).moe
    assert moe is not None
    assert moe.resolved_num_experts == 16
