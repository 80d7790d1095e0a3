"""The linter's findings against what stands outside it: published products, and predictions with and without."""

import numpy as np
import pytest
from predict.test_predict import h100

from moestro.config.model import ModelConfig
from moestro.config.plan import Plan, Workload
from moestro.hardware.published.gemm import read_gemm
from moestro.plan.alignment import RULE, price_shape
from moestro.plan.shapes import changed
from moestro.plan.size import KNEE_SHARE, lint_shape
from moestro.predict.target import target_of

MODEL = ModelConfig(vocab_size=32_000, hidden_size=2048, num_layers=8, num_heads=16, intermediate_size=8192)


def work(seq_len: int = 2048, batch: int = 16, **changes: object) -> Workload:
    return Workload(model=changed(MODEL, changes), seq_len=seq_len, global_batch_size=batch)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["h100-sxm", "h200-sxm", "a100-sxm-80gb", "b200"])
def test_published_products_above_the_knee_run_near_the_best(device: str) -> None:
    """And those up to ten times smaller do not."""
    knee = target_of(device).curves.product("bf16").knee_flops(KNEE_SHARE)
    rows = np.array([
        (2 * s.number("m") * s.number("n") * s.number("k"), s.flops_per_s)
        for s in read_gemm()[0]
        if s.op == "gemm" and s.case.get("device") == device and s.case.get("dtype") == "bf16"
    ])  # fmt: skip
    rate = rows[:, 1] / np.quantile(rows[:, 1], 0.95)
    above, below = rows[:, 0] >= knee, (rows[:, 0] < knee) & (rows[:, 0] > knee / 10)
    assert min(above.sum(), below.sum()) >= 20
    assert np.median(rate[above]) > 0.8
    assert np.median(rate[below]) < np.median(rate[above]) - 0.1


@pytest.mark.parametrize(
    ("own", "mended", "rule"),
    [
        ({"vocab_size": 32_003}, {"vocab_size": 32_064}, "vocabulary"),
        ({"intermediate_size": 5461}, {"intermediate_size": 5504}, "alignment"),
        ({"hidden_size": 1920, "num_heads": 24}, {"hidden_size": 1920, "num_heads": 15}, "heads"),
        ({"num_layers": 33, "vocab_size": 4096}, {"num_layers": 32, "vocab_size": 4096}, "layers"),
    ],
)
def test_the_loss_is_the_difference_of_two_predictions(
    own: dict[str, object], mended: dict[str, object], rule: str
) -> None:
    target, plan = h100(), Plan(pp=4 if rule == "layers" else 2, micro_batch_size=2)
    found = next(f for f in lint_shape(work(**own), plan, target).of("shape") if f.rule == rule)
    one, two = (price_shape(work(**changes), plan, target, RULE) for changes in (own, mended))
    useful = 1.0 if rule == "vocabulary" else two.model_flops / one.model_flops
    assert found.loss == pytest.approx(one.step_s / two.step_s * useful - 1, abs=1e-9)
    assert 0 < found.loss < 0.6


def test_stages_that_are_uneven_in_favour_of_the_head_are_no_finding() -> None:
    """Nine layers over two stages: the last has one less, and the head."""
    plan = Plan(pp=2, micro_batch_size=2)
    nine, ten = (price_shape(work(num_layers=n), plan, h100()) for n in (9, 10))
    assert nine.step_s / nine.model_flops < ten.step_s / ten.model_flops
    assert lint_shape(work(num_layers=9), plan, h100()).of("shape") == []


def test_more_tokens_gain_what_the_batchs_findings_say() -> None:
    """At least: attention and everything between products gains too in micro-batches of 16 times as many tokens."""
    target, narrow = h100(), {"hidden_size": 1024, "num_heads": 8, "intermediate_size": 2048}
    small = work(seq_len=512, batch=64, **narrow)
    loss = next(f.loss for f in lint_shape(small, Plan(), target).findings if f.rule == "knee")
    one, many = (price_shape(small, Plan(micro_batch_size=n), target) for n in (1, 16))
    products = [sum(p.time.by_part[part] for part in ("attention", "dense")) for p in (one, many)]
    gained = (products[0] - products[1]) / one.step_s
    assert 0.01 < loss < gained
