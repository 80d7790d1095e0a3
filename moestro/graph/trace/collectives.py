"""Collectives as PyTorch dispatches them: which operation, among whom, how many bytes; and what would arrive."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from moestro.graph.trace.values import Values
from moestro.graph.words import CollectiveOp

# Of c10d's operations: the collective, and where the buffer lies that counts its bytes (see hardware.curves.busbw): the
# whole output of a gather, else what is sent. Positions in the arguments.
_OPS: dict[str, tuple[CollectiveOp, int]] = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "scatter_": ("broadcast", 1),
    "gather_": ("broadcast", 0),
    "reduce_": ("all_reduce", 0),
    "send": ("send_recv", 0),
    "recv_": ("send_recv", 0),
    "recv_any_source_": ("send_recv", 0),
}
# Of functional collectives the input is the only buffer there is; a gather's output is `ranks` times it.
_FUNCTIONAL: dict[str, CollectiveOp] = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}


@dataclass(frozen=True)
class Message:
    """A collective that the traced rank took part in."""

    op: CollectiveOp
    group: tuple[int, ...]  # the ranks, in the order of the group
    bytes: int  # as moestro.hardware.curves.busbw has them
    dtype: torch.dtype
    sent: tuple[int, ...] = ()  # rows to each rank, of an all-to-all with uneven parts
    received: tuple[int, ...] = ()
    arrives: bool = False  # a receive: its send is another rank's
    label: str = ""  # what the program calls the group


def message_of(func: Any, args: Sequence[Any]) -> Message | None:
    """None for what moves nothing, such as a barrier or a wait."""
    namespace, name = func._schema.name.split("::")
    if namespace == "c10d" and name in _OPS:
        op, at = _OPS[name]
        buffers = list(_flat(args[at]))
        group = next(g for g in map(_group, args) if g is not None)
        sent = received = ()
        if name == "alltoall_base_" and args[3]:
            received, sent = tuple(args[3]), tuple(args[4])
        ranks = tuple(dist.get_process_group_ranks(group))
        if op == "send_recv":
            other = args[2] if name != "recv_any_source_" else group.rank()
            ranks = (ranks[group.rank()], ranks[other])
        size = _size(buffers)
        return Message(op, ranks, size, buffers[0].dtype, sent, received, name.startswith("recv"), group.group_desc)
    if namespace == "_c10d_functional" and name in _FUNCTIONAL:
        op = _FUNCTIONAL[name]
        strings = [a for a in args if isinstance(a, str)]
        group = dist.distributed_c10d._resolve_process_group(strings[-1])  # type: ignore[arg-type]
        ranks = tuple(dist.get_process_group_ranks(group))
        sent = received = ()
        if op == "all_to_all":
            received, sent = tuple(args[1]), tuple(args[2])
        buffers = list(_flat(args[0]))
        size = _size(buffers) * (len(ranks) if op == "all_gather" else 1)
        return Message(op, ranks, size, buffers[0].dtype, sent, received, label=group.group_desc)
    return None


def _size(buffers: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in buffers)


def _group(value: Any) -> Any:
    """The process group in a boxed argument of a c10d operation."""
    if isinstance(value, dist.ProcessGroup):
        return value
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(value)
    except (RuntimeError, TypeError):
        return None


def arrive(values: Values, func: Any, args: Sequence[Any], message: Message, out: Any) -> None:
    """Give what comes in the values that it would have if every rank were as this one."""
    name = func._schema.name
    if name.startswith("c10d::"):
        if message.op in ("all_reduce", "broadcast"):
            outputs = inputs = list(_flat(args[0]))
        elif message.op == "send_recv":
            for tensor in _flat(args[0]) if message.arrives else ():
                values.forget(tensor)
            return
        else:
            outputs, inputs = list(_flat(args[0])), list(_flat(args[1]))
    else:
        outputs, inputs = list(_flat([out])), list(_flat(args[0]))
    for output, source in zip(outputs, inputs * (len(outputs) // max(len(inputs), 1)), strict=False):
        real = values.of(source)
        if real is None or output.dtype.is_floating_point:
            continue
        with no_dispatch():
            found = _arrived(real, message, output, args, values.sums)
            beside = getattr(output, "_known", None)
            if beside is not None and beside.real.shape == output.shape:
                beside.real.copy_(found.view(output.shape))
                beside.state[0] = True
            else:
                values.set(output, found.reshape(output.shape).clone())


def _arrived(real: Tensor, message: Message, output: Tensor, args: Sequence[Any], is_sum: bool) -> Tensor:
    ranks, me = len(message.group), message.group.index(dist.get_rank())
    if message.op == "all_reduce":
        words = [a for a in args if isinstance(a, str)]  # functional collectives say it
        sums = words[0] == "sum" if words else is_sum
        return real * ranks if sums and real.dtype != torch.bool else real
    if message.op == "all_gather":
        return real.reshape(-1).repeat(output.numel() // max(real.numel(), 1))
    if message.op == "reduce_scatter":
        return real.reshape(ranks, -1)[me] * ranks
    if message.op == "all_to_all":
        mine = real.split(list(message.sent) or [len(real) // ranks] * ranks)[me]
        rows = message.received or (len(mine),) * ranks
        if len(mine) == 0:
            return real.new_zeros(output.shape)
        return torch.cat([mine[torch.arange(n) % len(mine)] for n in rows])
    return real


def _flat(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)
