"""A trained model from its folder, and the samples a run's report shows."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from train.helpers import config, state

from moestro.errors import MoestroError
from moestro.serve import samples
from moestro.serve.generate import generate
from moestro.serve.load import load_run
from moestro.serve.samples import write_samples
from moestro.train.loop import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    settings = {"train": {"steps": 4, "checkpoint_every": 2}, "run": {"sample_prompts": ["the ", "année"]}}
    return train(config(folder, settings)).folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def test_newest_checkpoint_in_evaluation_mode(run: Path) -> None:
    loaded = load_run(run)
    assert loaded.step == 4
    assert loaded.folder == run
    assert not loaded.model.training
    assert loaded.config.model.vocab_size == loaded.tokenizer.vocab_size == 257
    expected = state(run)
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, expected[f"model.{name}"]), name


def test_falls_back_to_the_older_checkpoint(copy: Path) -> None:
    (copy / "checkpoints" / "step_00000004" / "manifest.json").unlink()
    assert load_run(copy).step == 2


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(MoestroError, match=r"holds no run \(no config\.toml\); give the folder that"):
        load_run(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MoestroError, match="`moestro checkpoint import` it first"):
        load_run(tmp_path)


def test_no_checkpoint_yet(copy: Path) -> None:
    for path in (copy / "checkpoints").iterdir():
        path.rename(copy / path.name)
    with pytest.raises(MoestroError, match="has no usable checkpoint; train longer"):
        load_run(copy)


def test_only_damaged_checkpoints(copy: Path) -> None:
    for path in (copy / "checkpoints").iterdir():
        (path / "manifest.json").write_text("{")
    with pytest.raises(MoestroError, match=r"no usable checkpoint: .*step_00000004 is damaged"):
        load_run(copy)


def test_no_tokenizer(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    with pytest.raises(MoestroError, match="cannot read tokenizer"):
        load_run(copy)


def test_unknown_device(run: Path) -> None:
    with pytest.raises(MoestroError, match="not usable here"):
        load_run(run, "gpu7")


def test_a_config_of_another_model(copy: Path) -> None:
    text = (copy / "config.toml").read_text()
    (copy / "config.toml").write_text(text.replace("hidden_size = 16\nnum_layers", "hidden_size = 32\nnum_layers"))
    with pytest.raises(MoestroError, match="does not fit this configuration"):
        load_run(copy)


def test_samples(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_NEW_TOKENS", 16)
    written = write_samples(copy)
    assert [json.loads(line) for line in (copy / "samples.jsonl").read_text().splitlines()] == written
    assert [r["prompt"] for r in written] == ["the ", "année"]
    loaded = load_run(copy)
    for record in written:
        assert record["step"] == 4
        pieces = generate(loaded.model, loaded.tokenizer, record["prompt"], 16, record["temperature"], record["top_p"])
        assert "".join(pieces) == record["text"]
    assert write_samples(copy) == written  # replaced, not added
