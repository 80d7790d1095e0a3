"""A plan as a file that `moestro train` takes: the run's whole configuration, with what was predicted in comments."""

from collections.abc import Sequence
from pathlib import Path

from moestro.config.files import write_whole
from moestro.config.load import load_config, to_toml
from moestro.config.plan import Plan
from moestro.errors import MoestroError
from moestro.graph.convert import overrides_of
from moestro.parallel.layout import resolve_layout
from moestro.predict.words import Prediction


def write_plan(
    path: Path, preset: str, overrides: Sequence[str], plan: Plan, found: Prediction, every: int | None = None
) -> None:
    """preset, overrides: of the run that was planned. every: steps between checkpoints, where failures tell them.

    Raises:
        MoestroError: the trainer cannot do what the plan says, or the file cannot be written.
    """
    settings = [f"train.checkpoint_every={every}"] if every is not None else []
    config = load_config(preset, [*overrides, *overrides_of(plan), *settings]).config
    resolve_layout(config, plan.world_size)  # refused here, not when it starts
    step = found.step_s
    comments = [
        f"planned for {plan.world_size} devices: {found.profile}",
        f"predicted: {step.value:.4g} s a step ({step.low:.4g} to {step.high:.4g}), {found.tokens_per_s:.4g} tokens/s,",
        f"{found.memory.total / 1e9:.3g} GB on the fullest device; interval by {step.basis}",
    ]
    head = "".join(f"# {line}\n" for line in comments)
    try:
        write_whole(path, f"{head}\n{to_toml(config)}")
    except OSError as error:
        raise MoestroError(f"cannot write {path}: {error.strerror}") from error
