"""A world of ranks of which only one exists."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from moestro.errors import MoestroError


@contextmanager
def world_of(ranks: int, rank: int, device: torch.device) -> Iterator[None]:
    """The default process group of `rank` among `ranks`, whose collectives send nothing.

    Raises:
        MoestroError: this process belongs to a group already.
    """
    if dist.is_initialized():
        raise MoestroError("a step cannot be traced inside a process group; trace it in a process of its own")
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed import fake_pg

    if device.type not in dist.Backend.backend_capability.get("fake", []):
        make = fake_pg._create_fake_pg
        dist.Backend.register_backend("fake", make, extended_api=True, devices=["cpu", "cuda", "xpu", device.type])
    hook = sys.excepthook
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it knows meshes by their shape, and would give the next world this one's groups
        sys.excepthook = hook  # which a group changes to say its rank
