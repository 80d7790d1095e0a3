"""Writes down everything that a program does on one rank: operations, collectives, streams, and life-times of memory.

The program runs as it is, on tensors without values. The recorder sees every operation below autograd, so what it
writes down is what a device would be asked to do, in order.
"""

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from moestro.graph.trace.collectives import Message, arrive, message_of
from moestro.graph.trace.device import VirtualDevice
from moestro.graph.trace.fused import pairs_of
from moestro.graph.trace.ops import Cost, bytes_of, cost_of, makes_weight, moves, tensors
from moestro.graph.trace.routing import Routing
from moestro.graph.trace.values import Values

Phase = Literal["setup", "between", "forward", "recompute", "backward", "gradients", "update"]
PLAIN = (FakeTensor, Tensor, nn.Parameter)
COPIES = (torch.ops.aten._to_copy.default,)
WAIT = torch.ops._c10d_functional.wait_tensor.default


class Place(NamedTuple):
    """Where in the program something happens. `path`: the modules around it, the outermost first, as "name:Class";
    `micro`: (stage, number of the micro-batch), where somebody says so."""

    phase: Phase
    path: tuple[str, ...]
    micro: tuple[int, int] | None
    stream: int


@dataclass(slots=True)
class Op:
    """One operation. of_weight: a product of the backward pass that makes a weight's gradient."""

    name: str
    place: Place
    cost: Cost | None  # None: bound by memory
    bytes: int
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    of_weight: bool = False


@dataclass(slots=True)
class Exchange:
    """A collective in its place among the operations. blocking: the program waits for it at once."""

    message: Message
    place: Place
    blocking: bool


@dataclass(slots=True)
class Sync:
    """What a program tells its streams: "wait" (for another stream), "record event", "wait event", "wait work" (for a
    collective), "synchronize" (the host waits), "read" (a value of the device is on the host)."""

    what: str
    stream: int
    other: int  # the stream waited for, the event, or the collective by its place among the recorder's events


@dataclass(slots=True)
class Life:
    """Of a storage, between two events (by their numbers); died is None for one that outlives the trace."""

    bytes: int
    born: int
    died: int | None
    maker: str  # the operation
    place: Place
    of_weight: bool  # a parameter's copy in another type
    number: int = 0  # among all lives
    kind: str = ""  # "parameters", "gradients", "optimizer", where somebody says so


@dataclass
class Memory:
    """Of the device, in bytes. Where a storage changes its size, as FSDP2's do, it has several lives."""

    alive: int = 0
    of_weights: int = 0  # of those alive, in lives `of_weight`
    peak: int = 0
    lives: list[Life] = field(default_factory=list)
    changes: list[tuple[int, int]] = field(default_factory=list)  # in order: the number of a life, bytes or 0: its end

    def timeline(self) -> list[tuple[int, int]]:
        """(number of the event, bytes alive after it) wherever they change, in order."""
        changes: dict[int, int] = {}
        for life in self.lives:
            changes[life.born] = changes.get(life.born, 0) + life.bytes
            if life.died is not None:
                changes[life.died] = changes.get(life.died, 0) - life.bytes
        total, found = 0, []
        for event in sorted(changes):
            total += changes[event]
            found.append((event, total))
        return found


Event = Op | Exchange | Sync


class Recorder(TorchDispatchMode):
    """Between the mode of fake tensors and the program. `phase` and `micro` are set from outside, except that backward
    and recomputation are found."""

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self.values = Values(routing, self._call)
        self.phase: Phase = "setup"
        self.micro: tuple[int, int] | None = None
        self.path: list[str] = []
        self.recomputing = 0
        self.entered: Callable[[], None] | None = None  # called when the outermost module begins …
        self.turned: Callable[[], None] | None = None  # … and in backward
        self.events: list[Event] = []
        self.memory = Memory()
        # Of autograd's nodes, by their numbers in order: where the operation that they differentiate ran.
        self._numbers: list[int] = []
        self._origins: list[tuple[tuple[str, ...], tuple[int, int] | None]] = []
        self._origin: tuple[tuple[str, ...], tuple[int, int] | None] = ((), None)  # of what backward did last
        self._lives: dict[int, Life] = {}  # of the storages there are
        self._works: deque[int] = deque()  # collectives under way, by their places among the events

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing compiles while a trace runs, and the check costs as much as what is done here

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # a DTensor first says what it is made of
        if func.namespace == "prim":
            return func(*args, **kwargs)
        answer = self.values.answer(func, args, kwargs)
        if answer is not NotImplemented:
            self.note_read(args[0])
            return answer
        message = message_of(func, args)
        args = self.values.mask_as_rows(func, args)
        out = func(*args, **kwargs)
        place = self._place()
        if message is not None:
            self._note_exchange(func, args, message, place, out)
            arrive(self.values, func, args, message, out)
        else:
            self.values.follow(func, args, kwargs, out)
            if func is WAIT and hasattr(args[0], "_exchange"):
                self.note_sync("wait work", place.stream, args[0]._exchange)
            self._note_op(func, args, kwargs, out, place)
        self._note_memory(func, args, out, place)
        return out

    def note_sync(self, what: str, stream: int, other: int) -> None:
        self.events.append(Sync(what, stream, other))

    def note_read(self, tensor: Tensor) -> None:
        """The host waits for the device; many reads in a row wait once."""
        if _device(tensor) == "cpu":
            return
        stream, last = current_stream(), self.events[-1] if self.events else None
        if not (isinstance(last, Sync) and last.what == "read"):
            self.events.append(Sync("read", stream, 0))

    def alive(self) -> Iterable[Life]:
        return self._lives.values()

    def life_of(self, tensor: Tensor) -> Life | None:
        """Of the storage of a tensor, or of a DTensor's part."""
        local = getattr(tensor, "_local_tensor", tensor)
        return self._lives.get(local.untyped_storage()._cdata)

    def _call(self) -> tuple[object, bool]:
        place = self._place()
        return (place.path, place.micro), place.phase == "recompute"

    def _place(self) -> Place:
        stream = current_stream()
        if torch._C._current_graph_task_id() == -1:
            path = tuple(self.path)
            number = torch.autograd._get_sequence_nr()
            if not self._numbers or number > self._numbers[-1]:
                self._numbers.append(number)
                self._origins.append((path, self.micro))
            return Place(self.phase, path, self.micro, stream)
        if self.turned is not None:
            self.turned()
        node = torch._C._current_autograd_node()
        if node is not None and self._numbers:
            # A node has the number that was the next one when its operation ran.
            at = bisect_right(self._numbers, node._sequence_nr() + 1) - 1
            self._origin = self._origins[max(at, 0)]
        path, micro = self._origin
        if self.recomputing:
            return Place("recompute", _continued(path, self.path), micro, stream)
        return Place("backward", path, micro, stream)

    def _note_op(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, place: Place) -> None:
        outputs, inputs = tensors([out]), tensors(args)
        first = next(iter(outputs + inputs), None)
        # What the host computes is small bookkeeping.
        if first is None or _device(first) == "cpu" or not moves(func):
            return
        cost = self._attention(func, args) or cost_of(func, args, out)
        name, shapes = func._schema.name, tuple(tuple(t.shape) for t in inputs)
        of_weight = cost is not None and place.phase == "backward" and makes_weight(func, args)
        size = bytes_of(args, kwargs, out)
        self.events.append(Op(name, place, cost, size, (inputs or outputs)[0].dtype, shapes, of_weight))

    def _attention(self, func: Any, args: Sequence[Any]) -> Cost | None:
        name = func._schema.name
        if not name.startswith("moestro_trace::attention"):
            return None
        is_backward = name.endswith("backward")
        query, key, value = args[1:4] if is_backward else args[:3]
        mask, causal = args[-2:]
        with no_dispatch():
            pairs = pairs_of(query, key, mask, None if mask is None else self.values.of(mask), causal)
        *batch, heads, queries, dim = query.shape
        sequences = 1
        for n in batch:
            sequences *= n
        # As causal attention over so many keys that half of them make the pairs.
        keys = round(2 * pairs / max(1, queries)) - 1
        flops = 2.0 * sequences * heads * pairs * (dim + value.shape[-1])
        dims = (sequences, queries, keys, heads, key.shape[-3], dim, value.shape[-1])
        if is_backward:
            return Cost("attention_backward", dims, 2.5 * flops)
        return Cost("attention", dims, flops)

    def _note_exchange(self, func: Any, args: Sequence[Any], message: Message, place: Place, out: Any) -> None:
        # "asyncOp" is true where nothing is given; a trace does not see arguments that are their defaults.
        blocking = func.namespace == "c10d" and any(a is False for a in args)
        if func.namespace == "c10d" and not blocking:
            self._works.append(len(self.events))
        for tensor in tensors([out]) if func.namespace != "c10d" else ():
            tensor._exchange = len(self.events)  # type: ignore[attr-defined]
        self.events.append(Exchange(message, place, blocking))

    def note_wait(self) -> None:
        """A `Work` is waited for: the oldest, as programs wait in the order in which they asked."""
        if self._works:
            self.note_sync("wait work", current_stream(), self._works.popleft())

    def _note_memory(self, func: Any, args: Sequence[Any], out: Any, place: Place) -> None:
        for tensor in tensors([out]):
            if not isinstance(tensor, FakeTensor) or tensor.fake_device.type == "cpu":
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            life = self._lives.get(key)
            if life is None:
                weakref.finalize(storage, self._end, key)
            elif life.bytes == size:
                continue
            else:
                self._end(key)
            parameters = [t for t in tensors(args) if isinstance(t, nn.Parameter)]
            of_weight = func in COPIES and any(t.shape == tensor.shape for t in parameters)
            self._begin(key, Life(size, len(self.events), None, func._schema.name, place, of_weight))

    def note_resize(self, storage: torch.UntypedStorage) -> None:
        """A storage that is there has another size now, which no operation says."""
        life, size = self._lives.get(storage._cdata), storage.nbytes()
        if life is not None and life.bytes != size:
            self._end(storage._cdata)
            self._begin(storage._cdata, replace(life, bytes=size, born=len(self.events)))

    def _begin(self, key: int, life: Life) -> None:
        self._lives[key] = life
        memory = self.memory
        memory.changes.append((len(memory.lives), life.bytes))
        life.number = len(memory.lives)
        memory.lives.append(life)
        memory.alive += life.bytes
        memory.of_weights += life.bytes * life.of_weight
        memory.peak = max(memory.peak, memory.alive)

    def _end(self, key: int) -> None:
        life = self._lives.pop(key, None)
        if life is not None:
            life.died = len(self.events)
            self.memory.changes.append((life.number, 0))
            self.memory.alive -= life.bytes
            self.memory.of_weights -= life.bytes * life.of_weight


def _continued(outer: tuple[str, ...], inner: list[str]) -> tuple[str, ...]:
    """The modules of a recomputation, which begins at one of those in which its operation ran first."""
    if inner and inner[0] in outer:
        return (*outer[: outer.index(inner[0])], *inner)
    return (*outer, *inner)


def _device(tensor: Tensor) -> str:
    """Its type; `tensor.device` would ask the modes."""
    return (tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device).type


def current_stream() -> int:
    return VirtualDevice.current.number
