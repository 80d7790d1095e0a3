"""Held-out loss is the same on every layout, also when the last batches do not fill all ranks and micro-batches."""

from collections.abc import Iterator
from typing import Any

import pytest
from distributed import run_ranks

from moestro.data.batches import IGNORE, Batch
from moestro.train.evaluate import EvalResult, evaluate
from parallel.cases import CHOICES, MESH, Case, global_batch
from parallel.test_equal import trainer

LAYOUTS: list[dict[str, Any]] = [
    *({"pp": 2, "schedule": name} for name in CHOICES["schedule"]),
    {"dp": 2, "ep": 2},
    {"fsdp": 2, "ep": 2},
    {"cp": 2},
    {"tp": 2},
]


class Stream:
    """Three batches of at most `size` sequences, of which the last has one only."""

    bytes, predictions = 1000, 0

    def __init__(self) -> None:
        whole = global_batch(50)
        self.parts = [Batch(*(value[i:j] for value in vars(whole).values())) for i, j in ((0, 1), (1, 2), (2, 3))]
        self.predictions = sum(int((part.labels != IGNORE).sum()) for part in self.parts)

    def batches(self, size: int, limit: int | None) -> Iterator[Batch]:
        return iter(self.parts[:limit])


def evaluated(world_size: int, settings: dict[str, Any]) -> EvalResult:
    choices = {name: values[0] for name, values in CHOICES.items()} | {"model": "groups"}
    sizes = tuple((name, settings.get(name, 1)) for name in MESH)
    choices |= {name: value for name, value in settings.items() if name not in MESH}
    engine, _ = trainer(Case(world_size, sizes, tuple(choices.items())).config(), world_size)
    return evaluate(engine, Stream(), 1)  # type: ignore[arg-type]


def check(rank: int, expected: EvalResult) -> None:
    for settings in LAYOUTS:
        got = evaluated(2, settings)
        assert got.loss == pytest.approx(expected.loss, rel=1e-6), settings
        assert (got.tokens, got.bytes) == (expected.tokens, expected.bytes), settings


def test_evaluation_on_two_ranks() -> None:
    run_ranks(check, 2, evaluated(1, {}), timeout_s=400)
