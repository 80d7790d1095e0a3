"""The training loop: data, model and optimizers from a Config; steps, evaluations and checkpoints until done."""

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moestro.checkpoint.inspect import find_checkpoint
from moestro.checkpoint.saver import AsyncSaver, Saved
from moestro.checkpoint.store import Progress, load_checkpoint, newest_good, save_checkpoint
from moestro.config import Config, count
from moestro.data.batches import TrainStream, ValidationStream
from moestro.data.prepare import PreparedData, prepare
from moestro.data.reference import xz_bits_per_byte
from moestro.errors import MoestroError
from moestro.hardware.device import resolve_device, synchronize
from moestro.hardware.peak import measure_gemm_flops
from moestro.model.ops import product_dtype
from moestro.parallel.build import DTYPES, buffers
from moestro.parallel.comm import Group, all_reduce, rank_in
from moestro.parallel.logical import LogicalTensor
from moestro.parallel.process import connected, this_rank, world_size
from moestro.train.begin import begin, open_folder, trimmed_data, with_vocabulary
from moestro.train.cause import tell_cause
from moestro.train.clock import StepClock
from moestro.train.engine import build_engine, build_update, change_engine
from moestro.train.evaluate import EvalResult, evaluate
from moestro.train.folder import RunFolder
from moestro.train.guard_loop import Guard
from moestro.train.heartbeat import Heartbeat
from moestro.train.incidents import Incident, record
from moestro.train.interrupt import StopRequest
from moestro.train.metrics import layer_record, scalars, step_record
from moestro.train.noise import QuietHost, drop_page_cache
from moestro.train.notes import data_record, environment_record, layout_notes, over_budget_notes
from moestro.train.phases import Stretch, resolve_stretches
from moestro.train.progress import TrainProgress
from moestro.train.schedule import schedules
from moestro.train.step import BadStepError, StepResult, train_step
from moestro.train.together import agreed_signal, main_first, on_main
from moestro.train.trackers import Trackers


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
    ranks, me, path = world_size(), this_rank().rank, Path(config.run.dir) / config.run.name
    resolve_stretches(config, ranks)
    wanted = resolve_device(config.run.device)
    with Heartbeat(me, waits_show=wanted.type == "cpu") as pulse:
        try:
            with connected(wanted, ranks) as device:
                return _train(config, ranks, path, device, pulse)
        except BaseException as error:
            tell_cause(path, me, pulse.step, error)
            raise


def _train(config: Config, ranks: int, path: Path, device: torch.device, pulse: Heartbeat) -> TrainResult:
    world = dist.group.WORLD if ranks > 1 else None
    main = rank_in(world) == 0
    with open_folder(path, config.run.resume, world) as folder:
        prepared = main_first(world, lambda: prepare(config.data, encoders=config.model.encoders))
        config = with_vocabulary(config, prepared)
        on_main(world, lambda: begin(config, folder, prepared))
        trimmed = main_first(world, lambda: trimmed_data(config, prepared))
        return _Trainer(config, ranks, folder, prepared, trimmed, device, main, pulse).run()


class _Trainer:
    """The state of one run on this rank; `run` reads top to bottom."""

    def __init__(
        self,
        config: Config,
        ranks: int,
        folder: RunFolder,
        prepared: PreparedData,
        trimmed: list[tuple[PreparedData, list[str]]],
        device: torch.device,
        main: bool,
        pulse: Heartbeat,
    ) -> None:
        self.config, self.folder, self.prepared, self.device, self.main = config, folder, prepared, device, main
        self.pulse = pulse
        self.stretches, self.schedules = resolve_stretches(config, ranks), schedules(config)
        first = self.stretches[0]
        self.trimmed = [data for data, _ in trimmed]
        self.notices = list(dict.fromkeys([*prepared.notices, *(note for _, notes in trimmed for note in notes)]))
        self.engine, parts = build_engine(first.config, first.layout, device)
        self.world: Group = self.engine.mesh.world
        self.update = build_update(config, self.engine, parts)
        self.guard = Guard(config, folder, self.engine, self.update)
        self._begin(first)
        self.saver = AsyncSaver(self.world) if config.train.async_checkpoints else None
        dtype = product_dtype(torch.empty(0, dtype=DTYPES[config.train.dtype], device=device))
        # All ranks measure at once, as they will compute: ranks that share a device share its rate.
        rate = torch.tensor(measure_gemm_flops(device, dtype), dtype=torch.float64)
        self.peak_flops = float(all_reduce(rate, self.world))
        self.progress = Progress(step=0, tokens=0, train_time_s=0.0)
        self.stall_s = 0.0  # that training waited for checkpoints since the last line of metrics.jsonl
        self.moe_layers = [i for i, is_moe in enumerate(config.model.moe_blocks) if is_moe]
        self._write_environment(str(dtype).removeprefix("torch."))

    def run(self) -> TrainResult:
        config, train_config = self.config, self.config.train
        notes = self._resume()
        trackers = Trackers(config, self.folder.path, self.main)
        evaluation = None
        try:
            with (
                QuietHost(config.guard.gc_every, config.guard.drop_page_cache, self.trimmed) as quiet,
                StopRequest() as stop,
                TrainProgress(train_config.steps, self.progress.step, self.main) as bar,
            ):
                for note in (*self.notices, *notes, *layout_notes(self.engine, self.update)):
                    bar.say(note)
                stopped = agreed_signal(self.world, stop.requested)
                while self.progress.step < train_config.steps and not stopped:
                    self._advance(bar)
                    is_done = self._step(bar, trackers)
                    stopped = agreed_signal(self.world, stop.requested)
                    step = self.progress.step
                    if not is_done:
                        continue
                    quiet.after(step)
                    if _due(step, train_config.eval_every) and step < train_config.steps:
                        self._evaluate(bar, trackers, train_config.eval_batches)
                    if (
                        _due(step, train_config.checkpoint_every)
                        and step < train_config.steps
                        and not self.guard.is_suspect
                    ):
                        self._save(bar)
                    self._tell(bar, self.saver.poll() if self.saver else None)
                self._tell(bar, self.saver.wait() if self.saver else None)
                finished = self.progress.step >= train_config.steps
                if finished or not self.guard.is_suspect:
                    self._save_now()
                if finished:
                    self._advance(bar)  # a finished run that was resumed is still at its start
                    bar.say(f"evaluating all held-out text: {self.validation.num_sequences} sequences")
                    evaluation = self._evaluate(bar, trackers, None)
                    self._write_references()
                    for note in over_budget_notes(self.engine):
                        bar.say(note)
                    self.folder.event("finish", self.progress.step)
                else:
                    self.folder.event("interrupt", self.progress.step, signal=stopped)
        finally:
            trackers.close()
        return TrainResult(self.folder.path, self.progress.step, finished, evaluation)

    def _resume(self) -> list[str]:
        path, notes = newest_good(self.folder.checkpoints, self.world)
        for note in notes if self.main else ():
            record(self.folder.path, Incident("corrupt_checkpoint", "roll_back", 0, {"detail": note}, 0))
        for file in ("metrics.jsonl", "events.jsonl"):
            self.folder.mend(file)
        if path is None:
            self.folder.event("start", 0, init_from=self.config.run.init_from)
            return [*notes, *self._initialise()]
        self._load(path)
        self.folder.event("resume", self.progress.step, checkpoint=path.name)
        return [*notes, f"resumed from {path}"]

    def _load(self, path: Path) -> None:
        self.progress = load_checkpoint(path, self._state(), self.world)
        self.update.after_load()
        self.guard.resumed(self.progress)

    def _initialise(self) -> list[str]:
        """Take the weights and the balancing state from run.init_from, if that is set; the optimizer starts anew."""
        if self.config.run.init_from is None:
            return []
        path, notes = on_main(self.world, lambda: find_checkpoint(Path(str(self.config.run.init_from))))
        load_checkpoint(path, self.update.parameters_state() | buffers(self.engine.models), self.world)
        self.update.after_load()
        return [*notes, f"started from the weights of {path}"]

    def _advance(self, bar: TrainProgress) -> None:
        """Make ready for the next step if another stretch begins with it, or if a resumed run is in a later one."""
        step = self.progress.step
        for stretch in self.stretches:
            if self.stretch.end <= stretch.first_step <= step:
                self._enter(stretch)
        stretch = self.stretch
        if self.config.train.phases and step == min(s.first_step for s in self.stretches if s.phase == stretch.phase):
            lr, settings = self._lr_factor(step) * self.config.optim.lr, stretch.settings
            self.folder.event("phase", step, number=stretch.phase, **settings, lr=lr)
            bar.say(f"phase {stretch.phase}: {', '.join(f'{key} {value}' for key, value in settings.items())}")

    def _begin(self, first: Stretch) -> None:
        config = first.config
        batch_size = config.train.global_batch_size
        self.stream = TrainStream(self.trimmed[0], config.data, config.run.seed, batch_size=batch_size)
        self.validation = ValidationStream(self.prepared, config.data)
        self.counts = count(config.model, config.data.seq_len)
        self.stretch, self.guard.first = first, 1

    def _enter(self, stretch: Stretch) -> None:
        config, before = stretch.config, self.stretch
        batch_size = config.train.global_batch_size
        self.stream = self.stream.then(self.trimmed[stretch.phase], config.data, stretch.first_sample, batch_size)
        if stretch.phase != before.phase:
            self.guard.first = stretch.first_step + 1
        if config.data.seq_len != before.config.data.seq_len:
            self.validation = ValidationStream(self.prepared, config.data)
        self.engine = change_engine(self.engine, config, stretch.layout)
        self.counts = count(config.model, config.data.seq_len)
        self.stretch = stretch

    def _lr_factor(self, step: int) -> float:
        return next(s for s in reversed(self.schedules) if s.first_step <= step).factor(step)

    def _step(self, bar: TrainProgress, trackers: Trackers) -> bool:
        """Do the next step, or pass it over. Returns False where the run went back instead."""
        config, step = self.config, self.progress.step
        self.guard.step = step + 1
        if step + 1 in self.guard.skipped:
            return self._pass_over(bar)
        factor = self._lr_factor(step)
        self.update.set_learning_rate(factor)
        layout = self.engine.mesh.layout
        micro, mine = layout.micro_batch_size, layout.micro_batch_size * layout.micro_batches
        first = self.stretch.samples_before(step) + self.engine.mesh.place.batch * mine
        asked = time.perf_counter()
        self.pulse.at("data", step)
        batches = [self.stream.batch(i, micro) for i in range(first, first + mine, micro)]
        start, clock = time.perf_counter(), StepClock(self.device)
        self.pulse.at("passes")
        try:
            result = train_step(self.engine, self.update, batches, config.train.grad_clip, clock.mark, self.guard.check)
        except torch.OutOfMemoryError as error:
            raise MoestroError(
                f"out of memory on {self.device} at step {step + 1}; lower train.micro_batch_size (now {micro}) or set "
                'train.recompute="block" or train.dtype="bf16"'
            ) from error
        except BadStepError as error:
            return self._refused(error, bar)
        synchronize(self.device)
        step_s = time.perf_counter() - start
        self.pulse.took(step_s)
        saves = _due(step + 1, config.train.checkpoint_every) or step + 1 == config.train.steps
        if (bad := self.guard.look(result, saves)) is not None:
            return self._refused(bad, bar)
        self.pulse.at("log", step + 1)
        done = self.progress
        self.progress = Progress(step + 1, done.tokens + result.tokens, done.train_time_s + step_s)
        if _due(step + 1, config.train.log_every) or step + 1 == config.train.steps:
            parts = {"data": start - asked, "checkpoint": self.stall_s, **clock.seconds()}
            self.stall_s = 0.0
            self._log(result, factor * config.optim.lr, step_s, parts, bar, trackers)
        return True

    def _pass_over(self, bar: TrainProgress) -> bool:
        self.progress = replace(self.progress, step=self.progress.step + 1)
        self.folder.event("skip", self.progress.step)
        bar.say(f"step {self.progress.step} is passed over")
        return True

    def _refused(self, bad: BadStepError, bar: TrainProgress) -> bool:
        """The weights are as before the step. Returns whether the step counts as passed over, or the run went back."""
        self.folder.event(bad.signal, self.progress.step, detail=str(bad))
        if self.guard.passes_over(bad):
            bar.say(f"step {self.progress.step + 1}: {bad}")
            return self._pass_over(bar)
        self._roll_back(bad, bar)
        return False

    def _roll_back(self, bad: BadStepError, bar: TrainProgress) -> None:
        """Load the newest good checkpoint in place.

        Raises:
            MoestroError: there is none, or the run went back to it too often.
        """
        start, lost = time.perf_counter(), self.progress
        self._tell(bar, self.saver.wait() if self.saver else None)
        path, notes = newest_good(self.folder.checkpoints, self.world)
        if path is None or not self.guard.may_go_back_to(path):
            raise MoestroError(self.guard.stops(bad)) from bad
        if self.stretch is not self.stretches[0]:
            self._begin(self.stretches[0])
            self.engine = change_engine(self.engine, self.stretch.config, self.stretch.layout)
        self._load(path)
        skips = self.guard.goes_back(bad, path, lost, time.perf_counter() - start)
        self.folder.event("roll_back", self.progress.step, checkpoint=path.name, signal=bad.signal, skips=skips)
        for note in (*notes, f"step {lost.step + 1}: {bad.signal.replace('_', ' ')} ({bad}); back to {path.name}"):
            bar.say(note)

    def _log(
        self, result: StepResult, lr: float, step_s: float, parts: dict[str, float], bar: TrainProgress,
        trackers: Trackers,
    ) -> None:  # fmt: skip
        now = self.progress
        mfu = result.tokens * self.counts.train_flops_per_token / step_s / self.peak_flops
        record = step_record(result, now.step, lr, now.tokens, step_s, now.train_time_s, mfu)
        record |= {f"{part}_s": seconds for part, seconds in parts.items()}
        if self.config.train.phases:
            at = self.stretch
            record |= {"phase": at.phase, "seq_len": at.config.data.seq_len, "batch_tokens": at.batch_tokens}
        record["layers"] = [layer_record(i, load) for i, load in zip(self.moe_layers, result.layers, strict=True)]
        self.folder.append("metrics.jsonl", record)
        trackers.log(scalars(record), now.step)
        imbalance = max((layer["max_over_mean"] for layer in record["layers"]), default=None)
        bar.step(now.step, record["loss"], record["tokens_per_s"], mfu, imbalance)

    def _evaluate(self, bar: TrainProgress, trackers: Trackers, max_batches: int | None) -> EvalResult:
        size = self.engine.mesh.layout.micro_batch_size
        if max_batches is not None:  # counted in micro-batches of one process, so that every layout sees the same text
            max_batches *= self.stretch.config.train.resolved_micro_batch_size // size
        start = time.perf_counter()
        self.pulse.at("evaluate")
        result = evaluate(self.engine, self.validation, size, max_batches)
        record: dict[str, Any] = {"kind": "eval", "step": self.progress.step, **asdict(result)}
        record["eval_s"] = time.perf_counter() - start
        self.folder.append("metrics.jsonl", record)
        trackers.log(scalars(record), self.progress.step)
        bar.evaluated(result.bits_per_byte)
        return result

    def _save(self, bar: TrainProgress) -> None:
        start = time.perf_counter()
        if self.saver is None:
            self._save_now()
        else:
            keep, progress = self.config.train.keep_checkpoints, self.guard.noted(self.progress)
            self._tell(bar, self.saver.save(self.folder.checkpoints, self._state(), progress, keep))
        self.stall_s += time.perf_counter() - start

    def _save_now(self) -> None:
        keep, progress = self.config.train.keep_checkpoints, self.guard.noted(self.progress)
        self.pulse.at("checkpoint")
        start = time.perf_counter()
        path = save_checkpoint(self.folder.checkpoints, self._state(), progress, keep, self.world)
        stall_s = round(time.perf_counter() - start, 3)
        self.folder.event("checkpoint", self.progress.step, path=path.name, stall_s=stall_s)
        if self.config.guard.drop_page_cache:
            drop_page_cache(path)

    def _tell(self, bar: TrainProgress, saved: Saved | None) -> None:
        """Note how a save in the background went. A failed one is no reason to stop: the one before is still there."""
        if saved is None:
            return
        step = saved.progress.step
        if saved.path is not None:
            times = {"copy_s": round(saved.copy_s, 3), "write_s": round(saved.write_s, 3)}
            self.folder.event("checkpoint", step, path=saved.path.name, **times)
            if self.config.guard.drop_page_cache:
                drop_page_cache(saved.path)
        else:
            self.folder.event("checkpoint_failed", step, detail=str(saved.error))
            bar.say(f"{saved.error}; training goes on")

    def _state(self) -> dict[str, LogicalTensor]:
        """Everything a checkpoint holds, as this rank's parts of it."""
        return self.update.parameters_state() | buffers(self.engine.models) | self.update.state()

    def _write_environment(self, peak_dtype: str) -> None:
        data = data_record(self.prepared, self.notices, self.stream, self.validation)
        facts = environment_record(self.engine, self.update, self.counts, data, self.peak_flops, peak_dtype)
        self.folder.write("environment.json", json.dumps(facts, indent=1))

    def _write_references(self) -> None:
        if self.main:
            self.folder.write("references.json", json.dumps({"xz -9": xz_bits_per_byte(self.prepared)}))


def _due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
