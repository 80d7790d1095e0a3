"""A real small step, taken apart and put together again. Times are noisy here; what is counted is exact."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cli.helpers import moestro

from moestro.config import load_config
from moestro.errors import MoestroError
from moestro.measure import step as step_module
from moestro.measure.primitives import Call
from moestro.measure.step import BuiltStep, profiled, random_batches, take_apart
from moestro.measure.step_calls import CallRecorder
from moestro.measure.step_curves import compose, fit_steps
from moestro.measure.step_marks import part_of
from moestro.measure.step_projection import Projection, as_dict, project, write_projection

CPU = torch.device("cpu")
SMALL = [
    *("model.vocab_size=128", "model.hidden_size=32", "model.num_heads=2", "model.moe.num_experts=4"),
    *("model.moe.expert_hidden_size=48", "data.seq_len=32", "train.global_batch_size=4", "train.micro_batch_size=2"),
]


@pytest.fixture(scope="module")
def step() -> BuiltStep:
    return BuiltStep(load_config("sotu-tiny", SMALL).config, CPU)


@pytest.fixture(scope="module")
def recorder(step: BuiltStep) -> CallRecorder:
    return step.record()


@pytest.fixture(scope="module")
def calls(step: BuiltStep, recorder: CallRecorder) -> list[Call]:
    return take_apart(step, recorder)


@pytest.fixture(scope="module", autouse=True)
def hasty() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moestro.measure.step_projection.CASE_S", 0.0005)
        patch.setattr("moestro.measure.step_projection.ALONE_S", 3.0)
        patch.setattr("moestro.measure.step_replay.COPY_BYTES", (2**12, 2**16))
        patch.setattr("moestro.measure.step_replay.measure_gemm_flops", lambda device, dtype: 5e10)
        patch.setattr("moestro.measure.step.WARM_UP", 1)
        patch.setattr("moestro.measure.timing.FURTHER_ROUNDS", 0)
        yield


@pytest.fixture(scope="module")
def projection(step: BuiltStep) -> Projection:
    return project(step, "small", repeats=3)


def flops(calls: list[Call], part: str, phase: str) -> float:
    return sum(call.flops for call in calls if (call.part, call.phase) == (part, phase))


def test_the_calls_flops_are_those_that_the_config_counts(step: BuiltStep, calls: list[Call]):
    counted = step.counts.train_flops_per_token * step.tokens
    assert sum(call.flops for call in calls) == pytest.approx(counted, rel=0.01)
    for part in ("attention", "experts"):
        forward = step.counts.part(part).train_flops_per_token * step.tokens / 3
        assert flops(calls, part, "forward") == pytest.approx(forward, rel=1e-9)
        assert flops(calls, part, "backward") == pytest.approx(2 * forward, rel=1e-9)
    # The loss makes its gradients in the forward pass.
    head = step.counts.part("head").train_flops_per_token * step.tokens
    assert flops(calls, "head and loss", "forward") == pytest.approx(head, rel=1e-9)


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("zaya1-tiny", ("data.seq_len=32", "train.global_batch_size=2")),
        ("sotu-tiny", ("train.recompute=block",)),
        ("sotu-tiny", ("train.dtype=bf16", "optim.name=muon", "model.moe.experts=grouped")),
    ],
)
def test_flops_of_other_steps(preset: str, overrides: tuple[str, ...]):
    small = SMALL if preset == "sotu-tiny" else ()
    step = BuiltStep(load_config(preset, [*small, *overrides]).config, CPU)
    calls = take_apart(step, step.record())
    found = sum(call.flops for call in calls if call.phase != "optimizer")
    counted = step.counts.train_flops_per_token * step.tokens
    if "train.recompute=block" in overrides:  # blocks run forward twice
        blocks = counted - step.counts.part("head").train_flops_per_token * step.tokens
        counted += blocks / 3
    assert found == pytest.approx(counted, rel=0.01)
    experts = [flops(calls, "experts", phase) for phase in ("forward", "backward")]
    assert experts[1] == pytest.approx((3 if "train.recompute=block" in overrides else 2) * experts[0], rel=1e-9)
    assert any(c.kind == "gemm" and c.phase == "optimizer" for c in calls) == ("optim.name=muon" in overrides)


def test_nearly_every_call_is_known_by_its_work(calls: list[Call], recorder: CallRecorder):
    unknown = {call.op for call in calls if call.key not in recorder.work}
    assert sum(call.key in recorder.work for call in calls) > 0.95 * len(calls)
    assert not unknown & {"aten::mm", "aten::index", "aten::mul", "aten::index_add_"}


def test_two_steps_make_the_same_calls_and_leave_everything_as_it_was(step: BuiltStep):
    before = [p.detach().clone() for model in step.engine.models for p in model.parameters()]
    balance = [layer.router.bias.clone() for layer in step.engine.models[0].moe_layers()]
    first, second = profiled(step), profiled(step)
    assert first.ops == second.ops
    after = [p for model in step.engine.models for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(
        torch.equal(a, layer.router.bias) for a, layer in zip(balance, step.engine.models[0].moe_layers(), strict=True)
    )


def test_no_marker_is_left_behind(step: BuiltStep, calls: list[Call]):
    model = step.engine.models[0]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in (step.engine.stages[0], *model.modules()))


def test_the_sums_close(projection: Projection):
    accounted = projection.times.accounted
    assert accounted.calls_s + accounted.gaps_s + accounted.profiler_s == pytest.approx(accounted.wall_s)
    assert sum(row.in_step_s for row in projection.rows) == pytest.approx(projection.in_calls_s + projection.gaps_s)
    gaps = [row.gap_s for row in projection.rows]
    assert gaps == sorted(gaps, reverse=True)
    # Other work on the machine bends a step of a few milliseconds; on an idle one this is within 5 %.
    assert 0.3 < projection.sum_over_step < 3
    assert 0.2 < projection.composed_s / projection.times.median_s < 5
    assert 0.5 * projection.in_calls_s < projection.covered_s <= projection.in_calls_s
    assert sum(projection.floor_s) > 0
    assert 0.3 < projection.backward_over_forward < 10


def test_what_is_written_is_whole_and_never_written_over(projection: Projection, tmp_path: Path):
    folder = tmp_path / "deep" / "step"
    write_projection(projection, folder)
    assert sorted(p.name for p in folder.iterdir()) == ["calls.csv", "primitives.csv", "step.json"]
    read = json.loads((folder / "step.json").read_text())
    assert read["sum_over_step"] == projection.sum_over_step
    assert read["flops_of_calls"] == sum(call.flops for call in projection.calls)
    rows = list(csv.DictReader((folder / "calls.csv").open(encoding="utf-8")))
    assert sum(int(row["calls"]) for row in rows) == len(projection.calls)
    assert sum(float(row["in_step_s"]) for row in rows) == pytest.approx(projection.in_calls_s)
    with pytest.raises(MoestroError, match="choose another --out"):
        write_projection(projection, folder)
    assert not [p for p in folder.parent.iterdir() if p != folder]
    assert json.dumps(as_dict(projection))


def test_curves_from_one_step_price_it(projection: Projection):
    timed = projection.times.accounted.calls
    gap_s = projection.gaps_s / len(timed)
    curves = fit_steps([(c, t.seconds) for c, t in zip(projection.calls, timed, strict=True)], gap_s)
    whole = projection.in_calls_s + projection.gaps_s
    assert 0.2 * whole < compose(projection.calls, curves) < 5 * whole


def test_a_profiles_curves_take_the_place_of_measuring(step: BuiltStep):
    class One:
        gap_s = 0.0

        def seconds(self, call: Call) -> float:
            return 1.0

    found = project(step, "small", repeats=1, curves=("mine", One()))
    assert found.alone_s == [1.0] * len(found.calls)
    assert found.covered_s == pytest.approx(found.in_calls_s)
    assert found.alone_from == "the curves of profile mine"


def test_random_batches_are_full_and_the_same_every_time():
    config = load_config("sotu-tiny", SMALL).config
    first, second = random_batches(config, 2, 2), random_batches(config, 2, 2)
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(first, second, strict=True))
    assert first[0].input_ids.shape == (2, 32)
    assert torch.equal(first[0].input_ids[:, 1:], first[0].labels[:, :-1])
    assert [b.sample_ids.tolist() for b in first] == [[0, 1], [2, 3]]
    assert int(first[1].labels.min()) >= 0


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("embed_tokens", "embedding"),
        ("layers.0.self_attn.q_norm", "attention"),
        ("layers.0.mlp", "dispatch, combine"),
        ("layers.0.mlp.router.norm", "router"),
        ("layers.0.mlp.experts", "experts"),
        ("layers.0.mlp.shared_experts.down_proj", "shared experts"),
        ("layers.1.mlp", "dense feed-forward"),
        ("layers.1.mlp.gate_proj", "dense feed-forward"),
        ("layers.0.mlp.latent_in", "latent projections"),
        ("layers.1.post_attention_layernorm", "norms"),
        ("layers.2.block.self_attn", "attention"),
        ("layers.2.depth_router", "depth routers"),
        ("mtp.3.projection", "multi-token prediction"),
        ("mtp.3.block.mlp", "dispatch, combine"),
        ("encoders.image.layers.0.norm", "encoders"),
        ("layers.0", "rest of the model"),
    ],
)
def test_parts_of_the_model(path: str, part: str):
    assert part_of(path, {"layers.0.mlp", "mtp.3.block.mlp"}.__contains__) == part


def test_bad_input_is_answered_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for arguments, said in (
        (["sotu-tinny"], "no preset 'sotu-tinny'"),
        (["sotu-tiny", "model.hiden_size=3"], "unknown key 'model.hiden_size'"),
        (["sotu-tiny", "--out", str(tmp_path)], "choose another --out"),
        (["sotu-tiny", "--profile", str(tmp_path / "none.json")], "no profile at"),
        (["sotu-tiny", "--device", "cuda:99"], "not usable here"),
        (["sotu-tiny", "parallel.pp=2"], "parallel"),
        (["zaya1-8b", "model.num_layers=400"], "measure a smaller preset"),
    ):
        found = moestro("measure", "step", *arguments)
        assert found.code == 2, arguments
        assert said in found.err, found.err
        assert len(found.err.splitlines()) <= 2
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = moestro("measure", "step", "sotu-tiny", *SMALL)
    assert (found.code, "in one process" in found.err) == (2, True)


def test_a_step_that_is_never_the_same_is_told(step: BuiltStep, calls: list[Call]):
    with pytest.raises(RuntimeError, match="same calls twice"):
        step_module.time_step(step, calls[1:], repeats=1)


def test_the_command_prints_a_table_and_sums(step: BuiltStep, projection: Projection, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moestro.measure.step.BuiltStep", lambda config, device: step)
    monkeypatch.setattr("moestro.measure.step_projection.project", lambda *_: projection)
    found = moestro("measure", "step", "sotu-tiny")
    assert found.code == 0, found.err
    for word in ("between calls", "Σ calls alone", "random tokens", "load average"):
        assert word in found.out
    largest = projection.rows[0]  # the largest gap; which it is differs from run to run
    assert found.out.splitlines()[1].startswith(largest.kind)
    assert largest.part in found.out.splitlines()[1]
    assert found.err == ""
    assert json.loads(moestro("measure", "step", "sotu-tiny", "--json").out)["preset"] == "small"
