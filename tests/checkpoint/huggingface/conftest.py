"""The models that the tests share, made when they are first wanted."""

import pytest

from .models import Made, transformers


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return Made(tmp_path_factory.mktemp("huggingface"))
