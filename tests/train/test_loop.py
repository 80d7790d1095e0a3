"""Runs: the same twice, the same whether stopped or not, and honest about what went wrong."""

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moestro.config import Config
from moestro.errors import MoestroError
from moestro.model import transformer as transformer_module
from moestro.train import loop
from moestro.train.loop import TrainResult, train

from .helpers import assert_equal_state, by_step, config, events, records, state, timeless

STEPS = 6
RECIPES: dict[str, dict[str, Any]] = {
    "adamw, sign bias": {
        "model": {"moe": {"router": {"jitter": 0.05}, "balance": {"bias_rule": "sign", "z_loss_coef": 1e-3}}},
        "optim": {"name": "adamw", "warmup_steps": 2},
    },
    "muon, adamw bias, recompute": {
        "model": {"moe": {"router": {"jitter": 0.05, "score": "sigmoid"}, "balance": {"bias_rule": "adamw"}}},
        "optim": {"name": "muon", "schedule": "wsd", "decay_fraction": 0.5},
        "train": {"recompute": "block"},
    },
    "sequence loss, capacity, bf16": {
        "model": {"moe": {"router": {"capacity_factor": 1.0}, "balance": {"aux_scope": "sequence"}}},
        "train": {"dtype": "bf16"},
    },
}
RESUME = {"run": {"resume": "auto"}}


def stop_at(step: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send this process a signal in the middle of a step."""
    real, done = loop.train_step, [0]

    def signalled(*args: Any, **kwargs: Any) -> Any:
        done[0] += 1
        if done[0] == step:
            os.kill(os.getpid(), number)
        return real(*args, **kwargs)

    monkeypatch.setattr(loop, "train_step", signalled)


def before_step(step: int, act: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Call `act` with the model before the given step; returns a list that then holds the model."""
    real, done, models = loop.train_step, [0], []

    def acting(engine: Any, *args: Any, **kwargs: Any) -> Any:
        done[0] += 1
        if done[0] == step:
            act(engine.models[0])
            models.append(engine.models[0])
        return real(engine, *args, **kwargs)

    monkeypatch.setattr(loop, "train_step", acting)
    return models


def interrupted_run(settings: Config, step: int, number: int = signal.SIGINT) -> TrainResult:
    with pytest.MonkeyPatch.context() as patch:
        stop_at(step, number, patch)
        return train(settings)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a default run; the corpus of every temporary folder is the same."""
    return train(config(tmp_path_factory.mktemp("undisturbed"))).folder


class TestUndisturbed:
    @pytest.fixture(scope="class")
    def run(self, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
        folder = tmp_path_factory.mktemp("logged")
        return train(config(folder, {"train": {"eval_every": 2, "eval_batches": 2, "checkpoint_every": 2}}))

    def test_result(self, run: TrainResult) -> None:
        assert run.finished
        assert run.step == STEPS
        assert run.evaluation is not None
        assert run.evaluation.bits_per_byte == pytest.approx(records(run.folder, "eval")[-1]["bits_per_byte"])

    def test_every_step_is_logged_with_all_figures(self, run: TrainResult) -> None:
        logged = records(run.folder)
        assert [r["step"] for r in logged] == list(range(1, STEPS + 1))
        for record in logged:
            assert set(record) == {
                "kind", "step", "loss", "aux_loss", "z_loss", "other_loss", "mtp_loss", "lr",
                "grad_norm", "tokens", "tokens_per_s", "mfu",
                "step_s", "time_s", "data_s", "checkpoint_s", "passes_s", "reduce_s", "update_s", "layers",
            }  # fmt: skip
            assert all(math.isfinite(v) for k, v in record.items() if k not in ("kind", "layers"))
            assert [layer["layer"] for layer in record["layers"]] == [0, 1]
            for layer in record["layers"]:
                assert sum(layer["load"]) == pytest.approx(1, abs=1e-5)
                assert layer["max_over_mean"] == pytest.approx(4 * max(layer["load"]), abs=1e-4)
                assert 0 < layer["load_entropy"] <= 1
                assert layer["dropped"] == 0
        assert logged[0]["loss"] == pytest.approx(math.log(257), abs=1.0)
        assert logged[-1]["loss"] < logged[0]["loss"]
        assert logged[0]["tokens"] < logged[1]["tokens"] <= 2 * 4 * 32
        # What the machine did, by the definitions.
        assert logged[0]["tokens_per_s"] == pytest.approx(logged[0]["tokens"] / logged[0]["step_s"])
        assert logged[-1]["time_s"] == pytest.approx(sum(r["step_s"] for r in logged))
        for record in logged:  # the rest is what stands around the three parts
            parts = [record[key] for key in ("passes_s", "reduce_s", "update_s")]
            assert min(parts) > 0
            assert sum(parts) <= record["step_s"]

    def test_mfu_is_model_flops_over_time_and_peak(self, run: TrainResult) -> None:
        environment = json.loads((run.folder / "environment.json").read_text())
        record = records(run.folder)[0]
        flops = record["tokens"] * environment["flops_per_token"]
        assert record["mfu"] == pytest.approx(flops / record["step_s"] / environment["peak_flops_measured"])

    def test_evaluations_and_checkpoints_come_when_due(self, run: TrainResult) -> None:
        evaluations = records(run.folder, "eval")
        assert [r["step"] for r in evaluations] == [2, 4, 6]
        assert evaluations[0]["tokens"] < evaluations[-1]["tokens"]  # a part, then all
        assert [e["event"] for e in events(run.folder)] == ["start", *["checkpoint"] * 3, "finish"]
        assert sorted(p.name for p in (run.folder / "checkpoints").iterdir()) == ["step_00000004", "step_00000006"]

    def test_the_reference_compressor_is_noted(self, run: TrainResult) -> None:
        bits = json.loads((run.folder / "references.json").read_text())["xz -9"]
        assert 0.5 < bits < 10

    def test_no_temporary_file_is_left(self, run: TrainResult) -> None:
        assert [p.name for p in run.folder.rglob("*") if "tmp" in p.name] == []


@pytest.mark.parametrize("recipe", RECIPES, scope="class")
class TestToTheLastBit:
    @pytest.fixture(scope="class")
    def whole(self, recipe: str, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
        return train(config(tmp_path_factory.mktemp("whole"), RECIPES[recipe]))

    def test_twice_the_same(self, recipe: str, whole: TrainResult, tmp_path: Path) -> None:
        again = train(config(tmp_path, RECIPES[recipe]))
        for kind in ("train", "eval"):
            assert [timeless(r) for r in records(again.folder, kind)] == [
                timeless(r) for r in records(whole.folder, kind)
            ]
        assert_equal_state(state(again.folder), state(whole.folder))

    def test_stopped_and_resumed(self, recipe: str, whole: TrainResult, tmp_path: Path) -> None:
        stopped = interrupted_run(config(tmp_path, RECIPES[recipe]), 3)
        assert (stopped.finished, stopped.step) == (False, 3)
        assert state(stopped.folder)["step"] == 3
        resumed = train(config(tmp_path, RECIPES[recipe], RESUME))
        assert resumed.finished
        assert [timeless(r) for r in records(resumed.folder)] == [timeless(r) for r in records(whole.folder)]
        assert timeless(records(resumed.folder, "eval")[-1]) == timeless(records(whole.folder, "eval")[-1])
        got = state(resumed.folder)
        assert any(name.endswith("router.bias") for name in got)
        assert any("moment" in name or "exp_avg" in name for name in got)
        assert_equal_state(got, state(whole.folder))


class TestSeeds:
    def test_another_seed_is_another_run(self, tmp_path: Path) -> None:
        losses = []
        for seed in (0, 1):
            run = train(config(tmp_path, {"train": {"steps": 2}, "run": {"name": f"s{seed}", "seed": seed}}))
            losses.append([r["loss"] for r in records(run.folder)])
        assert losses[0] != losses[1]

    def test_evaluations_and_checkpoints_change_nothing(self, tmp_path: Path) -> None:
        busy = {"train": {"eval_every": 1, "checkpoint_every": 1}, "run": {"name": "busy"}}
        balance = {"model": {"moe": {"balance": {"bias_rule": "sign"}, "router": {"jitter": 0.1}}}}
        quiet = {"train": {"log_every": 3}, "run": {"name": "quiet"}}
        a, b = train(config(tmp_path, balance, busy)), train(config(tmp_path, balance, quiet))
        assert_equal_state(state(a.folder), state(b.folder))
        assert [r["step"] for r in records(b.folder)] == [3, 6]
        assert by_step(b.folder)[6] == by_step(a.folder)[6]

    @pytest.mark.parametrize("micro", [1, 4])
    def test_micro_batch_size_changes_only_rounding(self, micro: int, undisturbed: Path, tmp_path: Path) -> None:
        other = train(config(tmp_path, {"train": {"micro_batch_size": micro}})).folder
        for x, y in zip(records(undisturbed), records(other), strict=True):
            for key in ("loss", "aux_loss", "z_loss", "grad_norm"):
                assert y[key] == pytest.approx(x[key], rel=1e-4)
        expected = records(undisturbed, "eval")[-1]["loss"]
        assert records(other, "eval")[-1]["loss"] == pytest.approx(expected, rel=1e-4)


def test_every_sample_is_seen_once_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also over a stop and a resumption with other micro-batches."""
    real, seen = loop.train_step, []

    def watched(engine: Any, update: Any, batches: list[Any], *rest: Any) -> Any:
        seen.append([batch.sample_ids.tolist() for batch in batches])
        return real(engine, update, batches, *rest)

    monkeypatch.setattr(loop, "train_step", watched)
    interrupted_run(config(tmp_path), 2)
    train(config(tmp_path, RESUME, {"train": {"micro_batch_size": 1}}))
    assert [len(batches) for batches in seen] == [2, 2, 4, 4, 4, 4]
    assert [i for batches in seen for batch in batches for i in batch] == list(range(STEPS * 4))


class TestInterrupt:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_stops_after_the_step_and_keeps_it(self, number: int, tmp_path: Path) -> None:
        before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
        run = interrupted_run(config(tmp_path), 2, number)
        assert (run.step, run.finished, run.evaluation) == (2, False, None)
        assert [r["step"] for r in records(run.folder)] == [1, 2]
        last = events(run.folder)[-1]
        assert (last["event"], last["step"], last["signal"]) == ("interrupt", 2, signal.Signals(number).name)
        assert state(run.folder)["step"] == 2
        assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before

    def test_a_second_ctrl_c_interrupts_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def twice(_model: Any) -> None:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000):  # handlers run between bytecodes
                    pass

        before_step(2, twice, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            train(config(tmp_path, {"train": {"checkpoint_every": 1}}))
        monkeypatch.undo()
        assert train(config(tmp_path, RESUME)).finished

    def test_before_the_first_step_loses_nothing(self, undisturbed: Path, tmp_path: Path) -> None:
        """A signal that comes while the run is being set up stops it at step 0; resuming is still exact."""
        with pytest.MonkeyPatch.context() as patch:
            real = loop._Trainer._resume

            def resume(self: Any) -> list[str]:
                notes = real(self)
                patch.setattr(loop.TrainProgress, "__enter__", lambda bar: os.kill(os.getpid(), signal.SIGINT) or bar)
                return notes

            patch.setattr(loop._Trainer, "_resume", resume)
            assert train(config(tmp_path)).step == 0
        resumed = train(config(tmp_path, RESUME))
        assert_equal_state(state(resumed.folder), state(undisturbed))


class TestResume:
    def test_needs_to_be_asked_for(self, tmp_path: Path) -> None:
        train(config(tmp_path))
        with pytest.raises(MoestroError, match=r"already holds a run; continue it with run\.resume=auto"):
            train(config(tmp_path))

    def test_auto_starts_where_there_is_nothing(self, tmp_path: Path) -> None:
        run = train(config(tmp_path, RESUME))
        assert run.finished
        assert events(run.folder)[0]["event"] == "start"

    @pytest.mark.parametrize(
        ("change", "key"),
        [
            ({"model": {"hidden_size": 32}}, r"model\.hidden_size = 16, now it is 32"),
            ({"model": {"moe": {"top_k": 3}}}, r"model\.moe\.top_k"),
            ({"model": {"moe": {"balance": {"aux_coef": 0.5}}}}, r"model\.moe\.balance\.aux_coef"),
            ({"model": {"vocab_size": 300}}, r"model\.vocab_size"),
            ({"data": {"seq_len": 16}}, r"data\.seq_len"),
            ({"data": {"holdout_every": 5}}, r"data\.holdout_every"),
            ({"train": {"global_batch_size": 8}}, r"train\.global_batch_size"),
            ({"run": {"seed": 1}}, r"run\.seed"),
            ({"optim": {"name": "muon"}}, r"optim\.name"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_refuses_another_run(self, change: dict[str, Any], key: str, one_run: Path) -> None:
        before = {p: p.read_bytes() for p in sorted((one_run / "runs").rglob("*")) if p.is_file()}
        with pytest.raises(MoestroError, match=key):
            train(config(one_run, RESUME, change))
        after = {p: p.read_bytes() for p in sorted((one_run / "runs").rglob("*")) if p.is_file()}
        assert after == before  # and leaves the run as it was

    @pytest.fixture(scope="class")
    def one_run(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("one_run")
        train(config(folder, {"train": {"steps": 2}}))
        return folder

    def test_refuses_changed_text_under_the_same_path(self, tmp_path: Path) -> None:
        """The settings are the same, the tokens are not."""
        run = interrupted_run(config(tmp_path), 2)
        corpus = tmp_path / "corpus.jsonl"
        corpus.write_text(corpus.read_text().replace("congress", "CONGRESS"))
        tokenizer = (run.folder / "tokenizer.json").read_bytes()
        with pytest.raises(MoestroError, match="data"):
            train(config(tmp_path, RESUME))
        assert (run.folder / "tokenizer.json").read_bytes() == tokenizer

    def test_a_copy_of_the_same_text_cache_is_fine(self, tmp_path: Path) -> None:
        interrupted_run(config(tmp_path), 2)
        assert train(config(tmp_path, RESUME, {"data": {"cache_dir": str(tmp_path / "elsewhere")}})).finished

    def test_more_steps_are_allowed(self, tmp_path: Path) -> None:
        train(config(tmp_path, {"optim": {"schedule": "constant"}}))
        longer = train(config(tmp_path, {"optim": {"schedule": "constant"}, "train": {"steps": 9}}, RESUME))
        assert longer.step == 9
        straight = {"optim": {"schedule": "constant"}, "train": {"steps": 9}, "run": {"name": "straight"}}
        assert_equal_state(state(longer.folder), state(train(config(tmp_path, straight)).folder))

    def test_another_micro_batch_size_is_allowed(self, undisturbed: Path, tmp_path: Path) -> None:
        interrupted_run(config(tmp_path), 3)
        resumed = train(config(tmp_path, RESUME, {"train": {"micro_batch_size": 1}}))
        for a, b in zip(records(resumed.folder), records(undisturbed), strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)

    def test_another_learning_rate_takes_effect(self, tmp_path: Path) -> None:
        """It is the remedy that the message about a diverged run gives."""
        slow = {"optim": {"schedule": "constant", "lr": 1e-30, "weight_decay": 0.0}}
        stopped = interrupted_run(config(tmp_path, {"optim": {"schedule": "constant"}}), 3)
        before = state(stopped.folder)
        resumed = train(config(tmp_path, slow, RESUME))
        after = state(resumed.folder)
        assert records(resumed.folder)[-1]["lr"] == 1e-30
        assert torch.equal(after["model.lm_head.weight"], before["model.lm_head.weight"])

    def test_a_finished_run_is_finished_again(self, tmp_path: Path) -> None:
        first = train(config(tmp_path))
        before = state(first.folder)
        again = train(config(tmp_path, RESUME))
        assert again.finished
        assert len(records(again.folder)) == STEPS
        assert_equal_state(state(again.folder), before)
        assert again.evaluation == first.evaluation

    def test_steps_lost_with_a_kill_are_done_again(self, undisturbed: Path, tmp_path: Path) -> None:
        """A killed process: a checkpoint of step 2, metrics up to step 4 and half a line."""
        with pytest.MonkeyPatch.context() as patch:
            before_step(5, lambda _model: (_ for _ in ()).throw(SystemExit), patch)
            with pytest.raises(SystemExit):
                train(config(tmp_path, {"train": {"checkpoint_every": 2}}))
        run = tmp_path / "runs" / "tiny"
        newest = max((run / "checkpoints").iterdir())
        (newest / "manifest.json").unlink()
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "train", "step": 5, "lo')
        with (run / "events.jsonl").open("a") as file:
            file.write('{"time"')
        resumed = train(config(tmp_path, RESUME))
        assert [r["step"] for r in records(resumed.folder)] == [1, 2, 3, 4, 3, 4, 5, 6]
        assert by_step(resumed.folder) == by_step(undisturbed)
        assert_equal_state(state(resumed.folder), state(undisturbed))
        assert [e["event"] for e in events(run)].count("resume") == 1

    def test_damaged_newest_checkpoint_is_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = interrupted_run(config(tmp_path, {"train": {"checkpoint_every": 2}}), 3).folder
        (run / "checkpoints" / "step_00000003" / "manifest.json").write_text("{")
        capsys.readouterr()
        assert train(config(tmp_path, RESUME)).finished
        shown = capsys.readouterr().err
        assert "step_00000003 is damaged" in shown
        assert "resumed from" in shown
        assert "step_00000002" in shown


class TestDivergence:
    def test_is_reported_before_the_update(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def plant(model: Any) -> None:
            with torch.no_grad():
                model.lm_head.weight[3, 5] = math.nan
            kept.update({name: value.clone() for name, value in model.state_dict().items()})

        kept: dict[str, torch.Tensor] = {}
        models = before_step(3, plant, monkeypatch)
        with pytest.raises(MoestroError, match=r"diverged at step 3 .*weights were not updated.*optim\.lr"):
            train(config(tmp_path, {"train": {"checkpoint_every": 2}, "guard": {"max_rollbacks": 0}}))
        for name, value in models[0].state_dict().items():
            assert torch.equal(value.nan_to_num(), kept[name].nan_to_num()), name
        run = tmp_path / "runs" / "tiny"
        assert [r["step"] for r in records(run)] == [1, 2]
        last = events(run)[-1]
        assert (last["event"], last["step"]) == ("non_finite", 2)
        assert "nan" in last["detail"]
        assert [p.name for p in (run / "checkpoints").iterdir()] == ["step_00000002"]

    def test_a_run_resumes_after_it(self, undisturbed: Path, tmp_path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            real = transformer_module.linear_cross_entropy
            before_step(
                3,
                lambda _: patch.setattr(
                    transformer_module, "linear_cross_entropy", lambda *a, **k: real(*a, **k) * math.inf
                ),
                patch,
            )
            with pytest.raises(MoestroError):
                train(config(tmp_path, {"train": {"checkpoint_every": 2}, "guard": {"max_rollbacks": 0}}))
        resumed = train(config(tmp_path, RESUME))
        assert_equal_state(state(resumed.folder), state(undisturbed))


class TestVocabulary:
    def test_is_taken_from_the_tokenizer_and_saved(self, tmp_path: Path) -> None:
        run = train(config(tmp_path, {"train": {"steps": 1}}))
        assert "vocab_size = 257" in (run.folder / "config.toml").read_text()

    def test_may_be_larger(self, tmp_path: Path) -> None:
        run = train(config(tmp_path, {"train": {"steps": 1}, "model": {"vocab_size": 300}}))
        assert state(run.folder)["model.lm_head.weight"].shape == (300, 16)

    def test_must_not_be_smaller(self, tmp_path: Path) -> None:
        with pytest.raises(MoestroError, match=r"model\.vocab_size = 100 is smaller than the tokenizer's 257"):
            train(config(tmp_path, {"model": {"vocab_size": 100}}))
        assert not (tmp_path / "runs" / "tiny" / "config.toml").exists()
