"""The `moestro` command in this process, and a configuration file for it."""

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from train.helpers import config

from moestro.cli.main import main
from moestro.config import to_toml


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def moestro(*arguments: str) -> Outcome:
    """Run `moestro ARGUMENTS`; whatever is not turned into an exit status is raised here, as a traceback would be."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["moestro", *arguments])
        patch.setenv("COLUMNS", "160")
        try:
            main()
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 0 if exit.code is None else 1
    return Outcome(code, out.getvalue(), err.getvalue())


def config_file(folder: Path, *changes: dict[str, Any]) -> str:
    path = folder / "tiny.toml"
    path.write_text(to_toml(config(folder, *changes)), encoding="utf-8")
    return str(path)
