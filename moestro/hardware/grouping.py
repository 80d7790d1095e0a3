"""Which devices belong together: fast links inside a group, slow ones between groups, and equal devices in each.

After DeepCEE (arXiv 2505.15536): cluster on the network first, then on compute inside each network group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage

from moestro.errors import MoestroError

# Links differ in kind, not by chance, when the closest pair of groups is this many times slower than the widest group.
LINK_GAP = 3.0
COMPUTE_GAP = 1.25  # a device is of another kind when the next faster one computes this many times as fast


@dataclass(frozen=True)
class Grouping:
    """groups: of ranks, each in rising order. kinds: the same ranks, cut further into devices of about equal speed.

    gap: the largest ratio of the mean bandwidths of two successive merges, which has to reach `threshold` for a cut.
    inside_gbps, between_gbps: geometric means over the pairs; None where there are none.
    """

    groups: tuple[tuple[int, ...], ...]
    kinds: tuple[tuple[int, ...], ...]
    gap: float
    threshold: float
    inside_gbps: float | None
    between_gbps: float | None

    def __str__(self) -> str:
        if len(self.groups) == 1:
            return f"one group of {len(self.groups[0])}: bandwidths fall by no more than {self.gap:.1f}x at once"
        inside = "" if self.inside_gbps is None else f"{self.inside_gbps:.3g} GB/s inside, "
        named = " ".join("[" + " ".join(map(str, group)) + "]" for group in self.groups)
        return f"{len(self.groups)} groups {named}: {inside}{self.between_gbps:.3g} GB/s between (gap {self.gap:.1f}x)"


def group_devices(
    gbps: "np.ndarray | Sequence[Sequence[float]]",
    compute: "np.ndarray | Sequence[float] | None" = None,
    *,
    link_gap: float = LINK_GAP,
    compute_gap: float = COMPUTE_GAP,
) -> Grouping:
    """Group devices by the bandwidths of their pairs, then by speed.

    gbps: [devices, devices], above zero off the diagonal, which is not read; the two directions of a pair are averaged.
    compute: [devices] any score that grows with speed, or None: all are equal.
    Average-linkage clustering on log bandwidth. The tree is cut where the mean bandwidth of successive merges falls
    most, if it falls by `link_gap` or more: links that are all alike, fast or slow, make one group.

    Raises:
        MoestroError: a matrix that is not square, a bandwidth or score that is not a number above zero, or a number of
            scores other than of devices.
    """
    links = np.asarray(gbps, dtype=float)
    if links.ndim != 2 or links.shape[0] != links.shape[1] or not len(links):
        raise MoestroError(f"bandwidths of pairs are a square matrix, not {links.shape}")
    devices = len(links)
    pairs = np.triu_indices(devices, 1)
    both = np.stack([links[pairs], links.T[pairs]])
    if not (np.isfinite(both).all() and (both > 0).all()):
        raise MoestroError("the bandwidth of a pair is a number above zero; measure the missing pairs")
    speeds = np.ones(devices) if compute is None else np.asarray(compute, dtype=float)
    if speeds.shape != (devices,) or not (np.isfinite(speeds).all() and (speeds > 0).all()):
        raise MoestroError(f"compute scores are {devices} numbers above zero, one a device")
    log_gbps = np.log(both).mean(0)
    labels, gap = _cut(log_gbps, devices, link_gap)
    groups = _by_label(labels)
    kinds = tuple(kind for group in groups for kind in _kinds(group, speeds, compute_gap))
    same = labels[pairs[0]] == labels[pairs[1]]
    return Grouping(groups, kinds, gap, link_gap, _geometric_mean(log_gbps[same]), _geometric_mean(log_gbps[~same]))


def _cut(log_gbps: np.ndarray, devices: int, link_gap: float) -> tuple[np.ndarray, float]:
    """Labels [devices] of the clusters, and the largest ratio between successive merges."""
    if devices < 3:  # one link has nothing to be compared with
        return np.zeros(devices, dtype=int), 1.0
    tree = linkage(log_gbps.max() - log_gbps, method="average")
    heights = tree[:, 2]
    jumps = np.diff(heights)
    at = int(jumps.argmax())
    gap = float(np.exp(jumps[at]))
    if gap < link_gap:
        return np.zeros(devices, dtype=int), gap
    return fcluster(tree, (heights[at] + heights[at + 1]) / 2, criterion="distance"), gap


def _by_label(labels: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """The members of each label, groups in the order of their first."""
    members = dict[int, list[int]]()
    for device, label in enumerate(labels.tolist()):
        members.setdefault(label, []).append(device)
    return tuple(tuple(group) for group in members.values())


def _kinds(group: tuple[int, ...], speeds: np.ndarray, gap: float) -> list[tuple[int, ...]]:
    """The group cut wherever the next faster device is `gap` times as fast."""
    by_speed = sorted(group, key=lambda device: speeds[device])
    kinds = [[by_speed[0]]]
    for slower, faster in pairwise(by_speed):
        if speeds[faster] >= gap * speeds[slower]:
            kinds.append([])
        kinds[-1].append(faster)
    return sorted(tuple(sorted(kind)) for kind in kinds)


def _geometric_mean(logs: np.ndarray) -> float | None:
    return math.exp(logs.mean()) if len(logs) else None
