"""Every tracker gets every figure; one that is missing is named before anything is begun."""

import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

from moestro.errors import MoestroError
from moestro.train.loop import train
from moestro.train.metrics import load_entropy, scalars
from moestro.train.trackers import Trackers

from .helpers import config, records


def tensorboard_scalars(folder: Path) -> dict[tuple[str, int], float]:
    """(name, step) → value from event files: records of length, its CRC, an Event message, its CRC."""
    found = {}
    for path in folder.glob("events.out.tfevents.*"):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            event = Event.FromString(content[at + 12 : at + 12 + length])
            at += 12 + length + 4
            for value in event.summary.value:
                found[value.tag, event.step] = value.simple_value
    return found


class FakeWandb(ModuleType):
    def __init__(self) -> None:
        super().__init__("wandb")
        self.started: dict[str, Any] = {}
        self.logged: dict[int, dict[str, float]] = {}
        self.finished = 0

    def init(self, **settings: Any) -> "FakeWandb":
        self.started = settings
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.setdefault(step, {}).update(values)

    def finish(self) -> None:
        self.finished += 1


class FakeMlflow(ModuleType):
    def __init__(self) -> None:
        super().__init__("mlflow")
        self.run_name, self.ended = "", 0
        self.logged: dict[int, dict[str, float]] = {}

    def start_run(self, run_name: str) -> None:
        self.run_name = run_name

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.logged.setdefault(step, {}).update(values)

    def end_run(self) -> None:
        self.ended += 1


def expected_scalars(run: Path) -> dict[tuple[str, int], float]:
    both = records(run) + records(run, "eval")
    return {(name, record["step"]): value for record in both for name, value in scalars(record).items()}


def test_tensorboard(tmp_path: Path) -> None:
    run = train(config(tmp_path, {"run": {"trackers": ["tensorboard"]}, "train": {"steps": 3, "eval_every": 2}})).folder
    found, expected = tensorboard_scalars(run / "tensorboard"), expected_scalars(run)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-6), key
    names = {name for name, _ in found}
    assert {"train/loss", "train/lr", "eval/bits_per_byte", "router/max_over_mean/layer_01"} <= names


def test_wandb_and_mlflow_get_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, mlflow = FakeWandb(), FakeMlflow()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    settings = config(tmp_path, {"run": {"trackers": ["wandb", "mlflow"]}, "train": {"steps": 2}})
    run = train(settings).folder
    expected = expected_scalars(run)
    assert {(name, step): v for step, values in wandb.logged.items() for name, v in values.items()} == expected
    dotted = {(name, step): v for step, values in mlflow.logged.items() for name, v in values.items()}
    assert dotted == {(name.replace("/", "."), step): v for (name, step), v in expected.items()}
    assert wandb.started["name"] == mlflow.run_name == "tiny"
    assert wandb.started["config"]["train"]["steps"] == 2
    assert wandb.started["config"]["model"]["vocab_size"] == 257
    assert (wandb.finished, mlflow.ended) == (1, 1)
    assert not (run / "tensorboard").exists()


def test_are_closed_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr("moestro.train.loop.train_step", lambda *_: (_ for _ in ()).throw(SystemExit))
    with pytest.raises(SystemExit):
        train(config(tmp_path, {"run": {"trackers": ["wandb"]}}))
    assert wandb.finished == 1


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_missing_package(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MoestroError, match=f"run.trackers names {name}, which is not installed: pip install {name}"):
        train(config(tmp_path, {"run": {"trackers": [name]}}))
    # Nothing was begun: after the remedy the same command works.
    assert train(config(tmp_path)).finished


def test_none_at_all(tmp_path: Path) -> None:
    trackers = Trackers(config(tmp_path), tmp_path)
    trackers.log({"train/loss": 1.0}, 1)
    trackers.close()
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.jsonl"]


class TestLoadEntropy:
    @pytest.mark.parametrize(
        ("shares", "entropy"),
        [([0.25] * 4, 1.0), ([1.0, 0, 0, 0], 0.0), ([0.5, 0.5, 0, 0], 0.5), ([1.0], 1.0)],
    )
    def test_values(self, shares: list[float], entropy: float) -> None:
        assert load_entropy(shares) == pytest.approx(entropy)
