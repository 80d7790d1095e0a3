"""Serving on a target: loads that settle, the most that can be served, replicas, widths."""

import math

import pytest

from moestro.config import ModelConfig, MoEConfig
from moestro.config.model import MLAConfig
from moestro.config.plan import Plan, Workload
from moestro.errors import MoestroError
from moestro.hardware.catalog import load_device
from moestro.hardware.curves.network import CollectiveModel
from moestro.predict.curves import DeviceCurves
from moestro.predict.service import Demand, decode_floor, parse_demand, prefill, serve, widths
from moestro.predict.serving import decode_step, prefill_floor, queue_time
from moestro.predict.step import Place
from moestro.predict.target import Target

MODEL = ModelConfig(
    vocab_size=32_000,
    hidden_size=2048,
    num_layers=16,
    num_heads=16,
    num_kv_heads=4,
    max_seq_len=4096,
    moe=MoEConfig(num_experts=32, top_k=4, expert_hidden_size=1024),
)
WORK = Workload(model=MODEL, seq_len=4096, global_batch_size=64)
DEMAND = Demand(4.0, 1024, 256)


def h100(**changes: int) -> Target:
    """By the data sheet, so that nothing is read or fitted."""
    device = load_device("h100-sxm")
    curves = DeviceCurves(device, (), CollectiveModel((), device))
    return Target(Place(device, 8), curves, None, "test", **changes)


@pytest.fixture(scope="module")
def target() -> Target:
    return h100()


class TestDemand:
    def test_reads(self) -> None:
        assert parse_demand("4:4096:512") == (Demand(4.0, 4096, 512), None)
        assert parse_demand("0.5:1:1:8") == (Demand(0.5, 1, 1), 8)

    @pytest.mark.parametrize("text", ["", "4", "4:5", "4:5:6:7:8", "x:1:1", "4:1.5:1", "4:0:1", "0:1:1", "inf:1:1"])
    def test_mistakes(self, text: str) -> None:
        with pytest.raises(MoestroError, match="serving"):
            parse_demand(text)


class TestLoad:
    def test_keeps_up_by_littles_law(self, target: Target) -> None:
        found = serve(WORK, target, 1, Demand(20.0, 1024, 256))
        load = found.load
        assert load is not None
        assert load.used == pytest.approx(20 * found.prefill_s)
        assert load.first_token_s == queue_time(20.0, found.prefill_s)
        assert load.batch > 1
        step, alone_s = decode_floor(WORK, target, found.demand, 1, load.batch)
        assert load.step == step
        assert load.token_s == pytest.approx(alone_s / (1 - load.used))  # prompts go before
        assert load.used > 0.1
        assert 20 * 256 * load.token_s <= load.batch  # as many leave as come
        smaller = decode_floor(WORK, target, found.demand, 1, load.batch - 1)[1] / (1 - load.used)
        assert 20 * 256 * smaller > load.batch - 1  # and one fewer would not do
        assert found.request_s == pytest.approx(load.first_token_s + 255 * load.token_s)

    def test_a_quiet_server_decodes_one_sequence(self, target: Target) -> None:
        load = serve(WORK, target, 1, Demand(1e-6, 1024, 256)).load
        assert load is not None
        step = decode_step(MODEL, 1, 3.35e12, 1024 + 128)
        assert (load.batch, load.token_s) == (1, pytest.approx(step.floor_s, rel=1e-4))

    def test_the_most_is_the_edge(self, target: Target) -> None:
        most = serve(WORK, target, 2, DEMAND, tp=1).most_requests_per_s
        below, above = (serve(WORK, target, 2, Demand(most * f, 1024, 256), tp=1) for f in (0.999, 1.001))
        assert below.load is not None
        assert below.load.batch <= below.most_batch
        assert above.load is None
        assert above.request_s is None
        assert above.usd_per_million is None
        assert any("more than it can serve" in note for note in above.notes)

    def test_dollars_are_of_all_devices(self, target: Target) -> None:
        found = serve(WORK, target, 4, DEMAND, tp=2, usd_per_hour=3.0)
        assert found.usd_per_million == pytest.approx(4 * 3.0 / 3600 / (4 * 256) * 1e6)
        assert found.least_usd_per_million == pytest.approx(4 * 3.0 / 3600 / (found.most_requests_per_s * 256) * 1e6)


class TestReplicas:
    def test_the_fewest_devices_that_hold_it(self, target: Target) -> None:
        assert serve(WORK, target, 8, DEMAND).tp == 1
        moe = MODEL.moe
        assert moe is not None
        large = MODEL.model_copy(update={"moe": moe.model_copy(update={"num_experts": 512})})  # 105 GB
        found = serve(WORK.model_copy(update={"model": large}), target, 8, DEMAND)
        assert (found.tp, found.replicas) == (2, 4)
        assert serve(WORK.model_copy(update={"model": large, "precision": "fp8"}), target, 8, DEMAND).tp == 1

    def test_too_large_for_all(self, target: Target) -> None:
        moe = MODEL.moe
        assert moe is not None
        huge = MODEL.model_copy(update={"moe": moe.model_copy(update={"num_experts": 4096})})
        found = serve(WORK.model_copy(update={"model": huge}), target, 2, DEMAND)
        assert (found.tp, found.most_batch, found.load, found.most_requests_per_s) == (2, 0, None, 0.0)
        assert "does not fit" in found.notes[0]

    def test_more_devices_read_faster_and_send(self, target: Target) -> None:
        one, two = (decode_floor(WORK, target, DEMAND, tp, 8) for tp in (1, 2))
        assert two[0].floor_s == pytest.approx(one[0].floor_s / 2)
        assert one[1] == one[0].floor_s
        assert two[1] > two[0].floor_s

    def test_caches_that_cannot_be_shared_out_are_kept_by_all(self, target: Target) -> None:
        four, eight = (decode_floor(WORK, target, DEMAND, tp, 1)[0].cache_bytes for tp in (4, 8))
        assert eight == 2 * four  # four heads of keys and values
        latent = MODEL.model_copy(
            update={"mla": MLAConfig(kv_rank=512, nope_head_dim=128, rope_head_dim=64, v_head_dim=128)}
        )
        work = WORK.model_copy(update={"model": latent})
        one, two = (decode_floor(work, target, DEMAND, tp, 1)[0].cache_bytes for tp in (1, 2))
        assert two == 2 * one

    def test_mistakes(self, target: Target) -> None:
        with pytest.raises(MoestroError, match="share out"):
            serve(WORK, target, 8, DEMAND, tp=3)
        with pytest.raises(MoestroError, match="accelerators"):
            serve(WORK, h100(cores=4, threads=1), 1, DEMAND)


class TestPrefill:
    def test_longer_than_its_floor_and_in_proportion(self, target: Target) -> None:
        short, long = (prefill(WORK, target, prompt, 1) for prompt in (4096, 16_384))
        floor = prefill_floor(MODEL, 4096, 989e12)
        assert floor < short < 20 * floor
        assert 4.0 < long / short < 8.0  # attention grows with the square

    def test_prompts_that_tensor_ranks_do_not_divide(self, target: Target) -> None:
        assert prefill(WORK, target, 1023, 2) == prefill(WORK, target, 1024, 2)

    def test_the_head_is_left_out(self, target: Target) -> None:
        wordy = WORK.model_copy(update={"model": MODEL.model_copy(update={"vocab_size": 1_000_000})})
        assert prefill(wordy, target, 1024, 1) == pytest.approx(prefill(WORK, target, 1024, 1), rel=0.01)


class TestWidths:
    def test_three_widths_of_the_same_parameters(self, target: Target) -> None:
        service = serve(WORK, target, 8, DEMAND)
        found = widths(WORK, Plan(dp=8, ep=8, zero=1), target, service)
        assert [(w.experts, w.top_k, w.expert_hidden_size) for w in found] == [
            (16, 2, 2048),
            (32, 4, 1024),
            (64, 8, 512),
        ]
        assert found[1].prefill_s == service.prefill_s
        assert found[0].token_s == pytest.approx(found[2].token_s, rel=0.01)  # routers apart, the same bytes
        assert all(w.training_s is not None and math.isfinite(w.training_s) for w in found)
        assert (found[0].training_s or 0) < (found[2].training_s or 0)

    def test_numbers_stay_whole_and_layouts_fit(self, target: Target) -> None:
        odd = MoEConfig(num_experts=5, top_k=3, expert_hidden_size=1023)
        work = WORK.model_copy(update={"model": MODEL.model_copy(update={"moe": odd})})
        service = serve(work, target, 8, DEMAND)
        assert [w.experts for w in widths(work, Plan(dp=8), target, service)] == [5]
        found = widths(WORK, Plan(dp=32, ep=32), target, serve(WORK, target, 32, DEMAND))
        assert [w.training_s is None for w in found] == [True, False, False]

    def test_none_without_experts(self, target: Target) -> None:
        dense = MODEL.model_copy(update={"moe": None, "intermediate_size": 4096})
        work = WORK.model_copy(update={"model": dense})
        assert widths(work, Plan(dp=8), target, serve(work, target, 8, DEMAND)) == []
