"""What an optimizer steps on a rank: a whole parameter, a slice of many (ZeRO-1) or FSDP2's shard of one; and which
boxes of which logical tensors that memory holds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moestro.optim.build import Kind
from moestro.parallel.comm import Group, rank_in, size_of
from moestro.parallel.flat import FlatShard
from moestro.parallel.fsdp import shard_of, shard_start
from moestro.parallel.logical import boxes_of_slice
from moestro.parallel.parts import Part


@dataclass(frozen=True)
class Box:
    """Elements `offset` … of a slot's tensor are the box (start, size) of parameter `name`, of whole shape `shape`."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int

    def view(self, tensor: Tensor) -> Tensor:
        return tensor.view(-1)[self.offset : self.offset + prod(self.size)].view(self.size)


@dataclass
class Slot:
    """One tensor that an optimizer steps."""

    tensor: nn.Parameter
    kind: Kind
    names: list[str]  # of the parameters it holds elements of (a flat slice: of those it could)
    parts: list[Part]
    group: Group  # the ranks whose gradients are added
    holders: int  # how many ranks have the same elements
    boxes: list[Box]
    flat: FlatShard | None = None  # of which `tensor` is this rank's slice
    source: DTensor | None = None  # of which `tensor` is this rank's shard
    steps: dict[str, Tensor] = field(default_factory=dict)  # a flat slice's one step count, for each of its parameters

    @property
    def gradient(self) -> Tensor:
        """Zero where backward has not come by."""
        if self.tensor.grad is None:
            self.tensor.grad = torch.zeros_like(self.tensor)
        return self.tensor.grad

    def zero_grad(self) -> None:
        if self.flat is not None:
            self.flat.zero_grad()
            return
        self.tensor.grad = None
        if self.source is not None:
            self.source.grad = None

    def fetch_shard(self) -> None:
        """Follow FSDP2, whose shard and gradient may have moved."""
        if self.source is not None:
            self.tensor.data = local_shard(self.source)
            grad = self.source.grad
            self.tensor.grad = grad.to_local() if isinstance(grad, DTensor) else None


def whole_slot(name: str, parameter: nn.Parameter, kind: Kind, part: Part, group: Group) -> Slot:
    box = Box(name, part.shape, part.start, part.size, 0)
    return Slot(parameter, kind, [name], [part], group, size_of(group), [box])


def flat_slot(names: list[str], flat: FlatShard, kind: Kind, parts: list[Part]) -> Slot:
    boxes = []
    for index, (name, part) in enumerate(zip(names, parts, strict=True)):
        for span in flat.spans(index):
            if span.rank == rank_in(flat.group):
                offset = span.offset
                for start, size in boxes_of_slice(part.size, span.first, span.last):
                    boxes.append(Box(name, part.shape, _shifted(part.start, start), size, offset))
                    offset += prod(size)
    return Slot(flat.shard, kind, names, parts, flat.group, 1, boxes, flat=flat)


def shard_slot(name: str, parameter: DTensor, kind: Kind, part: Part, group: Group) -> Slot:
    tensor = nn.Parameter(local_shard(parameter))
    split, axis = shard_of(parameter)
    boxes = []
    if tensor.numel() > 0:
        start = [0] * tensor.dim()
        start[axis] = shard_start(parameter)
        boxes.append(Box(name, part.shape, _shifted(part.start, start), tuple(tensor.shape), 0))
    return Slot(tensor, kind, [name], [part], group, size_of(group) // size_of(split), boxes, source=parameter)


def local_shard(parameter: DTensor) -> Tensor:
    local: Tensor = parameter.to_local()
    return local.detach()


def _shifted(start: Sequence[int], by: Sequence[int]) -> tuple[int, ...]:
    return tuple(s + b for s, b in zip(start, by, strict=True))


def fresh_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter of an AdamW or a Muon the state it has before its first step, if it has none."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if state:
                continue
            if isinstance(optimizer, torch.optim.AdamW):
                state["step"] = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            else:
                state["momentum_buffer"] = torch.zeros_like(parameter)
