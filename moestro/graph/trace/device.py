"""A device that computes nothing, so that programs for an accelerator can be traced where there is none.

PyTorch keeps one place for a device it does not know (PrivateUse1) and, since 2.10 or so, lets Python fill it: tensors
of it have shapes and autograd, streams and events, and no memory. Programs find it as `torch.accelerator` while a trace
runs; at other times it says that it is not available.

Where a real accelerator is, its type is used instead: PyTorch knows one accelerator in a process, and fake tensors of a
device that is there need none of its memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moestro.errors import MoestroError

NAME = "virtual"


class VirtualStream:
    """A line of work. `number` 0 is the default one."""

    made = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = self.stream_id = VirtualStream.made
        VirtualStream.made += 1
        self.device_index, self.device_type = 0, 20  # PrivateUse1 among PyTorch's device types
        self._outer: list[VirtualStream] = []

    @property
    def device(self) -> torch.device:
        return torch.device(NAME, 0)

    def __enter__(self) -> "VirtualStream":
        self._outer.append(VirtualDevice.current)
        VirtualDevice.current = self
        return self

    def __exit__(self, *_: object) -> None:
        VirtualDevice.current = self._outer.pop()

    def wait_stream(self, other: "VirtualStream") -> None:
        VirtualDevice.note("wait", self, other.number)

    def wait_event(self, event: "VirtualEvent") -> None:
        VirtualDevice.note("wait event", self, event.number)

    def record_event(self, event: "VirtualEvent | None" = None) -> "VirtualEvent":
        event = event or VirtualEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        VirtualDevice.note("synchronize", self, 0)

    def query(self) -> bool:
        return True


class VirtualEvent:
    made = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        VirtualEvent.made += 1
        self.number = VirtualEvent.made

    def record(self, stream: VirtualStream | None = None) -> None:
        VirtualDevice.note("record event", stream or VirtualDevice.current, self.number)

    def wait(self, stream: VirtualStream | None = None) -> None:
        VirtualDevice.note("wait event", stream or VirtualDevice.current, self.number)

    def synchronize(self) -> None:
        VirtualDevice.note("synchronize", VirtualDevice.current, self.number)

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: "VirtualEvent") -> float:
        return 1.0  # ms; programs divide by it


class VirtualDevice:
    """What `torch.virtual` is."""

    Stream, Event = VirtualStream, VirtualEvent  # PyTorch looks for these names
    current = default = VirtualStream()
    present = False
    listener: Any = None  # called with (what, stream number, number of the other stream or of the event)

    @classmethod
    def note(cls, what: str, stream: VirtualStream, other: int) -> None:
        if cls.listener is not None:
            cls.listener(what, stream.number, other)

    @classmethod
    def is_available(cls) -> bool:
        return cls.present

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def is_bf16_supported(*_: Any) -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(_: Any) -> None: ...

    @classmethod
    def current_stream(cls, _: Any = None) -> VirtualStream:
        return cls.current

    @classmethod
    def default_stream(cls, _: Any = None) -> VirtualStream:
        return cls.default

    @classmethod
    def set_stream(cls, stream: VirtualStream) -> None:
        cls.current = stream

    @staticmethod
    def stream(stream: VirtualStream) -> VirtualStream:
        return stream

    @classmethod
    def synchronize(cls, _: Any = None) -> None:
        cls.note("synchronize", cls.current, 0)

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(_: int) -> None: ...

    manual_seed = manual_seed_all

    @staticmethod
    def get_rng_state(_: Any = None) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def set_rng_state(_: torch.Tensor, __: Any = None) -> None: ...

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def empty_cache() -> None: ...

    @staticmethod
    def memory_allocated(_: Any = None) -> int:
        return 0

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated

    @staticmethod
    def reset_peak_memory_stats(_: Any = None) -> None: ...


@contextmanager
def accelerator() -> Iterator[torch.device]:
    """The device to trace on: the machine's accelerator if it has one, else the virtual one, present for the block.

    Raises:
        MoestroError: this PyTorch can have no device in Python.
    """
    if not _registered() and torch.accelerator.is_available():
        yield torch.device(str(torch.accelerator.current_accelerator()), 0)
        return
    _register()
    VirtualDevice.present = True
    try:
        yield torch.device(NAME, 0)
    finally:
        VirtualDevice.present = False
        VirtualDevice.current, VirtualDevice.listener = VirtualDevice.default, None


def _registered() -> bool:
    return getattr(torch, NAME, None) is VirtualDevice


def _register() -> None:
    """Once for the life of the process, as PyTorch wants it."""
    if _registered():
        return
    from torch.utils import backend_registration

    set_up = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if set_up is None:
        raise MoestroError(f"PyTorch {torch.__version__} has no devices written in Python; trace with 2.11 or newer")

    class Hook(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return VirtualDevice.present

        def has_primary_context(self, _: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    set_up(NAME, VirtualDevice, Hook())


class Shapes(FakeTensorMode):
    """PyTorch's mode of tensors without values; it never asks a device for memory, also of a device that is there."""

    avoid_device_init = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
