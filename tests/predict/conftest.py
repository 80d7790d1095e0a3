"""The shipped public runs, read once for all tests of predictions."""

import pytest

from moestro.predict.public import PublicRun, parse_runs


@pytest.fixture(scope="session")
def public_runs() -> list[PublicRun]:
    return parse_runs()[0]
