"""Everything that has to be in place while a program is traced, and what is left of it afterwards."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils import checkpoint

from moestro.config.plan import RoutingConfig
from moestro.graph.trace.fused import FusedKernels
from moestro.graph.trace.device import Shapes, VirtualDevice, accelerator
from moestro.graph.trace.recorder import Recorder
from moestro.graph.trace.routing import Routing
from moestro.graph.trace.world import world_of


@contextmanager
def recording(
    world_size: int, rank: int, routing: RoutingConfig | None = None, recorded: Sequence[Tensor] = ()
) -> Iterator[tuple[Recorder, torch.device]]:
    """What is called in the block runs as `rank` of `world_size`, on the device that is given, and is written down.

    recorded: choices [rows, K] of a real run, see `routing`.
    """
    recorder = Recorder(Routing(routing or RoutingConfig(), recorded))
    with ExitStack() as stack:
        device = stack.enter_context(accelerator())
        stack.enter_context(world_of(world_size, rank, device))
        # Backward in this thread, as the modes below have parts that other threads do not see.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_watched_modules(recorder))
        stack.enter_context(_watched_recomputation(recorder))
        VirtualDevice.listener = recorder.note_sync
        for mode in (Shapes(), FusedKernels(), recorder):
            stack.enter_context(mode)
        yield recorder, device


@contextmanager
def _watched_modules(recorder: Recorder) -> Iterator[None]:
    """Keep recorder.path at the modules whose forward is running."""
    names: dict[int, str] = {}

    def enter(module: nn.Module, _: Any) -> None:
        if not recorder.path and recorder.entered is not None:
            recorder.entered()
        for name, child in module.named_children():
            names[id(child)] = name
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
