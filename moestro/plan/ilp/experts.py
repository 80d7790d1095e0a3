"""Replicas of busy experts, and on which device each lies.

`replicate`, `pack` and `balanced_experts` are the algorithm of DeepSeek's expert-parallel load balancer (EPLB, with
DeepSeek-V3, arXiv 2412.19437), written anew from its description: groups of experts to nodes, replicas to the experts
with the most load for each they have, replicas to devices. `exact_experts` finds the best placement there is, in small.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moestro.errors import MoestroError
from moestro.plan.ilp.program import Program

Whole = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Experts:
    """experts: of each place the expert that lies there, [places], those of a device side by side."""

    experts: Whole
    devices: int

    def load(self, loads: ArrayLike) -> Floats:
        """Of each device, where replicas share their expert's load evenly."""
        replicas = np.bincount(self.experts)
        each = np.asarray(loads, dtype=np.float64)[self.experts] / replicas[self.experts]
        found: Floats = each.reshape(self.devices, -1).sum(axis=1)
        return found

    def imbalance(self, loads: ArrayLike) -> float:
        """The busiest device's load over the mean."""
        load = self.load(loads)
        return float(load.max() / load.mean())


def balanced_experts(loads: ArrayLike, places: int, devices: int, groups: int = 1, nodes: int = 1) -> Experts:
    """Of one layer, in three steps: groups of experts to nodes, replicas inside each node, replicas to its devices.

    groups: the router's, of equal size, in which experts lie side by side; a group stays in a node, since its tokens
    do. Where groups do not share out over nodes, all devices are one node (the global variant).

    Raises:
        MoestroError: sizes that do not divide, fewer places than experts, or loads below zero.
    """
    load = _checked(loads, places, devices)
    if groups % nodes:
        groups, nodes = 1, 1
    if len(load) % groups or places % nodes or devices % nodes:
        raise MoestroError(
            f"{len(load)} experts in {groups} groups, {places} places and {devices} devices do not share out over "
            f"{nodes} nodes"
        )
    size = len(load) // groups
    by_node = pack(load.reshape(groups, size).sum(axis=1), nodes)
    found = []
    for own in by_node:
        experts = np.concatenate([np.arange(group * size, (group + 1) * size) for group in own])
        copies = replicate(load[experts], places // nodes)
        shared = load[experts] / np.bincount(copies)
        for device in pack(shared[copies], devices // nodes):
            found += [int(experts[copies[place]]) for place in device]
    return Experts(np.array(found), devices)


def replicate(loads: ArrayLike, places: int) -> Whole:
    """Which expert each place gets: each expert one, then one after the other that whose replicas are busiest."""
    load = np.asarray(loads, dtype=np.float64)
    count = np.ones(len(load))
    found = list(range(len(load)))
    for _ in range(places - len(load)):
        busiest = int((load / count).argmax())
        found.append(busiest)
        count[busiest] += 1
    return np.array(found)


def pack(loads: ArrayLike, packs: int) -> list[list[int]]:
    """Equally many items for each pack: the heaviest first, each to the lightest pack that has room.

    Raises:
        MoestroError: the items do not share out.
    """
    load = np.asarray(loads, dtype=np.float64)
    if len(load) % packs:
        raise MoestroError(f"{len(load)} items do not share out over {packs}")
    room = len(load) // packs
    found: list[list[int]] = [[] for _ in range(packs)]
    full = [0.0] * packs
    for item in np.argsort(-load, kind="stable"):
        lightest = min((n for n in range(packs) if len(found[n]) < room), key=full.__getitem__)
        found[lightest].append(int(item))
        full[lightest] += float(load[item])
    return found


def exact_experts(loads: ArrayLike, places: int, devices: int, limit_s: float = 20.0) -> tuple[Experts, float]:
    """The numbers of replicas and the places of least load on the busiest device, without regard to nodes; and a load
    that no placement's busiest device is below, lower than that of this one where time ran out.

    Every expert has a variable for each number of replicas that it might have and each device: small instances only (a
    dozen experts). The balanced placement is an upper bound from which it starts.

    Raises:
        MoestroError: as balanced_experts; or time ran out.
    """
    load = _checked(loads, places, devices)
    room, program = places // devices, Program()
    unit = float(load.sum()) / devices or 1.0
    busiest = program.number(cost=1.0, most=float(balanced_experts(load, places, devices).load(load).max()) / unit)
    most = places - len(load) + 1
    on: list[dict[tuple[int, int], int]] = [{} for _ in range(devices)]  # (expert, replicas) -> how many here
    for expert in range(len(load)):
        chosen = [program.integer(1) for _ in range(most)]
        program.row([(v, 1) for v in chosen], 1, 1)
        for number, choice in enumerate(chosen, 1):
            for device in range(devices):
                on[device][expert, number] = program.integer(min(number, room))
            program.row([*((here[expert, number], 1) for here in on), (choice, -number)], 0, 0)
    for here in on:
        program.row([(v, 1) for v in here.values()], room, room)
        program.row([(busiest, 1), *((v, -load[e] / n / unit) for (e, n), v in here.items())], 0)
    for one, other in pairwise(on):  # equal devices by falling load: each placement once
        terms = [(v, load[e] / n / unit) for (e, n), v in one.items()]
        program.row([*terms, *((v, -load[e] / n / unit) for (e, n), v in other.items())], 0)
    found = program.solve(limit_s)
    assert found is not None, "the balanced placement is one"
    experts = [e for here in on for (e, _), v in here.items() for _ in range(found.count(v))]
    return Experts(np.array(experts), devices), found.bound * unit


def _checked(loads: ArrayLike, places: int, devices: int) -> Floats:
    load = np.asarray(loads, dtype=np.float64)
    if load.ndim != 1 or not len(load) or not np.isfinite(load).all() or (load < 0).any():
        raise MoestroError("loads are of each expert of a layer, numbers of zero or more")
    if devices < 1 or places < len(load) or places % devices:
        raise MoestroError(
            f"{places} places for {len(load)} experts on {devices} devices: give as many as experts or more, in "
            "multiples of the devices"
        )
    return load
