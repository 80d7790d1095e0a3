"""Runs of a few steps in temporary folders."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from moestro.predict import cache
from moestro.train import loop


@pytest.fixture(scope="package", autouse=True)
def no_peak_measurement() -> Iterator[None]:
    """The half second of GEMM timing before each run, left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "measure_gemm_flops", lambda device, dtype: 1e11)
        yield


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no public samples: devices by their data sheets, at once."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(cache.FOLDER, str(folder))
    monkeypatch.setattr(cache, "_known", {})
    monkeypatch.setattr(cache, "_as_read", {})
    monkeypatch.setattr(cache, "_shipped", lambda device_id: ())
    return folder
