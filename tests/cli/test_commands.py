"""The commands: quick help, whole runs, and every mistake answered in a line or two."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from train.helpers import records

import moestro as package
from moestro.config import describe, load_config, preset_names
from moestro.errors import MoestroError
from moestro.serve.load import load_run

from .helpers import config_file, moestro

COMMANDS = (
    "",
    "train",
    "generate",
    "evaluate",
    "report",
    "config",
    "config list",
    "config show",
    "config count",
    "papers",
)


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, **options)


class TestHelp:
    def test_answers_within_half_a_second_of_cpu(self) -> None:
        spent = []
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            done = python("-m", "moestro", "--help")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            assert done.returncode == 0
            assert "Usage" in done.stdout
            spent.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        assert min(spent) < 0.5

    def test_loads_nothing_heavy(self) -> None:
        heavy = ["torch", "numpy", "pydantic", "plotly", "tokenizers"]
        done = python("-c", f"import sys, moestro.cli.main; print([m for m in {heavy} if m in sys.modules])")
        assert done.stdout.strip() == "[]"

    @pytest.mark.parametrize("command", COMMANDS)
    def test_of_every_command(self, command: str) -> None:
        done = moestro(*command.split(), "--help")
        assert done.code == 0
        assert "Usage" in done.out
        assert done.err == ""

    @pytest.mark.parametrize("command", ["", "train", "config"])
    def test_without_arguments(self, command: str) -> None:
        done = moestro(*command.split())
        assert "Usage" in done.out + done.err
        assert done.code in (0, 2)

    def test_version(self) -> None:
        done = moestro("--version")
        assert (done.code, done.out) == (0, f"moestro {package.__version__}\n")


class TestConfig:
    def test_list_names_every_preset(self) -> None:
        done = moestro("config", "list")
        assert done.code == 0
        for name in preset_names():
            assert name in done.out

    def test_list_says_how_large_a_model_is_and_what(self) -> None:
        (line,) = [line for line in moestro("config", "list").out.splitlines() if line.startswith("zaya1-8b")]
        assert "8.84\u00a0B  1.29\u00a0B  ZAYA1-8B: convolutional attention" in line

    def test_count_prints_parts_flops_and_cache(self) -> None:
        done = moestro("config", "count", "zaya1-8b", "model.moe.null_experts=0")
        assert done.code == 0
        lines = [" ".join(line.split()) for line in done.out.splitlines()]
        for start in (
            "experts 8,053,063,680 503,316,480 ",
            "all 8,840,478,544 1,290,731,344 ",
            "without embedding and head 8,303,345,488 753,598,288 ",
        ):
            assert sum(line.startswith(start) for line in lines) == 1
        assert "40,960 bytes a token" in done.out

    def test_count_for_machines(self) -> None:
        found = json.loads(moestro("config", "count", "gpt-oss-20b", "--json").out)
        assert found["total_params"] == sum(part["total_params"] for part in found["parts"].values()) == 20_914_757_184
        assert found["train_flops_per_token"] == sum(p["train_flops_per_token"] for p in found["parts"].values())
        assert (found["kv_cache_bytes_per_token"], found["kv_cache_bytes_of_windows"]) == (24_576, 3_145_728)

    def test_count_needs_the_size_of_the_vocabulary(self) -> None:
        file = ["data.tokenizer.kind=file", "data.tokenizer.path=none.json"]
        done = moestro("config", "count", "sotu-tiny", *file)
        assert (done.code, done.out) == (2, "")
        assert "set model.vocab_size" in done.err
        assert moestro("config", "count", "sotu-tiny", *file, "model.vocab_size=1024").code == 0

    def test_show_prints_every_setting_with_its_origin(self) -> None:
        changes = ["train.steps=7", "optim.lr=1e-4"]
        done = moestro("config", "show", "sotu-tiny", *changes)
        assert done.code == 0
        rows = [line.split() for line in done.out.splitlines()]
        expected = describe(load_config("sotu-tiny", changes))
        assert len(expected) > 50
        for key, value, origin in expected:
            assert len(value) > 60 or [key, *value.split(), *origin.split()] in rows
        assert ["train.steps", "7", "command", "line"] in rows
        assert ["optim.lr", "0.0001", "command", "line"] in rows

    @pytest.mark.parametrize(
        ("override", "shown"),
        [
            ("run.name=my first run", '"my first run"'),
            ('run.name="quoted name"', '"quoted name"'),
            ("run.name=it's", '"it\'s"'),
            ("run.name=a=b", '"a=b"'),
            ("run.name=", '""'),
            ("run.name=[red", "[red"),
            ('run.sample_prompts=["two words", "x"]', '"two words"'),
        ],
    )
    def test_overrides_with_spaces_and_quotes(self, override: str, shown: str) -> None:
        done = moestro("config", "show", "sotu-tiny", override)
        assert done.code == 0
        assert shown in done.out

    def test_markup_in_a_value_is_text(self) -> None:
        done = moestro("config", "show", "sotu-tiny", 'run.name="[bold]x[/bold]"')
        assert "[bold]x[/bold]" in done.out

    @pytest.mark.parametrize("lines", [0, 1])
    def test_a_closed_pipe_is_quiet(self, lines: int) -> None:
        """`moestro config show sotu-tiny | head -n LINES`, without the race of when head goes."""
        read, write = os.pipe()
        if lines == 0:
            os.close(read)
        with subprocess.Popen(
            [sys.executable, "-m", "moestro", "config", "show", "sotu-tiny"], stdout=write, stderr=subprocess.PIPE
        ) as child:
            os.close(write)
            if lines:
                os.read(read, 10)
                os.close(read)
            _, err = child.communicate()
        assert err == b""
        assert child.returncode in (0, 1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("trained")
    file = config_file(folder, {"run": {"sample_prompts": ["the "], "trackers": ["tensorboard"]}})
    done = moestro("train", file, "train.steps=4", "run.name=two words")
    return folder / "runs" / "two words", done


class TestEndToEnd:
    def test_train(self, trained: tuple[Path, Any]) -> None:
        run, done = trained
        assert done.code == 0
        assert "step 4/4" in done.err
        assert f"run     {run}" in done.out
        assert f"report  {run / 'report.html'}" in done.out
        sample = json.loads((run / "samples.jsonl").read_text())
        assert sample["prompt"] + sample["text"] in done.out
        names = {path.name for path in run.iterdir()}
        assert names >= {
            "config.toml", "environment.json", "metrics.jsonl", "events.jsonl", "checkpoints", "tokenizer.json",
            "references.json", "samples.jsonl", "tensorboard", "report.html",
        }  # fmt: skip
        assert json.loads((run / "environment.json").read_text())["command"].startswith("moestro train ")

    def test_generate(self, trained: tuple[Path, Any]) -> None:
        run, _ = trained
        command = ("generate", str(run), "peace of", "--max-new-tokens", "12", "--seed", "3")
        done = moestro(*command)
        assert done.code == 0
        assert done.err == ""
        assert done.out.startswith("peace of")
        assert done.out.endswith("\n")
        assert moestro(*command) == done
        greedy = [moestro(*command[:-1], str(seed), "--temperature", "0").out for seed in (1, 2)]
        assert greedy[0] == greedy[1]

    def test_evaluate(self, trained: tuple[Path, Any]) -> None:
        run, _ = trained
        done = moestro("evaluate", str(run), "--json")
        assert done.code == 0
        got = json.loads(done.out)
        expected = records(run, "eval")[-1]
        assert got == {"run": str(run), **{k: v for k, v in expected.items() if k not in ("kind", "eval_s")}}
        text = moestro("evaluate", str(run))
        assert f"at step 4 (measured): {expected['bits_per_byte']:.4f} bits/byte" in text.out

    def test_evaluate_a_part(self, trained: tuple[Path, Any]) -> None:
        run, _ = trained
        done = moestro("evaluate", str(run), "--json", "--max-batches", "1")
        assert json.loads(done.out)["tokens"] < records(run, "eval")[-1]["tokens"]

    @pytest.mark.parametrize("number", ["0", "-1"])
    def test_evaluate_nothing(self, number: str, trained: tuple[Path, Any]) -> None:
        done = moestro("evaluate", str(trained[0]), "--max-batches", number)
        assert done.code == 2
        assert "Traceback" not in done.err

    def test_report(self, trained: tuple[Path, Any]) -> None:
        run, _ = trained
        (run / "report.html").unlink()
        done = moestro("report", str(run))
        assert done.code == 0
        assert f"report  {run / 'report.html'}" in done.out
        assert "finished at step 4" in done.out
        assert "</html>" in (run / "report.html").read_text(encoding="utf-8")

    def test_the_loaded_model_is_the_trained_one(self, trained: tuple[Path, Any]) -> None:
        run, _ = trained
        assert load_run(run).step == 4
        assert all(torch.isfinite(p).all() for p in load_run(run).model.parameters())


def assert_error(done: Any, *parts: str) -> None:
    """Exit status 2 and, after any progress shown before it, an error of a line or two."""
    assert done.code == 2
    assert done.err.startswith("error: ") or "\nerror: " in done.err
    message = done.err[done.err.rindex("error: ") :]
    assert len(message.splitlines()) <= 2, message
    assert "Traceback" not in done.err
    for part in parts:
        assert part in message


class TestMistakes:
    @pytest.mark.parametrize("command", [("train",), ("config", "show")])
    @pytest.mark.parametrize(
        ("arguments", "part"),
        [
            (["sotu-tinny"], "Did you mean 'sotu-tiny'?"),
            (["none.toml"], "no such config file: none.toml"),
            (["/"], "is a folder"),
            (["sotu-tiny", "train.stepz=3"], "unknown key 'train.stepz'"),
            (["sotu-tiny", "trian.steps=3"], "Did you mean 'train"),
            (["sotu-tiny", "train.steps=many"], "bad value for 'train.steps': 'many'"),
            (["sotu-tiny", "train.steps=0"], "bad value for 'train.steps': 0"),
            (["sotu-tiny", "optim.name=muom"], "Did you mean 'muon'?"),
            (["sotu-tiny", "steps"], "'steps' is not an override; write section.key=value"),
            (["sotu-tiny", "train.steps.x=1"], "'steps' is a value, not a section"),
            (["sotu-tiny", "data.sources.3.path=x"], "'3' is not an index below 1"),
            (["sotu-tiny", "train.micro_batch_size=3"], "is not a multiple of"),
            (["sotu-tiny", "model.moe.top_k=999"], "top_k = 999 must lie between 1 and num_experts"),
            (["sotu-tiny", "model.max_seq_len=8"], "exceeds model.max_seq_len"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_in_the_configuration(self, command: tuple[str, ...], arguments: list[str], part: str) -> None:
        assert_error(moestro(*command, *arguments), part)

    def test_in_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "broken.toml"
        file.write_text("[model\n")
        assert_error(moestro("train", str(file)), "broken.toml is not valid TOML")
        file.write_bytes(b"\xff\xfe")
        assert_error(moestro("train", str(file)), "broken.toml is not valid TOML")
        file.write_text("[model]\nhidden_size = 8\n")
        assert_error(moestro("train", str(file)), "missing key")

    def test_several_at_once_are_not_a_flood(self) -> None:
        wrong = [f"{section}.nope=1" for section in "abcdefgh"]
        assert_error(moestro("train", "sotu-tiny", *wrong), "unknown key 'a'")

    @pytest.mark.parametrize(
        ("override", "part"),
        [
            ("data.sources.0.path=/nowhere/at/all", "/nowhere/at/all"),
            ("data.sources.0.path=pkg:no-such-package-here", "no-such-package-here"),
            ("data.tokenizer.kind=bpe", "vocabulary"),
            ("run.device=cuda:77", "run.device = 'cuda:77' is not usable here"),
            ("run.device=gpu", "run.device = 'gpu' is not usable here"),
            ('run.trackers=["wandb"]', "pip install wandb"),
            ("model.vocab_size=30", "model.vocab_size = 30 is smaller than the tokenizer's 257"),
            ("run.dir=/proc/version/x", "cannot make the run's folder"),
            ("data.cache_dir=/proc/version/x", "data.cache_dir"),
        ],
    )
    def test_of_a_run(self, override: str, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "wandb", None)
        file = config_file(tmp_path)
        overrides = [override, "data.tokenizer.vocab_size=5000"] if "bpe" in override else [override]
        assert_error(moestro("train", file, *overrides), part)
        assert not (tmp_path / "runs" / "tiny" / "metrics.jsonl").exists()

    @pytest.mark.parametrize("name", ["config.toml", "environment.json", "tokenizer.json", "report.html"])
    def test_a_file_that_cannot_be_written(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Path.write_text

        def full(path: Path, *arguments: Any, **options: Any) -> int:
            if name in path.name and "runs" in path.parts:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            return real(path, *arguments, **options)

        monkeypatch.setattr(Path, "write_text", full)
        assert_error(moestro("train", config_file(tmp_path), "train.steps=1"), "No space left")
        assert [p.name for p in (tmp_path / "runs").rglob("*tmp*")] == []

    def test_a_folder_that_holds_a_run(self, trained: tuple[Path, Any]) -> None:
        run, _ = trained
        file = str(run.parent.parent / "tiny.toml")
        assert_error(moestro("train", file, "train.steps=4", "run.name=two words"), "run.resume=auto")
        changed = moestro("train", file, "train.steps=4", "run.name=two words", "run.resume=auto", "run.seed=5")
        assert_error(changed, "run.seed = 0, now it is 5")

    def test_a_diverged_run(self, tmp_path: Path) -> None:
        done = moestro("train", config_file(tmp_path), "optim.lr=1e30", "train.grad_clip=1e-3", "train.dtype=fp32")
        assert_error(done, "training diverged at step", "optim.lr")

    def test_a_sample_prompt_too_long_is_found_before_training(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("moestro.report.write_report", lambda run: run)
        done = moestro("train", config_file(tmp_path), f'run.sample_prompts=["{"x" * 80}"]')
        if done.code:
            assert_error(done, "prompt")
            assert not (tmp_path / "runs" / "tiny" / "metrics.jsonl").exists()

    @pytest.mark.parametrize("command", [("generate", "RUN", "x"), ("evaluate", "RUN"), ("report", "RUN")])
    def test_no_run(self, command: tuple[str, ...], tmp_path: Path) -> None:
        arguments = [str(tmp_path / "nothing") if a == "RUN" else a for a in command]
        assert_error(moestro(*arguments), str(tmp_path / "nothing"))

    @pytest.mark.parametrize(
        ("options", "part"),
        [
            (["--temperature", "-1"], "temperature must be >= 0"),
            (["--temperature", "nan"], "temperature must be >= 0"),
            (["--top-p", "2"], "top_p in (0, 1]"),
            (["--max-new-tokens", "0"], "max_new_tokens >= 1"),
            (["--device", "gpu"], "not usable here"),
            (["--seed", "99999999999999999999"], "seed"),
        ],
    )
    def test_in_generate(self, options: list[str], part: str, trained: tuple[Path, Any]) -> None:
        assert_error(moestro("generate", str(trained[0]), "x", *options), part)

    def test_a_prompt_too_long(self, trained: tuple[Path, Any]) -> None:
        assert_error(moestro("generate", str(trained[0]), "x" * 70), "the prompt has 71 tokens", "shorten it")

    def test_a_prompt_that_is_not_unicode(self, trained: tuple[Path, Any]) -> None:
        assert_error(moestro("generate", str(trained[0]), b"\xff".decode("utf-8", "surrogateescape")))

    def test_a_report_that_cannot_be_written(self, trained: tuple[Path, Any], tmp_path: Path) -> None:
        run = tmp_path / "run"
        run.mkdir()
        for name in ("config.toml", "environment.json", "metrics.jsonl", "events.jsonl"):
            (run / name).write_bytes((trained[0] / name).read_bytes())
        (run / "report.html").mkdir()
        assert_error(moestro("report", str(run)), "report.html")
        assert sorted(p.name for p in run.iterdir() if "tmp" in p.name) == []

    @pytest.mark.parametrize(
        "arguments",
        [["trian"], ["train", "--nope"], ["generate", "run"], ["evaluate"], ["evaluate", "run", "--max-batches", "x"]],
        ids=" ".join,
    )
    def test_in_the_usage(self, arguments: list[str]) -> None:
        done = moestro(*arguments)
        assert done.code == 2
        assert "Traceback" not in done.err

    def test_debug_raises_what_was_hidden(self) -> None:
        for arguments in (("--debug", "config", "show", "nope"), ("config", "show", "nope", "--debug")):
            with pytest.raises(MoestroError, match="no preset 'nope'"):
                moestro(*arguments)

    def test_as_a_process(self) -> None:
        plain = python("-m", "moestro", "config", "show", "nope")
        assert (plain.returncode, plain.stdout) == (2, "")
        assert plain.stderr.startswith("error: no preset 'nope'")
        assert len(plain.stderr.splitlines()) == 1
        debug = python("-m", "moestro", "config", "show", "nope", "--debug")
        assert debug.returncode != 0
        assert "Traceback" in debug.stderr
        assert "MoestroError: no preset 'nope'" in debug.stderr


def test_ctrl_c_before_training_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moestro.train.loop.prepare", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    done = moestro("train", config_file(tmp_path))
    assert done.code == 130
    assert "Traceback" not in done.err
    monkeypatch.undo()
    monkeypatch.setattr("moestro.report.write_report", lambda run: run)
    assert moestro("train", config_file(tmp_path), "train.steps=1").code == 0  # nothing was begun
