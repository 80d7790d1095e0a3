"""Anyone's training step: a function that builds a model and runs a step, as one rank of a world of any size."""

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from moestro.config.plan import RoutingConfig
from moestro.errors import MoestroError
from moestro.graph.trace.calls import calls_of
from moestro.graph.trace.held import held
from moestro.graph.trace.program import Traced
from moestro.graph.trace.recorder import Recorder
from moestro.graph.trace.session import recording
from moestro.graph.trace.surroundings import surroundings
from moestro.graph.trace.to_graph import whole_graph
from moestro.graph.words import Parameters


def find(name: str) -> Callable[..., Any]:
    """The function of "module:function", with the current directory among the places to look in.

    Raises:
        MoestroError: there is none, or its module fails.
    """
    module, _, function = name.partition(":")
    if not function:
        raise MoestroError(f"'{name}' names no function; write module:function, for example train:step")
    sys.path.insert(0, os.getcwd())
    try:
        home = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MoestroError(
            f"there is no module '{error.name}' ({name}); call from the directory that it is in"
        ) from error
    except (Exception, SystemExit) as error:
        raise MoestroError(f"module '{module}' cannot be imported: {_reason(error)}") from error
    finally:
        sys.path.pop(0)
    if not hasattr(home, function):
        raise MoestroError(f"module '{module}' has no function '{function}'")
    found: Callable[..., Any] = getattr(home, function)
    if not callable(found):
        raise MoestroError(f"'{function}' of module '{module}' is no function")
    return found


def trace(
    function: Callable[..., Any],
    world_size: int,
    rank: int = 0,
    routing: RoutingConfig | None = None,
    recorded: Sequence[Tensor] = (),
    seed: int = 0,
) -> Traced:
    """Call `function()`, which builds a model and runs one step, or several of which the last is taken.

    It may call `torch.distributed.init_process_group` (the group is there already), read RANK and WORLD_SIZE, make
    device meshes, and take `torch.accelerator.current_accelerator()` or "cuda" for its device. A step begins with the
    forward of the outermost module after an optimizer has stepped. seed: of what the routing draws.

    Raises:
        MoestroError: the function fails, for example because it asks for values that a trace has not; the message says
            where.
    """
    began_s = time.perf_counter()
    with recording(world_size, rank, routing, recorded, seed) as (recorder, device):
        steps = _Steps(recorder)
        with surroundings(device, world_size, rank, recorder) as notes, steps.watched():
            try:
                function()
            except MoestroError:
                raise
            except (Exception, SystemExit) as error:
                raise MoestroError(f"tracing failed{_last_line(error)}: {_reason(error)}") from error
    ended_s = time.perf_counter()
    if not steps.starts:
        raise MoestroError("the traced function ran no module")
    start = steps.starts[-1].events
    if recorder.values.guesses:
        notes.append(
            f"{recorder.values.guesses} values that the program reads (as .item() of a loss) are not known: taken as 1"
        )
    graph = whole_graph(recorder.events[start:], world_size, steps.parameters, steps.saved)
    return Traced(
        replace(graph, notes=(*graph.notes, *notes)),
        calls_of(recorder.events, start, world_size),
        held(recorder.memory, [step.changes for step in steps.starts]),
        len(steps.starts),
        recorder.values.routing.calls > 0,
        steps.starts[0].at_s - began_s,
        ended_s - steps.starts[-1].at_s,
    )


class _Start(NamedTuple):
    """Of a step: the numbers of its first event and of its first change of memory."""

    events: int
    changes: int
    at_s: float


class _Steps:
    """Finds the parts of a step in a program that does not say them."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.starts: list[_Start] = []
        self.parameters = Parameters()
        self.saved = 0
        self._stepped = True
        self._before = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        recorder = self.recorder
        recorder.entered, recorder.turned = self._enter, self._turn
        before = register_optimizer_step_pre_hook(self._step)
        after = register_optimizer_step_post_hook(self._has_stepped)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            recorder.entered = recorder.turned = None

    def _enter(self) -> None:
        """The outermost module begins."""
        memory = self.recorder.memory
        if self._stepped:
            self.starts.append(_Start(len(self.recorder.events), len(memory.changes), time.perf_counter()))
            self._stepped = False
        self.recorder.phase = "forward"
        self._before = memory.alive - memory.of_weights

    def _turn(self) -> None:
        """Backward begins; what follows it belongs to the update, until the next forward."""
        if self.recorder.phase != "forward":
            return
        memory = self.recorder.memory
        self.saved = memory.alive - memory.of_weights - self._before
        self.recorder.phase = "update"
        for life in self.recorder.alive():
            if life.place.phase == "forward" and not life.kind:
                life.kind = "activations"

    def _step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._stepped:
            self.parameters = Parameters()
        self._stepped = True
        self.recorder.phase = "update"
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = sum(map(_held, parameters))
        now = self.parameters
        self.parameters = Parameters(dense=now.dense + numbers, trained=now.trained + numbers)
        self._mark("parameters", parameters)
        self._mark("gradients", [p.grad for p in parameters if p.grad is not None])

    def _has_stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        states = [value for state in optimizer.state.values() for value in state.values()]
        self._mark("optimizer", [value for value in states if isinstance(value, Tensor)])

    def _mark(self, kind: str, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            life = self.recorder.life_of(tensor)
            if life is not None:
                life.kind = kind


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


def _last_line(error: BaseException) -> str:
    """Where: the innermost line of the program itself, not of PyTorch nor of this package; "" if there is none."""
    found, step = "", error.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if "site-packages" not in file and os.path.dirname(__file__) not in file:
            found = f" at {file}:{step.tb_lineno}"
        step = step.tb_next
    return found


def _reason(error: BaseException) -> str:
    """In one line."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
