"""DistributedDataParallel of a traced program: PyTorch's reducer is C++ and refuses tensors without values.

What it does in steady state is done here by hooks (arXiv 2006.15704, §4): gradients go into buckets in the order in
which backward makes them, of 1 MiB for the first and then of `bucket_cap_mb`; a full bucket is reduced while backward
goes on, and what came out is copied back when backward has ended.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

FIRST_BYTES = 2**20
CAP_MB = 25


class TracedDDP(nn.Module):
    """Stands in for `torch.nn.parallel.DistributedDataParallel`, with its arguments and the names that programs use."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.module = module
        self.process_group = process_group if process_group is not None else dist.group.WORLD
        self.require_backward_grad_sync = True
        self.broadcast_buffers = broadcast_buffers
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self._cap = int((bucket_cap_mb or CAP_MB) * 2**20)
        self._buckets = _Buckets(self)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._buckets.take)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.broadcast_buffers and self.require_backward_grad_sync and torch.is_grad_enabled():
            self._send_buffers()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: Any) -> None:
        raise NotImplementedError("a trace reduces gradients as they are; leave the communication hook out of it")

    def join(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("in a trace all ranks have as many batches; leave join() out of it")

    def _send_buffers(self) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in self.module.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer.detach())
        for buffers in by_dtype.values():
            together = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(together, dist.get_process_group_ranks(self.process_group)[0], self.process_group)


class _Buckets:
    """Of one backward pass at a time; the memory of the buckets stays."""

    def __init__(self, ddp: TracedDDP) -> None:
        self.ddp = ddp
        self.kept: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self.full: list[tuple[Any, list[Tensor], Tensor]] = []  # the work, the parameters, and their bucket
        self.open: list[Tensor] = []
        self.bytes = 0
        self.waits = False

    def take(self, parameter: Tensor) -> None:
        """A parameter's gradient is there."""
        if not self.ddp.require_backward_grad_sync or parameter.grad is None:
            return
        if not self.waits:
            self.waits = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        gradient = parameter.grad
        if self.open and self.open[0].dtype != parameter.dtype:
            self._reduce()
        self.open.append(parameter)
        self.bytes += gradient.numel() * gradient.element_size()
        if self.bytes >= (self.ddp._cap if self.full else FIRST_BYTES):
            self._reduce()

    @torch.no_grad()
    def _reduce(self) -> None:
        gradients = [p.grad.detach() for p in self.open if p.grad is not None]
        numbers, dtype = sum(g.numel() for g in gradients), gradients[0].dtype
        key = len(self.full), numbers, dtype
        if key not in self.kept:
            self.kept[key] = torch.empty(numbers, dtype=dtype, device=gradients[0].device)
        bucket, ranks = self.kept[key], dist.get_world_size(self.ddp.process_group)
        for part, gradient in zip(bucket.split([g.numel() for g in gradients]), gradients, strict=True):
            torch.mul(gradient.reshape(-1), 1 / ranks, out=part)
        work = dist.all_reduce(bucket, group=self.ddp.process_group, async_op=True)
        self.full.append((work, self.open, bucket))
        self.open, self.bytes = [], 0

    @torch.no_grad()
    def _finish(self) -> None:
        if self.open:
            self._reduce()
        for work, parameters, bucket in self.full:
            work.wait()
            for part, parameter in zip(bucket.split([p.numel() for p in parameters]), parameters, strict=True):
                if self.ddp.gradient_as_bucket_view:
                    parameter.grad = part.view(parameter.shape)
                elif parameter.grad is not None:
                    parameter.grad.copy_(part.view(parameter.shape))
        self.full, self.waits = [], False
