"""Settings every test shares: one quiet thread, so that a busy machine slows nothing and results repeat."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with several ranks take longest: first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: "parallel" not in item.path.parts)
