"""A corpus of a few kilobytes, a model of a few thousand parameters, and readers of what a run leaves behind."""

import json
import random
from pathlib import Path
from typing import Any

import torch

from moestro.checkpoint.store import load_checkpoint, newest_good
from moestro.config import Config, ModelConfig, load_config, parse_config
from moestro.data.batches import Batch
from moestro.model.transformer import Transformer
from moestro.optim.update import Update
from moestro.parallel.build import buffers, build_model, whole_parts
from moestro.parallel.layout import ONE
from moestro.parallel.mesh import build_mesh
from moestro.train import step as step_module
from moestro.train.engine import alone
from moestro.train.step import StepResult

SEQ_LEN = 32
WORDS = "the of and people union state congress treasury war peace law duty nation year".split()  # noqa: SIM905


def write_corpus(path: Path, documents: int = 60, seed: int = 0) -> Path:
    """JSON lines of documents between 2 and about 120 bytes, so that packing leaves padding and mixes documents."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(1, 20))) for _ in range(documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def merge(base: dict[str, Any], *changes: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for change in changes:
        for key, value in change.items():
            nested = isinstance(value, dict) and isinstance(out.get(key), dict)
            out[key] = merge(out[key], value) if nested else value
    return out


MODEL: dict[str, Any] = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "max_seq_len": 64,
    "moe": {"num_experts": 4, "top_k": 2, "expert_hidden_size": 16},
}


def model_config(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(merge(MODEL, {"vocab_size": 257}, changes))


def tree(folder: Path, *changes: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run in folder/runs/tiny over the corpus folder/corpus.jsonl, which is written if absent."""
    corpus = folder / "corpus.jsonl"
    if not corpus.exists():
        write_corpus(corpus)
    base = {
        "model": MODEL,
        "data": {
            "sources": [{"path": str(corpus)}],
            "tokenizer": {"kind": "byte"},
            "seq_len": SEQ_LEN,
            "holdout_every": 10,
            "cache_dir": str(folder / "cache"),
        },
        "train": {"steps": 6, "global_batch_size": 4, "micro_batch_size": 2},
        "run": {"name": "tiny", "dir": str(folder / "runs"), "device": "cpu", "trackers": []},
    }
    return merge(base, *changes)


def config(folder: Path, *changes: dict[str, Any]) -> Config:
    return parse_config(tree(folder, *changes), source="test")


def records(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what a clock decides."""
    return {k: v for k, v in record.items() if k not in ("tokens_per_s", "mfu") and not k.endswith("_s")}


def by_step(run: Path) -> dict[int, dict[str, Any]]:
    """The last train record of each step: a resumed run does again what its predecessor did after its checkpoint."""
    return {record["step"]: timeless(record) for record in records(run)}


def state(run: Path) -> dict[str, Any]:
    """Everything in a run's newest checkpoint, flat: weights, balance buffers and the state of the optimizers."""
    settings = load_config(str(run / "config.toml")).config
    model = build_model(settings, torch.device("cpu"))
    mesh = build_mesh(ONE, torch.device("cpu"))
    update = Update([model], settings.optim, mesh, whole_parts(model), "auto")
    tensors = update.parameters_state() | buffers([model]) | update.state()
    path, _ = newest_good(run / "checkpoints")
    assert path is not None
    progress = load_checkpoint(path, tensors)
    values = {name: tensor.chunks[0].tensor.clone() for name, tensor in tensors.items()}
    return {"step": progress.step, "tokens": progress.tokens, **values}


class PlainUpdate:
    """Optimizers of one process, or what stands in their place, driven as a step drives `Update`."""

    def __init__(self, model: Transformer, optimizers: list[Any]) -> None:
        self.model, self.optimizers = model, optimizers

    def reduce_gradients(self) -> None:
        pass

    def clip(self, max_norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def train_step(
    model: Transformer, optimizers: list[Any], batches: list[Batch], balance: Any, grad_clip: float | None, seed: int
) -> StepResult:
    """A step of one process; `balance` is the model's own."""
    model.train()
    return step_module.train_step(alone(model, seed), PlainUpdate(model, optimizers), batches, grad_clip)


def flat_state(model: Transformer, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    flat: dict[str, Any] = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                flat[f"{type(optimizer).__name__}.{names[parameter]}.{key}"] = torch.as_tensor(value).clone()
        for i, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    flat[f"{type(optimizer).__name__}.group{i}.{key}"] = value
    return flat


def assert_equal_state(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """Bitwise."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value
        assert same, f"{name} differs"
