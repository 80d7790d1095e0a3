"""Context parallelism: each rank holds some positions of every sequence.

A sequence is cut into 2 · cp equal chunks, of which rank i holds numbers i and 2 · cp - 1 - i, in this order: early
positions attend to few keys and late ones to many, so every rank has the same work. tp then cuts what a cp rank holds
into contiguous parts, which its modules gather again; attention sees all positions of the cp rank.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from moestro.errors import MoestroError
from moestro.model.attention.mask import AttentionMask, attend, continuation_mask
from moestro.parallel.comm import all_gather, gather_list
from moestro.parallel.mesh import Mesh
from moestro.parallel.ring import chunks_of, ring_attention


class SequenceSlices:
    """The positions that this rank has of sequences of seq_len (see model.shards.SequenceShard)."""

    def __init__(self, mesh: Mesh, seq_len: int, kind: Literal["all_gather", "ring"], device: torch.device) -> None:
        """kind: how attention reaches the other ranks' keys and values: all at once, or passed around in a ring.

        Raises:
            MoestroError: the sequences cannot be cut into equal parts.
        """
        cp, tp = mesh.layout.cp, mesh.layout.tp
        self.parts = cp * tp
        self.splits_attention = cp > 1
        self._mesh, self._kind, self._device, self._cp = mesh, kind, device, cp
        self._chunks = chunks_of(cp, mesh.place.cp)
        if seq_len % (cp * len(self._chunks) * tp):
            raise MoestroError(
                f"sequences of {seq_len} cannot be cut for cp = {cp} and tp = {tp}; "
                f"make the length a multiple of {cp * len(self._chunks) * tp}"
            )
        chunks = torch.arange(seq_len, device=device).view(cp * len(self._chunks), -1)
        self._length = chunks.shape[1]
        self.context_positions = chunks[list(self._chunks)].flatten()  # [seq / cp], where attention has this rank
        self.positions = self.context_positions.view(tp, -1)[mesh.place.tp]  # [seq / parts], where all else has it
        held = torch.cat([chunks[list(chunks_of(cp, rank))].flatten() for rank in range(cp)])
        self._order = held.argsort()  # where the ranks' positions, laid end to end, hold position 0, 1, …
        self._masks: dict[int | None, list[AttentionMask]] = {}  # of each window, for the documents _masked
        self._masked: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """[batch, all positions, ...] → [batch, positions here, ...]."""
        return x.index_select(1, self.positions)

    def take_context(self, x: Tensor) -> Tensor:
        """[batch, all positions, ...] → [batch, positions that attention has here, ...]."""
        return x.index_select(1, self.context_positions)

    def gather(self, x: Tensor) -> Tensor:
        """[batch · positions here, ...] → [batch · all positions, ...] in their order; any dtype, without gradient."""
        x = x.detach()
        wire = x.view(torch.uint8) if x.dtype == torch.bool else x  # not every backend sends bool
        parts = gather_list(wire.reshape(-1, len(self.positions), *x.shape[1:]), self._mesh.sequence)
        return torch.cat(parts, 1).index_select(1, self._order).flatten(0, 1).view(x.dtype)

    def mine(self, x: Tensor) -> Tensor:
        """[batch · all positions, ...] → [batch · positions here, ...]."""
        return self.take(x.reshape(-1, len(self._order), *x.shape[1:])).flatten(0, 1)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        document_ids: Tensor | None,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of the queries here to the keys everywhere, inside documents (see `mask.attend`).

        query: [batch, heads, seq / cp, head_dim]; key: [batch, kv_heads, seq / cp, head_dim]; value: the same with a
        head_dim of its own; document_ids: [batch, seq] or None; window: tokens that one sees, itself included.
        """
        if self._kind == "ring" and self._mesh.cp is not None:
            return ring_attention(query, key, value, document_ids, self._mesh.cp, window, scale, sinks)
        key, value = self._whole(key, value)
        out = []
        masks = self._see(document_ids, window)
        for chunk, part, mask in zip(self._chunks, query.split(self._length, 2), masks, strict=True):
            keys = self._keys(chunk, window)  # nothing is computed for those that no query here sees
            out.append(attend(part, key[:, :, keys], value[:, :, keys], mask, scale, sinks))
        return torch.cat(out, 2)

    def before(self, x: Tensor, n: int) -> Tensor:
        """The n positions before each chunk held here, zeros before the first: [batch, chunks held, n, ...].

        x: [batch, seq / cp, ...], n >= 1. The gradient goes to the ranks that hold those positions.

        Raises:
            MoestroError: a chunk is shorter than n.
        """
        if n > self._length:
            raise MoestroError(
                f"the {n} positions before a chunk lie in more than one chunk of {self._length}; "
                "use longer sequences or lower parallel.cp"
            )
        tails = x.unflatten(1, (len(self._chunks), self._length))[:, :, self._length - n :]
        tails = self._sorted(all_gather(tails.unsqueeze(0), 0, self._mesh.cp), 2)
        before = [tails[chunk - 1] if chunk else torch.zeros_like(tails[0]) for chunk in self._chunks]
        return torch.stack(before, 1)

    def _whole(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Both [batch, kv_heads, seq / cp, head_dim] → [batch, kv_heads, seq, head_dim], in one collective."""
        both = all_gather(torch.cat((key, value), -1).unsqueeze(0), 0, self._mesh.cp)
        chunks = self._sorted(both.unflatten(3, (len(self._chunks), self._length)), 3)
        whole_key, whole_value = torch.cat(chunks, 2).split((key.shape[-1], value.shape[-1]), -1)
        return whole_key, whole_value

    def _sorted(self, x: Tensor, dim: int) -> list[Tensor]:
        """x: [cp, ..., chunks of a rank (dim), ...] → the chunks in order, each without those two axes."""
        held = [chunk for rank in range(self._cp) for chunk in chunks_of(self._cp, rank)]
        # unbind, because the gradient of so many slices would be as many whole tensors.
        found = [chunk for rank in x.unbind(0) for chunk in rank.unbind(dim - 1)]
        return [chunk for _, chunk in sorted(zip(held, found, strict=True), key=lambda pair: pair[0])]

    def _keys(self, chunk: int, window: int | None) -> slice:
        """The keys of which a query of the chunk may see some."""
        start = chunk * self._length
        return slice(0 if window is None else max(0, start - window + 1), start + self._length)

    def _see(self, document_ids: Tensor | None, window: int | None) -> list[AttentionMask]:
        """For each chunk here, which keys it sees. Layers of one type share the masks, which are large."""
        if self._masked is not document_ids:
            self._masks.clear()
            self._masked = document_ids
        if window not in self._masks:
            flex = self._device.type == "cuda"
            keys = [self._keys(chunk, window) for chunk in self._chunks]
            self._masks[window] = [_chunk_mask(self._length, k, document_ids, window, self._device, flex) for k in keys]
        return self._masks[window]


def _chunk_mask(
    queries: int, keys: slice, document_ids: Tensor | None, window: int | None, device: torch.device, flex: bool
) -> AttentionMask:
    """Which keys the last `queries` positions of `keys` see, for flex attention or for SDPA."""
    first, count = keys.start, keys.stop - keys.start
    past = count - queries
    if document_ids is None and (past == 0 or not flex):
        return continuation_mask(queries, count, device, window)
    if document_ids is not None and not flex:
        ids = document_ids[:, keys]
        same = (ids[:, past:].unsqueeze(2) == ids.unsqueeze(1)).tril_(past)
        if window is not None:
            same.triu_(past - window + 1)
        return AttentionMask(causal=False, dense=same.unsqueeze(1))

    # On a GPU, SDPA materialises all scores when heads are grouped and the mask is dense.
    def allowed(b: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = q + past >= k if window is None else (q + past >= k) & (q + past - k < window)
        return (
            seen if document_ids is None else seen & (document_ids[b, q + past + first] == document_ids[b, k + first])
        )

    batch = None if document_ids is None else len(document_ids)
    return AttentionMask(causal=False, block=create_block_mask(allowed, batch, None, queries, count, device))
