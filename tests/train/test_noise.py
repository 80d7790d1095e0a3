"""The host kept quiet: collections at the same steps, page cache given back."""

import gc
import os
import random
import weakref
from pathlib import Path

import numpy as np
import pytest

from moestro.data.prepare import prepare
from moestro.train.noise import QuietHost, cached_bytes, drop_page_cache

from .helpers import config


class Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


def test_collects_at_its_steps_only() -> None:
    was = gc.isenabled()
    with QuietHost(3, False, []) as quiet:
        assert not gc.isenabled()
        garbage = weakref.ref(Ring())
        for step in (1, 2):
            quiet.after(step)
            assert garbage() is not None
        quiet.after(3)
        assert garbage() is None
    assert gc.isenabled() == was
    assert gc.get_freeze_count() == 0


def test_none_leaves_the_collector_as_it_is() -> None:
    with QuietHost(None, False, []) as quiet:
        assert gc.isenabled()
        quiet.after(1)
    assert gc.isenabled()


def pauses(ranks: int, synchronised: bool, seed: int) -> float:
    """Steps of 10 ms on ranks that each pause for 10 ms in every 50 of them: the ideal time over the real one."""
    rng = random.Random(seed)
    steps, every = 5000, 50
    own = [rng.randrange(every) for _ in range(ranks)]
    total = 0.0
    for step in range(steps):
        if step % every == 0 and not synchronised:
            own = [rng.randrange(every) for _ in range(ranks)]
        late = [10.0 if (step % every == (0 if synchronised else phase)) else 0.0 for phase in own]
        total += 10.0 + max(late)
    return 10.0 * steps / total


def test_pauses_together_cost_as_on_one_rank() -> None:
    """SIGMA's check: four ranks with random pauses; synchronised ones restore 95 % and more of the ideal."""
    for seed in range(3):
        assert pauses(4, synchronised=False, seed=seed) < 0.94
        assert pauses(4, synchronised=True, seed=seed) >= 0.95


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    with path.open("wb") as out:
        out.write(os.urandom(1 << 18))
        out.flush()
        os.fsync(out.fileno())
    try:
        whole = cached_bytes(path)
        drop_page_cache(path)
        if cached_bytes(path) == whole:
            pytest.skip("this file system does not drop its cache on advice")
    except OSError:
        pytest.skip("this kernel does not tell what is cached")
    return path


def test_gives_the_page_cache_back(file: Path) -> None:
    content = file.read_bytes()
    assert cached_bytes(file) == 1 << 18
    drop_page_cache(file.parent)
    assert cached_bytes(file) == 0
    assert file.read_bytes() == content
    drop_page_cache(file.parent / "absent")


def test_drops_text_that_is_mapped(tmp_path: Path, file: Path) -> None:
    settings = config(tmp_path)
    prepared = prepare(settings.data, progress=False)
    shard = prepared.train[0]
    path = shard.folder / "tokens.bin"
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    before = np.array(shard.tokens)
    assert cached_bytes(path) > 0
    with QuietHost(1, True, [prepared]):
        assert cached_bytes(path) == 0
        assert np.array_equal(shard.tokens, before)
