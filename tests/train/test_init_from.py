"""A run that starts from another's weights."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moestro.checkpoint.store import Progress, save_checkpoint
from moestro.errors import MoestroError
from moestro.parallel.logical import model_tensors
from moestro.serve.load import load_run
from moestro.train import loop
from moestro.train.loop import train

from .helpers import config, events, state

MODEL = {"model": {"moe": {"balance": {"bias_rule": "sign", "bias_lr": 0.01}}}}
STILL = {"optim": {"lr": 1e-12, "weight_decay": 0.0}, "train": {"steps": 1}}


@pytest.fixture(autouse=True)
def _no_peak_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "measure_gemm_flops", lambda device, dtype: 1e11)


def named(name: str, **run: Any) -> dict[str, Any]:
    return {"run": {"name": name, "seed": 1, **run}}


def test_weights_and_balance_come_along_and_nothing_else(tmp_path: Path) -> None:
    first = train(config(tmp_path, MODEL)).folder
    before = state(first)
    for origin in (first, first / "checkpoints" / f"step_{before['step']:08d}"):
        second = train(config(tmp_path, MODEL, STILL, named(f"from-{origin.name}", init_from=str(origin)))).folder
        after = state(second)
        assert after["step"] == 1
        assert events(second)[0]["init_from"] == str(origin)
        for name, value in before.items():
            if name.startswith("model.") and "router.bias" not in name and "global_load" not in name:
                assert torch.allclose(after[name], value, rtol=0, atol=1e-9), name
        # The sign rule moves a bias by 0.01 a step; without the first run's, it would lie within that of 0.
        biases = [name for name in before if name.endswith("router.bias")]
        assert all(float((after[name] - before[name]).abs().max()) <= 0.0101 for name in biases)
        assert any(float(after[name].abs().max()) > 0.0301 for name in biases)


def test_refusals(tmp_path: Path) -> None:
    first = train(config(tmp_path, MODEL, {"train": {"steps": 1}})).folder
    for name, changes, words in (
        ("wider", {"model": {"hidden_size": 32}}, "does not fit this configuration"),
        ("nowhere", {"run": {"init_from": str(tmp_path / "nowhere")}}, "holds no checkpoint"),
    ):
        with pytest.raises(MoestroError, match=words):
            train(config(tmp_path, MODEL, named(name, init_from=str(first)), changes))
    other = Path(shutil.copytree(first, tmp_path / "other"))
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text + "\n")
    with pytest.raises(MoestroError, match="another tokenizer"):
        train(config(tmp_path, MODEL, named("other", init_from=str(other))))
    # A name is not spent on a start that could not be: with the right run.init_from the same command works.
    train(config(tmp_path, MODEL, STILL, named("nowhere", init_from=str(first))))


def test_weights_without_optimizer_state_are_not_resumed(tmp_path: Path) -> None:
    """As those of an imported model are."""
    first = train(config(tmp_path, MODEL, {"train": {"steps": 1}})).folder
    tensors = model_tensors(load_run(first, "cpu").model)
    shutil.rmtree(first / "checkpoints")
    save_checkpoint(first / "checkpoints", tensors, Progress(0, 0, 0.0), keep=1)
    with pytest.raises(MoestroError, match=r"holds no optimizer state.*run\.init_from"):
        train(config(tmp_path, MODEL, {"train": {"steps": 1}, "run": {"resume": "auto"}}))
