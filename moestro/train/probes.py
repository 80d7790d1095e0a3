"""Looks at weights and ranks that are too dear for every step: layers' norms, updates' sizes, replicas, arithmetic.

All ranks call each of these at the same step.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moestro.optim.update import Update
from moestro.parallel.comm import Group, all_reduce, gather_list
from moestro.parallel.ranks import together
from moestro.train.guards import odd_ones

SAMPLE = 4096  # elements of a tensor whose update is measured
ROWS, COLUMNS = 16, 256  # of a product that is computed again
# Of a product on an accelerator, over its largest element: kernels may add up in another order each time.
TOLERANCE = 1e-2
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Mismatch(NamedTuple):
    """Ranks that differ from the majority of those that should agree; all of them where there is none."""

    what: str
    ranks: list[int]
    among: list[int]

    @property
    def text(self) -> str:
        who = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"one of ranks {', '.join(map(str, self.ranks))}"
        return f"{self.what} is not the same on all replicas: {who}"


def layer_norms(update: Update) -> list[float]:
    """The root mean square of each layer's weights, over the matrices that all layers have; [] where there are none."""
    everyone = together(update.mesh.world, lambda: _sums_of_squares(update))
    sums: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))
    for rank in everyone:
        for (layer, name), (square, elements) in rank.items():
            total = sums[name][layer]
            total[0], total[1] = total[0] + square, total[1] + elements
    layers = sorted({layer for by_layer in sums.values() for layer in by_layer})
    common = [by_layer for by_layer in sums.values() if len(by_layer) == len(layers)]
    squares = ([by_layer[layer] for by_layer in common] for layer in layers if common)
    return [(sum(s for s, _ in parts) / sum(n for _, n in parts)) ** 0.5 for parts in squares]


def _sums_of_squares(update: Update) -> dict[tuple[int, str], tuple[float, int]]:
    names, squares, elements = [], [], []
    for name, tensor in update.parameters_state().items():
        found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if found is None or len(tensor.shape) < 2:
            continue
        for chunk in tensor.chunks:
            names.append((int(found[1]), found[2]))
            squares.append(torch.linalg.vector_norm(chunk.tensor, dtype=torch.float32).double().square())
            elements.append(chunk.tensor.numel())
    values = torch.stack(squares).tolist() if squares else []
    sums: dict[tuple[int, str], tuple[float, int]] = {}
    for key, square, n in zip(names, values, elements, strict=True):
        before = sums.get(key, (0.0, 0))
        sums[key] = before[0] + square, before[1] + n
    return sums


class UpdateSizes:
    """Made before an update; `measure` tells its root mean square over the learning rate, by tensor."""

    def __init__(self, update: Update) -> None:
        self._before = {name: _sample(tensor).clone() for name, (tensor, _) in update.stepped().items()}

    def measure(self, update: Update) -> tuple[dict[str, float], dict[str, float]]:
        """Sizes and learning rates of this rank's tensors."""
        now = update.stepped()
        changes = [(_sample(now[name][0]) - before).square().mean().sqrt() for name, before in self._before.items()]
        sizes = torch.stack(changes).tolist() if changes else []
        return dict(zip(self._before, sizes, strict=True)), {name: now[name][1] for name in self._before}


def _sample(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[:SAMPLE]


def differing_weights(update: Update) -> list[Mismatch]:
    """Weights that replicas hold with different bits, the first one of each group of replicas; the same on every rank.

    A checksum is the sum of a tensor's bit patterns as integers, so that one flipped bit always shows.
    """
    sums = {
        group: (list(named), torch.stack([_bit_sum(tensor) for tensor in named.values()]))
        for group, named in update.replicas().items()
    }
    return _disagreements(sums, update.mesh.world)


def _bit_sum(tensor: Tensor) -> Tensor:
    bits = tensor.contiguous().view(BITS[tensor.element_size()])
    return bits.sum(dtype=torch.int64)


def differing_products(update: Update, number: int) -> list[Mismatch]:
    """Compute a product with one of the weights (the `number`-th, beginning again after the last) twice, and on all
    replicas; what differs, the same on every rank."""
    replicas: Mapping[Group, Mapping[str, Tensor]] = update.replicas()
    if not replicas:
        replicas = {None: {name: tensor for name, (tensor, _) in update.stepped().items()}}
    sums, alone = {}, list[Mismatch]()
    for group, named in replicas.items():
        matrices = [(name, tensor) for name, tensor in named.items() if tensor.dim() > 1 and tensor.numel()]
        if not matrices:
            continue
        name, weight = matrices[number % len(matrices)]
        first, second = _product(weight, number), _product(weight, number)
        if not _is_close(first, second):
            me = update.mesh.rank
            alone.append(Mismatch(f"a product with {name}, computed twice on one rank,", [me], [me]))
        sums[group] = ([f"a product with {name}"], first)
    return _disagreements(sums, update.mesh.world, alone)


def _product(weight: Tensor, seed: int) -> Tensor:
    rows = weight.reshape(-1, weight.shape[-1])[:COLUMNS]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, rows.shape[1], generator=generator).to(rows)
    return x @ rows.t()


def _is_close(x: Tensor, y: Tensor) -> bool:
    if x.device.type == "cpu":
        return torch.equal(x, y)
    return bool((x - y).abs().max() <= TOLERANCE * x.abs().max())


def _disagreements(
    found: Mapping[Group, tuple[Sequence[str], Tensor]], world: Group, mine: Sequence[Mismatch] = ()
) -> list[Mismatch]:
    """Compare what the ranks of each group found: [names] integers, or one product. Everyone gets what anyone saw."""
    seen = list(mine)
    for group, (names, values) in found.items():
        everyone = gather_list(values, group)
        if all(_is_close(values, other) for other in everyone):
            continue
        ranks = dist.get_process_group_ranks(group) if group is not None else [0]
        for i, name in enumerate(names):
            here = [rank[i] if values.dtype == torch.int64 else rank for rank in everyone]
            classes = [next(j for j, other in enumerate(here) if _is_close(other, one)) for one in here]
            if odd := odd_ones(classes):
                seen.append(Mismatch(name, [ranks[j] for j in odd], ranks))
                break
    flag = torch.tensor(int(bool(seen)))
    if not int(all_reduce(flag, world, dist.ReduceOp.MAX)):
        return []
    unique = {(m.what, *m.ranks): m for rank in together(world, lambda: seen) for m in rank}
    return list(unique.values())
