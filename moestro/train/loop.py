"""The training loop: data, model and optimizers from a Config; steps, evaluations and checkpoints until done."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from moestro.checkpoint.store import Progress, load_checkpoint, newest_good, save_checkpoint
from moestro.config import Config, count
from moestro.data.batches import TrainStream, ValidationStream
from moestro.data.prepare import PreparedData, prepare
from moestro.data.reference import xz_bits_per_byte
from moestro.errors import MoestroError
from moestro.hardware.device import device_name, resolve_device, synchronize
from moestro.hardware.peak import measure_gemm_flops
from moestro.model.ops import product_dtype
from moestro.model.transformer import Transformer
from moestro.optim.build import build_optimizers, lr_factor, set_learning_rate
from moestro.train.evaluate import EvalResult, evaluate
from moestro.train.folder import RunFolder, environment, write_text
from moestro.train.interrupt import StopRequest
from moestro.train.metrics import layer_record, scalars, step_record
from moestro.train.progress import TrainProgress
from moestro.train.step import NonFiniteError, StepResult, train_step
from moestro.train.trackers import Trackers, check_trackers

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TrainResult:
    folder: Path
    step: int
    finished: bool  # False: stopped by a signal, to be resumed
    evaluation: EvalResult | None  # of the whole held-out text, when finished


def train(config: Config) -> TrainResult:
    """Train as `config` says, in the folder run.dir/run.name.

    Raises:
        MoestroError: for everything the user can mend, from a missing corpus to a loss that is not finite.
    """
    path = Path(config.run.dir) / config.run.name
    device = resolve_device(config.run.device)
    with RunFolder(path) as folder:
        if folder.has_run and config.run.resume == "never":
            raise MoestroError(
                f"{path} already holds a run; continue it with run.resume=auto or choose another run.name"
            )
        prepared = prepare(config.data)
        config = _with_vocabulary(config, prepared)
        if folder.has_run:
            folder.refuse_changes(config)
        check_trackers(config)
        _check_prompts(config, prepared)
        _refuse_changed_text(folder, prepared)
        folder.write_config(config)
        prepared.tokenizer.save(folder.tokenizer)
        return _Trainer(config, folder, prepared, device).run()


def build_model(config: Config, device: torch.device) -> Transformer:
    """The model of `config` with its initial weights on `device`."""
    model = Transformer(config.model, DTYPES[config.train.dtype], recompute=config.train.recompute == "block")
    model.init_weights(config.run.seed)
    return model.to(device)


class _Trainer:
    """The state of one run; `run` reads top to bottom."""

    def __init__(self, config: Config, folder: RunFolder, prepared: PreparedData, device: torch.device) -> None:
        self.config, self.folder, self.prepared, self.device = config, folder, prepared, device
        self.stream = TrainStream(prepared, config.data, config.run.seed)
        self.validation = ValidationStream(prepared, config.data)
        self.model = build_model(config, device)
        self.optimizers = build_optimizers(self.model, config.optim)
        self.counts = count(config.model, config.data.seq_len)
        dtype = product_dtype(torch.empty(0, dtype=DTYPES[config.train.dtype], device=device))
        self.peak_flops = measure_gemm_flops(device, dtype)
        self.progress = Progress(step=0, tokens=0, train_time_s=0.0)
        self.moe_layers = [i for i, is_moe in enumerate(config.model.moe_layers) if is_moe]
        self._environment(str(dtype).removeprefix("torch."))

    def run(self) -> TrainResult:
        config, train_config = self.config, self.config.train
        notes = self._resume()
        trackers = Trackers(config, self.folder.path)
        evaluation = None
        try:
            with StopRequest() as stop, TrainProgress(train_config.steps, self.progress.step) as bar:
                for note in (*self.prepared.notices, *notes):
                    bar.say(note)
                while self.progress.step < train_config.steps and not stop.requested:
                    self._step(bar, trackers)
                    step = self.progress.step
                    if _due(step, train_config.eval_every) and step < train_config.steps:
                        self._evaluate(bar, trackers, train_config.eval_batches)
                    if _due(step, train_config.checkpoint_every) and step < train_config.steps:
                        self._save()
                self._save()
                finished = self.progress.step >= train_config.steps
                if finished:
                    evaluation = self._evaluate(bar, trackers, None)
                    self._write_references()
                    self.folder.event("finish", self.progress.step)
                else:
                    self.folder.event("interrupt", self.progress.step, signal=stop.requested)
        finally:
            trackers.close()
        return TrainResult(self.folder.path, self.progress.step, finished, evaluation)

    def _resume(self) -> list[str]:
        path, notes = newest_good(self.folder.checkpoints)
        for file in ("metrics.jsonl", "events.jsonl"):
            self.folder.mend(file)
        if path is None:
            self.folder.event("start", 0)
            return notes
        self.progress = load_checkpoint(path, self.model, self.optimizers)
        self.folder.event("resume", self.progress.step, checkpoint=path.name)
        return [*notes, f"resumed from {path}"]

    def _step(self, bar: TrainProgress, trackers: Trackers) -> None:
        config, step = self.config, self.progress.step
        factor = lr_factor(step, config.train.steps, config.optim)
        set_learning_rate(self.optimizers, factor)
        size, micro = config.train.global_batch_size, config.train.resolved_micro_batch_size
        first = step * size
        batches = [self.stream.batch(i, micro) for i in range(first, first + size, micro)]
        balance = config.model.moe.balance if config.model.moe else None
        start = time.perf_counter()
        try:
            result = train_step(self.model, self.optimizers, batches, balance, config.train.grad_clip, config.run.seed)
        except torch.OutOfMemoryError as error:
            raise MoestroError(
                f"out of memory on {self.device} at step {step + 1}; lower train.micro_batch_size (now {micro}) or set "
                'train.recompute="block" or train.dtype="bf16"'
            ) from error
        except NonFiniteError as error:
            self.folder.event("non_finite", step, detail=str(error))
            raise MoestroError(
                f"training diverged at step {step + 1} ({error}); the weights were not updated. Lower optim.lr or set "
                "train.grad_clip, and resume from the last checkpoint or start again"
            ) from error
        synchronize(self.device)
        step_s = time.perf_counter() - start
        done = self.progress
        self.progress = Progress(step + 1, done.tokens + result.tokens, done.train_time_s + step_s)
        if _due(step + 1, config.train.log_every) or step + 1 == config.train.steps:
            self._log(result, factor * config.optim.lr, step_s, bar, trackers)

    def _log(self, result: StepResult, lr: float, step_s: float, bar: TrainProgress, trackers: Trackers) -> None:
        now = self.progress
        mfu = result.tokens * self.counts.train_flops_per_token / step_s / self.peak_flops
        record = step_record(result, now.step, lr, now.tokens, step_s, now.train_time_s, mfu)
        record["layers"] = [layer_record(i, load) for i, load in zip(self.moe_layers, result.layers, strict=True)]
        self.folder.append("metrics.jsonl", record)
        trackers.log(scalars(record), now.step)
        imbalance = max((layer["max_over_mean"] for layer in record["layers"]), default=None)
        bar.step(now.step, record["loss"], record["tokens_per_s"], mfu, imbalance)

    def _evaluate(self, bar: TrainProgress, trackers: Trackers, max_batches: int | None) -> EvalResult:
        result = evaluate(self.model, self.validation, self.config.train.resolved_micro_batch_size, max_batches)
        record: dict[str, Any] = {"kind": "eval", "step": self.progress.step, **asdict(result)}
        self.folder.append("metrics.jsonl", record)
        trackers.log(scalars(record), self.progress.step)
        bar.evaluated(result.bits_per_byte)
        return result

    def _save(self) -> None:
        keep = self.config.train.keep_checkpoints
        path = save_checkpoint(self.folder.checkpoints, self.model, self.optimizers, self.progress, keep)
        self.folder.event("checkpoint", self.progress.step, path=path.name)

    def _environment(self, peak_dtype: str) -> None:
        data = {
            "notices": self.prepared.notices,
            "skipped": self.prepared.skipped,
            "train_tokens": self.stream.tokens,
            "validation_bytes": self.validation.bytes,
            "fill": self.stream.fill,
        }
        record = environment(device_name(self.device)) | {
            "device": str(self.device),
            "peak_flops_measured": self.peak_flops,
            "peak_dtype": peak_dtype,
            "total_params": self.counts.total_params,
            "active_params": self.counts.active_params,
            "flops_per_token": self.counts.train_flops_per_token,
            "data": data,
        }
        write_text(self.folder.path / "environment.json", json.dumps(record, indent=1))

    def _write_references(self) -> None:
        bits = {"xz -9": xz_bits_per_byte(self.prepared)}
        write_text(self.folder.path / "references.json", json.dumps(bits))


def _with_vocabulary(config: Config, prepared: PreparedData) -> Config:
    size = prepared.tokenizer.vocab_size
    if config.model.vocab_size is None:
        return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": size})})
    if config.model.vocab_size < size:
        raise MoestroError(
            f"model.vocab_size = {config.model.vocab_size} is smaller than the tokenizer's {size}; "
            "raise it or leave it out"
        )
    return config


def _check_prompts(config: Config, prepared: PreparedData) -> None:
    """Said before the first step, not after the last."""
    for prompt in config.run.sample_prompts:
        if len(prepared.tokenizer.encode(prompt)) + 1 >= config.model.max_seq_len:
            raise MoestroError(f"run.sample_prompts: {prompt[:20]!r}… leaves no room in model.max_seq_len; shorten it")


def _refuse_changed_text(folder: RunFolder, prepared: PreparedData) -> None:
    """Raise MoestroError when the text is not the one this run was begun with; note it for the next time."""
    checksums = json.dumps([shard.meta["tokens_crc32"] for shard in (*prepared.train, *prepared.validation)])
    note = folder.path / "data.json"
    if note.exists() and note.read_text() != checksums:
        raise MoestroError(
            f"the text behind data.sources has changed since {folder.path} was begun; restore it or choose another "
            "run.name"
        )
    write_text(note, checksums)


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
