"""What a launched program expects around it: the launcher's variables, a group that it makes itself, and CUDA.

Programs name "cuda" and ask `torch.cuda` for streams, memory and names; while one is traced, that is the device of the
trace. What is not here fails with one line that says which call it was.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler, autocast
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from moestro.errors import MoestroError
from moestro.graph.trace.autocast import autocast_rules
from moestro.graph.trace.ddp import TracedDDP
from moestro.graph.trace.device import NAME as VIRTUAL
from moestro.graph.trace.device import VirtualDevice, VirtualEvent, VirtualStream
from moestro.graph.trace.recorder import Recorder

TOTAL_BYTES = 80 * 2**30  # of the memory that programs see; they only print it, or take a share
NO_COMPILER = "torch.compile: traced as it is without, operation by operation"


@contextmanager
def surroundings(device: torch.device, world_size: int, rank: int, recorder: Recorder) -> Iterator[list[str]]:
    """Gives notes on what the program asked for and did not get."""
    launcher = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    variables = {key: str(value) for key, value in launcher.items()}
    notes: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch.dict(os.environ, {**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
        )
        for name in ("init_process_group", "destroy_process_group"):
            stack.enter_context(mock.patch.object(dist, name, _nothing))
        for where in (nn.parallel, nn.parallel.distributed):
            stack.enter_context(mock.patch.object(where, "DistributedDataParallel", TracedDDP))
        stack.enter_context(mock.patch.object(torch, "compile", _uncompiled(notes)))
        stack.enter_context(mock.patch.object(nn.Module, "compile", _uncompiled(notes)))
        stack.enter_context(mock.patch.object(DataLoader, "__init__", _in_this_process(DataLoader.__init__)))
        stack.enter_context(mock.patch.object(torch.utils, "swap_tensors", _swap))
        if device.type == VIRTUAL:
            _cuda_is(device, recorder, stack)
        yield notes


def _note(notes: list[str], text: str) -> None:
    if text not in notes:
        notes.append(text)


def _uncompiled(notes: list[str]) -> Callable[..., Any]:
    def compile(model: Any = None, **options: Any) -> Any:
        _note(notes, NO_COMPILER)
        return (lambda function: function) if model is None else model

    return compile


def _in_this_process(init: Callable[..., None]) -> Callable[..., None]:
    """Of a loader: its workers would have no part in the trace."""
    signature = inspect.signature(init)
    here = {"num_workers": 0, "pin_memory": False, "prefetch_factor": None, "persistent_workers": False, "timeout": 0}
    here |= {"multiprocessing_context": None}

    def in_this_process(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.arguments.update(here)
        init(*bound.args, **bound.kwargs)

    return in_this_process


def _swap(one: Tensor, other: Tensor) -> None:
    """`module.to()` gives a parameter another's content. PyTorch's own refuses tensors that anything refers to weakly,
    as its mode of fake tensors does to all; that is harmless here."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def _cuda_is(device: torch.device, recorder: Recorder, stack: ExitStack) -> None:
    def named(init: Callable[..., None]) -> Callable[..., None]:
        def on_device(self: Any, device_type: str = "cuda", *args: Any, **kwargs: Any) -> None:
            init(self, device.type if device_type == "cuda" else device_type, *args, **kwargs)

        return on_device

    for kind in (DeviceMesh, autocast):
        stack.enter_context(mock.patch.object(kind, "__init__", named(kind.__init__)))
    scaler = GradScaler.__init__

    def on_scaler(self: Any, device_type: str = "cuda", *args: Any, **kwargs: Any) -> None:
        scaler(self, device.type if device_type == "cuda" else device_type, *args, **kwargs)

    stack.enter_context(mock.patch.object(GradScaler, "__init__", on_scaler))
    stack.enter_context(mock.patch.object(torch.cuda.amp, "autocast", _old_autocast))
    stack.enter_context(mock.patch.object(torch.cuda.amp, "GradScaler", GradScaler))
    for name, stand_in in _cuda(device, recorder).items():
        stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
    for name in ("range_push", "range_pop", "mark"):
        stack.enter_context(mock.patch.object(torch.cuda.nvtx, name, _nothing))
    for name, stand_in in _accelerator(device, recorder).items():
        stack.enter_context(mock.patch.object(torch.accelerator, name, stand_in))
    autocast_rules()
    stack.enter_context(_CudaIsVirtual(device))


def _old_autocast(
    enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
) -> torch.amp.autocast:
    return autocast("cuda", dtype, enabled, cache_enabled)


def _cuda(device: torch.device, recorder: Recorder) -> dict[str, Any]:
    """Of `torch.cuda`, by name, what ordinary programs use."""
    memory = recorder.memory
    properties = SimpleNamespace(
        name="virtual accelerator", total_memory=TOTAL_BYTES, major=9, minor=0, multi_processor_count=132, warp_size=32
    )

    def lacks(*_: Any, **__: Any) -> None:
        name = sys._getframe(1).f_code.co_name
        raise MoestroError(f"torch.cuda.{name} is not there while a step is traced; take it out of the traced function")

    silent = (
        "set_device", "empty_cache", "manual_seed", "manual_seed_all", "reset_peak_memory_stats",
        "reset_max_memory_allocated", "init", "ipc_collect", "set_per_process_memory_fraction", "set_rng_state",
    )  # fmt: skip
    return {
        **dict.fromkeys(silent, _nothing),
        "synchronize": VirtualDevice.synchronize,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda *_: nullcontext(),
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: (properties.major, properties.minor),
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (TOTAL_BYTES - memory.alive, TOTAL_BYTES),
        "memory_allocated": lambda *_: memory.alive,
        "memory_reserved": lambda *_: memory.alive,
        "max_memory_allocated": lambda *_: memory.peak,
        "max_memory_reserved": lambda *_: memory.peak,
        "get_rng_state": VirtualDevice.get_rng_state,
        "Stream": VirtualStream,
        "Event": VirtualEvent,
        "stream": lambda stream: nullcontext() if stream is None else stream,
        "current_stream": VirtualDevice.current_stream,
        "default_stream": VirtualDevice.default_stream,
        "set_stream": VirtualDevice.set_stream,
        "_lazy_init": lacks,
    }


def _accelerator(device: torch.device, recorder: Recorder) -> dict[str, Any]:
    """Of `torch.accelerator`, what would ask C++."""
    cuda = _cuda(device, recorder)
    same = ("empty_cache", "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    return {
        **{name: cuda[name] for name in (*same, "current_stream", "set_stream") if hasattr(torch.accelerator, name)},
        "synchronize": VirtualDevice.synchronize,
        "set_device_index": _nothing,
        "current_device_index": lambda: 0,
    }


def _nothing(*_: Any, **__: Any) -> None: ...


class _CudaIsVirtual(TorchFunctionMode):
    """Programs that name "cuda" get the device of the trace."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.backward:  # in which this mode would else be off
            with self:
                return _backward(*args, **(kwargs or {}))
        if func is Tensor.cuda:
            return args[0].to(self.device)
        if func is Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return args[0].device.type == self.device.type
        if func is torch.device and self._of(args[0] if args else (kwargs or {}).get("type")) is self.device:
            return self.device
        changed = {key: self._of(value) for key, value in (kwargs or {}).items()}
        return func(*(self._of(value) for value in args), **changed)

    def _of(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return self.device if value.type == "cuda" else value
        return self.device if isinstance(value, str) and value.split(":")[0] == "cuda" else value


def _backward(
    loss: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)
