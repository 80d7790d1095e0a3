"""Layers placed on fitted memory: what is fitted is what is kept to, and wrong counting does not matter."""

from dataclasses import replace

import pytest

from moestro.config import load_config
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.graph.convert import workload_of
from moestro.plan.chunks import chunks_that_fit
from moestro.plan.measured import balance_measured, measured_of, room_bytes
from moestro.predict.dry_run import StageMemory, fit_dry_run
from moestro.predict.predict import predict_step
from moestro.predict.probe_peaks import counted, counted_peaks, take
from moestro.predict.probe_rounds import Round, design
from moestro.predict.target import Target, target_of

GB = 1e9


def case(preset: str = "olmoe-1b-7b", trainer: str = "moestro", **changes: object) -> tuple[Workload, Plan]:
    batch = "train.global_batch_size=128"
    workload = workload_of(load_config(preset, [batch]).config).model_copy(update={"trainer": trainer})
    return workload, Plan.model_validate({"pp": 4, "dp": 8, "ep": 8, "zero": 1, **changes})


def fitted(workload: Workload, plan: Plan) -> StageMemory:
    rounds = design(workload, plan, ("none", "block"))
    peaks = take(rounds, counted(workload, plan))
    return fit_dry_run(rounds.flat, [peaks[place] for place in sorted(peaks)])


@pytest.fixture(scope="module")
def target() -> Target:
    return target_of("h100-sxm", 32)


@pytest.mark.parametrize("preset", ["olmoe-1b-7b", "deepseek-v2-lite"])
def test_fitted_to_counted_memory_it_is_counted_memory(preset: str, target: Target) -> None:
    workload, plan = case(preset)
    memory, layers = fitted(workload, plan), workload.model.num_layers
    sizes = (layers - 9, 2, 3, 4)
    for kind, again in (("none", (0,) * 4), ("block", sizes)):
        one = Round(sizes, kind, again)
        found = measured_of(workload, one.plan(plan), target, memory)
        assert found.rank_bytes == pytest.approx(counted_peaks(workload, plan, one), rel=0.03)


@pytest.mark.parametrize("trainer", ["moestro", pytest.param("megatron", marks=pytest.mark.slow)])
def test_limits_are_kept_and_binding_ones_cost_time(trainer: str, target: Target) -> None:
    workload, plan = case(trainer=trainer)
    memory = fitted(workload, plan)
    wide = balance_measured(workload, plan, target, memory, 200 * GB)
    tight = balance_measured(workload, plan, target, memory, 11 * GB)
    assert max(tight.rank_bytes) <= 11 * GB * (1 + 1e-9) < max(wide.rank_bytes)
    assert tight.step_s > wide.step_s
    assert sum(tight.plan.layers_per_stage or ()) == workload.model.num_layers
    assert measured_of(workload, tight.plan, target, memory).rank_bytes == pytest.approx(tight.rank_bytes)
    assert predict_step(workload, tight.plan, target, exact=True).step_s.value == tight.step_s
    with pytest.raises(MoestroError, match="no placement of the layers fits"):
        balance_measured(workload, plan, target, memory, 2 * GB)


def test_measured_memory_decides_not_counted(target: Target) -> None:
    """Activations that take three times what is counted: recomputed, where counted memory would keep them."""
    workload, plan = case()
    memory = fitted(workload, plan)
    heavy = replace(memory, activation_bytes={kind: 3 * size for kind, size in memory.activation_bytes.items()})
    limit = 20 * GB
    light_plan = balance_measured(workload, plan, target, memory, limit)
    heavy_plan = balance_measured(workload, plan, target, heavy, limit)
    assert (light_plan.plan.recompute, heavy_plan.plan.recompute) == ("none", "block")
    assert max(measured_of(workload, light_plan.plan, target, heavy).rank_bytes) > limit
    assert max(heavy_plan.rank_bytes) <= limit


def test_what_was_not_probed_is_asked_for(target: Target) -> None:
    workload, plan = case()
    memory = fitted(workload, plan)
    without = replace(memory, activation_bytes={"none": memory.activation_bytes["none"]})
    with pytest.raises(MoestroError, match="no probe had layers of 'block'"):
        measured_of(workload, Round((4, 4, 4, 4), "block", (4, 4, 4, 4)).plan(plan), target, without)
    with pytest.raises(MoestroError, match="no last stage with layers of 'none' was probed"):
        balance_measured(workload, plan, target, replace(memory, end_bytes={"first": 1e9}, end_in_flight={"first": 4}))


def test_room(target: Target) -> None:
    workload, plan = case()
    assert 0.9 * 80 * GB < room_bytes(workload, plan, target) < 0.98 * 80 * GB


def test_chunks() -> None:
    """More of them with less room; none are enough for nothing."""
    workload, plan = case(trainer="megatron", pp=1)
    room = [chunks_that_fit(workload, plan, size * GB, 8.0) for size in range(80, 10, -1)]
    assert room[0] == 1
    assert room[-1] is None
    known = [chunks for chunks in room if chunks is not None]
    assert known == sorted(known)
    assert len(set(known)) > 1
    assert chunks_that_fit(workload, plan, 200 * GB, bins=(4, 2)) == 2
