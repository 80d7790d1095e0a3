"""What incremental decoding keeps of the tokens before."""

from dataclasses import dataclass

import torch
from torch import Tensor


class LayerCache:
    """Entries of one layer in named buffers [..., entries, size], one entry a token.

    A layer with a sliding window keeps the last `window` entries: a new one takes the place of the oldest.
    """

    def __init__(
        self,
        sizes: dict[str, tuple[int, ...]],
        max_len: int,
        device: torch.device | str,
        dtype: torch.dtype,
        window: int | None = None,
    ) -> None:
        """sizes: of each buffer, without the axis of entries: (batch, kv_heads, head_dim)."""
        self.window = window if window is not None and window < max_len else None
        entries = self.window or max_len
        self.buffers = {
            name: torch.empty(*size[:-1], entries, size[-1], device=device, dtype=dtype) for name, size in sizes.items()
        }
        self.state: dict[str, Tensor] = {}  # what a layer keeps besides entries; it replaces them at every call
        self.length = 0  # entries so far, forgotten ones included

    def append(self, **new: Tensor) -> dict[str, Tensor]:
        """Store entries [..., new, size] and return those that the new tokens see: all, or the window before each.

        They are in the order of their tokens, except for one new token in a full window, which sees all of it.

        Raises:
            RuntimeError: without a window, more than max_len entries.
        """
        count = next(iter(new.values())).shape[-2]
        start, self.length = self.length, self.length + count
        if self.window is None and self.length > next(iter(self.buffers.values())).shape[-2]:
            raise RuntimeError(f"the cache is full: {start} entries, and {count} more are to come")
        return {name: self._append(self.buffers[name], value, start, count) for name, value in new.items()}

    def _append(self, buffer: Tensor, new: Tensor, start: int, count: int) -> Tensor:
        stop = start + count
        if self.window is None:
            buffer[..., start:stop, :] = new
            return buffer[..., :stop, :]
        if count == 1:
            buffer[..., start % self.window, :] = new[..., 0, :]
            return buffer[..., : min(stop, self.window), :]
        slots = torch.arange(max(0, start - self.window + 1), stop, device=buffer.device) % self.window
        before = buffer.index_select(-2, slots[:-count])
        kept = min(count, self.window)
        buffer.index_copy_(-2, slots[-kept:], new[..., -kept:, :].to(buffer.dtype))
        return torch.cat((before, new.to(buffer.dtype)), -2)


@dataclass
class KVCache:
    """One LayerCache for each layer (see `Transformer.new_cache`). `length` of at most max_len positions are filled."""

    layers: list[LayerCache]
    max_len: int
    length: int = 0
