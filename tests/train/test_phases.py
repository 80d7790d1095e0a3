"""Runs in phases: each step as its phase says, the same to the last bit however the run was stopped, on any layout."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import run_ranks
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from moestro.checkpoint.store import load_checkpoint
from moestro.config import Config, OptimConfig, parse_config
from moestro.config.phases import RampConfig
from moestro.data.batches import TrainStream
from moestro.data.prepare import prepare
from moestro.errors import MoestroError
from moestro.model.transformer import Transformer
from moestro.optim.build import lr_factor
from moestro.parallel.build import build_model
from moestro.parallel.logical import model_tensors
from moestro.report.phases import phase_starts
from moestro.report.plots import learning_plots
from moestro.report.read import read_run
from moestro.serve.load import load_run
from moestro.train import loop
from moestro.train.engine import alone as engine_of
from moestro.train.loop import train
from moestro.train.phases import resolve_stretches
from moestro.train.schedule import schedules
from moestro.train.step import train_step

from .helpers import (
    PlainUpdate,
    assert_equal_state,
    events,
    merge,
    model_config,
    records,
    state,
    timeless,
    tree,
    write_corpus,
)

CLOSE = 2e-5
# Steps 1-2 at 16 tokens, 3-6 at 32 with another base and a growing batch, 7-8 with another mixture and rate.
PHASES: list[dict[str, Any]] = [
    {"steps": 2, "seq_len": 16},
    {"steps": 4, "rope_theta": 1e6, "batch_ramp": {"start": 2, "steps": 2}, "global_batch_size": 6},
    {"steps": 2, "rope_theta": 1e6, "mixture": {"more": 3, "0": 1}, "lr_scale": 0.5, "schedule": "constant"},
]
BALANCE = {"model": {"moe": {"router": {"jitter": 0.05}, "balance": {"bias_rule": "sign"}}}}
RESUME = {"run": {"resume": "auto"}}


def settings(folder: Path, *changes: dict[str, Any], phases: list[dict[str, Any]] | None = PHASES) -> Config:
    other = folder / "other.jsonl"
    if not other.exists():
        write_corpus(other, documents=40, seed=1)
    values = merge(tree(folder, BALANCE), {"optim": {"eps": 1e-6}}, *changes)
    values["data"]["sources"] = [*values["data"]["sources"], {"path": str(other), "name": "more"}]
    if phases is not None:
        del values["train"]["steps"]
        values["train"]["phases"] = phases
    return parse_config(values, source="test")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return train(settings(folder, {"train": {"checkpoint_every": 2, "keep_checkpoints": 9, "eval_every": 5}})).folder


def test_every_step_is_as_its_phase_says(whole: Path) -> None:
    logged = records(whole)
    assert [r["phase"] for r in logged] == [0, 0, 1, 1, 1, 1, 2, 2]
    assert [r["seq_len"] for r in logged] == [16] * 2 + [32] * 6
    assert [r["batch_tokens"] for r in logged] == [4 * 16] * 2 + [2 * 32, 4 * 32, 6 * 32, 6 * 32] + [4 * 32] * 2
    grown = [b["tokens"] - a["tokens"] for a, b in zip([{"tokens": 0}, *logged], logged, strict=False)]
    assert all(0 < n <= r["batch_tokens"] for n, r in zip(grown, logged, strict=True))
    # One cosine over the first two phases, then a constant half.
    cosine = [lr_factor(step, 6, OptimConfig()) for step in range(6)]
    assert [r["lr"] / 3e-3 for r in logged] == pytest.approx([*cosine, 0.5, 0.5])


def test_phases_are_events(whole: Path) -> None:
    phases = [e for e in events(whole) if e["event"] == "phase"]
    assert [(e["step"], e["number"], e["seq_len"], e["batch_tokens"], e["rope_theta"]) for e in phases] == [
        (0, 0, 16, 64, 1e4), (2, 1, 32, 64, 1e6), (6, 2, 32, 128, 1e6),
    ]  # fmt: skip
    assert [e["mixture"] for e in phases] == [{"0": 1, "more": 1}] * 2 + [{"0": 1, "more": 3}]
    assert phases[2]["lr"] == pytest.approx(1.5e-3)


def test_the_report_shows_them(whole: Path) -> None:
    run = read_run(whole)
    assert phase_starts(run.train) == [3, 7]
    plots = learning_plots(run)
    assert plots[-1].key == "batch"
    for plot in plots:
        upright = [shape for shape in plot.figure.layout.shapes if shape.x0 == shape.x1]
        assert [shape.x0 for shape in upright] == [3, 7]


@pytest.mark.parametrize("step", [2, 4, 6])
def test_against_a_step_by_hand(step: int, whole: Path) -> None:
    """The step after a checkpoint, with the phase's rotary base, length and samples put together here."""
    config = settings(whole.parent.parent)
    model = build_model(load_run(whole).config, torch.device("cpu"))
    load_checkpoint(whole / f"checkpoints/step_{step:08d}", model_tensors(model))
    model.set_rope(config.model.rope.model_copy(update={"theta": 1e6}))
    data = prepare(config.data, progress=False)
    short = TrainStream(data, config.data.model_copy(update={"seq_len": 16}), 0)
    stream = TrainStream(data, config.data, 0, short, 8)
    first, count = {2: (8, 2), 4: (14, 6), 6: (26, 4)}[step]
    if step == 6:
        stream = TrainStream(data, config.in_phase(2).data, 0, stream, first)
    batches = [stream.batch(i, 2) for i in range(first, first + count, 2)]
    result = train_step(engine_of(model.train()), PlainUpdate(model, []), batches, None)
    logged = records(whole)[step]
    assert result.loss.item() == logged["loss"]
    assert result.grad_norm.item() == logged["grad_norm"]


def test_evaluation_and_later_use_have_the_phase(whole: Path) -> None:
    run = load_run(whole)
    assert run.model.config.rope.theta == 1e6
    assert [source.weight for source in run.config.data.sources] == [1, 3]
    assert settings(whole.parent.parent).as_of(2).data.seq_len == 16  # a checkpoint at a border is of the phase before
    assert settings(whole.parent.parent).as_of(3).data.seq_len == 32
    evals = records(whole, "eval")
    assert [r["step"] for r in evals] == [5, 8]
    assert evals[0]["tokens"] == evals[1]["tokens"]


@pytest.mark.parametrize(
    "attention", [{}, {"mla": {"kv_rank": 8, "nope_head_dim": 4, "rope_head_dim": 4, "v_head_dim": 4}}]
)
def test_a_changed_rope_is_that_of_a_model_built_with_it(attention: dict[str, Any]) -> None:
    before = {"theta": 1e4, "scaling": "yarn", "factor": 1.0, "original_max_seq_len": 16, "mscale_all_dim": 1.0}
    changed, built = (Transformer(model_config(rope=rope, **attention)) for rope in (before, {**before, "factor": 4.0}))
    changed.init_weights(0)
    built.init_weights(0)
    ids = torch.arange(40).unsqueeze(0)
    old = changed(ids).hidden
    changed.set_rope(built.config.rope)
    assert torch.equal(changed(ids).hidden, built(ids).hidden)
    assert not torch.allclose(changed(ids).hidden, old)


def test_phases_that_change_nothing_change_nothing(tmp_path: Path) -> None:
    plain = train(settings(tmp_path, phases=None))
    parts = train(settings(tmp_path, {"run": {"name": "parts"}}, phases=[{"steps": 2}, {"steps": 3}, {"steps": 1}]))
    assert_equal_state(state(parts.folder), state(plain.folder))
    extra = ("phase", "seq_len", "batch_tokens")
    stripped = [{k: v for k, v in timeless(r).items() if k not in extra} for r in records(parts.folder)]
    assert stripped == [timeless(r) for r in records(plain.folder)]


@pytest.mark.parametrize("step", [2, 3])
def test_stopped_and_resumed(step: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a border and within a ramp, with another border still to come: then the same to the last bit."""
    real, done = loop.train_step, [0]

    def signalled(*args: Any, **kwargs: Any) -> Any:
        done[0] += 1
        if done[0] == step:
            os.kill(os.getpid(), signal.SIGINT)
        return real(*args, **kwargs)

    monkeypatch.setattr(loop, "train_step", signalled)
    assert train(settings(tmp_path)).step == step
    monkeypatch.undo()
    monkeypatch.setattr(loop, "measure_gemm_flops", lambda device, dtype: 1e11)
    resumed = train(settings(tmp_path, RESUME))
    assert resumed.finished
    assert [timeless(r) for r in records(resumed.folder)] == [timeless(r) for r in records(whole)]
    assert_equal_state(state(resumed.folder), state(whole))
    assert [e["step"] for e in events(resumed.folder) if e["event"] == "phase"] == [0, 2, 6]


def test_phases_may_be_added_but_not_changed(tmp_path: Path) -> None:
    train(settings(tmp_path, phases=PHASES[:1]))
    with pytest.raises(MoestroError, match=r"was begun with train\.phases\.0\.seq_len = 16, now it is 32"):
        train(settings(tmp_path, RESUME, phases=[{"steps": 2, "seq_len": 32}]))
    with pytest.raises(MoestroError, match=r"was begun with train\.phases\.0\.seq_len = 16, now it is None"):
        train(settings(tmp_path, RESUME, {"train": {"steps": 2}}, phases=None))
    longer = train(settings(tmp_path, RESUME, phases=[*PHASES[:1], {"steps": 1}]))
    assert (longer.step, longer.finished) == (3, True)
    assert [e["step"] for e in events(longer.folder) if e["event"] == "phase"] == [0, 2]
    again = train(settings(tmp_path, RESUME, phases=[*PHASES[:1], {"steps": 1}]))
    assert records(again.folder, "eval")[-1]["loss"] == records(again.folder, "eval")[-2]["loss"]


def test_trimmed_for_each_phase(tmp_path: Path) -> None:
    turns = [{"turns": [{"prompt": "q", "reasoning": "r" * i, "answer": "a"}]} for i in range(1, 40)]
    path = tmp_path / "turns.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in turns))
    values = tree(tmp_path, {"train": {"phases": [{"steps": 1}, {"steps": 1, "seq_len": 64}]}})
    del values["train"]["steps"]
    values["data"]["sources"] = [{"path": str(path), "format": "turns", "trim": True}]
    run = train(parse_config(values, "test")).folder
    notices = json.loads((run / "environment.json").read_text())["data"]["notices"]
    assert [n.partition("sequences of ")[2] for n in notices] == [
        "32: 9 records whole, 27 with less reasoning, 0 left out",
        "64: 36 records whole, 0 with less reasoning, 0 left out",
    ]


class TestRamp:
    @hypothesis_settings(deadline=None, max_examples=15)
    @given(
        start=st.integers(1, 4),
        increment=st.integers(1, 4),
        jumps=st.integers(1, 5),
        length=st.integers(1, 200),
        by_steps=st.booleans(),
    )
    def test_grows_evenly_and_wholly(self, start: int, increment: int, jumps: int, length: int, by_steps: bool) -> None:
        unit = {"steps": length} if by_steps else {"tokens": length * 8}
        ramp, end = RampConfig(start=start, increment=increment, **unit), start + jumps * increment
        batches = ramp.batches(end, 8, 1000)
        assert sum(count for _, count in batches) == 1000
        sizes = [size for size, _ in batches]
        assert sizes == sorted(set(sizes))
        assert set(sizes) <= set(range(start, end + 1, increment))
        *grown, (last, _) = batches
        assert last == end
        if by_steps:
            assert sum(count for _, count in grown) == length
            assert max((c for _, c in grown), default=0) <= -(-length // jumps)
        else:
            seen = sum(size * count for size, count in grown)
            assert length <= seen < length + end  # the tokens asked for, and at most a batch more

    def test_refusals(self) -> None:
        with pytest.raises(ValueError, match="one of steps and tokens"):
            RampConfig(start=2, steps=3, tokens=4)
        with pytest.raises(ValueError, match="from 4 in jumps of 4 does not come to global_batch_size = 10"):
            RampConfig(start=4, steps=3).batches(10, 8, 100)
        with pytest.raises(ValueError, match="takes 3 steps, the phase has 3"):
            RampConfig(start=2, steps=3).batches(4, 8, 3)


class TestSchedules:
    def test_one_over_all_phases(self, tmp_path: Path) -> None:
        config = settings(tmp_path, {"optim": {"warmup_steps": 2}}, phases=[{"steps": 3}, {"steps": 5, "seq_len": 16}])
        (only,) = schedules(config)
        assert [only.factor(s) for s in range(8)] == [lr_factor(s, 8, config.optim) for s in range(8)]

    def test_a_phase_begins_its_own_and_others_go_on(self, tmp_path: Path) -> None:
        phases: list[dict[str, Any]] = [{"steps": 4}, {"steps": 2, "lr_scale": 0.5, "min_lr_ratio": 0.1}, {"steps": 4}]
        phases += [{"steps": 6, "warmup_steps": 3, "schedule": "constant"}]
        config = settings(tmp_path, {"optim": {"warmup_steps": 2}}, phases=phases)
        first, second, third = schedules(config)
        assert (first.first_step, first.steps, first.optim) == (0, 4, config.optim)
        assert second.factor(4) == 0.5  # no warm-up unless it asks
        assert (second.steps, third.first_step) == (6, 10)
        assert second.factor(9) > 0.05
        assert [third.factor(s) for s in (10, 11, 12, 13, 15)] == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])


class TestRefusals:
    @pytest.mark.parametrize(
        ("phase", "message"),
        [
            ({"steps": 5, "seq_len": 128}, r"train\.phases\.0\.seq_len = 128 exceeds model\.max_seq_len = 64"),
            ({"steps": 5, "global_batch_size": 7}, r"train\.phases\.0: global_batch_size = 7 is not a multiple"),
            (
                {"steps": 5, "mixture": {"mroe": 1}},
                r"train\.phases\.0: mixture names a source 'mroe'; known are 0, more",
            ),
            ({"steps": 5, "mixture": {"more": 1, "1": 1}}, "names a source twice"),
            ({"steps": 5, "mixture": {"more": 0}}, "weights of at least 0, and one above"),
            ({"steps": 5, "rope_factor": 2}, r"train\.phases\.0: factor = 2\.0 does nothing"),
            ({"steps": 5, "batch_ramp": {"start": 1, "steps": 3}}, "a batch of 1, not a multiple of micro_batch_size"),
            ({"steps": 5, "seqlen": 8}, r"Did you mean 'train\.phases\.0\.seq_len'"),
            ({"seq_len": 8}, r"missing key 'train\.phases\.0\.steps'"),
        ],
    )
    def test_one_line(self, phase: dict[str, Any], message: str, tmp_path: Path) -> None:
        with pytest.raises(MoestroError, match=message) as refusal:
            settings(tmp_path, phases=[phase])
        assert len(str(refusal.value).splitlines()) == 1

    def test_steps_that_are_not_the_sum(self, tmp_path: Path) -> None:
        values = tree(tmp_path, {"train": {"steps": 9, "phases": PHASES[:1]}})
        with pytest.raises(MoestroError, match=r"steps = 9, but the phases have 2 = 2; leave train\.steps out"):
            parse_config(values, "test")

    def test_a_phase_that_the_layout_cannot_do(self, tmp_path: Path) -> None:
        config = settings(
            tmp_path, {"train": {"micro_batch_size": 1}}, phases=[{"steps": 1}, {"steps": 1, "seq_len": 18}]
        )
        layout = config.parallel.model_copy(update={"cp": 2})
        with pytest.raises(MoestroError, match=r"train\.phases\.1: data\.seq_len = 18 cannot be cut"):
            resolve_stretches(config.model_copy(update={"parallel": layout}), 2)


def in_two_layouts(rank: int, folder: str) -> None:
    """Pipelined up to the middle of the ramp, then with cut sequences."""
    real, done = loop.train_step, [0]

    def signalled(*args: Any) -> Any:
        done[0] += 1
        if done[0] == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    loop.train_step = signalled
    loop.measure_gemm_flops = lambda device, dtype: 1e11
    one = {"train": {"micro_batch_size": 1}}
    assert train(settings(Path(folder), {"parallel": {"pp": 2}}, one)).step == 3
    loop.train_step = real
    assert train(settings(Path(folder), {"parallel": {"cp": 2}}, one, RESUME)).finished


def test_on_two_ranks(whole: Path, tmp_path: Path) -> None:
    settings(tmp_path)  # writes the corpora
    run_ranks(in_two_layouts, 2, str(tmp_path), timeout_s=400)
    run = tmp_path / "runs" / "tiny"
    for mine, expected in zip(records(run), records(whole), strict=True):
        assert mine["loss"] == pytest.approx(expected["loss"], rel=CLOSE)
        assert mine["grad_norm"] == pytest.approx(expected["grad_norm"], rel=20 * CLOSE)
        assert [mine[k] for k in ("tokens", "batch_tokens")] == [expected[k] for k in ("tokens", "batch_tokens")]
