"""Many plans at once against one after the other."""

import random

import pytest

from moestro.config import load_config
from moestro.config.plan import Workload
from moestro.graph.convert import workload_of
from moestro.plan.evaluate import Evaluator
from moestro.plan.space import plan_of, space_of
from moestro.predict.predict import predict_step
from moestro.predict.target import target_of

FAMILIES, PLANS = 6, 40


def workload(name: str, **changes: object) -> Workload:
    return workload_of(load_config(name).config).model_copy(update={"global_batch_size": 128, **changes})


@pytest.mark.parametrize(
    ("name", "devices", "changes"),
    [
        ("olmoe-1b-7b", 8, {}),
        ("deepseek-v3", 64, {"trainer": "megatron", "precision": "fp8"}),  # dense and expert layers, tokens ahead
        ("mixtral-8x7b", 16, {"trainer": "megatron", "optimizer": "muon", "fused_loss": False}),
        ("zaya1-8b", 16, {}),  # layers of several kinds, a state between stages
        ("gpt-oss-20b", 16, {"trainer": "megatron", "attention_kernel": "math", "fused_kernels": False}),
    ],
)
def test_equal_to_one_prediction_at_a_time(name: str, devices: int, changes: dict[str, object]) -> None:
    work, target = workload(name, **changes), target_of("h100-sxm", devices)
    offload = ("none", "optimizer", "activations") if changes else ("none",)
    space = space_of(work, devices, 8, {"offload": offload, "recompute_layers": (None, 1)})
    choose = random.Random(f"{name} {devices}")
    evaluator = Evaluator(work, target, devices)
    batches = []
    for family in choose.sample(list(space.families(work)), FAMILIES):
        batches += evaluator.batches(family, space)
    for _ in range(PLANS):
        batch = choose.choice(batches)
        i, j = choose.randrange(len(batch.pipelines)), choose.randrange(len(batch.variants))
        plan = plan_of(batch.family, batch.pipelines[i], batch.variants[j], 8)
        one = predict_step(work, plan, target)
        assert batch.step_s[i, j] == pytest.approx(one.step_s.value, rel=1e-9), plan
        assert batch.total_bytes[i, j] == pytest.approx(one.memory.total, rel=1e-9), plan
        assert batch.needed_bytes[i, j] == pytest.approx(one.memory.needed, rel=1e-9), plan
