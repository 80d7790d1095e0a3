"""Tensor parallelism with sequence parallelism: what a module gathers before, and sums and scatters after, its product.

Attention heads and feed-forward widths are split over the tp ranks. Between such modules each rank holds a part of the
positions, so norms, router, embedding and head work on its own tokens only, and their gradients add up over tp as they
do over data ranks (Megatron's sequence parallelism, arXiv 2205.05198, carried through to the loss).
"""

from dataclasses import dataclass

from torch import Tensor

from moestro.parallel.comm import Group, all_gather, rank_in, reduce_scatter, size_of


@dataclass(frozen=True)
class TensorRanks:
    """A `TensorShard` over a group."""

    group: Group

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return all_gather(x, dim, self.group)

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        return reduce_scatter(x, dim, self.group)

    def total(self, x: Tensor) -> Tensor:
        return all_gather(x.unsqueeze(0), 0, self.group).sum(0)

    def part(self, x: Tensor) -> Tensor:
        return x.tensor_split(size_of(self.group))[rank_in(self.group)]
