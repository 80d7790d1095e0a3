"""The whole trainer on several ranks: the same run as one process, stopped and resumed in other layouts."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from distributed import run_ranks

from moestro.config import Config, parse_config
from moestro.train import loop
from moestro.train.loop import train

from .helpers import assert_equal_state, events, merge, records, state, tree

CLOSE = 2e-5
SETTINGS: dict[str, Any] = {
    "model": {"moe": {"balance": {"bias_rule": "sign"}}},
    "train": {"checkpoint_every": 2, "eval_every": 3},
    "optim": {"eps": 1e-6},
}
MICRO_BATCHES_OF_ONE = {"train": {"micro_batch_size": 1}}
# Of two ranks each: the first run and the run that resumes it.
PAIRS = [
    ({"parallel": {"ep": 2}}, {"parallel": {"fsdp": 2}}),
    ({"parallel": {"pp": 2}, **MICRO_BATCHES_OF_ONE}, {"parallel": {"tp": 2}}),
    ({"parallel": {"cp": 2}, "train": {"async_checkpoints": True}}, {"parallel": {"pp": 2}, **MICRO_BATCHES_OF_ONE}),
]


def settings(folder: Path, *changes: dict[str, Any]) -> Config:
    """The whole global batch fits every layout's micro-batches."""
    return parse_config(merge(tree(folder, SETTINGS, {"train": {"micro_batch_size": 2}}), *changes), source="test")


def stop_then_resume(rank: int, folders: list[str], copies: list[str]) -> None:
    for (first, second), folder, copy in zip(PAIRS, folders, copies, strict=True):
        real, done = loop.train_step, [0]

        def signalled(*args: Any, real: Any = real, done: list[int] = done) -> Any:
            done[0] += 1
            if done[0] == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)  # to one of the two
            return real(*args)

        loop.train_step = signalled
        stopped = train(settings(Path(folder), first))
        loop.train_step = real
        assert (stopped.step, stopped.finished) == (3, False)
        resumed = train(settings(Path(folder), second, {"run": {"resume": "auto"}}))
        assert (resumed.step, resumed.finished) == (6, True)
        again = train(settings(Path(copy), second))
        assert again.finished


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(settings(tmp_path_factory.mktemp("alone"))).folder


def test_layouts_and_resumption(alone: Path, tmp_path: Path) -> None:
    folders, copies = ([tmp_path / f"{kind}{i}" for i in range(len(PAIRS))] for kind in ("run", "copy"))
    for folder in (*folders, *copies):
        folder.mkdir()
        settings(folder)  # writes the corpus
    run_ranks(stop_then_resume, 2, [str(f) for f in folders], [str(c) for c in copies], timeout_s=400)
    for folder in (*folders, *copies):
        run = folder / "runs" / "tiny"
        assert [r["step"] for r in records(run)] == [1, 2, 3, 4, 5, 6]
        for mine, expected in zip(records(run), records(alone), strict=True):
            for key in ("loss", "aux_loss", "grad_norm"):
                assert mine[key] == pytest.approx(expected[key], rel=CLOSE), key
            assert mine["tokens"] == expected["tokens"]
            assert [layer["load"] for layer in mine["layers"]] == [layer["load"] for layer in expected["layers"]]
        for mine, expected in zip(records(run, "eval"), records(alone, "eval"), strict=True):
            assert mine["loss"] == pytest.approx(expected["loss"], rel=CLOSE)
            assert (mine["tokens"], mine["bytes"]) == (expected["tokens"], expected["bytes"])
    for folder in folders:
        names = [event["event"] for event in events(folder / "runs" / "tiny")]
        assert names.count("start") == names.count("interrupt") == names.count("resume") == names.count("finish") == 1
        assert state(folder / "runs" / "tiny")["step"] == 6


def in_two_parts(rank: int, folder: str, undisturbed: str) -> None:
    layout = {"parallel": {"ep": 2}, "optim": {"schedule": "constant"}}
    train(settings(Path(undisturbed), layout))
    train(settings(Path(folder), layout, {"train": {"steps": 3}}))
    train(settings(Path(folder), layout, {"run": {"resume": "auto"}}))


def test_resumes_to_the_last_bit(tmp_path: Path) -> None:
    """In one layout a resumed run is the undisturbed one."""
    folder, undisturbed = tmp_path / "stopped", tmp_path / "undisturbed"
    for path in (folder, undisturbed):
        path.mkdir()
        settings(path)
    run_ranks(in_two_parts, 2, str(folder), str(undisturbed), timeout_s=400)
    assert_equal_state(state(folder / "runs" / "tiny"), state(undisturbed / "runs" / "tiny"))
