"""Runs with faults in their numbers: each ends as the run that was told from the start which steps to pass over."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moestro.config import Config
from moestro.errors import MoestroError
from moestro.optim.update import Update
from moestro.train import loop
from moestro.train.incidents import Incident, incidents
from moestro.train.loop import train

from .helpers import assert_equal_state, config, events, records, state

STEPS = 14
TINY: dict[str, Any] = {
    "model": {"moe": {"balance": {"bias_rule": "sign"}}},
    "train": {"steps": STEPS, "micro_batch_size": 4, "checkpoint_every": 4},
    "guard": {"window": 16},
}
RESUME = {"run": {"resume": "auto"}}


def settings(folder: Path, *changes: dict[str, Any]) -> Config:
    return config(folder, TINY, *changes)


def at_call(call: int, act: Callable[[Any], None], patch: pytest.MonkeyPatch) -> None:
    """Call `act` with the model before the given call of train_step, whichever step that is."""
    real, done = loop.train_step, [0]

    def acting(engine: Any, *args: Any) -> Any:
        done[0] += 1
        if done[0] == call:
            act(engine.models[0])
        return real(engine, *args)

    patch.setattr(loop, "train_step", acting)


def norms(patch: pytest.MonkeyPatch, planted: dict[int, float]) -> None:
    """Let the gradient norm of the given calls be another."""
    real, done = Update.clip, [0]

    def clip(self: Update, max_norm: float) -> torch.Tensor:
        done[0] += 1
        norm = real(self, max_norm)
        return norm * planted.get(done[0], 1.0)

    patch.setattr(Update, "clip", clip)


def poison(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight[3, 5] = math.nan


def blow_up(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(300)


def crash(_model: Any) -> None:
    raise SystemExit


def guarded(run: Path) -> list[Incident]:
    return incidents(run)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The state of an undisturbed run that passes the given steps over."""
    states: dict[tuple[int, ...], dict[str, Any]] = {}

    def of(*steps: int) -> dict[str, Any]:
        if steps not in states:
            folder = tmp_path_factory.mktemp("told")
            states[steps] = state(train(settings(folder, {"guard": {"skip_steps": list(steps)}})).folder)
        return states[steps]

    return of


def test_a_step_that_is_not_finite_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    norms(monkeypatch, {3: math.nan, 9: math.inf})
    run = train(settings(tmp_path)).folder
    assert [(i.signal, i.action, i.step, i.evidence["skips"]) for i in guarded(run)] == [
        ("non_finite", "skip_step", 2, [3]),
        ("non_finite", "skip_step", 8, [9]),
    ]
    assert [r["step"] for r in records(run)] == [s for s in range(1, STEPS + 1) if s not in (3, 9)]
    assert_equal_state(state(run), told(3, 9))
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        assert_equal_state(state(run), told())


def test_suspect_weights_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms(monkeypatch, {8: math.nan})  # a checkpoint is due after it
    run = train(settings(tmp_path)).folder
    assert [e["step"] for e in events(run) if e["event"] == "checkpoint"] == [4, 12, 14]


def test_too_many_in_a_row_roll_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    norms(monkeypatch, {6: math.nan, 7: math.nan, 8: math.nan})
    run = train(settings(tmp_path)).folder
    assert [i.action for i in guarded(run)] == ["skip_step", "skip_step", "roll_back"]
    last = guarded(run)[-1]
    assert (last.evidence["skips"], last.evidence["checkpoint"]) == ([8], "step_00000004")
    assert last.downtime_s is not None
    assert_equal_state(state(run), told(6, 7, 8))


def test_weights_that_are_not_finite_are_healed_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any
) -> None:
    at_call(6, poison, monkeypatch)
    run = train(settings(tmp_path)).folder
    (incident,) = guarded(run)
    assert (incident.signal, incident.action, incident.step) == ("non_finite", "roll_back", 5)
    assert incident.evidence["weights"] == {"0": "model.lm_head.weight"}
    assert incident.evidence["skips"] == []
    assert_equal_state(state(run), told())


class TestSpike:
    def test_rolls_back_and_passes_the_text_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any
    ) -> None:
        at_call(11, blow_up, monkeypatch)
        run = train(settings(tmp_path)).folder
        (incident,) = guarded(run)
        assert (incident.signal, incident.action, incident.step) == ("loss_spike", "roll_back", 10)
        assert (incident.evidence["skips"], incident.evidence["checkpoint"]) == ([10, 11], "step_00000008")
        assert_equal_state(state(run), told(10, 11))
        assert [e["step"] for e in events(run) if e["event"] == "roll_back"] == [8]

    def test_resumed_after_it_is_the_same_run(self, tmp_path: Path, told: Any) -> None:
        """Killed right after the roll-back: no checkpoint tells of it, but the audit log does."""
        with pytest.MonkeyPatch.context() as patch:
            at_call(11, blow_up, patch)
            at_call(12, crash, patch)
            with pytest.raises(SystemExit):
                train(settings(tmp_path))
        run = train(settings(tmp_path, RESUME)).folder
        assert_equal_state(state(run), told(10, 11))

    def test_resumed_before_it_sees_it_too(self, tmp_path: Path, told: Any) -> None:
        """What a spike is measured by is in the checkpoint."""
        with pytest.MonkeyPatch.context() as patch:
            at_call(9, crash, patch)
            with pytest.raises(SystemExit):
                train(settings(tmp_path))
        with pytest.MonkeyPatch.context() as patch:
            at_call(3, blow_up, patch)  # step 11
            run = train(settings(tmp_path, RESUME)).folder
        assert [i.signal for i in guarded(run)] == ["loss_spike"]
        assert_equal_state(state(run), told(10, 11))

    def test_only_noted_if_so_set(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        at_call(11, blow_up, monkeypatch)
        run = train(settings(tmp_path, {"guard": {"spike_action": "flag"}})).folder
        assert [(i.signal, i.action) for i in guarded(run)] == [("loss_spike", "flag")]
        assert [r["step"] for r in records(run)] == list(range(1, STEPS + 1))


def test_stops_when_it_keeps_going_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (6, 8, 10, 12):  # step 6 of each attempt
        at_call(call, poison, monkeypatch)
    with pytest.raises(MoestroError, match=r"training diverged at step 6 .*not updated"):
        train(settings(tmp_path))
    assert [i.action for i in guarded(tmp_path / "runs" / "tiny")] == ["roll_back"] * 3 + ["stop"]


def test_stops_without_a_checkpoint_to_go_back_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norms(monkeypatch, {1: math.nan, 2: math.nan, 3: math.nan})
    with pytest.raises(MoestroError, match="training diverged at step 3"):
        train(settings(tmp_path))
    assert [i.action for i in guarded(tmp_path / "runs" / "tiny")] == ["skip_step", "skip_step", "stop"]


def test_back_into_another_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    phases = {"train": {"phases": [{"steps": 5}, {"steps": 9, "seq_len": 64, "global_batch_size": 8}]}}
    with pytest.MonkeyPatch.context() as patch:
        at_call(7, poison, patch)  # in the second phase, back to step 4 of the first
        run = train(settings(tmp_path, phases, {"train": {"async_checkpoints": True}})).folder
    assert [i.evidence["checkpoint"] for i in guarded(run)] == ["step_00000004"]
    straight = train(settings(tmp_path, phases, {"run": {"name": "straight"}})).folder
    assert_equal_state(state(run), state(straight))
