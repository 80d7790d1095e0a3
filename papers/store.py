"""Recorded results: run a paper, keep what it found in results/<slug>.json, read it back."""

import json
import os
import platform
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from moestro import __version__
from moestro.errors import MoestroError
from papers.result import Paper, Progress, Record

RESULTS_DIR = Path(__file__).parent / "results"


def run_paper(paper: Paper, progress: Progress) -> Record:
    start = time.perf_counter()
    result = paper.run(progress)
    return Record(
        slug=paper.slug,
        recorded=datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        seconds=round(time.perf_counter() - start, 1),
        machine=_machine(),
        versions={"moestro": __version__, "torch": version("torch"), "python": platform.python_version()},
        result=result,
    )


def record_path(slug: str) -> Path:
    return RESULTS_DIR / f"{slug}.json"


def read_record(slug: str) -> Record | None:
    """The paper's recorded result, None when it has none.

    Raises:
        MoestroError: the file is there but is not a record.
    """
    path = record_path(slug)
    try:
        return TypeAdapter(Record).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        cause = str(error).splitlines()[0]
        raise MoestroError(f"{path} is not a record ({cause}); `moestro papers run {slug}` writes it anew") from error


def write_record(record: Record) -> Path:
    """Write results/<slug>.json whole or not at all.

    Raises:
        OSError: the folder cannot be written, as in a system-wide installation.
    """
    path = record_path(record.slug)
    text = json.dumps(asdict(record), indent=2, ensure_ascii=False) + "\n"
    path.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
        temporary = Path(file.name)
        file.write(text)
    temporary.chmod(0o644)  # a temporary file is private; a record is not
    os.replace(temporary, path)
    return path


def _machine() -> str:
    import torch

    from moestro.hardware.device import device_name

    processor = device_name(torch.device("cpu")).rpartition(",")[0]
    return f"{processor}, {os.cpu_count()} CPUs"
