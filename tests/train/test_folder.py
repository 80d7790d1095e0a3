"""A run's folder: one process at a time, whole files, and no run continued as another."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import moestro
from moestro.config import Config, load_config, parse_config, to_toml
from moestro.errors import MoestroError
from moestro.train import folder as folder_module
from moestro.train.folder import RunFolder, environment, write_text
from moestro.train.loop import train

from .helpers import config, tree


class TestLock:
    def test_two_runs_in_one_folder(self, tmp_path: Path) -> None:
        settings = config(tmp_path)
        with (
            RunFolder(tmp_path / "runs" / "tiny"),
            pytest.raises(MoestroError, match=r"another process is training in .*run\.name"),
        ):
            train(settings)
        assert train(settings).finished  # free again

    def test_against_another_process(self, tmp_path: Path) -> None:
        script = (
            "import fcntl, sys\n"
            "lock = open(sys.argv[1], 'w')\n"
            "fcntl.flock(lock, fcntl.LOCK_EX)\n"
            "print('locked', flush=True)\n"
            "sys.stdin.read()\n"
        )
        tmp_path.joinpath("run").mkdir()
        command = [sys.executable, "-c", script, str(tmp_path / "run" / ".lock")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"locked\n"
            with pytest.raises(MoestroError, match="another process"):
                RunFolder(tmp_path / "run")
            other.communicate()
        RunFolder(tmp_path / "run").close()  # a dead process holds nothing

    def test_is_released_after_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError), RunFolder(tmp_path / "run"):
            _ = 1 / 0
        RunFolder(tmp_path / "run").close()


class TestUnwritable:
    def test_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(MoestroError, match=r"cannot make the run's folder .*file/runs/tiny.*[Nn]ot a directory"):
            train(config(tmp_path, {"run": {"dir": str(tmp_path / "file" / "runs")}}))

    def test_the_folder_is_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "run").write_text("mine")
        with pytest.raises(MoestroError, match="cannot make the run's folder"):
            RunFolder(tmp_path / "run")
        assert (tmp_path / "run").read_text() == "mine"

    def test_a_record_that_cannot_be_added(self, tmp_path: Path) -> None:
        with RunFolder(tmp_path) as run:
            (tmp_path / "metrics.jsonl").mkdir()
            with pytest.raises(MoestroError, match=r"cannot write .*metrics\.jsonl: Is a directory"):
                run.append("metrics.jsonl", {})


class TestRecords:
    def test_append_adds_whole_lines(self, tmp_path: Path) -> None:
        with RunFolder(tmp_path) as run:
            run.append("metrics.jsonl", {"a": 1, "text": "line\nbreak"})
            run.append("metrics.jsonl", {"b": 2})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == [{"a": 1, "text": "line\nbreak"}, {"b": 2}]

    @pytest.mark.parametrize(
        ("content", "mended"),
        [
            (b'{"a": 1}\n{"b"', b'{"a": 1}\n'),
            (b'{"a": 1}\n', b'{"a": 1}\n'),
            (b'{"a', b""),
            (b"", b""),
            (b'{"a": 1}\n\xff\xfe', b'{"a": 1}\n'),
        ],
    )
    def test_mend_cuts_a_torn_last_line_only(self, content: bytes, mended: bytes, tmp_path: Path) -> None:
        with RunFolder(tmp_path) as run:
            (tmp_path / "metrics.jsonl").write_bytes(content)
            run.mend("metrics.jsonl")
            assert (tmp_path / "metrics.jsonl").read_bytes() == mended
            run.append("metrics.jsonl", {"c": 3})
        assert (tmp_path / "metrics.jsonl").read_bytes() == mended + b'{"c": 3}\n'

    def test_mend_of_no_file(self, tmp_path: Path) -> None:
        with RunFolder(tmp_path) as run:
            run.mend("metrics.jsonl")
        assert not (tmp_path / "metrics.jsonl").exists()

    def test_an_event_has_time_name_and_step(self, tmp_path: Path) -> None:
        with RunFolder(tmp_path) as run:
            run.event("checkpoint", 3, path="x")
        event = json.loads((tmp_path / "events.jsonl").read_text())
        assert event.pop("time")[:2] == "20"
        assert event == {"event": "checkpoint", "step": 3, "path": "x"}


class TestWriteText:
    def test_whole_or_not_at_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "a.json"
        write_text(path, "old")
        monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises((OSError, MoestroError), match="killed"):
            write_text(path, "new")
        assert path.read_text() == "old"
        assert [p.name for p in tmp_path.iterdir()] == ["a.json"]

    def test_replaces(self, tmp_path: Path) -> None:
        for text in ("old", "nëw"):
            write_text(tmp_path / "a.txt", text)
        assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "nëw"
        assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


class TestConfig:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"train": {"micro_batch_size": None, "eval_every": 3}, "optim": {"betas": [0.8, 0.99]}},
            {"run": {"sample_prompts": ['with "quotes"', "ünï\ncode"], "trackers": ["tensorboard"]}},
            {"model": {"moe": {"top_k": [2, 3], "router": {"capacity_factor": 1.25, "group_size": 8}}}},
            {"model": {"moe": None, "intermediate_size": 32}},
        ],
        ids=lambda changes: ",".join(changes) or "plain",
    )
    def test_the_saved_config_reloads_equal(self, changes: dict[str, Any], tmp_path: Path) -> None:
        settings = parse_config(tree(tmp_path, changes), source="test")
        with RunFolder(tmp_path / "run") as run:
            run.write_config(settings)
            assert run.config() == settings
            run.refuse_changes(settings)
        assert load_config(str(tmp_path / "run" / "config.toml")).config == settings

    @pytest.mark.parametrize("off", [None, 0.0])
    def test_a_run_without_clipping_stays_one(self, off: float | None, tmp_path: Path) -> None:
        """Gradients unclipped, however that is written: refused, or remembered."""
        try:
            settings = config(tmp_path, {"train": {"grad_clip": off}})
        except MoestroError:
            return
        with RunFolder(tmp_path) as run:
            run.write_config(settings)
            assert run.config() == settings

    def test_clipping_can_be_turned_off_on_the_command_line(self, tmp_path: Path) -> None:
        path = tmp_path / "tiny.toml"
        path.write_text(to_toml(config(tmp_path)))
        values = []
        for word in ("none", "0"):
            with contextlib.suppress(MoestroError):
                values.append(load_config(str(path), [f"train.grad_clip={word}"]).config.train.grad_clip)
        assert set(values) & {None, 0.0}

    def test_a_damaged_config_is_named(self, tmp_path: Path) -> None:
        settings = config(tmp_path)
        run = tmp_path / "runs" / "tiny"
        run.mkdir(parents=True)
        (run / "config.toml").write_text("model = [")
        with pytest.raises(MoestroError, match=r"config\.toml is not valid TOML"):
            train(parse_config(tree(tmp_path, {"run": {"resume": "auto"}}), source="test"))
        assert isinstance(settings, Config)


class TestEnvironment:
    def test_keys(self, tmp_path: Path) -> None:
        run = train(config(tmp_path, {"train": {"steps": 1}})).folder
        written = json.loads((run / "environment.json").read_text())
        assert set(written) == {
            "moestro", "python", "torch", "platform", "device_name", "num_threads", "cpu_count", "git_commit",
            "git_dirty", "started_at", "command", "device", "peak_flops_measured", "peak_dtype", "total_params",
            "active_params", "flops_per_token", "world_size", "layout",
            "muon_exchange_bytes", "data",
        }  # fmt: skip
        assert written["moestro"] == moestro.__version__
        assert written["device"] == "cpu"
        assert written["num_threads"] == 1
        assert written["peak_dtype"] == "float32"
        assert 0 < written["active_params"] < written["total_params"]
        assert set(written["data"]) == {"notices", "skipped", "train_tokens", "validation_bytes", "fill"}
        assert 0 < written["data"]["fill"] <= 1

    def test_outside_a_checkout(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(moestro, "__file__", str(tmp_path / "moestro" / "__init__.py"))
        assert environment("cpu")["git_commit"] is None

    def test_without_git(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / ".git").mkdir()
        monkeypatch.setattr(moestro, "__file__", str(tmp_path / "moestro" / "__init__.py"))
        monkeypatch.setattr(folder_module.subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(FileNotFoundError()))
        assert environment("cpu")["git_dirty"] is None
