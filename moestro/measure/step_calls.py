"""What the calls of a step work on: taken down by running the step once under a dispatch mode, which sees every
operation below autograd with its arguments. Nothing is timed here.

The profiler's events know shapes, strides and dtypes of arguments but neither results nor what indices hold. So events
and calls are brought together by a key that both can make.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moestro.measure.primitives import Event
from moestro.measure.step_work import Operand, bytes_of, flops_of

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
IN_EVENTS = {"float": "fp32", "c10::BFloat16": "bf16", "c10::Half": "fp16", "double": "fp64"}
ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "int": 8}
NO_TENSOR = ("", "Scalar", "ScalarList", "TensorList", "GenericList")
OVERWRITES = ("aten::copy_", "aten::fill_", "aten::zero_")  # the first argument is not read


@dataclass(frozen=True)
class TensorRecipe:
    """values: what is in it, of indices and masks only; other tensors may hold any number."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    values: Tensor | None


@dataclass(frozen=True)
class Work:
    """What a call does, and how to make it again: the operation and its arguments, tensors as `TensorRecipe`."""

    operands: tuple[Operand, ...]
    is_view: bool
    flops: float
    bytes_moved: float
    function: Any  # torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class CallRecorder(TorchDispatchMode):
    """Takes down the work of every call that differs from those before, by key."""

    def __init__(self) -> None:
        super().__init__()
        self.work: dict[str, Work] = {}
        self.keys: dict[str, list[str]] = {}  # of an operation's calls, in their order

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        given = [args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(func._schema.arguments)]
        key = call_key(name, given)
        self.keys.setdefault(name, []).append(key)
        if key in self.work:
            return func(*args, **kwargs)
        recipes = _recipe(tuple(args)), _recipe(dict(kwargs))  # before an in-place call changes them
        result = func(*args, **kwargs)
        operands = _operands(func, given, result)
        causal, wanted = _argument(func, given, "is_causal"), _argument(func, given, "output_mask")
        flops = flops_of(name, operands, bool(causal), sum(wanted[:2]) if wanted else 2)
        moved = 0.0 if func.is_view or "empty" in name else bytes_of(name, operands)
        self.work[key] = Work(operands, func.is_view, flops, moved, func, *recipes)
        return result


def call_key(name: str, given: Sequence[Any]) -> str:
    """Of a call: its name, and shape, stride and dtype of each argument that is a tensor with an axis."""
    described = [name]
    for value in given:
        if isinstance(value, Tensor) and value.dim():
            described.append(_described(value.shape, value.stride(), DTYPES.get(value.dtype, "int")))
        elif isinstance(value, (list, tuple)):
            described += [_described(t.shape, t.stride(), "") for t in _tensors(value) if t.dim()]
    return " ".join(described)


def event_key(name: str, shapes: Sequence[Any], strides: Sequence[Any], dtypes: Sequence[str]) -> str:
    """The same of a profiled event, from what the profiler keeps of its arguments."""
    described = [name]
    for shape, stride, dtype in zip(shapes, strides, dtypes, strict=False):
        if shape and isinstance(shape[0], list):
            described += [_described(s, t, "") for s, t in zip(shape, stride, strict=True) if s]
        elif shape and dtype not in NO_TENSOR:
            described.append(_described(shape, stride, IN_EVENTS.get(dtype, "int")))
    return " ".join(described)


def _described(shape: Sequence[int], stride: Sequence[int], dtype: str) -> str:
    return f"{'×'.join(map(str, shape))}@{'×'.join(map(str, stride))}{dtype}"


def event_operands(
    name: str, shapes: Sequence[Any], strides: Sequence[Any], dtypes: Sequence[str]
) -> tuple[Operand, ...]:
    """Of a profiled event: its arguments that are tensors, all read, and the first written by a name like `add_`."""
    found: list[Operand] = []
    for shape, stride, dtype in zip(shapes, strides, dtypes, strict=False):
        if dtype not in NO_TENSOR:
            short = IN_EVENTS.get(dtype, "int")
            written = not found and name.endswith("_")
            found.append(Operand(tuple(shape), tuple(stride), short, ITEM_BYTES[short], True, written))
    return tuple(found)


class Lookup:
    """The work of profiled calls, in their order.

    By key; where the events show less of the arguments than a key wants (the indices of `aten::index`), an operation's
    n-th event is its n-th call, if there are as many of both.
    """

    def __init__(self, recorder: CallRecorder, ops: Sequence[str]) -> None:
        self.work, self.seen = recorder.work, Counter[str]()
        events = Counter(ops)
        self.keys = {op: keys for op, keys in recorder.keys.items() if len(keys) == events[op]}

    def find(self, event: Event) -> tuple[str, Work | None]:
        """The key of a call and its work, None if it was not taken down."""
        number = self.seen[event.name]
        self.seen[event.name] += 1
        key = event.key
        if key not in self.work and event.name in self.keys:
            key = self.keys[event.name][number]
        return key, self.work.get(key)


def _argument(func: Any, given: Sequence[Any], name: str) -> Any:
    """What a call gives for an argument, or else its default; None if it has no such argument."""
    for argument, value in zip(func._schema.arguments, given, strict=True):
        if argument.name == name:
            return argument.default_value if value is None else value
    return None


def _operands(func: Any, given: Sequence[Any], result: Any) -> tuple[Operand, ...]:
    """Tensors among the arguments in their order, then results that are no argument."""
    found, known = [], set()
    for argument, value in zip(func._schema.arguments, given, strict=True):
        written = argument.alias_info is not None and argument.alias_info.is_write
        overwritten = argument.is_out or (argument.name == "self" and func._schema.name in OVERWRITES)
        for tensor in _tensors(value):
            found.append(_operand(tensor, read=not overwritten, written=written))
            known.add(id(tensor))
    found += [_operand(t, read=False, written=True) for t in _tensors(result) if id(t) not in known]
    return tuple(found)


def _operand(tensor: Tensor, read: bool, written: bool) -> Operand:
    dtype = DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return Operand(tuple(tensor.shape), tensor.stride(), dtype, tensor.element_size(), read, written)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _recipe(value: Any) -> Any:
    if isinstance(value, Tensor):
        any_number = value.dtype.is_floating_point or value.dtype.is_complex
        values = None if any_number else value.detach().clone()
        return TensorRecipe(tuple(value.shape), value.stride(), value.dtype, value.device, values)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_recipe, value))
    return {key: _recipe(item) for key, item in value.items()} if isinstance(value, dict) else value
