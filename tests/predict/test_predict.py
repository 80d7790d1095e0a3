"""A prediction: its parts add up, it follows the work and the target, and kept curves give the same times."""

import hashlib
import json
import os
import pickle
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.config import ModelConfig, MoEConfig
from moestro.config.plan import Plan, RoutingConfig, Workload
from moestro.errors import MoestroError
from moestro.graph.count import count_step
from moestro.graph.words import Kernel
from moestro.hardware.catalog import load_device
from moestro.hardware.curves.network import CollectiveModel
from moestro.hardware.profile import Machine, MachineProfile, Sample
from moestro.predict import cache
from moestro.predict.constants import Constants
from moestro.predict.curves import DeviceCurves
from moestro.predict.perfetto import pipeline_trace
from moestro.predict.predict import HOST, predict_step, price_step
from moestro.predict.processes import CALLS, CALLS_OF_GROUP
from moestro.predict.step import Place
from moestro.predict.target import AS_MEASURED, Target, target_of_profile

MODEL = ModelConfig(
    vocab_size=4096,
    hidden_size=512,
    num_layers=8,
    num_heads=8,
    max_seq_len=1024,
    moe=MoEConfig(num_experts=16, top_k=2, expert_hidden_size=256),
)
WORK = Workload(model=MODEL, seq_len=1024, global_batch_size=64)


def h100(samples: tuple[Sample, ...] = (), **changes: object) -> Target:
    """Without any sample, so that nothing is read or fitted: shares of the data sheet."""
    device = load_device("h100-sxm")
    curves = DeviceCurves(device, samples, CollectiveModel((), device))
    return Target(**{"place": Place(device, 8), "curves": curves, "devices": None, "profile": "test", **changes})  # type: ignore[arg-type]


class TestStep:
    @settings(max_examples=30, deadline=None)
    @given(
        pp=st.sampled_from([1, 2, 4]),
        tp=st.sampled_from([1, 2]),
        dp=st.sampled_from([1, 2, 8]),
        ep=st.sampled_from([1, 2]),
        zero=st.sampled_from([0, 1]),
        recompute=st.sampled_from(["none", "block"]),
        exact=st.booleans(),
    )
    def test_parts_add_up(self, pp: int, tp: int, dp: int, ep: int, zero: int, recompute: str, exact: bool) -> None:
        if dp * tp % ep:
            return
        plan = Plan(pp=pp, tp=tp, dp=dp, ep=ep, zero=zero, recompute=recompute)  # type: ignore[arg-type]
        found = predict_step(WORK, plan, h100(), exact=exact)
        time = found.time
        assert found.step_s.value == pytest.approx(time.total)
        assert sum(time.by_part.values()) == pytest.approx(time.compute)
        assert min(time.compute, time.host, time.communication, time.bubble, time.optimizer) >= 0
        assert (time.bubble > 0) == (pp > 1)
        assert found.tokens_per_s == pytest.approx(WORK.tokens / time.total)
        assert found.tokens_per_s_per_device * plan.world_size == pytest.approx(found.tokens_per_s)
        assert len(found.memory_by_rank) == pp
        assert max(found.memory_by_rank) == pytest.approx(found.memory.total)
        assert found.step_s.low < found.step_s.value < found.step_s.high

    def test_mfu_is_model_flops_over_peak(self) -> None:
        plan = Plan(dp=8)
        found = predict_step(WORK, plan, h100())
        flops = count_step(WORK, plan).model_flops
        assert found.mfu == pytest.approx(flops / (found.step_s.value * 8 * 989.4e12), rel=1e-3)

    def test_low_precision_is_held_against_the_peak_of_bf16(self) -> None:
        plan = Plan(dp=8)
        fp8 = WORK.model_copy(update={"precision": "fp8"})
        found = predict_step(fp8, plan, h100())
        flops = count_step(fp8, plan).model_flops
        assert found.mfu == pytest.approx(flops / (found.step_s.value * 8 * 989.4e12), rel=1e-3)

    def test_twice_the_batch_takes_twice_the_computation(self) -> None:
        twice = WORK.model_copy(update={"global_batch_size": 128})
        one, two = (predict_step(work, Plan(dp=8), h100()).time for work in (WORK, twice))
        assert two.compute == pytest.approx(2 * one.compute)
        assert two.optimizer == pytest.approx(one.optimizer)

    def test_constants_given_replace_the_targets(self) -> None:
        slow = Constants(gemm=10, grouped=10, attention=10, memory=10, launch_s=0)
        plain = Constants(gemm=1, grouped=1, attention=1, memory=1, launch_s=0)
        times = [predict_step(WORK, Plan(), h100(), constants).time.compute for constants in (plain, slow)]
        assert times[1] == pytest.approx(10 * times[0])

    def test_too_few_devices_are_an_error(self) -> None:
        with pytest.raises(MoestroError, match="needs 8 devices, and there are 4"):
            predict_step(WORK, Plan(dp=8), h100(devices=4))

    def test_says_what_it_rests_on(self) -> None:
        notes = predict_step(WORK, Plan(dp=8, ep=8), h100()).notes
        assert any("no products measured on h100-sxm in bf16" in note for note in notes)
        assert any("catalog's bandwidth" in note and "ep" in note for note in notes)
        assert any("balanced" in note for note in notes)
        uneven = WORK.model_copy(update={"routing": RoutingConfig(kind="measured", max_over_mean=2.0)})
        found = predict_step(uneven, Plan(dp=8, ep=8), h100())
        assert not any("balanced" in note for note in found.notes)
        assert found.time.by_part["experts"] > predict_step(WORK, Plan(dp=8, ep=8), h100()).time.by_part["experts"]

    def test_says_when_it_does_not_fit(self) -> None:
        def notes(limit: float) -> list[str]:
            return [n for n in predict_step(WORK, Plan(), h100(memory_bytes=limit)).notes if "does not fit" in n]

        total = predict_step(WORK, Plan(), h100()).memory.total
        assert notes(total * 0.99)
        assert not notes(total * 1.01)


def sample(op: str, seconds: float, flops: float | None = None, **case: int | float | str) -> Sample:
    return Sample(op=op, case=case, median_s=seconds, flops=flops)


def profile(threads: int = 2, cores: int = 2, **changes: object) -> MachineProfile:
    """A CPU of 1e11 FLOP/s and 1e10 bytes/s, whose host takes 10 µs for a call."""
    samples = []
    for n in (64, 128, 256, 512, 1024, 2048):
        samples.append(sample("gemm", 2.0 * n**3 / 1e11 + 2e-6, 2.0 * n**3, m=n, n=n, k=n, dtype="fp32"))
    for size in (1024 * 4**k for k in range(8)):
        samples.append(sample("copy", 2 * size / 1e10 + 1e-6, bytes=size, dtype="fp32"))
        samples.append(sample("all_reduce", size / 1e9 + 1e-4, bytes=size, ranks=2, nodes=1, dtype="fp32"))
    heads: dict[str, int | float | str] = {"heads": 4, "kv_heads": 4, "head_dim": 64, "dtype": "fp32", "causal": 1}
    for seq in (256, 1024):
        for phase, factor in (("fwd", 1.0), ("bwd", 2.5)):
            seconds = seq**2 * 1024 * factor / 1e11 + 1e-5
            samples.append(sample("attention", seconds, batch=1, seq=seq, phase=phase, **heads))
    samples += [sample(f"host_t{number}", 5e-6, what="mean") for number in (1, 4)]
    machine = Machine(
        device_name="a CPU", device_type="cpu", cores=cores, threads=threads, memory_bytes=16e9, load_average=0.1
    )
    whole = {
        "name": "here",
        "created_at": "2026-01-02T03:04:05+00:00",
        "mode": "quick",
        "machine": machine,
        "samples": tuple(samples),
    }
    return MachineProfile(**{**whole, **changes})  # type: ignore[arg-type]


SMALL = Workload(model=MODEL.model_copy(update={"num_layers": 2}), seq_len=256, global_batch_size=8, precision="fp32")


class TestMeasuredMachine:
    def test_the_hosts_time_comes_on_top(self) -> None:
        target = target_of_profile(profile())
        found = predict_step(SMALL, Plan(micro_batch_size=8), target).time
        without = predict_step(SMALL, Plan(micro_batch_size=8), target, AS_MEASURED).time
        graph = count_step(SMALL, Plan(micro_batch_size=8))
        passes = [node for stage in graph.stages for node in (*stage.forward, *stage.backward, *stage.weight)]
        kernels = [node for node in passes if isinstance(node, Kernel)]
        calls = sum(CALLS * node.launches * node.times for node in kernels)
        calls += sum(CALLS_OF_GROUP * 16 * node.times for node in kernels if node.op == "grouped_gemm")
        assert found.host == pytest.approx(10e-6 * calls)
        assert without.host == 0
        assert found.compute == pytest.approx(without.compute)
        assert HOST not in found.by_part
        assert sum(found.by_part.values()) == pytest.approx(found.compute)

    def test_memory_bound_work_takes_what_norms_and_the_optimizer_took(self) -> None:
        """Here three times, and the optimizer fifteen times, what a copy of as many bytes takes."""
        extra = [
            Sample(op=op, case={"tokens": tokens, "dtype": "fp32"}, median_s=times * size / 1e10, bytes_moved=size)
            for op, times in (("rmsnorm", 3.0), ("swiglu", 3.0), ("adamw", 15.0))
            for tokens, size in ((256, 2.0**20), (2048, 2.0**23))
        ]
        slow = target_of_profile(profile(samples=(*profile().samples, *extra)))
        assert slow.curves.copy is not None
        assert slow.curves.copy.seconds(2.0**22) == pytest.approx(3 * 2.0**22 / 1e10, rel=0.1)
        assert slow.curves.copy.seconds(2048) == pytest.approx(2048 / 1e10 + 1e-6, rel=0.1)
        assert slow.constants_for(SMALL, 1).optimizer == pytest.approx(5, rel=0.1)
        plain = predict_step(SMALL, Plan(micro_batch_size=8), target_of_profile(profile())).time
        found = predict_step(SMALL, Plan(micro_batch_size=8), slow).time
        assert found.optimizer > 3 * plain.optimizer
        assert found.host == pytest.approx(plain.host)
        assert plain.compute < found.compute < 3 * plain.compute

    def test_products_take_what_was_measured(self) -> None:
        found = predict_step(SMALL, Plan(micro_batch_size=8), target_of_profile(profile())).time
        head = 3 * 2.0 * 8 * 256 * 512 * 4096 / 1e11
        assert found.by_part["head"] == pytest.approx(head, rel=0.3)

    def test_processes_share_the_cores(self) -> None:
        def seconds(ranks: int, threads: int) -> float:
            target = target_of_profile(profile(threads=threads))
            constants = target.constants_for(SMALL, ranks)
            return constants.gemm

        assert seconds(1, 2) == 1
        assert seconds(2, 2) == 2
        assert seconds(4, 2) == 4
        assert seconds(2, 1) == 1
        assert seconds(1, 1) == 1
        assert target_of_profile(profile()).constants_for(SMALL, 4).launch_s == pytest.approx(2 * 10e-6 * CALLS)

    def test_memory_is_shared_too(self) -> None:
        notes = predict_step(SMALL, Plan(dp=2), target_of_profile(profile())).notes
        assert not any("does not fit" in note for note in notes)
        machine = profile().machine.model_copy(update={"memory_bytes": 0.5e9})
        notes = predict_step(SMALL, Plan(dp=2), target_of_profile(profile(machine=machine))).notes
        assert any("has 0.2 GB" in note for note in notes)

    def test_a_suspect_or_partial_profile_says_so(self) -> None:
        machine = profile().machine.model_copy(update={"load_average": 3.0})
        samples = tuple(s for s in profile().samples if not s.op.startswith("host"))
        notes = target_of_profile(profile(machine=machine, samples=samples)).notes
        assert any("no host section" in note for note in notes)
        assert any("load 3.0" in note for note in notes)
        assert target_of_profile(profile()).notes == ()

    def test_a_precision_nobody_measured_is_an_error(self) -> None:
        with pytest.raises(MoestroError, match="does not compute in bf16"):
            predict_step(WORK, Plan(), target_of_profile(profile()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and few samples to fill it from."""
    monkeypatch.setenv(cache.FOLDER, str(tmp_path))
    monkeypatch.setattr(cache, "_known", {})
    monkeypatch.setattr(cache, "_as_read", {})
    monkeypatch.setattr(cache, "_shipped", lambda device_id: profile().samples[:6] if device_id else ())
    return tmp_path


def flipped(content: bytes) -> bytes:
    """With one bit changed that unpickling does not notice: a wrong number in a curve."""
    for place in range(len(content) - 2, cache.DIGEST_BYTES, -1):
        changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        with suppress(Exception):
            if pickle.loads(changed[cache.DIGEST_BYTES :])._products:
                return changed
    raise AssertionError


class TestCache:
    def test_kept_curves_price_the_same_and_read_no_sample(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        device = load_device("h100-sxm")
        first = cache.known_curves(device)
        expected = first.product("fp32").seconds(100, 200, 300), first.network.seconds("all_reduce", 1e6, 8).seconds
        cache.keep_if_grown(first)
        assert len(list(folder.iterdir())) == 1

        def unread(device_id: str | None) -> tuple[Sample, ...]:
            raise AssertionError("read a sample")

        monkeypatch.setattr(cache, "_shipped", unread)
        monkeypatch.setattr(cache, "_known", {})
        again = cache.known_curves(device)
        assert again is not first
        assert again.product("fp32").seconds(100, 200, 300) == expected[0]
        assert again.network.seconds("all_reduce", 1e6, 8).seconds == expected[1]
        assert cache.known_curves(device) is again

    def test_written_only_when_something_was_fitted(self, folder: Path) -> None:
        curves = cache.known_curves(load_device("h100-sxm"))
        cache.keep_if_grown(curves)
        assert not list(folder.iterdir())
        curves.product("fp32")
        cache.keep_if_grown(curves)
        assert list(folder.iterdir())

    @pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "another thing"])
    def test_a_damaged_file_is_made_again(self, folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
        device = load_device("h100-sxm")
        curves = cache.known_curves(device)
        curves.product("fp32")
        assert cache.keep_curves(curves)
        path = next(folder.iterdir())
        content = path.read_bytes()
        other = pickle.dumps({"not": "curves"})
        path.write_bytes(
            {
                "cut": content[:-10],
                "flipped": flipped(content),
                "empty": b"",
                "another thing": hashlib.sha256(other).digest() + other,
            }[damage]
        )
        monkeypatch.setattr(cache, "_known", {})
        again = cache.known_curves(device)
        assert isinstance(again, DeviceCurves)
        assert not again._products

    def test_a_file_of_other_code_is_not_used_and_goes(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        device = load_device("h100-sxm")
        cache.known_curves(device).product("fp32")
        cache.keep_curves(cache.known_curves(device))
        old = next(folder.iterdir())
        monkeypatch.setattr(cache, "_origin", lambda: "changed")
        fresh = cache.known_curves(device)
        assert not fresh._products
        cache.keep_curves(fresh)
        assert not old.exists()
        assert len(list(folder.iterdir())) == 1

    def test_a_device_with_other_figures_has_a_file_of_its_own(self, folder: Path) -> None:
        device = load_device("h100-sxm")
        assert cache._path(device) != cache._path(
            device.model_copy(update={"compute_units": load_device("b200").compute_units})
        )

    def test_a_folder_that_cannot_be_written_is_no_error(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        blocked = folder / "file"
        blocked.write_text("")
        monkeypatch.setenv(cache.FOLDER, str(blocked))
        assert not cache.keep_curves(cache.known_curves(load_device("h100-sxm")))

    def test_another_users_file_is_not_read(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        device = load_device("h100-sxm")
        cache.known_curves(device).product("fp32")
        cache.keep_curves(cache.known_curves(device))
        monkeypatch.setattr(cache, "_known", {})
        monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        assert not cache.known_curves(device)._products

    def test_the_users_cache_folder(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv(cache.FOLDER, raising=False)
        monkeypatch.setattr(cache.sys, "platform", "linux")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache.cache_folder() == tmp_path / "moestro"


class TestTrace:
    def test_every_pass_is_there_and_none_overlap_on_a_rank(self) -> None:
        plan = Plan(pp=4, dp=2)
        costs = price_step(count_step(WORK, plan), WORK, plan, h100())
        trace = json.loads(json.dumps(pipeline_trace(costs, plan, Constants())))
        passes = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["args"]]
        assert len([e for e in passes if e["name"] == "forward"]) == 4 * plan.micro_batches(WORK)
        for rank in range(4):
            own = sorted((e["ts"], e["ts"] + e["dur"]) for e in passes if e["tid"] == rank)
            assert all(later[0] >= earlier[1] - 1e-3 for earlier, later in pairwise(own))
