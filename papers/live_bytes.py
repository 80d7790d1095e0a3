"""How much memory tensors take, counted rather than asked of an allocator: the same on every machine."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """While active, follows every storage that an operation makes: bytes alive now, and the most so far.

    Tensors made before do not count. Memory that an operation uses inside and frees does not count either.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        before = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage in self._known or id(storage) in before:
                continue
            self._known[storage] = True
            self.now += storage.nbytes()
            weakref.finalize(storage, self._gone, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _gone(self, size: int) -> None:
        self.now -= size
