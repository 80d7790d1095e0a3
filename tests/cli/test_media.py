"""A run that learns from images, as a user starts it."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from train.helpers import assert_equal_state, by_step, config, merge, records, state

from moestro.train.loop import train

from .helpers import config_file, moestro

LETTERS = "abcdefgh"
ENCODER = {"name": "image", "input_size": 8, "max_patches": 4, "hidden_size": 16, "num_layers": 1, "num_tokens": 1}


def write_pictures(folder: Path, documents: int = 160) -> str:
    """An image of one of eight kinds, and its letter: without the image a letter costs ln 8."""
    for i in range(8):
        np.save(folder / f"{i}.npy", np.eye(8, dtype=np.float32)[[i, 0, 1, i]])
    rng = np.random.default_rng(0)
    lines = [{"text": f"<image>{LETTERS[i]}", "media": [f"{i}.npy"]} for i in rng.integers(0, 8, documents).tolist()]
    path = folder / "pictures.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def settings(folder: Path, **more: Any) -> list[dict[str, Any]]:
    pictures = {"path": write_pictures(folder), "format": "media"}
    base = {
        "model": {"encoders": [ENCODER], "moe": {"expert_groups": [2, 2]}},
        "data": {"sources": [pictures], "seq_len": 16},
        "train": {"steps": 45, "global_batch_size": 16, "micro_batch_size": 8},
        "optim": {"name": "adamw", "lr": 2e-2, "schedule": "constant", "warmup_steps": 0},
    }
    return [merge(base, more)]


def test_the_loss_falls_below_what_text_alone_could_reach(tmp_path: Path) -> None:
    done = moestro("train", config_file(tmp_path, *settings(tmp_path)))
    assert done.code == 0, done.err
    losses = [r["loss"] for r in records(tmp_path / "runs" / "tiny")]
    blind = math.log(8) / 2  # two labels a document: the letter and the end
    assert losses[0] > blind
    assert np.mean(losses[-5:]) < 0.5 * blind
    evaluated = json.loads(moestro("evaluate", str(tmp_path / "runs" / "tiny"), "--json").out)
    assert evaluated["loss"] < 0.5 * blind
    assert evaluated["tokens"] == 2 * evaluated["bytes"] == 2 * 16  # the letters; an image counts nothing


def test_resumed_is_as_if_never_stopped(tmp_path: Path) -> None:
    """By modality, with a text source beside the images, in another process's micro-batches."""
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": f"{i} is a number"}) + "\n" for i in range(50)))
    sources = [{"path": write_pictures(tmp_path), "format": "media"}, {"path": str(text)}]
    both = settings(tmp_path, data={"sources": sources, "batch_by": "modality"}, train={"steps": 6})
    train(config(tmp_path, *both, {"run": {"name": "whole"}}))
    train(config(tmp_path, *both, {"train": {"steps": 3}}))
    resumed = moestro("train", config_file(tmp_path, *both, {"run": {"resume": "auto"}}))
    assert resumed.code == 0, resumed.err
    whole, tiny = tmp_path / "runs" / "whole", tmp_path / "runs" / "tiny"
    assert by_step(tiny) == by_step(whole)
    assert_equal_state(state(tiny), state(whole))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"encoders": []}}, 'has format = "media", but the model has no [[model.encoders]]'),
        ({"model": {"encoders": [ENCODER | {"input_size": 7}]}}, "the encoder 'image' takes [4, 7]"),
        ({"model": {"encoders": [ENCODER | {"max_patches": 64, "num_tokens": 25}]}}, "no room for the 25 tokens"),
    ],
)
def test_mistakes(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    good = config_file(tmp_path, *settings(tmp_path, model={"moe": {"expert_groups": None}}))
    overrides = [f"model.{key}={value}" for key, value in change["model"].items()]
    done = moestro("train", good, *(o.replace("': ", "' = ").replace("'", '"') for o in overrides))
    assert done.code == 2
    assert message in done.err


def test_ready_made_ids_beyond_the_vocabulary_are_named(tmp_path: Path) -> None:
    codes = tmp_path / "codes.jsonl"
    codes.write_text('{"tokens": [300, 301]}\n' * 20)
    source = {"data": {"sources": [{"path": str(codes), "format": "tokens"}]}, "train": {"steps": 1}}
    done = moestro("train", config_file(tmp_path, source))
    assert done.code == 2
    assert "sources bring token ids up to 301; set model.vocab_size to at least 302" in done.err
    types = {"model": {"vocab_size": 302, "token_types": [257], "moe": {"expert_groups": [2, 2]}}}
    assert train(config(tmp_path, source, types)).finished
