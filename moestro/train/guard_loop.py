"""What a run does about a step that went wrong: pass its text over, go back to a checkpoint, or only note it.

All ranks decide alike, as they decide from figures that were added up over all of them. What was decided is in the
run's audit log and, with the figures that the next decisions depend on, in its checkpoints: so a run that is resumed
goes on as one that was never stopped, and its weights are a function of its settings and its audit log.
"""

from collections import Counter, deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moestro.checkpoint.manifest import Progress, StepFigures
from moestro.checkpoint.store import checkpoints, newest_good
from moestro.config import Config
from moestro.optim.update import Update
from moestro.parallel.comm import rank_in
from moestro.parallel.ranks import together
from moestro.train.engine import Engine
from moestro.train.folder import RunFolder
from moestro.train.guards import Verdict, spike
from moestro.train.incidents import Action, Incident, Signal, incidents, record
from moestro.train.probes import differing_weights
from moestro.train.step import BadStepError, StepResult
from moestro.train.together import on_main
from moestro.train.watch import Watch, is_due


class Guard:
    """Of one run on this rank. Steps are counted from 1, as in metrics.jsonl."""

    def __init__(self, config: Config, folder: RunFolder, engine: Engine, update: Update) -> None:
        self._settings, self._folder, self._update, self._stages = config.guard, folder, update, engine.stages
        self._world = world = engine.mesh.world
        self._watch = Watch(config)
        past = on_main(world, lambda: incidents(folder.path))
        self.skipped: set[int] = {*config.guard.skip_steps}
        for incident in past:
            self.skipped |= {*incident.evidence.get("skips", ())}
            self.skipped -= {*incident.evidence.get("takes_back", ())}
        self._rollbacks = Counter(
            i.evidence["checkpoint"] for i in past if i.action == "roll_back" and "skips" in i.evidence
        )
        self._recent: deque[StepFigures] = deque(maxlen=config.guard.window)
        self._streak: list[int] = []  # steps in a row that were not finite
        self._in_spike = False  # and noted as one
        self.step = 0  # the one that is computed
        self.first = 1  # of those whose figures are like these: the data's or sequences' last change

    @property
    def is_suspect(self) -> bool:
        """Whether the weights may be what made the last step go wrong; they must not become a checkpoint."""
        return bool(self._streak)

    def resumed(self, progress: Progress) -> None:
        """The weights are those of a checkpoint."""
        self.skipped |= {*progress.skipped}
        self._recent = deque(progress.recent, maxlen=self._settings.window)
        self._streak, self._in_spike = [], False

    def noted(self, progress: Progress) -> Progress:
        """With what a checkpoint must hold for the guard."""
        return replace(progress, skipped=tuple(sorted(self.skipped)), recent=tuple(self._recent))

    def check(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Between backward and update.

        Raises:
            BadStepError: on every rank, if there must be no update.
        """
        figures = StepFigures(self.step, *torch.stack([loss.double(), grad_norm.double()]).tolist())
        alike = [f for f in self._recent if f.step >= self.first]
        verdict = spike(alike, figures.loss, figures.grad_norm, self._settings)
        if verdict is not None and verdict.roll_back and self._target() is not None:
            raise BadStepError(verdict.signal, _text(verdict), verdict.evidence)
        if verdict is not None and not self._in_spike:
            self.note(verdict.signal, "flag", verdict.evidence)
        self._in_spike = verdict is not None
        self._recent.append(figures)
        self._streak = []
        self._watch.before_update(self.step, self._update)

    def look(self, result: StepResult, saves: bool) -> BadStepError | None:
        """After the update. saves: whether a checkpoint of these weights is due.

        Returns what the run must go back for: replicas with different weights.
        """
        for signal, evidence, rank in self._watch.findings(self.step, result, self._update):
            self.note(signal, "flag", evidence, rank=rank, step=self.step)
        if not (saves or is_due(self.step, self._settings.checksums_every)) or self._settings.checksums_every is None:
            return None
        found = differing_weights(self._update)
        if not found:
            return None
        evidence = {"tensors": [m.what for m in found], "ranks": found[0].ranks, "among": found[0].among}
        return BadStepError("corrupt_weights", found[0].text, evidence)

    def passes_over(self, bad: BadStepError) -> bool:
        """Whether the run goes on without this step, whose update was refused; if not, it must go back, or stop."""
        if bad.signal != "non_finite":
            return False
        bad.evidence |= self._where()
        if len(self._streak) >= self._settings.max_skips or "weights" in bad.evidence:
            return False
        self._streak.append(self.step)
        self.skipped.add(self.step)
        ranks = bad.evidence["ranks"]
        evidence = bad.evidence | {"skips": [self.step]}
        self.note(bad.signal, "skip_step", evidence, rank=ranks[0] if len(ranks) == 1 else None)
        return True

    def may_go_back_to(self, checkpoint: Path) -> bool:
        return self._rollbacks[checkpoint.name] < self._settings.max_rollbacks

    def goes_back(self, bad: BadStepError, checkpoint: Path, lost: Progress, took_s: float) -> list[int]:
        """The run went back to `checkpoint` from `lost`; returns the steps that it passes over this time."""
        self._rollbacks[checkpoint.name] += 1
        skips = self._skips(bad)
        self.skipped |= {*skips}
        evidence = bad.evidence | {"skips": skips, "checkpoint": checkpoint.name, "found_at": self.step}
        ranks = bad.evidence.get("ranks", ())
        self.note(bad.signal, "roll_back", evidence, lost.step, took_s, ranks[0] if len(ranks) == 1 else None)
        return skips

    def stops(self, bad: BadStepError) -> str:
        """Note that the run ends here; returns what to tell the user. The steps that were passed over just before did
        not help, so they will be done when the run is resumed."""
        self.note(bad.signal, "stop", bad.evidence | {"takes_back": self._streak})
        if bad.signal == "corrupt_weights":
            return (
                f"since step {self.step} replicas hold different weights ({bad}), and there is no good checkpoint "
                "to go back to; look at the memory of that machine (moestro doctor) and resume or start again"
            )
        return (
            f"training diverged at step {self.step} ({bad}); the weights were not updated. Lower optim.lr or set "
            "train.grad_clip, and resume from the last checkpoint or start again"
        )

    def note(
        self, signal: Signal, action: Action, evidence: dict[str, Any], step: int | None = None,
        took_s: float | None = None, rank: int | None = None,
    ) -> None:  # fmt: skip
        """One line of the audit log, by the main rank. took_s: without training."""
        if rank_in(self._world) == 0:
            done = self.step - 1 if step is None else step
            took_s = None if took_s is None else round(took_s, 3)
            record(self._folder.path, Incident(signal, action, done, evidence, rank, downtime_s=took_s))

    def _skips(self, bad: BadStepError) -> list[int]:
        if bad.signal == "non_finite":
            # With weights that are not finite nothing is wrong with the text, nor with that of the steps before.
            count = 0 if "weights" in bad.evidence else 1
        else:
            count = self._settings.spike_skips if bad.signal in ("loss_spike", "grad_spike") else 0
        return list(range(max(1, self.step - count + 1), self.step + 1))

    def _target(self) -> Path | None:
        """The checkpoint that a roll-back would go to, if there is one and it has not been tried too often.

        One that was is not verified again: that reads all of it, and a loss that stays high asks at every step.
        """
        newest = on_main(self._world, lambda: checkpoints(self._folder.checkpoints)[-1:])
        if not newest or not self.may_go_back_to(newest[0]):
            return None
        path, _ = newest_good(self._folder.checkpoints, self._world)
        return path if path is not None and self.may_go_back_to(path) else None

    def _where(self) -> dict[str, Any]:
        """Ranks whose own loss is not finite, and weights that are not."""

        def mine() -> tuple[bool, str | None]:
            outcomes = [outcome for stage in self._stages for outcome in stage.outcomes.values()]
            losses = [outcome.nll for outcome in outcomes if outcome.nll is not None]
            unsound = (
                name
                for name, tensor in self._update.parameters_state().items()
                for chunk in tensor.chunks
                if not torch.isfinite(chunk.tensor).all()
            )
            return all(bool(torch.isfinite(loss).all()) for loss in losses), next(unsound, None)

        found = together(self._world, mine)
        evidence: dict[str, Any] = {"ranks": [rank for rank, (is_finite, _) in enumerate(found) if not is_finite]}
        weights = {str(rank): name for rank, (_, name) in enumerate(found) if name is not None}
        return evidence | ({"weights": weights} if weights else {})


def _text(verdict: Verdict) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value:.6g}" for key, value in verdict.evidence.items())
