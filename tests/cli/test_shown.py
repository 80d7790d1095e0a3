"""What machines read is JSON, whatever the numbers are."""

import json
from typing import NamedTuple

import numpy as np
import pytest

from moestro.cli.shown import finite, print_json


class Pair(NamedTuple):
    rate: float
    name: str


def test_no_number_breaks_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    inf, nan = float("inf"), float("nan")
    print_json({"rate": inf, "all": (1.5, nan, Pair(-inf, "storage")), "n": 3, "no": None, "ü": True})
    text = capsys.readouterr().out
    pair = {"rate": None, "name": "storage"}
    assert json.loads(text) == {"rate": None, "all": [1.5, None, pair], "n": 3, "no": None, "ü": True}
    assert "ü" in text


def test_what_is_no_plain_data_is_refused() -> None:
    assert finite(np.float64(2.5)) == 2.5
    with pytest.raises(TypeError):
        print_json({"count": np.int64(3)})
