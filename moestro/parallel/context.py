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
        self._masks: tuple[Tensor | None, list[AttentionMask]] | None = None

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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None) -> Tensor:
        """Causal attention of the queries here to the keys everywhere, inside documents.

        query: [batch, heads, seq / cp, head_dim]; key, value: [batch, kv_heads, seq / cp, head_dim];
        document_ids: [batch, seq] or None; returns like query.
        """
        if self._kind == "ring" and self._mesh.cp is not None:
            return ring_attention(query, key, value, document_ids, self._mesh.cp)
        key, value = self._whole(key, value)
        out = []
        for chunk, part, mask in zip(self._chunks, query.split(self._length, 2), self._see(document_ids), strict=True):
            stop = (chunk + 1) * self._length  # later keys are never looked at, so nothing is computed for them
            out.append(attend(part, key[:, :, :stop], value[:, :, :stop], mask))
        return torch.cat(out, 2)

    def halo(self, x: Tensor, n: int) -> Tensor:
        """The n positions before each chunk held here, zeros before the first: [batch, chunks held, n, ...].

        x: [batch, seq / cp, ...]. The gradient goes to the ranks that hold those positions.

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
        both = all_gather(torch.stack((key, value)).unsqueeze(0), 0, self._mesh.cp)
        chunks = self._sorted(both.unflatten(4, (len(self._chunks), self._length)), 4)
        whole_key, whole_value = torch.cat(chunks, 3).unbind(0)
        return whole_key, whole_value

    def _sorted(self, x: Tensor, dim: int) -> list[Tensor]:
        """x: [cp, ..., chunks of a rank (dim), ...] → the chunks in order, each without those two axes."""
        held = [chunk for rank in range(self._cp) for chunk in chunks_of(self._cp, rank)]
        # unbind, because the gradient of so many slices would be as many whole tensors.
        found = [chunk for rank in x.unbind(0) for chunk in rank.unbind(dim - 1)]
        return [chunk for _, chunk in sorted(zip(held, found, strict=True), key=lambda pair: pair[0])]

    def _see(self, document_ids: Tensor | None) -> list[AttentionMask]:
        """For each chunk here, which keys it sees. All layers of a batch share the masks, which are large."""
        if self._masks is None or self._masks[0] is not document_ids:
            starts = [chunk * self._length for chunk in self._chunks]
            flex = self._device.type == "cuda"
            masks = [_chunk_mask(start, start + self._length, document_ids, self._device, flex) for start in starts]
            self._masks = document_ids, masks
        return self._masks[1]


def _chunk_mask(start: int, stop: int, document_ids: Tensor | None, device: torch.device, flex: bool) -> AttentionMask:
    """Which of the keys 0 … stop - 1 the queries start … stop - 1 see, for flex attention or for SDPA."""
    if document_ids is None and (start == 0 or not flex):
        return continuation_mask(stop - start, stop, device)
    if document_ids is not None and not flex:
        same = document_ids[:, start:stop].unsqueeze(2) == document_ids[:, :stop].unsqueeze(1)
        return AttentionMask(causal=False, dense=same.tril_(start).unsqueeze(1))

    # On a GPU, SDPA materialises all scores when heads are grouped and the mask is dense.
    def allowed(b: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        causal = q + start >= k
        return causal if document_ids is None else causal & (document_ids[b, q + start] == document_ids[b, k])

    batch = None if document_ids is None else len(document_ids)
    return AttentionMask(causal=False, block=create_block_mask(allowed, batch, None, stop - start, stop, device))
