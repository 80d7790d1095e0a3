"""The collapse detector on runs: a planted sick one, and healthy ones that must stay quiet."""

from pathlib import Path
from typing import Any

import pytest
import torch

from moestro.errors import MoestroError
from moestro.train import loop
from moestro.train.incidents import incidents
from moestro.train.loop import train

from .helpers import config, records

SIX_LAYERS: dict[str, Any] = {
    "model": {"num_layers": 6},
    "train": {"micro_batch_size": 4, "grad_clip": None},
    "optim": {"schedule": "constant", "warmup_steps": 5},
    "guard": {"probe_every": 5, "spike_sigma": None, "max_skips": 0},
}


@pytest.mark.slow
def test_seen_long_before_the_loss_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistaken weight decay of two middle layers, which grows with the steps until it drives the weights apart."""
    real, calls = loop.train_step, [0]

    def sick(engine: Any, *args: Any) -> Any:
        calls[0] += 1
        with torch.no_grad():
            for name, parameter in engine.models[0].named_parameters():
                if name.startswith(("layers.2.", "layers.3.")) and parameter.dim() > 1:
                    parameter.mul_(1 - 0.03 * 1.1 ** calls[0])
        return real(engine, *args)

    monkeypatch.setattr(loop, "train_step", sick)
    with pytest.raises(MoestroError, match="diverged"):
        train(config(tmp_path, SIX_LAYERS, {"train": {"steps": 80}}))
    run = tmp_path / "runs" / "tiny"
    alarm = next(i for i in incidents(run) if i.signal == "collapse")
    lowest, diverged = float("inf"), None
    for record in records(run):
        lowest = min(lowest, record["loss"])
        if record["loss"] > lowest + 1:
            diverged = record["step"]
            break
    assert diverged is not None
    assert alarm.step <= diverged / 2
    assert alarm.evidence["layer"] in (2, 3)


@pytest.mark.slow
def test_no_false_alarm_in_ten_healthy_seeds(tmp_path: Path) -> None:
    for seed in range(10):
        run = train(config(tmp_path, SIX_LAYERS, {"train": {"steps": 20}, "run": {"seed": seed, "name": f"s{seed}"}}))
        assert [i for i in incidents(run.folder) if i.signal != "dead_experts"] == []
