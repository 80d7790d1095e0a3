"""Groups of devices from the bandwidths of their pairs, and from their speed."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import MoestroError
from moestro.hardware.grouping import group_devices

NOISE = 0.2


def planted(
    sizes: list[int], gap: float, seed: int, noise: float = NOISE
) -> tuple[np.ndarray, tuple[tuple[int, ...], ...]]:
    """Bandwidths [devices, devices] of 100 inside the clusters and 100/gap between, and the clusters, shuffled."""
    rng = np.random.default_rng(seed)
    cluster = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    gbps = np.where(cluster[:, None] == cluster[None, :], 100.0, 100.0 / gap)
    gbps = gbps * rng.uniform(1 - noise, 1 + noise, gbps.shape)
    members = {int(c): tuple(np.flatnonzero(cluster == c).tolist()) for c in cluster}
    return gbps, tuple(sorted(members.values()))


@settings(deadline=None, max_examples=150)
@given(first=st.integers(1, 12), second=st.integers(2, 12), seed=st.integers(0, 10**6))
def test_two_planted_clusters_are_recovered_exactly(first: int, second: int, seed: int) -> None:
    gbps, clusters = planted([first, second], 10, seed)
    found = group_devices(gbps)
    assert found.groups == clusters
    assert found.gap > found.threshold
    assert found.between_gbps == pytest.approx(10, rel=0.2)
    assert found.inside_gbps == pytest.approx(100, rel=0.25)


@settings(deadline=None, max_examples=50)
@given(sizes=st.lists(st.integers(2, 6), min_size=3, max_size=5), seed=st.integers(0, 10**6))
def test_several_planted_clusters(sizes: list[int], seed: int) -> None:
    gbps, clusters = planted(sizes, 10, seed)
    assert group_devices(gbps).groups == clusters


@settings(deadline=None, max_examples=150)
@given(devices=st.integers(1, 24), seed=st.integers(0, 10**6))
def test_links_that_are_alike_make_one_group(devices: int, seed: int) -> None:
    gbps, _ = planted([devices], 1, seed)
    found = group_devices(gbps)
    assert found.groups == (tuple(range(devices)),)
    assert found.between_gbps is None
    assert str(found).startswith(f"one group of {devices}: ")


def test_each_direction_counts_alike() -> None:
    gbps, clusters = planted([3, 3], 10, 0, noise=0)
    skewed = gbps * np.where(np.triu(np.ones((6, 6))) > 0, 2.0, 0.5)
    found = group_devices(skewed)
    assert found.groups == clusters
    assert found.inside_gbps == pytest.approx(100)
    assert found.gap == pytest.approx(10)


def test_groups_are_cut_by_speed() -> None:
    gbps, _ = planted([1], 1, 0)
    gbps = np.where(np.arange(6)[:, None] // 3 == np.arange(6)[None, :] // 3, 50.0, 1.0)
    found = group_devices(gbps, [100, 312, 99, 310, 305, 300])
    assert found.groups == ((0, 1, 2), (3, 4, 5))
    assert found.kinds == ((0, 2), (1,), (3, 4, 5))
    assert str(found) == "2 groups [0 1 2] [3 4 5]: 50 GB/s inside, 1 GB/s between (gap 50.0x)"


@pytest.mark.parametrize("devices", [1, 2])
def test_too_few_links_to_compare(devices: int) -> None:
    found = group_devices(np.full((devices, devices), 5.0))
    assert found.groups == (tuple(range(devices)),)
    assert found.inside_gbps == (None if devices == 1 else pytest.approx(5.0))


def test_the_diagonal_is_not_read() -> None:
    gbps = np.full((3, 3), 4.0)
    np.fill_diagonal(gbps, math.nan)
    assert group_devices(gbps).groups == ((0, 1, 2),)


@pytest.mark.parametrize(
    ("gbps", "compute", "message"),
    [
        (np.ones((2, 3)), None, "a square matrix"),
        (np.ones((0, 0)), None, "a square matrix"),
        (np.array([[1, math.nan], [1, 1]]), None, "a number above zero; measure the missing pairs"),
        (np.array([[1, 0], [1, 1]]), None, "a number above zero"),
        (np.ones((2, 2)), [1.0], "2 numbers above zero"),
        (np.ones((2, 2)), [1.0, -1.0], "2 numbers above zero"),
    ],
)
def test_bad_input(gbps: np.ndarray, compute: list[float] | None, message: str) -> None:
    with pytest.raises(MoestroError, match=message):
        group_devices(gbps, compute)
