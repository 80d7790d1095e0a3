"""What the rows about parallel training stand on: work on several ranks, and counting live memory."""

import time

import pytest
import torch
import torch.distributed as dist

from papers.live_bytes import LiveBytes
from papers.ranks import run_on_ranks


def add(rank: int, amount: float) -> torch.Tensor:
    x = torch.tensor([rank + amount])
    dist.all_reduce(x)
    return x + rank


def fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("nothing to add")
    dist.barrier()


def wait_long(rank: int) -> None:
    if rank == 1:
        time.sleep(60)
    dist.barrier()


def test_results_come_in_order_of_rank() -> None:
    assert [x.item() for x in run_on_ranks(add, 2, 0.5)] == [2.0, 3.0]


def test_a_rank_that_fails_is_reported() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)fail on 2 ranks.*(nothing to add|Connection closed)"):
        run_on_ranks(fail, 2)


def test_a_rank_that_does_not_end_is_ended() -> None:
    with pytest.raises(RuntimeError, match="still run after 1 s"):
        run_on_ranks(wait_long, 2, limit_s=1)


class TestLiveBytes:
    def test_counts_what_is_made_and_what_is_gone(self) -> None:
        before = torch.ones(100)
        with LiveBytes() as live:
            x = torch.zeros(256)
            assert live.now == 1024
            y = x.view(16, 16).t() + 0  # views are free, the sum is not
            assert live.now == 2048
            del x
            assert live.now == 1024
            before.add_(1)
            before.view(10, 10)
        assert (live.now, live.peak) == (1024, 2048)
        del y
        assert live.now == 0

    def test_counts_what_backward_makes(self) -> None:
        x = torch.ones(256, requires_grad=True)
        with LiveBytes() as live:
            (x * x).sum().backward()
        assert live.now == 1024  # the gradient
        assert live.peak >= 2048
