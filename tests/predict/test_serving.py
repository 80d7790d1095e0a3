"""Serving: the table of decode floors of ZAYA1-8B, caches, and queues."""

import math
import random

import pytest

from moestro.config.counts import resolved_model
from moestro.config.load import load_config
from moestro.config.model import ModelConfig
from moestro.errors import MoestroError
from moestro.predict.serving import decode_step, experts_touched, prefill_floor, queue_time, simulate_queue


def preset(name: str) -> ModelConfig:
    return resolved_model(load_config(name).config)


@pytest.mark.parametrize(
    ("batch", "touched", "gigabytes", "floor_ms"), [(1, 1, 2.58, 0.60), (16, 10.3, 11.9, 2.76), (64, 15.7, 17.4, 4.0)]
)
def test_decode_floors_of_zaya1(batch: int, touched: float, gigabytes: float, floor_ms: float) -> None:
    step = decode_step(preset("zaya1-8b"), batch, 4.33e12)
    assert step.experts_touched == pytest.approx(touched, abs=0.05)
    assert step.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=5e-3)
    assert step.floor_s * 1e3 == pytest.approx(floor_ms, abs=0.03)


def test_large_batches_read_all_weights_once() -> None:
    step = decode_step(preset("zaya1-8b"), 4096, 4.33e12)
    assert step.weight_bytes == pytest.approx(2 * 8.840e9, rel=1e-3)


def test_experts_touched_against_drawing() -> None:
    rng = random.Random(0)
    drawn = [len({e for _ in range(12) for e in rng.sample(range(32), 4)}) for _ in range(3000)]
    assert experts_touched(32, 4, 12) == pytest.approx(sum(drawn) / len(drawn), rel=0.01)
    assert experts_touched(8, 2, 1) == pytest.approx(2)
    assert experts_touched(8, 8, 3) == 8


def test_caches() -> None:
    latent = decode_step(preset("deepseek-v3"), 2, 1e12, context=1000)
    assert latent.cache_bytes == 2 * 2 * 1000 * 61 * (512 + 64)
    windows = decode_step(preset("gpt-oss-20b"), 1, 1e12, context=4096)
    assert windows.cache_bytes == 2 * 2 * 8 * 64 * (12 * 4096 + 12 * 128)
    assert decode_step(preset("gpt-oss-20b"), 1, 1e12).cache_bytes == 0
    with pytest.raises(MoestroError, match="batch"):
        decode_step(preset("gpt-oss-20b"), 0, 1e12)


def test_prefill_is_two_flops_a_weight_and_token() -> None:
    model = preset("zaya1-8b")
    assert prefill_floor(model, 10_000, 1e15) == pytest.approx(2 * 0.7536e9 * 10_000 / 1e15, rel=0.01)


def test_a_queue_at_load_0_91_explains_a_first_token_after_1443_ms() -> None:
    assert queue_time(4, 0.2285) == pytest.approx(1.443, rel=0.05)
    assert queue_time(4, 0.2285) / 0.2285 > 6


@pytest.mark.parametrize("load", [0.1, 0.5, 0.8])
def test_queue_against_simulation(load: float) -> None:
    assert simulate_queue(load, 1.0, 100_000, seed=2) == pytest.approx(queue_time(load, 1.0), rel=0.03)


def test_queues_blow_up_as_the_load_nears_one() -> None:
    times = [queue_time(load, 1.0) for load in (0.0, 0.5, 0.9, 0.99, 0.999)]
    assert times[0] == 1.0
    assert times == sorted(times)
    assert times[-1] > 500
    assert queue_time(1.0, 1.0) == math.inf
