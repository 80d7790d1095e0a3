"""A trained model from its run folder."""

from dataclasses import dataclass
from pathlib import Path

from moestro.checkpoint.store import load_checkpoint, newest_good
from moestro.config import Config, load_config
from moestro.data.tokenizer import Tokenizer
from moestro.errors import MoestroError
from moestro.hardware.device import resolve_device
from moestro.model.transformer import Transformer
from moestro.parallel.build import DTYPES
from moestro.parallel.logical import model_tensors


@dataclass(frozen=True)
class LoadedRun:
    folder: Path
    config: Config  # as it is in the phase that the run is in
    model: Transformer  # in evaluation mode
    tokenizer: Tokenizer
    step: int


def load_run(folder: Path, device: str = "auto") -> LoadedRun:
    """Load the newest good checkpoint of a run.

    Raises:
        MoestroError: no run, or no usable checkpoint, in `folder`.
    """
    if not (folder / "config.toml").is_file():
        if (folder / "config.json").is_file():
            raise MoestroError(
                f"{folder} holds no run; if it is a Hugging Face model, `moestro checkpoint import` it first"
            )
        raise MoestroError(f"{folder} holds no run (no config.toml); give the folder that `moestro train` printed")
    config = load_config(str(folder / "config.toml")).config
    path, damaged = newest_good(folder / "checkpoints")
    if path is None:
        detail = f": {damaged[0]}" if damaged else "; train longer, or wait for train.checkpoint_every"
        raise MoestroError(f"{folder} has no usable checkpoint{detail}")
    model = Transformer(config.model, DTYPES[config.train.dtype]).to(resolve_device(device))
    progress = load_checkpoint(path, model_tensors(model))
    config = config.as_of(progress.step)
    model.set_rope(config.model.rope)
    return LoadedRun(folder, config, model.eval(), Tokenizer.load(folder / "tokenizer.json"), progress.step)
