"""Work on several ranks of this machine."""

import time

import pytest
import torch
import torch.distributed as dist

from moestro.parallel.local import run_on_ranks


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
