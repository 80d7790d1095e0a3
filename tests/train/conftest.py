"""Runs of a few steps in temporary folders."""

from collections.abc import Iterator

import pytest

from moestro.train import loop


@pytest.fixture(scope="package", autouse=True)
def no_peak_measurement() -> Iterator[None]:
    """The half second of GEMM timing before each run, left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "measure_gemm_flops", lambda device, dtype: 1e11)
        yield
