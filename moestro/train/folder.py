"""A run's folder: resolved config, environment, metrics, events, checkpoints, report; held by one process at a time."""

import fcntl
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self, TextIO

import torch

import moestro
from moestro.config import Config, load_config, to_toml
from moestro.errors import MoestroError

# Changing one of these between start and resume would continue another run than the one that was begun.
FIXED = ("model.", "data.", "train.global_batch_size", "train.phases", "run.seed", "optim.name")
FREE = ("data.cache_dir", "model.moe.experts", "model.attention")


class RunFolder:
    """Opens (or makes) the folder and locks it until `close`. Of several ranks only the main one does, and writes."""

    def __init__(self, path: Path, main: bool = True) -> None:
        self.path, self._main = path, main
        self._lock: TextIO | None = None
        if not main:
            return
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = (path / ".lock").open("w")
        except OSError as error:
            raise MoestroError(f"cannot make the run's folder {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise MoestroError(
                f"another process is training in {path}; wait for it or choose another run.name"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def has_run(self) -> bool:
        return (self.path / "config.toml").exists()

    def config(self) -> Config:
        return load_config(str(self.path / "config.toml")).config

    def write_config(self, config: Config) -> None:
        self.write("config.toml", to_toml(config))

    def write(self, file: str, text: str) -> None:
        if self._main:
            write_text(self.path / file, text)

    def refuse_changes(self, config: Config) -> None:
        """Raise MoestroError when `config` would not continue the run in this folder."""
        begun = self.config()
        if phases := len(begun.train.phases):  # more of them may be added
            train = config.train.model_copy(update={"phases": config.train.phases[:phases]})
            config = config.model_copy(update={"train": train})
        old, new = _flat(begun.model_dump(mode="json")), _flat(config.model_dump(mode="json"))
        for key in sorted(old.keys() | new.keys()):
            if key.startswith(FIXED) and key not in FREE and old.get(key) != new.get(key):
                raise MoestroError(
                    f"{self.path} was begun with {key} = {old.get(key)!r}, now it is {new.get(key)!r}; "
                    "resume with the same settings or choose another run.name"
                )

    def append(self, file: str, record: dict[str, Any]) -> None:
        """Add one JSON line in one write, so that a killed run leaves at most one torn line, at the end."""
        if not self._main:
            return
        try:
            with (self.path / file).open("ab") as stream:
                stream.write((json.dumps(record) + "\n").encode())
        except OSError as error:
            raise MoestroError(f"cannot write {self.path / file}: {error.strerror}") from error

    def mend(self, file: str) -> None:
        """Cut a torn last line off, left by a killed run, before more is appended."""
        path = self.path / file
        if self._main and path.exists() and not (content := path.read_bytes()).endswith(b"\n"):
            with path.open("r+b") as stream:
                stream.truncate(content.rfind(b"\n") + 1)

    def event(self, name: str, step: int, **details: Any) -> None:
        self.append(
            "events.jsonl", {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": name, "step": step, **details}
        )


def write_text(path: Path, text: str) -> None:
    """Write through a temporary name, so that the file is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def environment(device: str) -> dict[str, Any]:
    """Versions, machine and code state, for whoever reads the run later."""
    commit, dirty = _git_state()
    return {
        "moestro": moestro.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device_name": device,
        "num_threads": torch.get_num_threads(),
        "cpu_count": os.cpu_count(),
        "git_commit": commit,
        "git_dirty": dirty,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join(["moestro", *sys.argv[1:]]),
    }


def _git_state() -> tuple[str | None, bool | None]:
    """The commit of the checkout this package runs from, if it runs from one."""
    root = Path(moestro.__file__).parents[1]
    if not (root / ".git").exists():
        return None, None
    try:
        head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run(
            ["git", "-C", root, "status", "--porcelain"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return head.stdout.strip(), bool(status.stdout.strip())


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, list) and all(isinstance(item, dict) for item in tree):
        tree = {str(i): item for i, item in enumerate(tree)}
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(_flat(value, f"{prefix}.{key}" if prefix else key))
    return flat
