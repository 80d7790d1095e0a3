"""Everything that has to be in place while a program is traced, and what is left of it afterwards."""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as hooks
from torch.utils import checkpoint
from torch.utils._mode_utils import no_dispatch

from moestro.config.plan import RoutingConfig
from moestro.graph.trace.device import Shapes, VirtualDevice, accelerator
from moestro.graph.trace.fused import fused_kernels
from moestro.graph.trace.recorder import Recorder
from moestro.graph.trace.routing import Routing
from moestro.graph.trace.world import world_of


@contextmanager
def recording(
    world_size: int,
    rank: int,
    routing: RoutingConfig | None = None,
    recorded: Sequence[Tensor] = (),
    seed: int = 0,
) -> Iterator[tuple[Recorder, torch.device]]:
    """What is called in the block runs as `rank` of `world_size`, on the device that is given, and is written down.

    recorded: choices [rows, K] of a real run, see `routing`. seed: of its draws.
    """
    recorder = Recorder(Routing(routing or RoutingConfig(), recorded, seed))
    with ExitStack() as stack:
        device = stack.enter_context(accelerator())
        stack.enter_context(world_of(world_size, rank, device))
        # Backward in this thread, as the modes below have parts that other threads do not see.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_watched_modules(recorder))
        stack.enter_context(_watched_recomputation(recorder))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(mock.patch.object(dist, "all_reduce", _told(dist.all_reduce, recorder)))
        resize = torch.UntypedStorage.resize_
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", _resized(resize, recorder)))
        stack.enter_context(mock.patch.object(FakeTensor, "tolist", _listed(FakeTensor.tolist, recorder)))
        stack.enter_context(mock.patch.object(FakeWork, "wait", _waited(FakeWork.wait, recorder)))
        VirtualDevice.listener = recorder.note_sync
        # PyTorch prints a traceback of its own for shapes that do not fit; the error says it in a line.
        stack.enter_context(mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # of a copied module
        for context in (fused_kernels(), Shapes(), recorder):
            stack.enter_context(context)
        yield recorder, device


def _told(all_reduce: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """The same, telling the recorder whether it adds."""

    def told(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        recorder.values.sums = op == dist.ReduceOp.SUM
        try:
            return all_reduce(tensor, op, *args, **kwargs)
        finally:
            recorder.values.sums = True

    return told


def _listed(tolist: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """The same, at once where the values are known, as those of meshes are; PyTorch's own reads one after the other."""

    def listed(tensor: FakeTensor) -> Any:
        real = recorder.values.of(tensor)
        if real is None:
            return tolist(tensor)
        recorder.note_read(tensor)
        with no_dispatch():
            return real.tolist()

    return listed


def _waited(wait: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """The same, telling the recorder."""

    def waited(work: dist.Work, *args: Any) -> Any:
        recorder.note_wait()
        return wait(work, *args)

    return waited


def _resized(resize: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """The same, telling the recorder: FSDP2 frees gathered weights so."""

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        recorder.note_resize(storage)
        return result

    return resized


class _Generator(torch.Generator):
    """The virtual device has no random numbers of its own; nobody sees their values."""

    def __new__(cls, device: object = "cpu") -> "_Generator":
        return super().__new__(cls, device="cpu")  # type: ignore[call-arg]


@contextmanager
def _watched_modules(recorder: Recorder) -> Iterator[None]:
    """Keep recorder.path at the modules whose forward is running."""
    names: dict[int, str] = {}

    def enter(module: nn.Module, _: Any) -> None:
        if not recorder.path:
            names.update((id(child), name.rpartition(".")[2]) for name, child in module.named_modules())
            if recorder.entered is not None and torch._C._current_graph_task_id() == -1:
                recorder.entered()
        recorder.path.append(f"{names.get(id(module), '')}:{type(module).__name__}")

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        recorder.path.pop()

    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _watched_recomputation(recorder: Recorder) -> Iterator[None]:
    """Tell the recorder while `torch.utils.checkpoint` computes something again."""
    plain = checkpoint._recomputation_hook

    class Watched(plain):  # type: ignore[misc, valid-type]
        def __enter__(self) -> Any:
            recorder.recomputing += 1
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            recorder.recomputing -= 1
            super().__exit__(*error)

    checkpoint._recomputation_hook = Watched  # type: ignore[misc]
    try:
        yield
    finally:
        checkpoint._recomputation_hook = plain  # type: ignore[misc]
