from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F

from moestro.parallel import flat as flat_module
from moestro.parallel.comm import Group
from moestro.parallel.flat import FlatShard, Span, all_reduce_buckets

SHAPES = [(3, 5), (1,), (7,), (2, 3, 3)]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(float(torch.Size(s).numel())).view(s).to(dtype) + 1) for s in SHAPES]


def group_of(ranks: int, rank: int = 0) -> Any:
    return SimpleNamespace(size=lambda: ranks, rank=lambda: rank)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 40])
def test_slices_are_equal_and_together_everything(ranks: int) -> None:
    found: dict[int, list[tuple[Span, Tensor]]] = {i: [] for i in range(len(SHAPES))}
    lengths = set()
    for rank in range(ranks):
        flat = FlatShard(parameters(), group_of(ranks, rank))
        lengths.add(flat.shard.numel())
        for i in range(len(SHAPES)):
            for span in flat.spans(i):
                if span.rank == rank:
                    found[i].append((span, flat.shard.detach()[span.offset : span.offset + span.last - span.first]))
    assert len(lengths) == 1
    for i, parameter in enumerate(parameters()):
        assert torch.equal(torch.cat([piece for _, piece in found[i]]).view(parameter.shape), parameter.detach())
        ends = [span.last for span, _ in found[i]]
        assert [span.first for span, _ in found[i]] == [0, *ends[:-1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_and_slices_start_at_multiples_of_16_bytes(dtype: torch.dtype) -> None:
    for rank in range(3):
        flat = FlatShard(parameters(dtype), group_of(3, rank))
        for tensor in (*flat.parameters, flat.shard):
            assert tensor.data_ptr() % 16 == 0
            assert tensor.grad is not None
            assert tensor.grad.data_ptr() % 16 == 0


def test_parameters_keep_their_values_and_autograd_fills_the_buffer() -> None:
    flat = FlatShard(before := parameters(), None)
    for parameter, expected in zip(before, parameters(), strict=True):
        assert torch.equal(parameter.detach(), expected.detach())
    for _ in range(2):  # micro-batches add up
        F.linear(torch.ones(1, 5), flat.parameters[0]).sum().backward()
    flat.reduce_gradients()
    assert flat.shard.grad is not None
    assert (flat.shard.grad[:15] == 2).all()
    assert (flat.shard.grad[15:] == 0).all()
    flat.zero_grad()
    assert (flat.shard.grad == 0).all()
    flat.shard.data.add_(1)
    flat.gather_parameters()
    assert torch.equal(flat.parameters[2].detach(), parameters()[2].detach() + 1)


def test_a_gradient_that_is_no_view_any_more_is_noticed() -> None:
    flat = FlatShard(parameters(), None)
    flat.parameters[1].grad = None
    flat.parameters[1].sum().backward()
    with pytest.raises(AssertionError, match="replaced"):
        flat.reduce_gradients()


def check_ranks(rank: int) -> None:
    world = dist.get_world_size()
    group = dist.new_group(list(range(world)))
    flat = FlatShard(parameters(), group)
    assert flat.slice_elements * world >= 41
    for step in range(2):
        for i, parameter in enumerate(flat.parameters):
            assert parameter.grad is not None
            parameter.grad += (rank + 1) * (i + 1)
        flat.reduce_gradients()
        assert flat.shard.grad is not None
        flat.shard.data.sub_(flat.shard.grad)
        flat.gather_parameters()
        flat.zero_grad()
        total = world * (world + 1) // 2
        for i, (parameter, start) in enumerate(zip(flat.parameters, parameters(), strict=True)):
            assert torch.equal(parameter.detach(), start.detach() - (step + 1) * total * (i + 1)), (step, i)
    check_buckets(rank, group)


def check_buckets(rank: int, group: Group) -> None:
    collectives: list[int] = []
    plain = flat_module.all_reduce

    def counted(x: Tensor, group: Group) -> Tensor:
        collectives.append(x.numel())
        return plain(x, group)

    flat_module.all_reduce = counted  # type: ignore[assignment]
    flat_module.BUCKET_BYTES = 4 * 10
    tensors = [torch.full((n,), float(rank + n)) for n in (3, 4, 30, 0, 5, 2)]
    turned = torch.arange(12.0).view(4, 3).t() + rank
    all_reduce_buckets([*tensors, turned], group)
    ranks = group.size() if group is not None else 1
    for tensor, n in zip(tensors, (3, 4, 30, 0, 5, 2), strict=True):
        assert torch.equal(tensor, torch.full((n,), float(sum(r + n for r in range(ranks)))))
    assert torch.equal(turned, ranks * torch.arange(12.0).view(4, 3).t() + sum(range(ranks)))
    assert collectives == [7, 30, 7, 12], "small ones together, large ones alone"


def test_ranks_add_up_and_share() -> None:
    run_ranks(check_ranks, 3)
