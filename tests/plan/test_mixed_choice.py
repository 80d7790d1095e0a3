"""Attention and experts on two kinds of devices, against the ways that do not tell them apart."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moestro.config import ModelConfig, MoEConfig
from moestro.config.plan import Workload
from moestro.errors import MoestroError
from moestro.plan.mixed import Sides, simulate
from moestro.plan.mixed_choice import Choice, Kind, _pipeline, choose
from moestro.predict import cache
from moestro.predict.target import target_of

MODEL = ModelConfig(
    vocab_size=512, hidden_size=512, num_layers=4, num_heads=8, max_seq_len=4096,
    moe=MoEConfig(num_experts=12, top_k=2, expert_hidden_size=1024),
)  # fmt: skip
WORKLOAD = Workload(model=MODEL, seq_len=4096, global_batch_size=48, precision="fp16")


@pytest.fixture(scope="module", autouse=True)
def no_samples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Devices by their data sheets, at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.FOLDER, str(tmp_path_factory.mktemp("cache")))
        patch.setattr(cache, "_known", {})
        patch.setattr(cache, "_as_read", {})
        patch.setattr(cache, "_shipped", lambda device_id: ())
        yield


@pytest.fixture(scope="module")
def found() -> Choice:
    return choose(WORKLOAD, target_of("a40-v100-mixed"))


def test_every_split_is_there(found: Choice) -> None:
    """Either way round, one number divides the other, and experts share out."""
    splits = {(one.attention_on, one.mixed.attention_devices, one.mixed.expert_devices) for one in found.apart}
    allowed = {(m, n) for m in range(1, 7) for n in range(1, 7) if (m % n == 0 or n % m == 0) and 12 % n == 0}
    assert splits == {(kind.name, m, n) for kind in found.kinds for m, n in allowed}
    seconds = [one.step_s for one in found.apart]
    assert found.apart[0].step_s == min(seconds)


def test_time_by_hand(found: Choice) -> None:
    """Of the best split: rounds of micro-batches, and embedding and head of all sequences on the attention devices."""
    best = found.apart[0]
    kind = next(kind for kind in found.kinds if kind.name == best.attention_on)
    rounds = 48 / best.mixed.attention_devices / best.micro_batches
    once = simulate(best.mixed, 4, best.micro_batches, best.given, backward=True)
    ends = 48 / best.mixed.attention_devices * 3 * kind.sides.ends_s
    assert rounds == int(rounds)
    assert best.step_s == pytest.approx(rounds * once.total_s + ends)
    assert (best.attention, best.experts) == (once.attention, once.experts)


def test_rivals(found: Choice) -> None:
    fast, slow = found.kinds
    assert found.ideal_s <= found.uniform_s
    most = max(fast.sides.attention_s, slow.sides.attention_s) + max(fast.sides.experts_s, slow.sides.experts_s)
    ends, sent = max(fast.sides.ends_s, slow.sides.ends_s), max(fast.sent_s, slow.sent_s) / 2  # half leaves the node
    assert found.uniform_s == pytest.approx(4 * (4 * (3 * most + 4 * sent) + 3 * ends))
    assert sum(found.layers) == 4
    assert found.ideal_s >= max(0.0, min(found.alone_s) / 2 - 1e-9)
    assert found.pipeline_s > 0


def test_scores_are_written_where_flash_attention_does_not_run(found: Choice) -> None:
    names = {kind.name: kind for kind in found.kinds}
    fp32 = choose(WORKLOAD.model_copy(update={"attention_kernel": "math"}), target_of("a40-v100-mixed"))
    written = {kind.name: kind for kind in fp32.kinds}
    assert names["v100-sxm-16gb"].sides.attention_s >= written["v100-sxm-16gb"].sides.attention_s
    assert names["a40"].sides.attention_s < written["a40"].sides.attention_s


def test_experts_that_do_not_fit_are_given_over() -> None:
    big = MODEL.model_copy(update={"moe": MoEConfig(num_experts=12, top_k=2, expert_hidden_size=40_960)})
    found = choose(WORKLOAD.model_copy(update={"model": big}), target_of("a40-v100-mixed"))
    assert all(sum(one.given) > 0 for one in found.apart if one.mixed.expert_devices == 1)


def test_mistakes() -> None:
    target = target_of("a40-v100-mixed")
    with pytest.raises(MoestroError, match="two pools of unlike devices, not h100-sxm"):
        choose(WORKLOAD, target_of("h100-8"))
    with pytest.raises(MoestroError, match="no experts"):
        choose(WORKLOAD.model_copy(update={"model": MODEL.model_copy(update={"moe": None})}), target)
    huge = MODEL.model_copy(update={"moe": MoEConfig(num_experts=7, top_k=2, expert_hidden_size=10_000_000)})
    with pytest.raises(MoestroError, match="no split of the devices fits"):
        choose(WORKLOAD.model_copy(update={"model": huge}), target)
    first = target.parts[0]
    nic = first.place.device.nic.model_copy(update={"per_device_gbit": type(first.place.device.nic.per_device_gbit)()})
    blank = replace(first, place=replace(first.place, device=first.place.device.model_copy(update={"nic": nic})))
    with pytest.raises(MoestroError, match="rate of a40's NICs is not known"):
        choose(WORKLOAD, replace(target, parts=(blank, target.parts[1])))


def test_a_pipeline_sends_as_much_backward_as_forward() -> None:
    """Two devices of either kind, in nodes of one: half of the tokens leave in each of a layer's four exchanges."""
    kinds = [Kind(name, 2, 1, Sides(0.0, 0.0, 0.0), 1.0, None) for name in ("one", "other")]
    work = WORKLOAD.model_copy(update={"model": MODEL.model_copy(update={"num_layers": 4}), "global_batch_size": 20})
    total_s, layers = _pipeline(work, kinds)
    assert layers == (2, 2)
    assert total_s == pytest.approx((10 + 1) * 2 * 4 * 0.5)
