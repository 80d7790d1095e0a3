"""Anyone's training step: a function that builds a model and runs a step, as one rank of a world of any size."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from moestro.config.plan import RoutingConfig
from moestro.errors import MoestroError
from moestro.graph.trace.device import NAME as VIRTUAL
from moestro.graph.trace.recorder import Recorder
from moestro.graph.trace.session import recording
from moestro.graph.trace.to_graph import whole_graph
from moestro.graph.words import Parameters, StepGraph


def find(name: str) -> Callable[..., Any]:
    """The function of "module:function", with the current directory among the places to look in.

    Raises:
        MoestroError: there is none.
    """
    module, _, function = name.partition(":")
    if not function:
        raise MoestroError(f"'{name}' names no function; write module:function, for example train:step")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise MoestroError(
            f"there is no module '{error.name}' ({name}); call from the directory that it is in"
        ) from error
    except AttributeError as error:
        raise MoestroError(f"module '{module}' has no function '{function}'") from error
    finally:
        sys.path.pop(0)
    result: Callable[..., Any] = found
    return result


def trace(
    function: Callable[..., Any],
    world_size: int,
    rank: int = 0,
    routing: RoutingConfig | None = None,
    recorded: Sequence[Tensor] = (),
) -> tuple[StepGraph, Recorder]:
    """Call `function()`, which builds a model and runs one step, or several of which the last is taken.

    It may call `torch.distributed.init_process_group` (the group is there already), read RANK and WORLD_SIZE, make
    device meshes, and take `torch.accelerator.current_accelerator()` or "cuda" for its device. A step begins with the
    forward of the outermost module after an optimizer has stepped.

    Raises:
        MoestroError: the function fails, for example because it asks for values that a trace has not; the message says
            where.
    """
    with recording(world_size, rank, routing, recorded) as (recorder, device):
        steps = _Steps(recorder)
        with _surroundings(device, world_size, rank), steps.watched():
            try:
                function()
            except MoestroError:
                raise
            except Exception as error:
                reason = str(error).splitlines()[0] if str(error) else ""
                raise MoestroError(
                    f"tracing failed at {_last_line(error)}: {type(error).__name__}: {reason}"
                ) from error
    if steps.start is None:
        raise MoestroError("the traced function ran no module")
    graph = whole_graph(recorder.events[steps.start :], world_size, steps.parameters, steps.saved)
    return graph, recorder


class _Steps:
    """Finds the parts of a step in a program that does not say them."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.start: int | None = None  # event at which the last step begins
        self.parameters = Parameters()
        self.saved = 0
        self._stepped = True
        self._before = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        recorder = self.recorder
        recorder.entered, recorder.turned = self._enter, self._turn
        handle = register_optimizer_step_pre_hook(self._step)
        try:
            yield
        finally:
            handle.remove()
            recorder.entered = recorder.turned = None

    def _enter(self) -> None:
        """The outermost module begins."""
        if self._stepped:
            self.start, self._stepped = len(self.recorder.events), False
        self.recorder.phase = "forward"
        memory = self.recorder.memory
        self._before = memory.alive - memory.of_weights

    def _turn(self) -> None:
        """Backward begins; what follows it belongs to the update, until the next forward."""
        if self.recorder.phase == "forward":
            memory = self.recorder.memory
            self.saved = memory.alive - memory.of_weights - self._before
            self.recorder.phase = "update"

    def _step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._stepped:
            self.parameters = Parameters()
        self._stepped = True
        self.recorder.phase = "update"
        numbers = sum(_held(p) for group in optimizer.param_groups for p in group["params"])
        now = self.parameters
        self.parameters = Parameters(dense=now.dense + numbers, trained=now.trained + numbers)


def _held(parameter: Tensor) -> int:
    """Numbers that a rank has before ZeRO splits them: of a DTensor cut over other dimensions, its part."""
    if not isinstance(parameter, DTensor):
        return parameter.numel()
    mesh, numbers = parameter.device_mesh, parameter.numel()
    for axis, placement in enumerate(parameter.placements):
        name = (mesh.mesh_dim_names or ("",) * mesh.ndim)[axis]
        if placement.is_shard() and any(word in name for word in ("tp", "ep", "tensor", "expert")):
            numbers //= mesh.size(axis)
    return numbers


@contextmanager
def _surroundings(device: torch.device, world_size: int, rank: int) -> Iterator[None]:
    """What a launched program expects: the launcher's variables, a group that it makes itself, and CUDA."""
    launcher = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    launcher |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500}  # type: ignore[dict-item]
    mesh_init = DeviceMesh.__init__

    def on_device(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        mesh_init(self, device.type if device_type == "cuda" else device_type, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {key: str(value) for key, value in launcher.items()}))
        for name in ("init_process_group", "destroy_process_group"):
            stack.enter_context(mock.patch.object(dist, name, _nothing))
        if device.type == VIRTUAL:
            stack.enter_context(mock.patch.object(DeviceMesh, "__init__", on_device))
            for name in ("set_device", "synchronize", "empty_cache", "manual_seed", "reset_peak_memory_stats"):
                stack.enter_context(mock.patch.object(torch.cuda, name, _nothing))
            stack.enter_context(mock.patch.object(torch.cuda, "is_available", return_value=True))
            stack.enter_context(mock.patch.object(torch.cuda, "device_count", return_value=1))
            stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=0))
            stack.enter_context(_CudaIsVirtual(device))
        yield


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


def _last_line(error: BaseException) -> str:
    """The innermost line of the program itself: not of PyTorch, nor of this package."""
    found, step = "?", error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if "site-packages" not in file and os.path.dirname(__file__) not in file:
            found = f"{file}:{step.tb_lineno}"
        step = step.tb_next
    return found
