"""Before the first step: the run's folder, the data of each phase, and a refusal of what cannot be trained here."""

import json
from pathlib import Path

from moestro.checkpoint.inspect import all_checkpoints
from moestro.checkpoint.store import checkpoints
from moestro.config import Config
from moestro.data.prepare import PreparedData
from moestro.data.tokenizer import Tokenizer
from moestro.data.trim import trim_sources
from moestro.errors import DamagedDataError, MoestroError
from moestro.parallel.comm import Group
from moestro.train.folder import RunFolder
from moestro.train.together import on_main
from moestro.train.trackers import check_trackers


def open_folder(path: Path, resume: str, world: Group) -> RunFolder:
    """The run's folder, held by the main rank; a refusal there is one everywhere."""
    folder: list[RunFolder] = []

    def hold() -> None:
        folder.append(RunFolder(path))
        if folder[0].has_run and resume == "never":
            folder[0].close()
            raise MoestroError(
                f"{path} already holds a run; continue it with run.resume=auto or choose another run.name"
            )

    on_main(world, hold)
    return folder[0] if folder else RunFolder(path, main=False)


def trimmed_data(config: Config, prepared: PreparedData) -> list[tuple[PreparedData, list[str]]]:
    """Each phase's data, and notes on what was trimmed."""
    return [trim_sources(prepared, config.in_phase(number).data) for number in range(config.num_phases)]


def begin(config: Config, folder: RunFolder, prepared: PreparedData) -> None:
    """Refuse what cannot be trained or continued here, then note what will be."""
    if folder.has_run:
        folder.refuse_changes(config)
    if config.run.init_from is not None and not checkpoints(folder.checkpoints):
        _check_start(Path(config.run.init_from), prepared)
    check_trackers(config)
    _check_prompts(config, prepared)
    _refuse_changed_text(folder, prepared)
    folder.write_config(config)
    prepared.tokenizer.save(folder.tokenizer)


def with_vocabulary(config: Config, prepared: PreparedData) -> Config:
    """The config with the size of the tokenizer's vocabulary, where it leaves that open.

    Raises:
        MoestroError: the model knows fewer token ids than the data have.
    """
    size = prepared.tokenizer.vocab_size
    if prepared.vocab_size > max(config.model.vocab_size or 0, size):
        raise MoestroError(
            f"sources bring token ids up to {prepared.vocab_size - 1}; set model.vocab_size to at least "
            f"{prepared.vocab_size}"
        )
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


def _check_start(source: Path, prepared: PreparedData) -> None:
    """Raise MoestroError when run.init_from cannot be begun from, before the folder holds a run."""
    tokenizer = all_checkpoints(source)[-1].parent.parent / "tokenizer.json"
    if tokenizer.is_file() and Tokenizer.load(tokenizer).fingerprint != prepared.tokenizer.fingerprint:
        raise MoestroError(
            f"run.init_from = {source} was trained with another tokenizer; set data.tokenizer.kind=file "
            f"data.tokenizer.path={tokenizer}"
        )


def _refuse_changed_text(folder: RunFolder, prepared: PreparedData) -> None:
    """Raise MoestroError when the text is not the one this run was begun with; note it for the next time."""
    checksums = json.dumps([shard.checksum for shard in (*prepared.train, *prepared.validation)])
    note = folder.path / "data.json"
    if note.exists() and note.read_text() != checksums:
        raise DamagedDataError(
            f"the text behind data.sources has changed since {folder.path} was begun; restore it or choose another "
            "run.name"
        )
    folder.write(note.name, checksums)
