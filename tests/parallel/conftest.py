"""What one process computes, worked out once for all workers of a test run."""

import fcntl
from pathlib import Path

import pytest
import torch

from parallel.cases import MODELS


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    from parallel.test_equal import train_alone

    base = tmp_path_factory.getbasetemp()
    folder = base if worker_id == "master" else base.parent  # the parent is shared by xdist's workers
    path = folder / "references.pt"
    with (folder / "references.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            torch.save({(m, o): train_alone(m, o) for m in MODELS for o in ("adamw", "muon")}, path)
    return path
