"""A small simulation of nodes with one network card each, and of the ways an all-to-all can use it."""

from dataclasses import dataclass
from functools import cache
from itertools import product

import torch

SLOW = 6e9  # bytes/s, a device's share of its node's card in the two-hop comparison
Message = tuple[int, int, float]  # from device, to device, bytes


@dataclass(frozen=True)
class Network:
    """Nodes with one card each, devices with a port each towards the others of the node. Seconds and bytes/s."""

    devices: int  # of a node
    card: float
    port: float
    card_latency: float = 0.0
    port_latency: float = 0.0


def simulate(network: Network, messages: list[Message]) -> float:
    """Seconds until the last message has arrived; each occupies its sender's and its receiver's card (or port).

    Messages start in their order, as soon as both ends are free.
    """
    free, end = dict[tuple[str, int], float](), 0.0
    for source, to, size in messages:
        nodes = source // network.devices, to // network.devices
        if source == to or size == 0:
            continue
        if nodes[0] == nodes[1]:
            ends, seconds = (("port out", source), ("port in", to)), network.port_latency + size / network.port
        else:
            ends, seconds = (("card out", nodes[0]), ("card in", nodes[1])), network.card_latency + size / network.card
        done = max(free.get(e, 0.0) for e in ends) + seconds
        free |= dict.fromkeys(ends, done)
        end = max(end, done)
    return end


def rounds(nodes: int, devices: int) -> list[tuple[int, int]]:
    """All pairs of devices, in an order that keeps every card and port busy: node by node, each to another one."""
    pairs = [
        (node * devices + device, (node + shift) % nodes * devices + (device + turn) % devices)
        for shift, turn, device, node in product(range(nodes), range(devices), range(devices), range(nodes))
    ]
    return [(source, to) for source, to in pairs if source != to]


def leader_speed_up(network: Network, nodes: int, size: float) -> float:
    """Flat over leader time, when each device has `size` bytes for each device."""
    devices = network.devices
    count = nodes * devices
    flat = simulate(network, [(source, to, size) for source, to in rounds(nodes, devices)])
    gather = simulate(network, [(d, d - d % devices, count * size) for d in range(count)])
    scatter = simulate(network, [(d - d % devices, d, count * size) for d in range(count)])
    between = [(a * devices, b * devices, devices**2 * size) for a, b in rounds(nodes, 1)]
    return flat / (gather + simulate(network, between) + scatter)


@dataclass(frozen=True)
class Route:
    """Random tokens of each device, each to `experts` (q) devices on each of `visited` (M) of the other nodes."""

    nodes: int = 5
    devices: int = 8
    visited: int = 2
    experts: int = 3
    tokens: int = 512
    token_bytes: int = 2 * 7168

    def predicted(self, latency: float = 0.0) -> float:
        """Fast over slow bandwidth of a device beyond which two hops are faster; (1 - 1/R) q / (q - 1) without latency.

        Flat: R²(N - 1) messages on a card and T·M·q copies a device. Two hops: R(N - 1) messages and T·M copies, then
        R - 1 messages on a port and the copies that do not stay where they landed.
        """
        devices, others = self.devices, self.nodes - 1
        copy = self.token_bytes / SLOW
        flat = devices**2 * others * latency + self.tokens * self.visited * self.experts * copy
        first = devices * others * latency + self.tokens * self.visited * copy
        left = flat - first - (devices - 1) * latency  # for the second hop
        inside = self.tokens * self.visited * self.experts * (1 - 1 / devices) * copy  # at a ratio of one
        return inside / left if left > 0 else float("inf")


@cache
def messages_of(route: Route) -> tuple[list[Message], list[Message], list[Message]]:
    """Flat, one copy an expert; and two hops: to the device of the same number on each node, then inside."""
    generator = torch.Generator().manual_seed(route.experts)
    count, size = route.nodes * route.devices, route.token_bytes
    first, copies = torch.zeros(count, route.nodes), torch.zeros(count, count)
    for device in range(count):
        other = torch.rand(route.tokens, route.nodes - 1, generator=generator).argsort(1)[:, : route.visited]
        node = (device // route.devices + 1 + other) % route.nodes
        place = torch.rand(route.tokens, route.visited, route.devices, generator=generator).argsort(2)
        to = node[:, :, None] * route.devices + place[:, :, : route.experts]
        first[device] = torch.bincount(node.flatten(), minlength=route.nodes)
        copies[device] = torch.bincount(to.flatten(), minlength=count)
    second = torch.zeros(count, count)  # from the device where a copy lands
    for source, target in product(range(count), repeat=2):
        second[target - target % route.devices + source % route.devices, target] += copies[source, target]
    pairs = rounds(route.nodes, route.devices)
    landing = [(a, b) for a, b in pairs if a % route.devices == b % route.devices]
    return (
        [(a, b, size * copies[a, b].item()) for a, b in pairs],
        [(a, b, size * first[a, b // route.devices].item()) for a, b in landing],
        [(a, b, size * second[a, b].item()) for a, b in pairs],
    )


def two_hop_speed_up(route: Route, ratio: float, latency: float = 0.0) -> float:
    """Flat over two-hop time when a device's port is `ratio` times as fast as its share of the card."""
    network = Network(route.devices, SLOW * route.devices, SLOW * ratio, latency, latency)
    flat, first, second = messages_of(route)
    return simulate(network, flat) / (simulate(network, first) + simulate(network, second))


def break_even(route: Route, latency: float = 0.0) -> float:
    """The simulated ratio at which both take equally long; infinite when two hops never win."""
    low, high = 0.1, 1000.0
    if two_hop_speed_up(route, high, latency) < 1:
        return float("inf")
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if two_hop_speed_up(route, middle, latency) > 1 else (middle, high)
    return high
