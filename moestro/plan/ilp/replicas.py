"""All layers' experts on devices: the balancer's placement made better, how far it is from the best, what it saves.

The balancer (`experts.balanced_experts`) is greedy. From its placement replicas change places, and a second replica of
an idle expert becomes one of a busy expert, as long as the busiest device's load falls. Where there is time for it, the
integer program looks for the best of each layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moestro.config.plan import RoutingConfig, Workload
from moestro.errors import MoestroError
from moestro.plan.ilp.experts import Experts, balanced_experts, exact_experts, replicate

Floats = NDArray[np.float64]
ROUNDS = 200  # of exchanges, for a layer at most
NEAR = 1e-9  # of the busiest device's load, by which an exchange must lower it


@dataclass(frozen=True)
class Layer:
    """Of one layer, the busiest device's load over the mean.

    before: experts in their order, one replica each. balanced: by the balancer. after: as placed here. bound: no
    placement's is below.
    """

    experts: Experts
    before: float
    balanced: float
    after: float
    bound: float

    @property
    def gap(self) -> float:
        """How far from the best it may be, as a share of the bound."""
        return max(0.0, self.after / self.bound - 1)


def place_experts(
    loads: ArrayLike, places: int, devices: int, nodes: int = 1, groups: int = 1, limit_s: float = 0.0
) -> list[Layer]:
    """Of each layer.

    Args:
        loads: [layers, experts] in any unit.
        places: of all devices together, for experts and their replicas.
        nodes, groups: with several nodes a group of experts stays in one (the router's groups, equally large), since
            that is as far as their tokens go.
        limit_s: for the integer program of each layer, or of each of its nodes; 0: none.

    Raises:
        MoestroError: loads that are not numbers of zero or more, a layer without any, sizes that do not divide, or
            fewer places than experts.
    """
    every = checked_loads(loads)
    if nodes > 1 and groups % nodes:
        raise MoestroError(
            f"{groups} groups of experts do not share out over {nodes} nodes: give groups that do, or one node to "
            "place experts anywhere"
        )
    return [_placed(load, places, devices, nodes, groups, limit_s) for load in every]


def checked_loads(loads: ArrayLike) -> Floats:
    """[layers, experts]. Raises MoestroError: they are not that, or a layer has none."""
    try:
        found = np.asarray(loads, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise MoestroError("loads are numbers, [layers, experts], as many experts in each layer") from error
    found = found[None, :] if found.ndim == 1 else found
    if found.ndim != 2 or not found.size:
        raise MoestroError(f"loads are of layers and experts, [layers, experts], not {list(found.shape)}")
    bad = ~np.isfinite(found) | (found < 0)
    if bad.any():
        layer, expert = (int(n) for n in np.argwhere(bad)[0])
        raise MoestroError(
            f"the load of expert {expert} in layer {layer} is {found[layer, expert]:g}; give numbers of zero or more"
        )
    idle = np.flatnonzero(found.sum(axis=1) == 0)
    if idle.size:
        raise MoestroError(f"layer {int(idle[0])} has no load at all: there is nothing to place its experts by")
    return found


def least_busiest(load: Floats, places: int, devices: int) -> float:
    """No placement's busiest device has less: its even share, or the busiest replica when all places go to the experts
    that need them most."""
    copies = replicate(load, places)
    return max(float(load.sum()) / devices, float((load[copies] / np.bincount(copies)[copies]).max()))


def improved(placed: Experts, load: Floats, nodes: int = 1) -> Experts:
    """With replicas changed as long as that lowers the busiest device's load; none leaves its node."""
    slots = placed.experts.copy()
    for _ in range(ROUNDS):
        now = Experts(slots, placed.devices)
        better = _swapped(now, load, nodes)
        if better is None:
            better = _replaced(now, load, nodes)
        if better is None:
            return now
        slots = better
    return Experts(slots, placed.devices)


def routed(workload: Workload, loads: ArrayLike, layers: Sequence[Layer] = ()) -> Workload:
    """The workload with these loads; with layers, as placed: replicas count as experts that share the load of theirs.

    A plan whose ep is the number of devices then prices experts, exchanges and memory as they lie. Summing the
    gradients of replicas is not in it.

    Raises:
        MoestroError: the model has another number of experts, or none.
    """
    shares, moe = checked_loads(loads), workload.model.moe
    if moe is None or shares.shape[1] != moe.resolved_num_experts:
        experts = 0 if moe is None else moe.resolved_num_experts
        raise MoestroError(f"loads of {shares.shape[1]} experts for a model with {experts}")
    model = workload.model
    if layers:
        shares = np.stack([_shares(one.experts, load) for one, load in zip(layers, shares, strict=True)])
        times = moe.granularity
        changes = {
            "num_experts": shares.shape[1],
            "granularity": 1,
            "expert_hidden_size": moe.resolved_expert_hidden_size,
            "top_k": moe.top_k * times if isinstance(moe.top_k, int) else tuple(k * times for k in moe.top_k),
        }
        model = model.model_copy(update={"moe": moe.model_copy(update=changes)})
    routing = RoutingConfig(kind="measured", loads=tuple(tuple(map(float, row)) for row in shares))
    return workload.model_copy(update={"routing": routing, "model": model})


def _placed(load: Floats, places: int, devices: int, nodes: int, groups: int, limit_s: float) -> Layer:
    mean = float(load.sum()) / devices
    balanced = balanced_experts(load, places, devices, groups, nodes)
    best = improved(balanced, load, nodes)
    bound = max(least_busiest(load, places, devices), _busiest_node(load, devices, nodes, groups))
    if limit_s and best.load(load).max() > bound * (1 + NEAR):
        best, below = _searched(best, load, nodes, limit_s)
        bound = max(bound, below)
    in_order = max(float(own.sum()) for own in np.array_split(load, devices))
    return Layer(
        best, in_order / mean, balanced.imbalance(load), best.imbalance(load),
        min(bound, float(best.load(load).max())) / mean,
    )  # fmt: skip


def _searched(placed: Experts, load: Floats, nodes: int, limit_s: float) -> tuple[Experts, float]:
    """With each node's experts placed by the integer program, where that is better; and a bound, of one node only."""
    slots, below = placed.experts.copy(), 0.0
    for node in range(nodes):
        part = slice(node * len(slots) // nodes, (node + 1) * len(slots) // nodes)
        own = np.unique(slots[part])
        before = Experts(np.searchsorted(own, slots[part]), placed.devices // nodes)
        try:
            exact, below = exact_experts(load[own], part.stop - part.start, placed.devices // nodes, limit_s)
        except MoestroError:  # no time for a first answer
            continue
        if exact.load(load[own]).max() < before.load(load[own]).max():
            slots[part] = own[exact.experts]
    return Experts(slots, placed.devices), below if nodes == 1 else 0.0


def _busiest_node(load: Floats, devices: int, nodes: int, groups: int) -> float:
    """Of a device in the node of the busiest group, at the least: its other groups are the idlest."""
    if nodes == 1:
        return 0.0
    of_groups = np.sort(load.reshape(groups, -1).sum(axis=1))
    others = groups // nodes - 1
    return float(of_groups[-1] + of_groups[:others].sum()) * nodes / devices


def _shares(placed: Experts, load: Floats) -> Floats:
    """Of each place, its replica's load."""
    found: Floats = load[placed.experts] / np.bincount(placed.experts)[placed.experts]
    return found


def _swapped(now: Experts, load: Floats, nodes: int) -> NDArray[np.int64] | None:
    """Two replicas that change places, so that the busier of their devices has the least; None: none helps."""
    share, on = _shares(now, load), now.load(load)
    room, busiest = len(share) // now.devices, int(on.argmax())
    device = np.arange(len(share)) // room
    per_node = now.devices // nodes
    mine = np.arange(busiest * room, (busiest + 1) * room)
    there = np.flatnonzero((device // per_node == busiest // per_node) & (device != busiest))
    if not there.size:
        return None
    change = share[there][None, :] - share[mine][:, None]  # what the busiest device gets, [mine, there]
    then = np.maximum(on[busiest] + change, on[device[there]][None, :] - change)
    a, b = np.unravel_index(int(then.argmin()), then.shape)
    if then[a, b] >= on[busiest] * (1 - NEAR):
        return None
    slots = now.experts.copy()
    slots[[mine[a], there[b]]] = slots[[there[b], mine[a]]]
    return slots


def _replaced(now: Experts, load: Floats, nodes: int) -> NDArray[np.int64] | None:
    """A place that another expert has twice goes to one of the busiest device's experts; the best of such changes."""
    on, copies = now.load(load), np.bincount(now.experts)
    room, busiest = len(now.experts) // now.devices, int(on.argmax())
    per_node = len(now.experts) // nodes
    own = now.experts[busiest * room : (busiest + 1) * room]
    node = busiest * room // per_node
    best, least = None, float(on.max()) * (1 - NEAR)
    for place in range(node * per_node, (node + 1) * per_node):
        if copies[now.experts[place]] < 2:
            continue
        for expert in dict.fromkeys(own.tolist()):
            if expert == now.experts[place]:
                continue
            slots = now.experts.copy()
            slots[place] = expert
            then = float(Experts(slots, now.devices).load(load).max())
            if then < least:
                best, least = slots, then
    return best
